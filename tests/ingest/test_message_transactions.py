"""Fetch, handle, commit, acknowledge: in this order, each once, and whatever goes wrong is what the caller gets."""

import threading
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from pipeline.domain.errors import InvalidInputError
from pipeline.ingest.consumer import ContextManagerTx, ContextManagerTxFactory, QueueConsumer, RecoveryRunner
from pipeline.ingest.errors import PoisonError, QueueError
from pipeline.ingest.queue import QueueMessage, RedisStreamsQueue
from pipeline.store.database import Database, Statement, Transaction
from tests.ingest.redis_streams import GROUP, STALE, Ledger, Page, Place, in_thread
from tests.support.rule import rule
from tests.support.wait import wait_for


class Traced(RedisStreamsQueue):
    """A queue that writes its calls into the same trace as the database."""

    ledger: Ledger
    ack_error: Exception | None = None

    def read(self, block_ms: int | None = None, count: int | None = None) -> list[QueueMessage]:
        found = super().read(block_ms, count)
        self.ledger.trace += ["fetch"] if found else []
        return found

    def claim_stale(self, min_idle_ms: int | None = None, count: int = 1) -> list[QueueMessage]:
        found = super().claim_stale(min_idle_ms, count)
        self.ledger.trace += ["fetch"] if found else []
        return found

    def ack(self, *messages: QueueMessage) -> None:
        self.ledger.trace.append("ack")
        super().ack(*messages)


class Worker:
    """A consumer or a recovery over one traced queue, with a handler that follows a script."""

    def __init__(self, place: Place, ledger: Ledger, *, recovers: bool) -> None:
        queue = place.queue()
        queue.__class__ = Traced
        assert isinstance(queue, Traced)
        queue.ledger = ledger
        self.ledger, self.recovers = ledger, recovers
        self.loop: Any = RecoveryRunner(queue) if recovers else QueueConsumer(queue)
        self.handled: list[str] = []
        self.error: BaseException | None = None

    def handler(self, message: QueueMessage, page: Page) -> None:
        self.ledger.trace.append("handler")
        self.handled.append(message.id)
        page.written.append(message.id)
        if self.error is not None:
            raise self.error
        self.loop.stop()

    def run(self) -> None:
        self.loop.run(self.handler, self.ledger)


