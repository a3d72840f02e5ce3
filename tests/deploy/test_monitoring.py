"""Rules, dashboards and the files that bring them up name only what exists."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.store.reads.invariants import INVARIANTS
from pipeline.telemetry.transition_log import TRANSITIONS
from tests.deploy import promql
from tests.deploy.known_names import DEPLOY, document, metrics, rules
from tests.support.source_code import ROOT

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
PAGES: list[dict[str, Any]] = [json.loads(path.read_text()) for path in DASHBOARDS]
RULE_TESTS = sorted((DEPLOY / "prometheus" / "tests").glob("*.yml"))
ALERTS = [rule for rule in rules() if "alert" in rule]


def queries(page: dict[str, Any]) -> list[str]:
    """Every expression of a dashboard, with a value in the place of its own variables."""
    expressions = [target["expr"] for panel in page["panels"] for target in panel.get("targets", ())]
    return [re.sub(r'"\$(\w+)"', r'"\1"', expression) for expression in expressions]


EXPRESSIONS = [rule["expr"] for rule in rules()] + [query for page in PAGES for query in queries(page)]


def loaded(path: str) -> Any:
    return document(DEPLOY / path)


def test_an_expression_is_promql_and_names_metrics_and_labels_that_exist(subtests: pytest.Subtests) -> None:
    known = metrics()
    for expression in EXPRESSIONS:
        with subtests.test(expression=expression):
            kept = promql.grouped_by(expression)
            found = set()
            for metric, labels in promql.selectors(expression):
                family = promql.family(metric, set(known))
                assert family in known, metric
                assert set(labels) <= known[family], (metric, labels)
                found |= known[family]
            assert kept <= found, kept


def test_an_expression_with_an_unknown_metric_is_found() -> None:
    expression = "max by (kind) (pipeline_attentoin)"
    assert [name for name, _ in promql.selectors(expression) if name not in metrics()] == ["pipeline_attentoin"]
    with pytest.raises(ValueError, match="unclosed"):
        promql.parsed("max by (kind) (")


def test_transitions_and_invariants_in_an_expression_are_ones(subtests: pytest.Subtests) -> None:
    names = {"transition": set(TRANSITIONS), "invariant": {invariant.name for invariant in INVARIANTS}}
    for expression in EXPRESSIONS:
        with subtests.test(expression=expression):
            for _, labels in promql.selectors(expression):
                for label, known in names.items():
                    if wanted := labels.get(label):
                        assert any(re.fullmatch(wanted, name) for name in known), wanted


def test_an_alert_has_a_severity_a_summary_and_a_runbook(subtests: pytest.Subtests) -> None:
    for alert in ALERTS:
        with subtests.test(alert=alert["alert"]):
            assert alert["labels"]["severity"] in ("critical", "warning")
            assert alert["annotations"]["summary"]
            runbook = (ROOT / alert["annotations"]["runbook"]).read_text()
            assert alert["alert"] in runbook, f"the runbook does not name {alert['alert']}"


def test_the_dashboards_are_up_to_date_with_their_source() -> None:
    script = DEPLOY / "grafana" / "dashboards.py"
    command = [sys.executable, "-B", str(script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_data_source_of_a_dashboard_is_provided() -> None:
    provided = {
        source["uid"]: source["type"]
        for source in loaded("grafana/provisioning/datasources/pipeline.yaml")["datasources"]
    }
    for page in PAGES:
        named = re.findall(r'"datasource": \{\s*"type": "(\w+)",\s*"uid": "(\w+)"', json.dumps(page, indent=1))
        assert named
        assert {provided.get(uid) == kind for kind, uid in named} == {True}


def test_panels_of_a_dashboard_have_unique_ids_and_do_not_overlap() -> None:
    for page in PAGES:
        numbers = [panel["id"] for panel in page["panels"]]
        assert len(set(numbers)) == len(numbers)
        cells = [
            (x, y)
            for place in (panel["gridPos"] for panel in page["panels"])
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(set(cells)) == len(cells)


def test_every_metric_of_ours_is_in_a_dashboard_or_an_alert() -> None:
    known = set(metrics())
    used = {promql.family(name, known) for expression in EXPRESSIONS for name, _ in promql.selectors(expression)}
    ours = {name for name in known if name.startswith("pipeline_") and not name.startswith("pipeline_consumer_engine_")}
    assert ours - used == set()  # the engine's belong to consumers of anybody's items


def test_the_collector_sends_traces_where_tempo_listens() -> None:
    collector, tempo = loaded("otel/collector.yaml"), loaded("tempo/tempo.yaml")
    pipelines = collector["service"]["pipelines"]
    for name in ("receivers", "processors", "exporters"):
        assert {part for pipeline in pipelines.values() for part in pipeline[name]} == set(collector[name])
    port = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    assert collector["exporters"]["otlp"]["endpoint"] == f"tempo:{port}"


def test_every_service_with_metrics_in_the_compose_file_is_scraped() -> None:
    services = document(ROOT / "docker-compose.yml")["services"]
    serving = {
        (name, int(service["environment"]["PIPELINE_METRICS_PORT"]))
        for name, service in services.items()
        if "PIPELINE_METRICS_PORT" in service.get("environment", {})
    }
    assert {services[name]["environment"]["PIPELINE_METRICS_HOST"] for name, _ in serving} == {"0.0.0.0"}
    jobs = loaded("prometheus/prometheus.yml")["scrape_configs"]
    found = [config for job in jobs for config in job.get("dns_sd_configs", ())]
    assert {(name, config["port"]) for config in found for name in config["names"]} == serving
    assert {"worker", "ingest"} <= {name for name, _ in serving}
    static = [target for job in jobs for config in job.get("static_configs", ()) for target in config["targets"]]
    assert {target.partition(":")[0] for target in static} <= set(services)


@needs_promtool
def test_promtool_accepts_configuration_and_rules() -> None:
    for what in (["check", "rules", "rules.yml"], ["check", "config", "--syntax-only", "prometheus.yml"]):
        _promtool(*what)


@needs_promtool
def test_the_rules_fire_when_they_should_and_not_otherwise() -> None:
    _promtool("test", "rules", *map(str, RULE_TESTS))


def test_every_paging_alert_fires_in_a_test() -> None:
    tests = [test for path in RULE_TESTS for test in document(path)["tests"]]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert {alert["alert"] for alert in ALERTS} - fired == set()


def _promtool(*arguments: str) -> None:
    place: Path = DEPLOY / "prometheus"
    done = subprocess.run([str(PROMTOOL), *arguments], cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
