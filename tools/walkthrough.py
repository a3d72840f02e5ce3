"""Two runs walked by the verbs, one transaction at a time, with what the tables say after each.

The first goes well. The second loses its worker after the mail left and before anybody wrote that
down: its outcome is unknown until a person settles it.
"""

from collections import Counter
from datetime import timedelta
from threading import Event
from typing import Any
from uuid import UUID

from rich.table import Table

from pipeline.background import rescuer
from pipeline.domain.idempotency import effect_id
from pipeline.domain.states import EventId, Fence, PhaseTask, RunId
from pipeline.domain.values import (
    Actor,
    AppliedMutation,
    HandlerSpec,
    NewEvent,
    PreparedRun,
    Request,
    Reservation,
    RunLease,
    RunOutput,
    TopicSpec,
    WorkflowSpec,
)
from pipeline.store.database import Database, Statement
from pipeline.store.reads import work
from pipeline.transitions import events, mutations, registration, resolution, runs, starts

LEASE = timedelta(seconds=1)
TIMEOUT = timedelta(milliseconds=200)
PAID, SENT = "orders.paid", "receipts.sent"
_INPUTS = Statement[Any]("""
SELECT d.* FROM pipeline.runs r CROSS JOIN unnest(r.event_ids) AS i(event_id)
JOIN pipeline.deliveries d ON d.event_id = i.event_id AND d.handler_id = r.handler_id
WHERE r.id = :run_id ORDER BY d.event_id
""")


def a_workflow(name: str) -> WorkflowSpec:
    """One consumer that sends a receipt for every paid order."""
    consumer = HandlerSpec(name="send_receipt", subscribes=(PAID,))
    return WorkflowSpec(name=name, topics=(TopicSpec(name=PAID), TopicSpec(name=SENT)), handlers=(consumer,))


class Walkthrough:
    """One consumer, an outside world that counts what it did, and a table that follows a run."""

    def __init__(self, db: Database, workflow: str) -> None:
        self.db, self.workflow = db, workflow
        self.sent: Counter[str] = Counter()
        self.table = Table(show_header=True, header_style="bold")
        for column in ("what happens", "phase", "status", "event", "ledger"):
            self.table.add_column(column)

    def run_successfully(self, order: str) -> None:
        """prepare, mutate, next."""
        self._publish(order)
        run = self._begin(order)
        self._send_mail(run)
        with self.db.transaction() as tx:
            (mutation,) = work.mutations(tx, [run.mutation_id])
            applied = AppliedMutation(mutation_id=mutation.id, result={"order": order}, fence=Fence(run.fence))
            mutations.apply(tx, [applied]).only()
        self._add_row("the provider says yes", run.id)
        self._emit(run.id)

    def crash_in_flight(self, order: str) -> None:
        """The worker vanishes after the mail left and before anybody wrote that down."""
        self._publish(order)
        run = self._begin(order)
        self._send_mail(run)
        self._add_row("the mail left, the worker died", run.id)
        Event().wait(LEASE.total_seconds() + 0.2)
        rescuer.recover(self.db)
        self._add_row("its lease lapsed: who knows?", run.id)
        with self.db.transaction() as tx:
            person = Actor(name="you", reason="the mail is in the provider's log")
            resolution.happened(tx, run.mutation_id, person, result={"order": order})
        self._add_row("you say: it happened", run.id)
        with self.db.transaction() as tx:
            (retry,) = starts.retry(tx, [run.id]).runs
        self._add_row("a new run carries it forward", retry.id)
        self._emit(retry.id)

    def _publish(self, order: str) -> None:
        with self.db.transaction() as tx:
            new = NewEvent(topic=PAID, message_id=order, payload={"order": order}, title=f"Order {order}")
            events.publish(tx, self.workflow, [new])

    def _begin(self, order: str) -> Any:
        with self.db.transaction() as tx:
            (run,) = starts.start(tx, self.workflow, "send_receipt").runs
        self._add_row(f"order {order} is paid: a run starts", run.id)
        with self.db.transaction() as tx:
            (run,) = runs.claim(tx, PhaseTask.PREPARE, [run.id], lease_duration=LEASE, worker="demo").claimed
            seen = work.reservable_events(tx, run, PAID, limit=1)
            ids = tuple(EventId(event.id) for event in seen)
            pinned = PreparedRun(lease=_lease(run), reservations=(Reservation(topic=PAID, ids=ids),))
            runs.finish_prepare(tx, [pinned]).only()
        self._add_row("prepare pins its input", run.id)
        with self.db.transaction() as tx:
            (run,) = runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="demo").claimed
            mutations.begin_mutation(tx, [_request(run, order)]).only()
        self._add_row("mutate asks, the ledger knows first", run.id)
        with self.db.transaction() as tx:
            (run,) = work.runs(tx, [run.id])
        return run

    def _send_mail(self, run: Any) -> None:
        """The outside world. No transaction is open here."""
        self.sent[str(run.event_ids[0])] += 1

    def _emit(self, run_id: UUID) -> None:
        with self.db.transaction() as tx:
            (run,) = runs.claim(tx, PhaseTask.NEXT, [run_id], lease_duration=LEASE, worker="demo").claimed
            receipt = NewEvent(topic=SENT, message_id=f"receipt:{run.event_ids[0]}", payload={})
            runs.commit(tx, [RunOutput(lease=_lease(run), events=(receipt,))]).only()
        self._add_row("next publishes and commits", run_id)

    def _add_row(self, what: str, run_id: UUID) -> None:
        with self.db.transaction() as tx:
            (run,) = work.runs(tx, [run_id])
            ledger = work.mutations(tx, [run.mutation_id]) if run.mutation_id else []
            inputs = tx.all(_INPUTS, run_id=run_id)
        event = inputs[0].status if inputs else "pending"
        self.table.add_row(what, run.phase, run.status, event, ledger[0].status if ledger else "")


def _lease(run: Any) -> RunLease:
    return RunLease(RunId(run.id), Fence(run.fence))


def _request(run: Any, order: str) -> Request:
    return Request(
        lease=_lease(run),
        connector="email",
        operation="send",
        params={"to": "customer@example.org", "order": order},
        request_hash=f"receipt {order}",
        effect_id=effect_id(run.handler_uid, run.inputs, f"receipt {order}"),
        timeout=TIMEOUT,
        reconcilable=False,
    )


def run_walkthrough(db: Database) -> Walkthrough:
    """Walk both runs in a workflow of their own: an earlier demo may have been cut short."""
    with db.transaction() as tx:
        name = f"walk {tx.clock():%Y-%m-%d %H:%M:%S.%f}"
        registration.register(tx, a_workflow(name))
    demo = Walkthrough(db, name)
    demo.run_successfully("4711")
    demo.crash_in_flight("4712")
    return demo
