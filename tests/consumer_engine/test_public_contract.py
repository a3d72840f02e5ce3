"""What users rely on from release to release, pinned here: a change of this file is a change for them."""

from pathlib import Path

from pipeline.consumer_engine.errors import ExceptionType
from pipeline.consumer_engine.lifecycle import ItemStatus, Step
from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.telemetry.metrics import metrics_with_prefix
from tests.support.rule import rule

RETRY = {"max_attempts": 1, "timeout": None, "backoff": 0.0, "backoff_multiplier": 2.0, "backoff_cap": 0.0}


@rule("E-36", "E-37")
def test_the_defaults_are_the_ones_users_have_built_on() -> None:
    assert ConsumerPolicy().model_dump() == {
        "name": None,
        "loop": {
            "batch": {"size": 1, "min_size": 1, "max_size": None, "interval": 0.0, "acknowledge_together": False},
            "concurrency": {"value": 1, "min": 1, "max": None},
            "timeout": None,
            "limit": None,
            "transaction_timeout": None,
            "streaming": False,
            "continuous": False,
            "empty_queue": {"backoff": 1.0, "backoff_multiplier": 2.0, "backoff_cap": 30.0, "interval": 0.0},
        },
        "steps": {
            "fetch": {"retry": RETRY, "extra": {}},
            "process": {"retry": RETRY},
            "success": {"retry": RETRY},
            "exception": {"retry": RETRY},
        },
    }


@rule("E-37")
def test_the_values_that_dashboards_and_alerts_use_stay() -> None:
    assert [member.value for member in Step] == ["fetch", "process", "success", "exception"]
    assert [member.value for member in ItemStatus] == ["success", "exception", "timeout", "unfinished"]
    assert [member.value for member in ExceptionType] == ["business", "system", "timeout"]
    assert {label for metric in metrics_with_prefix("pipeline.consumer_engine.") for label in metric.labels} == {
        "task",
        "status",
        "step",
        "result",
        "scope",
    }


@rule("E-31")
def test_the_guide_says_that_a_task_is_given_what_it_needs(project: Path) -> None:
    guide = (project / "docs/guides/consume-items.md").read_text(encoding="utf-8")
    assert "A task opens no connections of its own. Pass it what it needs" in guide
