"""Counters that alerts use begin at zero: Prometheus sees no increase in a series that begins above zero."""

import re

from pipeline.tasks import telemetry as worker
from pipeline.telemetry.metrics import METRICS
from tests.deploy import promql
from tests.deploy.known_names import rules
from tests.support.recorded_metrics import counting

#: Counters of ours that a rule asks about, with the labels by which it chooses.
WATCHED = [
    (metric, labels)
    for rule in rules()
    for metric, labels in promql.selectors(rule["expr"])
    if metric.startswith("pipeline_") and metric.endswith("_total")
]


def test_every_counter_that_a_rule_watches_begins_at_zero_in_a_worker() -> None:
    with counting() as counted:
        worker.count_zeros(["shop"])
        rows = counted.rows()
    begun = [(METRICS[row.name].prometheus, dict(row.labels), row.value) for row in rows]
    assert {value for _, _, value in begun} == {0}
    assert WATCHED
    for metric, labels in WATCHED:
        wanted = labels.get("transition", "").replace("[.]", ".")
        names = re.fullmatch(r"(.*)\((.*)\)", wanted)
        each = [f"{names[1]}{name}" for name in names[2].split("|")] if names else [wanted]
        for name in each:
            chosen = {"transition": name} if name else {}
            assert any(metric == found and chosen.items() <= of.items() for found, of, _ in begun), (metric, name)
