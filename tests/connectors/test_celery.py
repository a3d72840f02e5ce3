"""Existing Celery tasks as mutations: run here or sent to their workers, and what they say is true."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import celery
import pytest
import redis
from celery import Celery, Task, shared_task
from celery.contrib.testing.worker import start_worker
from pydantic import BaseModel

from pipeline import Call, Grade, InvalidInputError, LogicError, NotFound, Retry, Workflow
from pipeline.connectors.celery import Tasks
from pipeline.domain.reconciliation import Applied, ErrorMeaning
from pipeline.embedded import servers
from pipeline.store.database import Database
from pipeline.testing import FaultyProxy, Inline, Subject, is_complete_http_request
from tests.support.conformance_retries import patient
from tests.testing.conformance_server import World, running

#: Celery's and redis-py's own: a deprecated command, and connections that a broken line leaves to the collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SECOND = timedelta(seconds=1)


class Declined(Exception):  # noqa: N818 - as a shop names it
    """The card was declined: nothing happened."""


def a_shop(**settings: Any) -> Any:
    app = Celery("shop", set_as_current=False)
    app.conf.update(task_publish_retry=False, **settings)
    return app


def a_call(key: str = "key") -> Call:
    return Call.within(key, 30 * SECOND)


def called(tasks: Tasks, name: str, **params: Any) -> Any:
    return type(tasks).operations()[name].function(tasks, a_call(), **params)


def test_a_task_becomes_a_durable_effect_in_two_lines(db: Any) -> None:
    app, seen = a_shop(), []
    shop = Workflow("shop")
    tasks = Tasks()

    @tasks.durable(shop)
    @app.task(shared=False, bind=True)
    def charge(self: Any, order: str, cents: int = 100) -> str:
        seen.append((self.request.id, order, cents))
        return f"receipt of {order}"

    run = Inline(db, [shop], [tasks])
    run.publish(shop.topics["charge"], {"order": "1"})
    run.run()
    ((key, *arguments),) = seen
    assert arguments == ["1", 100]
    (mutation,) = run.ledger()
    assert (mutation.status, mutation.result, mutation.idempotency_key) == ("applied", "receipt of 1", key)
    assert charge.run("2") == "receipt of 2", "the task is the same as before"


def test_an_error_of_a_task_is_unknown_unless_it_is_declared_and_its_own_retry_raises_it() -> None:
    app, tasks = a_shop(), Tasks()

    @app.task(shared=False, bind=True, autoretry_for=(ConnectionRefusedError,))
    def charge(self: Any, card: str) -> None:
        if card == "retries":
            self.retry(exc=ValueError("again"))
        raise {"declined": Declined(), "down": ConnectionRefusedError(), "wrong": LogicError("no such card")}[card]

    tasks.add(charge, refused=(Declined,))
    reading = type(tasks).operations()["charge"].reading
    found = {}
    for card in ("declined", "down", "wrong", "retries"):
        with pytest.raises(Exception) as raised:  # noqa: PT011 - each has its own
            called(tasks, "charge", card=card)
        found[card] = (type(raised.value), reading(raised.value).meaning)
    assert found == {
        "declined": (Declined, ErrorMeaning.REFUSED),
        "down": (ConnectionRefusedError, ErrorMeaning.UNKNOWN),  # an earlier step of the task may have happened
        "wrong": (LogicError, ErrorMeaning.REFUSED),
        "retries": (ValueError, ErrorMeaning.UNKNOWN),
    }


def test_the_grade_of_a_task_is_what_it_declares() -> None:
    app = a_shop()

    @app.task(shared=False)
    def charge(order: str) -> None: ...

    def grade(**options: Any) -> Grade:
        tasks = Tasks()
        tasks.add(charge, **options)
        return type(tasks).operations()["charge"].grade

    def found(call: Call, order: str) -> NotFound:
        del call, order
        return NotFound()

    assert [grade(), grade(keyed=True), grade(remote=True), grade(remote=True, keyed=True), grade(reconcile=found)] == [
        Grade.D,
        Grade.C,
        Grade.B,
        Grade.A,
        Grade.B,
    ]


def test_a_bare_durable_is_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidInputError, match=r"expected a workflow: @tasks\.durable\(workflow\)"):
        Tasks().durable(print)


def test_a_task_that_cannot_be_a_mutation_is_refused_with_a_sentence() -> None:
    app, tasks = a_shop(), Tasks("legacy")

    @app.task(shared=False, ignore_result=True)
    def silent() -> None: ...

    @app.task(shared=False)
    def positional(*orders: str) -> None: ...

    with pytest.raises(InvalidInputError, match="ignores its result"):
        tasks.add(silent, remote=True)
    with pytest.raises(InvalidInputError, match="takes 'orders' by position only"):
        tasks.add(positional)
    tasks.add(silent)
    with pytest.raises(InvalidInputError, match="has a task 'silent' already"):
        tasks.add(silent)
    assert "silent" not in type(Tasks("legacy")).operations(), "each connector has tasks of its own"


def test_what_is_no_task_or_could_not_be_run_is_refused_with_a_sentence() -> None:
    app, tasks = a_shop(), Tasks()

    def plain() -> None: ...

    async def awaited() -> None: ...

    def unreadable(order: str) -> None: ...

    def add() -> None: ...

    unreadable.__annotations__["order"] = "Unknown"  # as of an import for type checkers only
    refusals = {
        "expected this decorator above that of Celery": plain,
        "which Celery does not run": app.task(shared=False)(awaited),
        "cannot be read .name 'Unknown' is not defined.": app.task(shared=False)(unreadable),
        "has an attribute 'add' already": app.task(shared=False)(add),
    }
    for said, task in refusals.items():
        with pytest.raises(InvalidInputError, match=said):
            tasks.durable(Workflow("shop"))(task)


class CountingTask(Task):  # type: ignore[misc]  # celery ships no types
    """A base class as in many shops."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Count the call."""
        type(self).calls += 1
        return super().__call__(*args, **kwargs)


