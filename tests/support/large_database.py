"""A database with a long history and a lively present, to look at how statements get along with both.

The history is written straight into the tables, because reaching two hundred thousand finished runs
through the verbs takes minutes; the invariants hold of it all the same. The present comes through
the verbs: runs of every stage, some stopped in doubt, some that wait for a retry.
"""

from collections.abc import Sequence
from copy import copy
from datetime import timedelta
from typing import Any

from sqlalchemy import text

from pipeline.domain.failures import Failure, FailureKind
from pipeline.domain.states import EventId, Fence, PhaseTask, RunId
from pipeline.domain.values import AppliedMutation, NewEvent, PreparedRun, Reservation, RunFailure, RunLease
from pipeline.domain.workflows import OnUncertain
from pipeline.store.database import Database, encode_rows
from pipeline.store.reads import work
from pipeline.transitions import events, mutations, runs, starts, stops
from tests.factories import IN, OUT, a_request, a_workflow, held

WORKFLOW = "billing"
#: Longer than the tests take. A statement that finds its runs' leases lapsed writes nothing and touches few pages.
LEASE = timedelta(days=1)
LAPSED = timedelta(microseconds=1)

#: One committed run per consumed event, each with its applied mutation; a hundred runs to a session.
_HISTORY = (
    """
    CREATE TEMP TABLE done ON COMMIT DROP AS
    SELECT n, pipeline.next_event_id() AS event, pipeline.uuid7() AS run, pipeline.uuid7() AS mutation
    FROM generate_series(:first, :last) AS n
    """,
    """
    INSERT INTO pipeline.sessions (id, workflow, finished_at, result)
    SELECT md5('session ' || n / 100)::uuid, :workflow, pipeline.clock(), 'completed'
    FROM done GROUP BY n / 100
    """,
    """
    INSERT INTO pipeline.events (id, workflow, topic, message_id, key, payload)
    SELECT event, :workflow, :topic, 'done-' || n, 'customer ' || n % 1000, '{"order": 4711}' FROM done ORDER BY event
    """,
    """
    INSERT INTO pipeline.runs (id, workflow, handler_id, session_id, phase, status, mutation_outcome, mutation_id,
                               offered, event_ids, prepare_result, fence, started_at, finished_at)
    SELECT run, :workflow, :handler_id, md5('session ' || n / 100)::uuid, 'committed', 'committed', 'success',
           mutation, ARRAY[event], ARRAY[event], '{"data": null}', 3, pipeline.clock(), pipeline.clock()
    FROM done ORDER BY run
    """,
    """
    INSERT INTO pipeline.mutations (id, run_id, workflow, connector, operation, params, request_hash, effect_id,
      idempotency_key, status, reconcilable, settle, timeout, attempts, sent_at, send_deadline, quiet_until,
      resolved_by, resolved_at)
    SELECT mutation, run, :workflow, 'mail', 'send', '{"to": "someone"}', 'abc', run, run || '\\:0', 'applied', true,
           '0', '20 s', 1, pipeline.clock(), pipeline.clock(), pipeline.clock(), 'call', pipeline.clock()
    FROM done ORDER BY mutation
    """,
    """
    INSERT INTO pipeline.deliveries (event_id, handler_id, topic, status, run_id, key)
    SELECT event, :handler_id, :topic, 'consumed', run, 'customer ' || n % 1000 FROM done ORDER BY event
    """,
)
_BACKLOG = """
WITH fresh AS (
  INSERT INTO pipeline.events (workflow, topic, message_id, key, payload)
  SELECT :workflow, :topic, 'waiting-' || gen_random_uuid(), 'customer ' || n % 1000, '{"order": 4711}'
  FROM generate_series(1, :count) AS n RETURNING id, key
)
INSERT INTO pipeline.deliveries (event_id, handler_id, topic, key) SELECT id, :handler_id, :topic, key FROM fresh
"""


QUIET_EVENTS = 20

#: Rows to a transaction: watermarks of everybody on this server wait for the oldest one that is open.
_PORTION = 10_000


