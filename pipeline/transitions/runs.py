"""A run's way forward: claimed, prepared, mutated, committed. One function per transition, for cohorts.

Every transition takes an open database transaction and a set of runs and is one statement for all of them, guarded
row by row. What a worker writes carries the fence of its claim, so a worker that returns after
its lease changes nothing.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any, NotRequired, TypedDict, TypeVar, Unpack
from uuid import UUID

from sqlalchemy.exc import DBAPIError, IntegrityError

from pipeline.domain.codec import Sealed, opened, seal
from pipeline.domain.errors import IllegalTransitionError, OutdatedCodeError, PipelineError
from pipeline.domain.payloads import checked_json
from pipeline.domain.states import MutationOutcome, Phase, PhaseTask, RunId, RunStatus
from pipeline.domain.values import DEFAULT_LIMITS, Limits, PreparedRun, RunLease, RunOutput
from pipeline.store.database import Statement, Transaction, encode_rows
from pipeline.store.functions import COMMIT_OWNS_INPUTS
from pipeline.store.reads import work
from pipeline.store.rows import ClaimedRunRow, CommittedRunRow, RunIdRow, RunOfWorkflowRow
from pipeline.store.schema import RunRow
from pipeline.store.writes import events as event_store
from pipeline.store.writes import handlers as handler_store
from pipeline.store.writes import runs as run_store
from pipeline.transitions.events import event_rows, unknown_topic_error
from pipeline.transitions.results import BatchResult, Transition, match_results, requested_events, reservation_error

log = logging.getLogger(__name__)

AnyRunRow = TypeVar("AnyRunRow", bound=RunRow)
Merge = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a phase task may do with the runs its message named."""

    claimed: tuple[ClaimedRunRow, ...]  #: held now: do the phase
    passed: tuple[RunId, ...]  #: already past it: a redelivery, hand them on
    unavailable: tuple[RunId, ...]  #: stopped, held by another worker, or of an unknown handler: leave them alone
    unknown_handler: tuple[RunId, ...] = ()  #: of handlers the claimer does not know: for another worker
    idle_count: int = 0  #: of those that are past it, how many have nothing to do in it


class Claimer(TypedDict):
    """The worker that claims: for how long, under which name, which handlers and topics it knows; by default all."""

    lease_duration: timedelta
    worker: str
    known_handlers: NotRequired[run_store.KnownNames]
    known_topics: NotRequired[run_store.KnownNames]


#: What each task claims, and the phase in which it works.
_CLAIMS: Mapping[PhaseTask, tuple[Statement[ClaimedRunRow], Phase]] = {
    PhaseTask.PREPARE: (run_store.CLAIM_PREPARE, Phase.PREPARING),
    PhaseTask.MUTATE: (run_store.CLAIM_MUTATE, Phase.MUTATING),
    PhaseTask.NEXT: (run_store.CLAIM_NEXT, Phase.EMITTING),
    PhaseTask.PRODUCE: (run_store.CLAIM_PRODUCE, Phase.PREPARING),
}


def claim(tx: Transaction, task: PhaseTask, ids: Sequence[UUID], **claimer: Unpack[Claimer]) -> Claims:
    """Claim those of these runs that a phase task can work on.

    - ``prepare``: runs of consumers that have not selected their inputs;
    - ``mutate``: runs with inputs that may request a mutation, or whose request was approved;
    - ``next``: runs whose outcome is known, or that have no inputs;
    - ``produce``: runs of producers.
    """
    statement, target = _CLAIMS[task]
    worker = claimer["worker"]
    known = {"handlers": claimer.get("known_handlers"), "topics": claimer.get("known_topics")}
    claimed = run_store.claim(tx, statement, ids, known, lease=claimer["lease_duration"], worker=worker)
    for row in claimed:
        tx.log_on_commit(
            "run.claimed", run_id=row.id, workflow=row.workflow, phase=row.phase, fence=row.fence, worker=worker
        )
    try:
        return _claims(tx, claimed, ids, target, known)
    except DBAPIError as error:
        # the claim may be committed already; what is not known of the other runs, the next tick finds
        log.warning("%d runs were claimed, and nothing is known of the others: %s", len(claimed), error)
        return Claims(claimed=tuple(claimed), passed=(), unavailable=())