class Refund(Task):  # type: ignore[misc]
    """A task that is a class."""

    name = "shop.refund"

    def run(self, order: str) -> str:
        """Return the key."""
        return f"{order} {self.request.id}"


def test_a_task_of_any_kind_runs_with_its_base_class_and_knows_the_key() -> None:
    app, tasks = a_shop(), Tasks()

    @app.task(shared=False, bind=True, base=CountingTask)
    def counted(self: Any, *, call: str) -> str:
        return f"{call} {self.request.id}"

    @shared_task(bind=True, ignore_result=True, name="tests.shared")
    def shared(self: Any, order: str, **more: str) -> str:
        return f"{order} {more} {self.request.id}"

    @app.task(shared=False, bind=True)
    def reports(self: Any) -> str:
        self.update_state(state="PROGRESS")
        return str(self.request.id)

    for task in (counted, shared, reports):
        tasks.add(task)
    tasks.add(app.register_task(Refund()))
    assert called(tasks, "counted", call="1") == "1 key"
    assert counted.calls == 1
    assert called(tasks, "shared", order="1", note="x") == "1 {'note': 'x'} key"
    assert called(tasks, "refund", order="1") == "1 key"
    assert called(tasks, "reports") == "key"


class Order(BaseModel):
    """An argument of a task with models."""

    number: str
    due: datetime


class Receipt(BaseModel):
    """The result of a task with models."""

    order: str


DUE = {"number": "1", "due": "2026-01-02T03:04:05Z"}


@pytest.mark.skipif(celery.__version__ < "5.5", reason="Celery reads models since 5.5")
def test_a_task_with_models_gets_and_returns_them(db: Database) -> None:
    app, shop, tasks = a_shop(), Workflow("shop"), Tasks()

    @tasks.durable(shop)
    @app.task(shared=False, pydantic=True)
    def charge(order: Order) -> Receipt:
        return Receipt(order=f"{order.number} of {order.due.year}")

    run = Inline(db, [shop], [tasks])
    run.publish(shop.topics["charge"], {"order": DUE})
    run.run()
    (mutation,) = run.ledger()
    assert (mutation.status, mutation.result) == ("applied", {"order": "1 of 2026"})


def test_the_message_of_a_task_with_models_holds_their_fields() -> None:
    app, tasks = a_shop(broker_url="memory://", result_backend="cache+memory://"), Tasks()

    @app.task(shared=False, name="shop.charge")
    def charge(order: Order) -> None: ...

    tasks.add(charge, remote=True)
    app.backend.store_result("key", None, "SUCCESS")  # so that the call ends as soon as the message is sent
    called(tasks, "charge", order=Order.model_validate(DUE))
    with app.connection() as connection:
        message = connection.SimpleQueue("celery").get(block=False)
    assert message.payload[1] == {"order": DUE}


def test_results_that_only_their_sender_can_read_say_nothing() -> None:
    app, tasks = a_shop(broker_url="memory://", result_backend="rpc://"), Tasks()

    @app.task(shared=False, name="shop.charge")
    def charge() -> None: ...

    tasks.add(charge, remote=True)
    with pytest.raises(LogicError, match="a result backend that only the sender can read"):
        called(tasks, "charge")


@pytest.fixture
def world() -> Iterator[World]:
    with running() as found:
        yield found