@pytest.fixture(params=[False, True], ids=["consumer", "recovery"])
def recovers(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def a_message(place: Place, *, stale: bool) -> str:
    """One entry, new or left behind by a consumer that died."""
    place.queue("absent")
    (entry,) = place.add({"n": 1})
    if stale:
        place.queue("dead").read()
        place.make_stale()
    return entry


@rule("Q-1", "Q-2", "Q-3")
def test_q10_the_order_is_fetch_begin_handler_commit_ack(place: Place, recovers: bool) -> None:
    """Q14 as well: a recovery follows the same order."""
    entry = a_message(place, stale=recovers)
    worker = Worker(place, Ledger(), recovers=recovers)
    worker.run()
    assert worker.ledger.trace == ["fetch", "begin", "handler", "commit", "ack"]
    assert (worker.handled, worker.ledger.committed, place.pending()) == ([entry], [entry], {})


@rule("Q-4", "Q-20", "Q-2")
@pytest.mark.parametrize("undo_fails", [False, True])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_q10_q11_an_error_of_the_handler_rolls_back_and_is_raised_as_it_is(
    place: Place, recovers: bool, error: BaseException, undo_fails: bool
) -> None:
    entry = a_message(place, stale=recovers)
    worker = Worker(place, Ledger(undo_fails=undo_fails), recovers=recovers)
    worker.error = error
    with pytest.raises(type(error)) as caught:
        worker.run()
    assert caught.value is error
    assert worker.ledger.trace == ["fetch", "begin", "handler", "rollback"]
    assert ("The rollback failed too: OSError('already closed')" in getattr(error, "__notes__", [])) is undo_fails
    assert (worker.ledger.committed, list(place.pending())) == ([], [entry])
    vars(error).pop("__notes__", None)


@rule("Q-3")
@pytest.mark.parametrize("undo_fails", [False, True])
def test_q10_an_error_of_the_commit_is_raised_and_nothing_is_acknowledged(
    place: Place, recovers: bool, undo_fails: bool
) -> None:
    entry = a_message(place, stale=recovers)
    error = OSError("the database went away")
    worker = Worker(place, Ledger(fails="commit", error=error, undo_fails=undo_fails), recovers=recovers)
    with pytest.raises(OSError, match="went away") as caught:
        worker.run()
    assert caught.value is error
    assert worker.ledger.trace == ["fetch", "begin", "handler", "commit", "rollback"]
    assert list(place.pending()) == [entry]


def test_q10_a_transaction_that_cannot_begin_is_an_error_and_the_message_stays_pending(
    place: Place, recovers: bool
) -> None:
    entry = a_message(place, stale=recovers)
    error = OSError("too many connections")
    worker = Worker(place, Ledger(fails="begin", error=error), recovers=recovers)
    with pytest.raises(OSError, match="too many") as caught:
        worker.run()
    assert caught.value is error
    assert (worker.handled, list(place.pending())) == ([], [entry])


def test_q10_a_factory_that_makes_context_managers_is_refused_before_the_handler_is_called(
    place: Place, recovers: bool
) -> None:
    worker = Worker(place, Ledger(), recovers=recovers)
    entry = a_message(place, stale=recovers)
    engine: Any = create_engine("sqlite://")
    with pytest.raises(
        InvalidInputError, match=r"begin\(\) of Engine gave a .* ContextManagerTxFactory\(engine\.begin\)"
    ):
        worker.loop.run(worker.handler, engine)
    assert worker.handled == []
    assert list(place.pending()) == [entry]


@rule("Q-17")
def test_q10_an_acknowledgement_that_fails_leaves_the_commit_and_the_message_pending(
    place: Place, recovers: bool
) -> None:
    entry = a_message(place, stale=recovers)
    worker = Worker(place, Ledger(), recovers=recovers)
    hand = worker.handler

    def handler(message: QueueMessage, page: Page) -> None:
        hand(message, page)
        pending.update(place.pending())
        place.raw.rename(place.stream, f"{place.stream}:away")
        place.raw.set(place.stream, "no stream")

    pending: dict[str, str] = {}
    with pytest.raises(QueueError, match="acknowledge"):
        worker.loop.run(handler, worker.ledger)
    place.raw.rename(f"{place.stream}:away", place.stream)
    assert (worker.ledger.committed, place.pending()) == ([entry], pending)
    assert list(pending) == [entry]


def test_q10_stop_in_a_handler_lets_the_current_message_finish(place: Place) -> None:
    place.queue("absent")
    entries = place.add({"n": 1}, {"n": 2})
    worker = Worker(place, Ledger(), recovers=False)
    worker.run()
    assert worker.ledger.committed == entries[:1]
    assert place.pending() == {}
    assert place.undelivered() == 1


def test_q14_a_recovery_polls_slowly_and_stops_during_a_wait(quiet: Place) -> None:
    runner, ledger = RecoveryRunner(quiet.queue()), Ledger()
    quiet.raw.config_resetstat()
    loop = in_thread(lambda: runner.run(lambda *_: None, ledger, every_ms=60_000))
    wait_for(lambda: quiet.calls("xpending")["xpending"])
    threading.Event().wait(0.3)
    runner.stop()
    loop.outcome(within=30)  # half of the wait that it is in
    assert quiet.calls("xpending", "xclaim", "xreadgroup") == {"xpending": 1, "xclaim": 0, "xreadgroup": 0}


def test_q14_a_recovery_holds_one_message_at_a_time_and_works_until_none_is_stale(place: Place) -> None:
    entries = place.add(*({"n": n} for n in range(12)))
    place.queue("dead", max_read_count=12).read()
    place.make_stale()
    runner, ledger = RecoveryRunner(place.queue("rescuer")), Ledger()
    held: list[int] = []

    def handler(message: QueueMessage, page: Page) -> None:
        page.written.append(message.id)
        held.append(list(place.pending().values()).count("rescuer"))

    assert runner.run_once(handler, ledger, min_idle_ms=2 * STALE) == 0
    assert runner.run_once(handler, ledger, limit=5) == 5
    assert runner.run_once(handler, ledger) == 7
    assert runner.run_once(handler, ledger) == 0
    assert (ledger.committed, held, place.pending()) == (entries, [1] * 12, {})


def test_q14_a_poisoned_entry_ends_a_recovery_and_stays_pending(place: Place) -> None:
    place.queue("absent")
    bad = place.add_raw({b"data": b"bad"})
    with pytest.raises(PoisonError):
        place.queue("dead").read()
    place.make_stale()
    with pytest.raises(PoisonError, match=bad):
        RecoveryRunner(place.queue()).run(lambda *_: None, Ledger())
    assert list(place.pending(GROUP)) == [bad]


def test_q10_a_context_manager_that_commits_serves_as_a_transaction(db: Database) -> None:
    factory = ContextManagerTxFactory(db.transaction)
    read = Statement[Any]("SELECT count(*) FROM pipeline.workflows")
    scope: ContextManagerTx[Transaction] = factory.begin()
    first = scope.tx.first(read)
    assert first is not None
    scope.commit()
    scope.rollback()  # nothing is left to undo
    undone = factory.begin()
    undone.tx.execute(text("CREATE TABLE never_there (n int)"))
    undone.rollback()
    with db.transaction() as tx:
        row = tx.first(Statement[Any]("SELECT to_regclass('never_there')"))
    assert row is not None
    assert row[0] is None


def test_q10_a_commit_that_fails_in_a_context_manager_is_the_error_that_is_raised(db: Database) -> None:
    scope = ContextManagerTxFactory(db.transaction).begin()
    scope.tx.execute(
        text("CREATE TEMP TABLE late (n int UNIQUE DEFERRABLE INITIALLY DEFERRED); INSERT INTO late VALUES (1), (1)")
    )
    with pytest.raises(Exception, match="duplicate key"):
        scope.commit()
    scope.rollback()


def test_q14_a_recovery_that_is_stopped_claims_nothing_further_in_the_same_pass(place: Place) -> None:
    entries = place.add({"n": 1}, {"n": 2}, {"n": 3})
    place.queue("dead", max_read_count=3).read()
    place.make_stale()
    runner, ledger = RecoveryRunner(place.queue()), Ledger()
    assert runner.run_once(lambda message, page: runner.stop(), ledger) == 1
    assert list(place.pending()) == entries[1:]


def test_q14_a_recovery_ends_with_the_error_when_an_entry_was_trimmed_and_the_next_one_goes_on(place: Place) -> None:
    gone, kept = place.add({"n": 1}, {"n": 2})
    place.queue("dead", max_read_count=2).read()
    place.make_stale()
    place.raw.xdel(place.stream, gone)
    runner, seen = RecoveryRunner(place.queue()), []
    with pytest.raises(PoisonError, match=gone):
        runner.run_once(lambda message, page: seen.append(message.id), Ledger())
    runner.run_once(lambda message, page: seen.append(message.id), Ledger())
    assert seen == [kept]


async def _async_handler(message: QueueMessage, page: Page) -> None: ...


def _generator_handler(message: QueueMessage, page: Page) -> Any:
    yield message


@rule("Q-3")
@pytest.mark.parametrize("handler", [_async_handler, _generator_handler])
def test_a_handler_that_has_not_run_is_refused_and_its_message_stays_pending(
    place: Place, recovers: bool, handler: Any
) -> None:
    entry = a_message(place, stale=recovers)
    worker = Worker(place, Ledger(), recovers=recovers)
    with pytest.raises(InvalidInputError, match=rf"handler {handler.__name__} returned .* which has not run"):
        worker.loop.run(handler, worker.ledger)
    assert worker.ledger.trace == ["fetch", "begin", "rollback"]
    assert list(place.pending()) == [entry]