def _claims(
    tx: Transaction,
    claimed: Sequence[ClaimedRunRow],
    ids: Sequence[UUID],
    target: Phase,
    known: Mapping[str, run_store.KnownNames],
) -> Claims:
    """Tell what became of the runs that could not be claimed. Let unclaimed handlers of the others run again."""
    mine = {row.id for row in claimed}
    missing = [id_ for id_ in ids if id_ not in mine]
    found = work.runs(tx, missing) if missing else ()
    passed = tuple(RunId(row.id) for row in found if _is_past(row, target))
    left = tuple(RunId(id_) for id_ in missing if id_ not in passed)
    unknown = tuple(RunId(row.id) for row in run_store.requeue_unknown(tx, left, known))
    unclaimed = sorted({row.handler_id for row in claimed if row.is_unclaimed})
    if unclaimed:  # a worker knows them after all
        tx.execute(handler_store.CLEAR_UNCLAIMED, ids=unclaimed)
    idle = sum(_has_nothing_to_mutate(row, target) for row in found)
    return Claims(claimed=tuple(claimed), passed=passed, unavailable=left, unknown_handler=unknown, idle_count=idle)


def finish_prepare(
    tx: Transaction, cohort: Sequence[PreparedRun], limits: Limits = DEFAULT_LIMITS
) -> BatchResult[RunRow]:
    """Pin the inputs of each run and save its plan: all of a run's events, or none of them."""
    landed = tx.guarded(run_store.FINISH_PREPARE, [_prepared_row(item, limits) for item in cohort])
    for run in landed:
        tx.log_on_commit("run.prepared", run_id=run.id, workflow=run.workflow, events=len(run.event_ids))
    items = {item.lease.run_id: item for item in cohort}
    move = Transition(
        verb="finish_prepare",
        phases=[Phase.PREPARING],
        explain=lambda run: reservation_error(tx, run, items[run.id]),
    )
    return _match_runs(tx, [item.lease for item in cohort], landed, move)


def no_mutation(
    tx: Transaction, cohort: Sequence[RunLease], costs: Mapping[RunLease, Decimal | None] | None = None
) -> BatchResult[RunRow]:
    """The mutate handler asked for nothing: the phase is over with an empty outcome."""
    rows = [{"run": held.run_id, "fence": held.fence, "cost": (costs or {}).get(held)} for held in cohort]
    landed = tx.guarded(run_store.NO_MUTATION, rows)
    for run in landed:
        tx.log_on_commit("run.mutated", run_id=run.id, workflow=run.workflow, outcome=MutationOutcome.NONE)
    return _match_runs(tx, cohort, landed, Transition(verb="no_mutation", phases=[Phase.PREPARED]))


def commit(
    tx: Transaction,
    cohort: Sequence[RunOutput],
    *,
    merge: Mapping[int, Merge] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    exclusive_handlers: Collection[int] = (),
) -> BatchResult[CommittedRunRow]:
    """Publish, consume and finish, for every run that is still held; save the states they returned.

    ``merge`` maps a handler's id to the function that folds a returned state into the current one,
    applied under the handler's row lock. Without it a returned state replaces the current one. The
    handlers in ``exclusive_handlers`` may do so only while their workflow runs one at a time: older code must not
    replace what newer code merges.
    """
    landing = _commit(tx, event_store.COMMIT, cohort, Phase.EMITTING, limits)
    _save_states(tx, cohort, landing, merge or {}, limits, exclusive_handlers)
    return landing


def commit_producer(
    tx: Transaction, cohort: Sequence[RunOutput], limits: Limits = DEFAULT_LIMITS
) -> BatchResult[CommittedRunRow]:
    """Publish what producers made, save their state and book their next slot."""
    landing = _commit(tx, event_store.COMMIT_PRODUCER, cohort, Phase.PREPARING, limits)
    _save_states(tx, cohort, landing, {}, limits)
    return landing