def test_a_task_that_runs_here_conforms_to_its_declared_grade(world: World) -> None:
    app = a_shop()
    with FaultyProxy("127.0.0.1", world.server_port, is_complete=is_complete_http_request) as proxy:

        @app.task(shared=False, bind=True)
        def charge(self: Any, cents: int) -> str:
            request = Request(
                f"{proxy.url}/keyed", data=str(cents).encode(), headers={"Idempotency-Key": self.request.id}
            )
            with urlopen(request, timeout=0.4) as answer:
                return str(answer.read())

        tasks = Tasks()
        tasks.add(charge, keyed=True, settle=SECOND)
        subject = Subject(
            connector=tasks,
            operation="charge",
            params={"cents": 990},
            effects=world.effects,
            proxy=proxy,
            timeout=timedelta(milliseconds=500),
            settle=timedelta(milliseconds=500),
        )
        patient(subject).require(Grade.C)


@pytest.fixture
def broker(embedded: servers.Servers) -> Iterator[str]:
    """A Redis number that nothing else of this test run uses."""
    url = f"{embedded.broker_url.rpartition('/')[0]}/11"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        yield url
        client.flushdb()


def test_a_task_that_is_sent_to_its_worker_conforms_to_its_declared_grade(broker: str) -> None:
    """The worker is Celery's own, in a thread; only the way to the broker is broken, not that to the results."""
    place = urlsplit(broker)
    with FaultyProxy(place.hostname or "", place.port or 0, has_effect=lambda data: b"LPUSH" in data) as proxy:
        through = broker.replace(f":{place.port}/", f":{proxy.port}/")
        options = {"socket_timeout": 0.4, "socket_connect_timeout": 0.4}
        app = a_shop(broker_url=through, result_backend=broker, broker_transport_options=options)
        workers = a_shop(broker_url=broker, result_backend=broker, worker_enable_remote_control=False)

        def charge(self: Any, cents: int) -> str:
            with redis.Redis.from_url(broker) as client:
                client.incr(f"effects of {self.request.id}")
            return f"charged {cents}"

        for each in (app, workers):
            each.task(shared=False, bind=True, name="shop.charge")(charge)

        def effects(key: str) -> int:
            with redis.Redis.from_url(broker) as client:
                return int(client.get(f"effects of {key}") or 0)

        tasks = Tasks()
        tasks.add(app.tasks["shop.charge"], remote=True, settle=SECOND)
        subject = Subject(
            connector=tasks,
            operation="charge",
            params={"cents": 990},
            effects=effects,
            proxy=proxy,
            is_http=False,
            timeout=SECOND,
            settle=SECOND,
        )
        with start_worker(workers, pool="solo", perform_ping_check=False, shutdown_timeout=30):
            patient(subject).require(Grade.B)


def test_the_result_backend_says_how_a_sent_task_ended_and_nothing_about_one_it_does_not_know(broker: str) -> None:
    app, tasks = a_shop(broker_url=broker, result_backend=broker), Tasks()

    @app.task(shared=False, name="shop.charge")
    def charge(order: str) -> None: ...

    tasks.add(charge, remote=True, refused=(Declined,))
    reconcile = type(tasks).operations()["charge"].reconcile_function
    assert reconcile is not None
    assert reconcile(tasks, a_call("never sent"), order="1") == Retry("the state of the task is PENDING")
    app.backend.store_result("done", "receipt", "SUCCESS")
    assert reconcile(tasks, a_call("done"), order="1") == Applied("receipt")
    app.backend.store_result("declined", Declined("no"), "FAILURE")
    assert reconcile(tasks, a_call("declined"), order="1") == NotFound("the task failed with Declined")
    app.backend.store_result("broken", ValueError("no"), "FAILURE")
    assert isinstance(reconcile(tasks, a_call("broken"), order="1"), Retry)


def test_a_sent_task_needs_a_result_backend_and_a_broker() -> None:
    app, tasks = a_shop(broker_url="redis://127.0.0.1:1/0", result_backend="cache+memory://"), Tasks()
    without, others = a_shop(broker_url="redis://127.0.0.1:1/0"), Tasks()

    @app.task(shared=False)
    def charge() -> None: ...

    @without.task(shared=False, name="charge")
    def refund() -> None: ...

    tasks.add(charge, remote=True)
    others.add(refund, remote=True)
    with pytest.raises(Exception, match="the broker cannot be reached") as raised:
        called(tasks, "charge")
    assert type(tasks).operations()["charge"].reading(raised.value).meaning is ErrorMeaning.NOT_NOW
    with pytest.raises(LogicError, match="no result backend"):
        called(others, "refund")
