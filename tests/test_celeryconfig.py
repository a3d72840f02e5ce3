"""Celery's settings: their values, and that they follow ours."""

import runpy
import ssl
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.app.defaults import SETTING_KEYS

from pipeline import celery
from pipeline.background.sweeps import PERIODS
from pipeline.config import Settings, SettingsError
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.states import CONSUMER_TASKS, PhaseTask
from pipeline.tasks import phases, publish, signals  # noqa: F401 - the tasks of the app
from pipeline.telemetry.spans import SPANS

CONFIG = Path(__file__).parents[1] / "celeryconfig.py"


def loaded(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, Any]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return {name: value for name, value in runpy.run_path(str(CONFIG)).items() if not name.startswith("_")}


def own_app(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Any:
    """Our own app, made anew, with its tasks."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(celery, "_installation", None)
    return celery.installed().app


def test_every_name_is_a_setting_of_celery(monkeypatch: pytest.MonkeyPatch) -> None:
    since_celery_5_6 = {"task_create_missing_queue_type"}
    assert set(loaded(monkeypatch)) - {"os", "Settings"} <= SETTING_KEYS | since_celery_5_6


def test_a_message_is_redelivered_until_its_work_is_done() -> None:
    tasks = [task for name, task in celery.app.tasks.items() if name.startswith("pipeline.")]
    assert len(tasks) == len(PhaseTask) + len(PERIODS) + 3
    assert all(task.acks_late and task.reject_on_worker_lost and task.ignore_result for task in tasks)


def test_beat_starts_every_sweep_and_lets_old_messages_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = own_app(monkeypatch).conf.beat_schedule
    assert {entry["task"] for entry in schedule.values()} == {f"pipeline.sweep.{name}" for name in PERIODS}
    assert all(entry["options"]["expires"] >= entry["schedule"].total_seconds() for entry in schedule.values())


def test_values_follow_our_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    conf = own_app(
        monkeypatch,
        PIPELINE_BROKER_URL="redis://:pw@there:1234/5",
        PIPELINE_VISIBILITY_TIMEOUT="20m",
        PIPELINE_MUTATE_TIME_LIMIT="5m",
        PIPELINE_QUEUE_PREFIX="eu.orders",
    ).conf
    assert conf.broker_url == "redis://:pw@there:1234/5"
    assert conf.broker_transport_options["visibility_timeout"] == 1200
    assert conf.broker_transport_options["unacked_key"] == "eu.orders.unacked"
    assert conf.task_default_queue == "eu.orders.schedule"
    assert {queue.name for queue in conf.task_queues} == {
        f"eu.orders.{name}" for name in ("prepare", "mutate", "next", "schedule")
    }

    class Mutate(celery.PipelineTask):
        name = "pipeline.mutate"

    Mutate.annotate()
    assert (Mutate.soft_time_limit, Mutate.time_limit) == (300, 315)


def test_every_network_wait_on_redis_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    options = loaded(monkeypatch)["broker_transport_options"]
    assert options["socket_timeout"] > 0
    assert options["socket_connect_timeout"] > 0
    assert options["health_check_interval"] > 0


def test_options_of_redis_are_not_given_to_rabbitmq(monkeypatch: pytest.MonkeyPatch) -> None:
    config = loaded(monkeypatch, PIPELINE_BROKER_URL="amqp://there")
    options = config["broker_transport_options"]
    assert options == {"confirm_publish": True, "read_timeout": 5, "write_timeout": 5}
    queues = own_app(monkeypatch).conf.task_queues
    assert {queue.queue_arguments["x-queue-type"] for queue in queues} == {"quorum"}
    queues = own_app(monkeypatch, PIPELINE_BROKER_URL="redis://there").conf.task_queues
    assert not any(queue.queue_arguments for queue in queues)


def test_importing_the_app_reads_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not own_app(monkeypatch, PIPELINE_LEASE="nonsense").configured


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


def test_every_phase_task_has_a_queue_a_route_and_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    conf = own_app(monkeypatch).conf
    assert [queue.name for queue in conf.task_queues] == ["pipeline.schedule", *CONSUMER_TASKS]
    assert set(conf.task_routes[0]) >= set(PhaseTask)
    assert {task.method for task in PhaseTask} <= set(SPANS)


def installed_in(app: Celery) -> celery.Installation:
    found = celery.Installation(app, ("shop.billing",))
    app.add_defaults(found.configure)
    return found


def test_a_process_has_one_installed_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(celery, "_installation", None)
    shop = Celery("shop", set_as_current=False)
    celery.install(shop, workflows=["shop.billing"])
    assert celery.installed().load_settings().workflows == ("shop.billing",)
    with pytest.raises(InvalidInputError, match="already installed in the Celery app 'shop'"):
        celery.install(Celery("other", set_as_current=False))


def test_settings_of_the_app_that_were_assigned_after_install_are_named() -> None:
    app = Celery("shop", broker="redis://there/0", set_as_current=False)
    found = installed_in(app)
    assert [*found.problems(found.load_settings())] == []
    app.conf.beat_schedule = {}
    (problem,) = found.problems(found.load_settings())
    assert "expected install to be called last" in problem


def test_the_queues_routes_and_beat_entries_of_the_app_stay_as_they_are() -> None:
    app = Celery("shop", broker="redis://there/0", set_as_current=False)
    app.conf.update(
        task_default_queue="mails", task_routes=("shop.Router", {"shop.*": "mails"}), include=["shop.tasks"]
    )
    app.conf.beat_schedule = {"clock": {"task": "shop.clock", "schedule": 1.0}}
    installed_in(app)
    alone = Celery("shop", set_as_current=False)
    alone.conf.task_default_queue = "mails"
    assert app.amqp.queues["mails"] == alone.amqp.queues["mails"]
    assert app.conf.task_routes[1:] == ["shop.Router", {"shop.*": "mails"}]
    assert app.conf.beat_schedule["clock"] == {"task": "shop.clock", "schedule": 1.0}
    assert app.conf.include[0] == "shop.tasks"
    assert app.conf.task_acks_late is False


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"broker_url": "sqs://"}, "neither Redis, Redis Sentinel nor RabbitMQ"),
        ({"task_always_eager": True}, "task_always_eager is on"),
        ({"task_protocol": 1}, "task_protocol is 1; expected 2"),
    ],
)
def test_a_setting_that_contradicts_ours_is_named(setting: dict[str, Any], sentence: str) -> None:
    app = Celery("shop", broker="redis://there/0", set_as_current=False)
    app.conf.update(setting)
    found = installed_in(app)
    (problem,) = found.problems(found.load_settings())
    assert sentence in problem