def heartbeat(
    tx: Transaction, cohort: Sequence[RunLease], *, lease_duration: timedelta, fresh_for: timedelta = timedelta(0)
) -> BatchResult[RunIdRow]:
    """Extend leases, except those written within ``fresh_for``.

    A run that is refused is no longer the caller's: stop working on it.
    """
    landed = tx.guarded(run_store.HEARTBEAT, _lease_rows(cohort), lease=lease_duration, fresh_for=fresh_for)
    move = Transition(verb="heartbeat", phases=list(Phase), condition=" and claimed")
    return match_results(tx, cohort, landed, key=lambda row: row.id, transition=move)


def hand_back(tx: Transaction, cohort: Sequence[RunLease], *, is_delayed: bool = False) -> BatchResult[RunRow]:
    """Hand runs back. A run whose mutation may be in flight is never handed back.

    The next tick redispatches them; with ``is_delayed`` only after ``redispatch_after``.
    """
    landed = tx.guarded(run_store.HAND_BACK, _lease_rows(cohort), later=is_delayed)
    for run in landed:
        tx.log_on_commit("run.handed_back", run_id=run.id, workflow=run.workflow, phase=run.phase)
    move = Transition(
        verb="hand back", phases=[Phase.PREPARING, Phase.PREPARED, Phase.EMITTING], condition=", with nothing sent"
    )
    return _match_runs(tx, cohort, landed, move)


def shorten_leases(tx: Transaction, *, limit: int = 1000) -> tuple[RunId, ...]:
    """Shorten leases that end later than they can, since Postgres's clock was set back after they were written.

    Each gets the time that a heartbeat now would give it: no living worker loses a run.
    """
    return tuple(RunId(row.id) for row in tx.all(run_store.SHORTEN_LEASES, limit=limit))


def expire_leases_of_process(tx: Transaction, worker: str) -> Sequence[RunOfWorkflowRow]:
    """Let the leases of a process lapse at once, because it is known to be gone. Recovery then finds its runs."""
    return tx.all(run_store.EXPIRE_LEASES_OF_PROCESS, worker=worker)


def mark_dispatched(tx: Transaction, ids: Sequence[UUID]) -> tuple[RunId, ...]:
    """Record that a message was sent for runs that no worker holds, so that the sweep waits before it repeats."""
    return tuple(RunId(row.id) for row in run_store.execute_ids(tx, run_store.MARK_DISPATCHED, ids))


def _is_past(row: RunRow, target: Phase) -> bool:
    """Whether a run needs this phase no more: it has it behind it, or has nothing to mutate."""
    if row.status not in (RunStatus.ACTIVE, RunStatus.COMMITTED):
        return False
    return Phase(row.phase).rank > target.rank or _has_nothing_to_mutate(row, target)


def _has_nothing_to_mutate(row: RunRow, target: Phase) -> bool:
    """Whether a run without inputs is between prepare and next: it has nothing to mutate."""
    return target is Phase.MUTATING and row.phase == Phase.PREPARED and not row.event_ids


def _commit(
    tx: Transaction, statement: Statement[CommittedRunRow], cohort: Sequence[RunOutput], needs: Phase, limits: Limits
) -> BatchResult[CommittedRunRow]:
    published = [row for item in cohort for row in event_rows(item.events, limits, run_id=item.lease.run_id)]
    rows = [_emitted_row(item, limits) for item in cohort]
    try:
        landed = tx.guarded(statement, rows, events=encode_rows(published))
    except IntegrityError as error:
        raise _lost_inputs_error(error) or error from error
    topics = {item.lease.run_id: [event.topic for event in item.events] for item in cohort}
    for run in landed:
        new = run.published_count
        if new:
            repeats = len(topics[run.id]) - new
            tx.log_on_commit("event.published", run_id=run.id, workflow=run.workflow, events=new, repeats=repeats)
        tx.log_on_commit("run.committed", run_id=run.id, workflow=run.workflow)
    move = Transition(verb="commit", phases=[needs], explain=lambda run: _why_not_committed(tx, run, topics[run.id]))
    return _match_runs(tx, [item.lease for item in cohort], landed, move)


def _why_not_committed(tx: Transaction, run: RunRow, topics: Sequence[str]) -> PipelineError:
    """A run that is held in the right phase publishes to a topic that is not there, or is of the other kind."""
    known = work.topics_by_name(tx, run.workflow)
    for topic in topics:
        if topic not in known:
            return unknown_topic_error(tx, run.workflow, topic)
    found = f"{run.phase}, {run.status}, of another kind of handler"
    return IllegalTransitionError("run", run.id, verb="commit", found=found, allowed=[f"{run.phase} of this kind"])


