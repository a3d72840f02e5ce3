"""What the files under deploy/ may name: metrics of ours with their labels, and those of others that we rely on."""

from typing import Any

import yaml

from pipeline.telemetry.metrics import METRICS
from tests.support.source_code import ROOT

DEPLOY = ROOT / "deploy"

#: Metrics of ours by their Prometheus name, with their labels.
OURS: dict[str, set[str]] = {metric.prometheus: set(metric.labels) for metric in METRICS.values()}
#: Metrics of Prometheus itself and of redis_exporter.
THEIRS: dict[str, set[str]] = {
    "up": {"job"},
    "redis_key_size": {"key"},
    "redis_stream_group_lag": {"stream", "group"},
    "redis_stream_group_entries_read": {"stream", "group"},
    "redis_stream_group_messages_pending": {"stream", "group"},
}


def rules() -> list[dict[str, Any]]:
    """Every recording and alert rule."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metrics() -> dict[str, set[str]]:
    """Everything an expression may name, recorded series included."""
    return OURS | THEIRS | {rule["record"]: set() for rule in rules() if "record" in rule}
