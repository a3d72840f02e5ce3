"""Reconcile attempts that a worker cannot make wait in a queue that only workers with the code read."""

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import redis
from celery import Celery

from pipeline.background.messages import ReconcileMessage
from pipeline.embedded import servers
from pipeline.tasks import messages
from tests.support.ports import free_port

QUEUE = "pipeline.reconcile.shop.2"
MESSAGE = ReconcileMessage(
    mutation_id="0199c0de-0000-7000-8000-000000000000",
    workflow="shop",
    version=2,
    deferred_until=datetime(2030, 1, 1, tzinfo=UTC),
)


def an_app(url: str) -> Celery:
    app = Celery(broker=url, set_as_current=False)
    app.conf.task_queues = {name: {"exchange": name} for name in ("pipeline.mutate", "pipeline.schedule")}
    app.conf.task_default_queue = "pipeline.schedule"
    app.conf.broker_transport_options = {"socket_connect_timeout": 1}
    app.conf.task_publish_retry = False
    return app


@pytest.fixture
def app(embedded: servers.Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """A Redis number that nothing else of this test run uses, as the broker of this process."""
    with an_app(f"{embedded.broker_url.rpartition('/')[0]}/12") as app:
        monkeypatch.setattr(messages, "app", app)
        yield app


@pytest.fixture
def client(app: Celery) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(app.conf.broker_url) as client:
        client.flushdb()
        yield client
        client.flushdb()


def test_a_redispatched_attempt_reaches_the_queue_of_its_workflow_and_version(
    app: Celery, client: "redis.Redis"
) -> None:
    messages.redispatch_reconcile(MESSAGE)
    assert {name: client.llen(name) for name in (QUEUE, "pipeline.schedule")} == {QUEUE: 1, "pipeline.schedule": 0}
    assert QUEUE not in app.amqp.queues, "the sender does not read it"


def test_a_queue_that_no_worker_reads_stays_bounded(client: "redis.Redis") -> None:
    messages.redispatch_reconcile(MESSAGE)
    client.lpush(QUEUE, *["waiting"] * 998)
    for _ in range(3):
        messages.redispatch_reconcile(MESSAGE)
    assert client.llen(QUEUE) == 1000


def test_a_broker_that_is_away_only_delays_a_redispatched_attempt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with an_app(f"redis://127.0.0.1:{free_port()}/0") as app:
        monkeypatch.setattr(messages, "app", app)
        messages.redispatch_reconcile(MESSAGE)
    assert "the sweep reconciles" in caplog.text


def test_reconcile_attempts_travel_in_one_message_and_wait_for_no_broker(
    client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [MESSAGE.mutation_id, "0199c0de-0000-7000-8000-000000000001"]
    assert messages.dispatch_reconcile(ids)
    assert client.llen("pipeline.schedule") == 1
    with an_app(f"redis://127.0.0.1:{free_port()}/0") as away:
        monkeypatch.setattr(messages, "app", away)
        assert not messages.dispatch_reconcile(ids)
    assert "the sweep reconciles 2 mutations later" in caplog.text


@pytest.mark.parametrize(("chosen", "reads"), [([], True), (["pipeline.mutate"], False), (["pipeline.schedule"], True)])
def test_a_worker_that_reads_the_queue_of_the_sweeps_reads_those_of_its_workflows(
    app: Celery, chosen: list[str], reads: bool
) -> None:
    queues = app.amqp.queues
    queues.select(chosen)
    messages.consume_more_queues([("shop", 2), ("billing", 1)])
    found = set(queues.consume_from) - {f"pipeline.{name}" for name in ("prepare", "mutate", "next", "schedule")}
    assert found == ({QUEUE, "pipeline.reconcile.billing.1", "pipeline.publish"} if reads else set())


def test_a_long_name_of_a_workflow_makes_a_queue_that_every_broker_takes(app: Celery) -> None:
    names = {messages._reconcile_queue(f"{'ü' * 250}{end}", 1).name for end in "ab"}
    assert [len(name) for name in names] == [83, 83]