def _save_states(
    tx: Transaction,
    cohort: Sequence[RunOutput],
    landing: BatchResult[RunRow],
    merge: Mapping[int, Merge],
    limits: Limits,
    exclusive_handlers: Collection[int] = (),
) -> None:
    """Fold the states of the runs that landed into their handlers, in run order, under row locks."""
    handler_of = {row.id: row.handler_id for row in landing.updated}
    returned = [item for item in cohort if item.has_state and item.lease.run_id in handler_of]
    if not returned:
        return
    ids = sorted({handler_of[item.lease.run_id] for item in returned})
    current = {row.id: row.state for row in tx.all(handler_store.LOCK_HANDLER_STATES, ids=ids)}
    replacing = [handler for handler in ids if handler in exclusive_handlers and handler not in merge]
    shared = tx.all(handler_store.SHARED_STATES, ids=replacing) if replacing else ()
    if shared:
        raise OutdatedCodeError((row.workflow, row.name) for row in shared)
    for item in sorted(returned, key=lambda item: item.lease.run_id):
        handler = handler_of[item.lease.run_id]
        fold = merge.get(handler)
        state = fold(opened(current[handler]), item.state) if fold else item.state
        current[handler] = checked_json(state, what=f"state after run {item.lease.run_id}", limit=limits.state)
    workflows = {} if tx.codecs is None else {row.handler_id: row.workflow for row in landing.updated}
    for handler in ids:
        codec = None if tx.codecs is None else tx.codecs.writer(tx, workflows[handler])
        state = current[handler] if codec is None else seal(codec, current[handler], "state", handler)
        tx.execute(handler_store.SET_STATE, id=handler, state=json.dumps(state))


def _lost_inputs_error(error: IntegrityError) -> IllegalTransitionError | None:
    """Why a commit was refused by ``pipeline.require_inputs``; None if something else was refused."""
    about: Any = error.orig
    if about.diag.constraint_name != COMMIT_OWNS_INPUTS:
        return None
    run_id, found = UUID(about.diag.message_detail), about.diag.message_hint
    return IllegalTransitionError(
        "run", run_id, verb="commit", found=found, allowed=["owner of every event it reserved"]
    )


def _prepared_row(item: PreparedRun, limits: Limits) -> dict[str, Any]:
    events, topics = requested_events(item)
    result = {
        "reservations": [{"topic": r.topic, "ids": list(r.ids)} for r in item.reservations],
        "data": item.data,
        "ui": item.ui,
        "approval": item.needs_approval,
    }
    if item.wake_at is not None:
        result["wake_at"] = item.wake_at.isoformat()
    plain = {name: None if isinstance(part, Sealed) else part for name, part in result.items()}  # the rest was checked
    checked_json(plain, what=f"PrepareResult of run {item.lease.run_id}", limit=limits.prepare_result)
    return {
        "run": item.lease.run_id,
        "fence": item.lease.fence,
        "events": events,
        "topics": topics,
        "result": result,
        "wake_at": item.wake_at,
        "cost": item.cost,
    }


def _emitted_row(item: RunOutput, limits: Limits) -> dict[str, Any]:
    if item.has_state:
        checked_json(item.state, what=f"state returned by run {item.lease.run_id}", limit=limits.state)
    return {
        "run": item.lease.run_id,
        "fence": item.lease.fence,
        "state": (item.state if item.sealed_state is None else item.sealed_state) if item.has_state else None,
        "cost": item.cost,
        "next_run_at": item.next_run_at,
    }


def _lease_rows(cohort: Sequence[RunLease]) -> list[dict[str, Any]]:
    return [{"run": held.run_id, "fence": held.fence} for held in cohort]


def _match_runs(
    tx: Transaction, asked: Sequence[RunLease], landed: Sequence[AnyRunRow], move: Transition
) -> BatchResult[AnyRunRow]:
    return match_results(tx, asked, landed, key=lambda row: row.id, transition=move)