class Crowd:
    """The database, and the runs in it by how far they got."""

    def __init__(self, db: Database, *, done: int, waiting: int = 0) -> None:
        self.db = db
        a_workflow(db, WORKFLOW, concurrency=1_000, on_uncertain=OnUncertain.CONTAIN)
        with db.transaction() as tx:
            handler = work.handler(tx, WORKFLOW, "send")
        assert handler is not None
        self.handler_id: int = handler.id
        for first in range(0, done, _PORTION):
            self._write(*_HISTORY, first=first, last=min(first + _PORTION, done) - 1)
        self._live()
        self._rest(waiting)

    def behind(self, db: Database, waiting: int) -> "Crowd":
        """The same runs in a copy of the database, with more events that wait."""
        other = copy(self)
        other.db = db
        other._rest(waiting)
        return other

    def _rest(self, waiting: int) -> None:
        """Let so many events wait, and some of a quiet topic behind them; then Postgres may know what there is."""
        for _ in range(0, waiting, _PORTION):
            self._write(_BACKLOG, count=_PORTION)
        self._write(_BACKLOG, count=QUIET_EVENTS, topic=OUT)
        with self.db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM (ANALYZE, INDEX_CLEANUP ON)"))

    def rows(self, cohort: Sequence[RunLease], **extra: Any) -> str:
        """The cohort as the verbs hand it to their statements."""
        return encode_rows([{"run": run.run_id, "fence": run.fence, **extra} for run in cohort])

    def _write(self, *statements: str, **params: Any) -> None:
        params = {"workflow": WORKFLOW, "topic": IN, "handler_id": self.handler_id} | params
        with self.db.transaction() as tx:
            for statement in statements:
                tx.execute(text(statement), **{key: value for key, value in params.items() if f":{key}" in statement})

    def _live(self) -> None:
        """300 events: runs of every stage hold two hundred of them, the others are pending."""
        new = [NewEvent(topic=IN, message_id=f"now-{n}", payload={}, key=f"customer {n % 50}") for n in range(300)]
        with self.db.transaction() as tx:
            events.publish(tx, WORKFLOW, new)
        with self.db.transaction() as tx:
            self.started = [run.id for run in starts.start(tx, WORKFLOW, "send", count=200).runs]
        with self.db.transaction() as tx:
            self.preparing = runs.claim(
                tx, PhaseTask.PREPARE, self.started[:160], lease_duration=LEASE, worker="w"
            ).claimed
            runs.claim(tx, PhaseTask.PREPARE, self.started[160:170], lease_duration=LAPSED, worker="w")
        with self.db.transaction() as tx:
            plans = [_plan(run) for run in self.preparing[:140]]
            self.prepared = [run.id for run in runs.finish_prepare(tx, plans).updated]
        with self.db.transaction() as tx:
            self.taken = runs.claim(tx, PhaseTask.MUTATE, self.prepared[:110], lease_duration=LEASE, worker="w").claimed
            self.mutating = mutations.begin_mutation(tx, [a_request(run) for run in self.taken[:90]]).updated
        with self.db.transaction() as tx:
            known = [AppliedMutation(mutation_id=row.id, fence=Fence(row.fence)) for row in self.mutating[:60]]
            self.mutated = [row.run_id for row in mutations.apply(tx, known).updated]
        with self.db.transaction() as tx:
            self.emitting = runs.claim(tx, PhaseTask.NEXT, self.mutated[:40], lease_duration=LEASE, worker="w").claimed
        self._stop_some()

    def _stop_some(self) -> None:
        """Twenty runs with an unknown outcome, ten that wait for a retry."""
        lost = Failure(kind=FailureKind.TRANSIENT, message="reset by peer")
        crashed = Failure(kind=FailureKind.CRASH, message="killed")  # a first crash is followed up without a pause
        doubted = [RunLease(RunId(row.run_id), Fence(row.fence)) for row in self.mutating[60:80]]
        self.carried = [run.id for run in self.emitting[:10]]
        carried = [held(run) for run in self.emitting[:10]]
        with self.db.transaction() as tx:
            stops.stop(tx, [RunFailure(lease=run, failure=lost) for run in doubted])
            stops.stop(tx, [RunFailure(lease=run, failure=crashed) for run in carried])


def _plan(run: Any) -> PreparedRun:
    return PreparedRun(lease=held(run), reservations=(Reservation(topic=IN, ids=tuple(map(EventId, run.offered))),))
