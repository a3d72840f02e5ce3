"""Celery's settings: their values, and that they follow ours."""

import runpy
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
from celery.app.defaults import SETTING_KEYS

from pipeline.background.sweeps import PERIODS
from pipeline.config import Settings, SettingsError
from pipeline.domain.states import CONSUMER_TASKS, PhaseTask
from pipeline.telemetry.spans import SPANS

CONFIG = Path(__file__).parents[1] / "celeryconfig.py"


def loaded(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, Any]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return {name: value for name, value in runpy.run_path(str(CONFIG)).items() if not name.startswith("_")}


def test_every_name_is_a_setting_of_celery(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = {"os", "timedelta", "Any", "Settings", "TIME_LIMIT_GRACE", "PERIODS"}
    assert set(loaded(monkeypatch)) - imported <= SETTING_KEYS


def test_a_message_is_redelivered_until_its_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    config = loaded(monkeypatch)
    assert config["task_acks_late"]
    assert config["task_reject_on_worker_lost"]
    assert config["worker_prefetch_multiplier"] == 1


def test_beat_starts_every_sweep_and_lets_old_messages_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = loaded(monkeypatch)["beat_schedule"]
    assert {entry["task"] for entry in schedule.values()} == {f"pipeline.sweep.{name}" for name in PERIODS}
    assert all(entry["options"]["expires"] >= entry["schedule"].total_seconds() for entry in schedule.values())


def test_values_follow_our_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = loaded(
        monkeypatch,
        PIPELINE_BROKER_URL="redis://:pw@there:1234/5",
        PIPELINE_VISIBILITY_TIMEOUT="20m",
        PIPELINE_MUTATE_TIME_LIMIT="5m",
    )
    assert config["broker_url"] == "redis://:pw@there:1234/5"
    assert config["broker_transport_options"]["visibility_timeout"] == 1200
    assert config["task_annotations"]["pipeline.mutate"] == {"soft_time_limit": 300, "time_limit": 315}


def test_every_network_wait_on_redis_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    options = loaded(monkeypatch)["broker_transport_options"]
    assert options["socket_timeout"] > 0
    assert options["socket_connect_timeout"] > 0
    assert options["health_check_interval"] > 0


def test_options_of_redis_are_not_given_to_rabbitmq(monkeypatch: pytest.MonkeyPatch) -> None:
    config = loaded(monkeypatch, PIPELINE_BROKER_URL="amqp://there")
    options = config["broker_transport_options"]
    assert options == {"confirm_publish": True, "read_timeout": 5, "write_timeout": 5}
    assert {queue["queue_arguments"]["x-queue-type"] for queue in config["task_queues"].values()} == {"quorum"}
    assert (
        "queue_arguments"
        not in loaded(monkeypatch, PIPELINE_BROKER_URL="redis://there")["task_queues"]["pipeline.next"]
    )


def test_importing_the_app_reads_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_LEASE", "nonsense")
    monkeypatch.delitem(sys.modules, "pipeline.celery", raising=False)
    app = runpy.run_module("pipeline.celery")["app"]
    assert not app.configured


def test_with_sentinel_the_primary_is_named_and_no_sentinel_is_waited_for_endlessly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "sentinel://:pw@one:26379/0;sentinel://:pw@two:26379/0"
    config = loaded(monkeypatch, PIPELINE_BROKER_URL=url, PIPELINE_BROKER_PRIMARY="orders")
    options = config["broker_transport_options"]
    assert config["broker_url"] == url
    assert options["master_name"] == "orders"
    assert options["sentinel_kwargs"]["socket_timeout"] > 0
    assert (
        "master_name"
        not in loaded(monkeypatch, PIPELINE_BROKER_URL="redis://one", PIPELINE_BROKER_PRIMARY="")[
            "broker_transport_options"
        ]
    )


def test_the_certificate_of_a_broker_with_tls_is_verified_unless_its_url_disables_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert loaded(monkeypatch, PIPELINE_BROKER_URL="rediss://one")["broker_use_ssl"] == {
        "ssl_cert_reqs": ssl.CERT_REQUIRED
    }
    assert "broker_use_ssl" not in loaded(monkeypatch, PIPELINE_BROKER_URL="rediss://one?ssl_cert_reqs=none")
    assert "broker_use_ssl" not in loaded(monkeypatch, PIPELINE_BROKER_URL="redis://one")


def test_a_name_of_a_primary_without_sentinel_and_sentinel_without_one_are_refused() -> None:
    for environ in ({"PIPELINE_BROKER_URL": "sentinel://one"}, {"PIPELINE_BROKER_PRIMARY": "orders"}):
        with pytest.raises(SettingsError, match="PIPELINE_BROKER_PRIMARY: expected a name if and only if"):
            Settings.load(environ)


def test_no_password_of_any_sentinel_is_shown() -> None:
    url = "sentinel://:secret@one:26379/0;sentinel://:secret@two:26379/0"
    rows = Settings.load({"PIPELINE_BROKER_URL": url, "PIPELINE_BROKER_PRIMARY": "orders"}).describe()
    assert not [row for row in rows if "secret" in row.value]


def test_every_phase_task_has_a_queue_a_time_limit_and_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    config = loaded(monkeypatch)
    assert list(config["task_queues"]) == [*CONSUMER_TASKS, "pipeline.schedule"]
    assert set(config["task_routes"]) == set(config["task_annotations"]) == set(PhaseTask)
    assert {task.method for task in PhaseTask} <= set(SPANS)
