"""Single steps of schedulers, workers and persons, each in a transaction of its own."""

from typing import Any

from pipeline.background.scheduler import facts_of
from pipeline.domain.scheduling import DueReason, due_reason
from pipeline.domain.states import EventId, PhaseTask
from pipeline.domain.values import NewEvent, PreparedRun, Reservation
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.transitions import events, runs, starts, workflows
from pipeline.transitions.events import PublishResult
from tests.factories import IN, LEASE, committed, held, the_run
from tests.support.table_reads import one
from tests.support.wait import wait_for


def reason_due(db: Database, handler: str = "send", workflow: str = "billing") -> DueReason | None:
    """Why the scheduler would start the handler now, or None."""
    with db.transaction() as tx:
        (row,) = [row for row in work.handler_facts(tx, workflow) if row.name == handler]
    return due_reason(facts_of(row), row.now)


def started(db: Database, count: int = 1, **options: Any) -> list[Any]:
    """The runs that a scheduler gets when it asks for this many."""
    with db.transaction() as tx:
        return list(starts.start(tx, "billing", "send", count=count, **options).runs)


def preparing(db: Database, run: Any) -> Any:
    """The run, claimed for prepare."""
    with db.transaction() as tx:
        (row,) = runs.claim(tx, PhaseTask.PREPARE, [run.id], lease_duration=LEASE, worker="w").claimed
    return row


def seen(db: Database, run: Any, *, ordered: bool = False) -> list[EventId]:
    """What a claimed run is shown."""
    with db.transaction() as tx:
        return [EventId(row.id) for row in work.reservable_events(tx, run, IN, ordered=ordered)]


def prepared(db: Database, run: Any, *ids: EventId, topic: str = IN, **options: Any) -> Any:
    """The run after its prepare chose these events, or nothing."""
    reservations = (Reservation(topic=topic, ids=ids),) if ids else ()
    with db.transaction() as tx:
        row: Any = runs.finish_prepare(tx, [PreparedRun(lease=held(run), reservations=reservations, **options)]).only()
    return row


def rested(db: Database, run: Any, **options: Any) -> Any:
    """The claimed run, having wanted nothing, committed."""
    return committed(db, prepared(db, run, **options))


def done(db: Database, run: Any) -> Any:
    """The prepared run, taken through a mutate that asks for nothing, and committed."""
    with db.transaction() as tx:
        (row,) = runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed
        runs.no_mutation(tx, [held(row)]).only()
    return committed(db, the_run(db, run.id))


def republished(db: Database, message_id: str, payload: Any, **options: Any) -> PublishResult:
    """A publish of a message id that is there already, with ``replace``."""
    new = NewEvent(topic=IN, message_id=message_id, payload=payload, **options)
    with db.transaction() as tx:
        return events.publish(tx, "billing", [new], replace=True)


def a_handler(db: Database, name: str = "send") -> Any:
    return one(db, "SELECT * FROM pipeline.handlers WHERE name = :name", name=name)


def watermark_at_least(db: Database, event_id: int, handler: str = "send") -> None:
    """Raise watermarks until this handler's has reached an event.

    Other tests of this machine may hold transactions open, on other databases too, and a horizon waits
    for every transaction that could still publish below it: hence rounds instead of a fixed number.
    """

    def risen() -> bool:
        with db.transaction() as tx:
            workflows.raise_watermarks(tx)
        return bool(a_handler(db, handler).low_watermark >= event_id)

    wait_for(risen, within=100, why=f"the watermark of {handler} at {event_id}")
