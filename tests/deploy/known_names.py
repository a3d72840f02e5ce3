"""What the files under deploy/ may name: metrics of ours with their labels, and those of others that we rely on."""

from pathlib import Path
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


def documents(text: str) -> list[Any]:
    """The YAML documents of a text, read by the C library: the pages are read when the tests are collected."""
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def document(path: Path) -> Any:
    """The only YAML document of a file."""
    (found,) = documents(path.read_text())
    return found


def rules() -> list[dict[str, Any]]:
    """Every recording and alert rule."""
    groups = document(DEPLOY / "prometheus" / "rules.yml")["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metrics() -> dict[str, set[str]]:
    """Everything an expression may name, recorded series included."""
    return OURS | THEIRS | {rule["record"]: set() for rule in rules() if "record" in rule}
