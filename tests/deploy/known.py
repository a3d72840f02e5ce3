"""What the files under deploy/ may name: metrics of ours with their labels, and those of others that we rely on."""

from collections.abc import Mapping
from typing import Any

import yaml

from pipeline.config import Settings
from tests.support.source import ROOT

DEPLOY = ROOT / "deploy"

_EFFECT = {"connector", "operation"}
_BACKLOG = {"workflow", "topic", "handler"}
#: Metrics of ours by their Prometheus name, with their labels.
OURS: dict[str, set[str]] = {
    "pipeline_transitions_total": {"transition", "workflow"},
    "pipeline_runs_stopped_total": {"workflow", "handler", "status"},
    "pipeline_run_latency_seconds": {"workflow", "handler"},
    "pipeline_phase_duration_seconds": {"workflow", "phase", "result"},
    "pipeline_cohort_size": {"phase"},
    "pipeline_deliveries_ignored_total": {"task"},
    "pipeline_rescues_total": {"workflow"},
    "pipeline_mutation_duration_seconds": {*_EFFECT, "outcome"},
    "pipeline_reconcile_looks_total": {*_EFFECT, "verdict"},
    "pipeline_mutation_certainty_seconds": {*_EFFECT, "verdict"},
    "pipeline_sweep_duration_seconds": {"sweep"},
    "pipeline_runs": {"workflow", "phase", "status"},
    "pipeline_backlog_events": _BACKLOG,
    "pipeline_backlog_age_seconds": _BACKLOG,
    "pipeline_leases": {"state"},
    "pipeline_mutations_open": {*_EFFECT, "status"},
    "pipeline_mutations_oldest_seconds": {*_EFFECT, "status"},
    "pipeline_breakers_open": _EFFECT,
    "pipeline_workflows": {"workflow", "status"},
    "pipeline_sweeps_age_seconds": {"sweep"},
    "pipeline_findings": {"invariant", "severity"},
    "pipeline_attention": {"kind"},
}
#: Metrics of Prometheus itself and of redis_exporter.
THEIRS: dict[str, set[str]] = {
    "up": {"job"},
    "redis_key_size": {"key"},
    "redis_stream_group_lag": {"stream", "group"},
    "redis_stream_group_entries_read": {"stream", "group"},
    "redis_stream_group_messages_pending": {"stream", "group"},
}


#: Settings that processes do not know yet.
COMING = {"PIPELINE_LOG_FORMAT", "PIPELINE_METRICS_PORT", "PIPELINE_OTLP_ENDPOINT"}


def load(environ: Mapping[str, str]) -> Settings:
    """The settings of a process with this environment, or everything that is wrong with it."""
    known = {f"PIPELINE_{name.upper()}" for name in Settings.model_fields}
    return Settings.load({name: value for name, value in environ.items() if name in known or name not in COMING})


def rules() -> list[dict[str, Any]]:
    """Every recording and alert rule."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metrics() -> dict[str, set[str]]:
    """Everything an expression may name, recorded series included."""
    return OURS | THEIRS | {rule["record"]: set() for rule in rules() if "record" in rule}
