"""Explore every state of a small model of the protocol, and check what must hold in each: ``python -m tools.model``.

The model has one event, one consumer, two workers and a bounded number of runs. It moves by the domain's own tables
and decisions. Its steps are those of workers, sweeps and operators, and what can go wrong between them: a process that
dies or freezes, a message that is lost or comes twice, a clock that jumps, a search that lags, an answer that is lost.
Time has no length here. Only its order counts: a deadline, then the end of the quiet period.

Each seeded bug takes one guard away. The search then finds a shortest way to a broken rule, and prints it.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, IntEnum
from typing import NamedTuple

from rich.console import Console

from pipeline.domain.boundary import InputAction, Side, disposition_of
from pipeline.domain.failures import Failure, FailureKind, RunFacts
from pipeline.domain.failures import decide as decide_stop
from pipeline.domain.policies import FailurePolicy, MutationRetryPolicy
from pipeline.domain.reconciliation import (
    Applied,
    CallEnd,
    CallError,
    CallFacts,
    DoubtFacts,
    ErrorMeaning,
    ErrorReading,
    NextAction,
    NotFound,
    decide,
)
from pipeline.domain.states import (
    DELIVERY_TRANSITIONS,
    INITIAL_PHASES,
    MUTATION_TRANSITIONS,
    PHASE_TASKS,
    PHASE_TRANSITIONS,
    RUN_STATUS_TRANSITIONS,
    UNRESOLVED,
    DeliveryStatus,
    Evidence,
    MutationOutcome,
    MutationStatus,
    Phase,
    PhaseTask,
    RunStatus,
)
from pipeline.domain.workflows import AfterFailedMutation, OnExhausted, OnLogicError, OnUncertain


class Lease(Enum):
    """Whether a worker holds a run."""

    NONE = "none"
    LIVE = "live"
    LAPSED = "lapsed"


class Age(IntEnum):
    """How old a request is, by one clock."""

    FRESH = 0  #: before its deadline
    OVERDUE = 1  #: after its deadline, in the quiet period
    QUIET = 2  #: after the quiet period


class Wire(Enum):
    """Where a request is, in truth. No process sees this."""

    UNSENT = "unsent"
    TRAVELLING = "travelling"
    APPLIED = "applied"
    REFUSED = "refused"
    LOST = "lost"


class Stage(Enum):
    """What a worker does next with its run."""

    PREPARE = "prepare"  #: record which inputs it reserves
    ASK = "ask"  #: write the mutation to the ledger
    SEND = "send"  #: send the request
    WAIT = "wait"  #: wait for the answer
    NEXT = "next"  #: commit


class Run(NamedTuple):
    """The row of a run, as far as the protocol depends on it."""

    phase: Phase
    status: RunStatus
    outcome: MutationOutcome
    fence: int
    lease: Lease
    mutation: int | None
    retry_pending: bool


class Mutation(NamedTuple):
    """The row of a mutation, and beside it the truth about its request."""

    run: int
    status: MutationStatus
    key: int
    database_age: Age
    age: Age  #: by the clock of the hosts, which does not jump here
    wire: Wire
    is_visible: bool  #: a search finds it
    is_absence: bool  #: it was recorded as failed because it was not found


class Worker(NamedTuple):
    """The memory of a process: gone when it dies, kept while it is frozen."""

    run: int
    fence: int
    stage: Stage


class Attempt(NamedTuple):
    """A reconcile attempt under way, in the memory of a process."""

    mutation: int
    is_found: bool
    was_quiet: bool  #: the quiet period was over, by both clocks, when it began


class State(NamedTuple):
    """Everything: rows, messages, memories, and the outside system."""

    delivery: DeliveryStatus
    owner: int | None
    runs: tuple[Run, ...]
    mutations: tuple[Mutation, ...]
    messages: frozenset[tuple[PhaseTask, int]]
    workers: tuple[Worker | None, ...]
    attempt: Attempt | None
    has_jumped: bool


class Bug(Enum):
    """A guard that is taken away, to see that the search finds what it prevents."""

    NO_FENCE = "no fence"  #: a worker writes although the run is not its own any more
    KEY_NOT_KEPT = "key not kept"  #: a repeat after "not found" has a new key
    EARLY_ABSENCE = "absence believed too early"  #: "not found" counts in the quiet period
    STALE_ABSENCE = "absence recorded late"  #: "not found" from the quiet period counts after it
    ONE_CLOCK = "one clock"  #: the quiet period ends by the database's clock alone
    EARLY_RELEASE = "release before the deadline"  #: a run that dies in its call gives its inputs back
    SEND_AFTER_DEADLINE = "send after the deadline"  #: a frozen worker wakes up and sends


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """What the outside system does, and what its connector declares."""

    name: str
    honours_keys: bool
    can_reconcile: bool
    lag_is_bounded: bool  #: by the end of the quiet period a search finds what happened
    operator_errs: bool  #: an operator may say that it did not happen although it did


#: The declarations under which an effect happens at most once, whatever else goes wrong.
PROVIDERS = (
    Provider(name="keys and search", honours_keys=True, can_reconcile=True, lag_is_bounded=False, operator_errs=True),
    Provider(name="search only", honours_keys=False, can_reconcile=True, lag_is_bounded=True, operator_errs=False),
    Provider(name="keys only", honours_keys=True, can_reconcile=False, lag_is_bounded=False, operator_errs=True),
    Provider(name="neither", honours_keys=False, can_reconcile=False, lag_is_bounded=False, operator_errs=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The protocol against one provider, with its bounds, and at most one guard missing."""

    provider: Provider
    bug: Bug | None = None
    after_failed: AfterFailedMutation = AfterFailedMutation.PREPARE
    max_runs: int = 2
    max_messages: int = 1
    max_claims: int = 4

    @property
    def start(self) -> State:
        """An event that was just published."""
        return State(DeliveryStatus.PENDING, None, (), (), frozenset(), (None, None), None, False)


Step = tuple[str, State]


def steps(model: Model, state: State) -> Iterator[Step]:
    """Every step that is possible from a state."""
    for source in (_schedule, _messages, _work, _die, _time, _world, _rescue, _reconcile, _operator):
        for name, after in source(model, state):
            yield name, _canonical(after)


_STALE = -1  #: the fence of a worker that does not hold its run any more


def _canonical(state: State) -> State:
    """Make states equal that differ only in what no later step reads, and in which of two workers is which."""
    runs = tuple(run if run.status is RunStatus.ACTIVE else run._replace(fence=_STALE) for run in state.runs)
    workers = tuple(
        worker if worker is None or worker.fence == runs[worker.run].fence else worker._replace(fence=_STALE)
        for worker in state.workers
    )
    mutations = tuple(_canonical_mutation(each) for each in state.mutations)
    in_order = sorted(workers, key=lambda each: (each is None, each and (each.run, each.fence, each.stage.value)))
    return state._replace(runs=runs, workers=tuple(in_order), mutations=mutations)


def _canonical_mutation(mutation: Mutation) -> Mutation:
    """Forget the time of a request that has left and whose outcome is known."""
    if mutation.status in UNRESOLVED or mutation.wire is Wire.UNSENT:
        return mutation
    return mutation._replace(age=Age.QUIET, database_age=Age.QUIET, is_visible=mutation.wire is Wire.APPLIED)


def _with_run(state: State, number: int, run: Run) -> State:
    return state._replace(runs=(*state.runs[:number], run, *state.runs[number + 1 :]))


def _with_mutation(state: State, number: int, mutation: Mutation) -> State:
    return state._replace(mutations=(*state.mutations[:number], mutation, *state.mutations[number + 1 :]))


def _with_worker(state: State, number: int, worker: Worker | None) -> State:
    return state._replace(workers=(*state.workers[:number], worker, *state.workers[number + 1 :]))


def _with_message(model: Model, state: State, task: PhaseTask, run: int) -> State:
    """Send a message. The bound on messages loses one, as a broker may."""
    messages = state.messages | {(task, run)}
    return state._replace(messages=messages) if len(messages) <= model.max_messages else state


def _schedule(model: Model, state: State) -> Iterator[Step]:
    """Start a run, start a retry, and send the message of a run that no worker holds again."""
    if len(state.runs) < model.max_runs:
        offered = any(run.status is RunStatus.ACTIVE and run.phase.rank < Phase.PREPARED.rank for run in state.runs)
        if state.delivery is DeliveryStatus.PENDING and not offered:
            yield "start a run", _started(model, state, Phase.PENDING)
        for number, run in enumerate(state.runs):
            if run.retry_pending and _status_of(state, run) not in UNRESOLVED:
                phase = Phase.PREPARED if run.outcome is MutationOutcome.FAILURE else Phase.EMITTING
                left = _with_run(state, number, run._replace(retry_pending=False))
                moved = left._replace(owner=len(state.runs)) if state.delivery is DeliveryStatus.RESERVED else left
                yield f"retry run {number}", _started(model, moved, phase, run.outcome)
    for number, run in enumerate(state.runs):
        message = (PHASE_TASKS.get(run.phase, PhaseTask.NEXT), number)
        if run.status is RunStatus.ACTIVE and run.lease is not Lease.LIVE and message not in state.messages:
            sent = _with_message(model, state, *message)
            if sent is not state:
                yield f"redispatch run {number}", sent


def _started(model: Model, state: State, phase: Phase, outcome: MutationOutcome = MutationOutcome.NONE) -> State:
    assert phase in INITIAL_PHASES
    kept = outcome if phase is Phase.EMITTING else MutationOutcome.NONE
    run = Run(phase, RunStatus.ACTIVE, kept, 0, Lease.NONE, None, False)
    number = len(state.runs)
    return _with_message(model, state._replace(runs=(*state.runs, run)), PHASE_TASKS[phase], number)


def _status_of(state: State, run: Run) -> MutationStatus | None:
    return None if run.mutation is None else state.mutations[run.mutation].status


def _messages(model: Model, state: State) -> Iterator[Step]:
    """Deliver a message to a worker, once or again, or lose it."""
    for message in state.messages:
        task, number = message
        without = state._replace(messages=state.messages - {message})
        yield f"lose {task} of run {number}", without
        claimed = _claimed(model, state.runs[number], task)
        if claimed is None:
            continue
        for place, worker in enumerate(state.workers):
            if worker is None:
                run, stage = claimed
                for left, how in ((without, "take"), (state, "take a copy of")):
                    held = _with_worker(_with_run(left, number, run), place, Worker(number, run.fence, stage))
                    yield f"worker {place}: {how} {task} of run {number}", held
                break  # workers are alike


_CLAIMS: Mapping[PhaseTask, tuple[frozenset[Phase], Stage, Phase | None]] = {
    PhaseTask.PREPARE: (frozenset({Phase.PENDING, Phase.PREPARING}), Stage.PREPARE, Phase.PREPARING),
    PhaseTask.MUTATE: (frozenset({Phase.PREPARED}), Stage.ASK, None),
    PhaseTask.NEXT: (frozenset({Phase.MUTATED, Phase.EMITTING}), Stage.NEXT, Phase.EMITTING),
}


def _claimed(model: Model, run: Run, task: PhaseTask) -> tuple[Run, Stage] | None:
    """The run as a claim leaves it; None: it is not to be had."""
    phases, stage, phase = _CLAIMS[task]
    if run.status is not RunStatus.ACTIVE or run.lease is Lease.LIVE or run.phase not in phases:
        return None
    if run.fence >= model.max_claims:
        return None
    return run._replace(fence=run.fence + 1, lease=Lease.LIVE, phase=phase or run.phase), stage


def _holds(model: Model, run: Run, worker: Worker) -> bool:
    """Whether the run is still the worker's: it is active under the worker's fence."""
    return (run.status is RunStatus.ACTIVE and run.fence == worker.fence) or model.bug is Bug.NO_FENCE


def _work(model: Model, state: State) -> Iterator[Step]:
    """The next step of each worker."""
    for place, worker in enumerate(state.workers):
        if worker is not None:
            yield from _STAGES[worker.stage](model, state, place, worker)


def _prepare(model: Model, state: State, place: int, worker: Worker) -> Iterator[Step]:
    run, idle = state.runs[worker.run], _with_worker(state, place, None)
    if (
        not _holds(model, run, worker)
        or run.phase is not Phase.PREPARING
        or state.delivery is not DeliveryStatus.PENDING
    ):
        yield f"worker {place}: prepare is refused", idle
        return
    prepared = _with_run(idle, worker.run, run._replace(phase=Phase.PREPARED, lease=Lease.NONE))
    reserved = prepared._replace(delivery=DeliveryStatus.RESERVED, owner=worker.run)
    yield f"worker {place}: reserve for run {worker.run}", _with_message(model, reserved, PhaseTask.MUTATE, worker.run)


def _ask(model: Model, state: State, place: int, worker: Worker) -> Iterator[Step]:
    run, idle = state.runs[worker.run], _with_worker(state, place, None)
    has_lease = run.lease is Lease.LIVE or model.bug is Bug.NO_FENCE
    if not _holds(model, run, worker) or run.phase is not Phase.PREPARED or not has_lease:
        yield f"worker {place}: the request is refused", idle
        return
    number = len(state.mutations)
    mutation = Mutation(
        run=worker.run,
        status=MutationStatus.IN_FLIGHT,
        key=_key(model, state),
        database_age=Age.FRESH,
        age=Age.FRESH,
        wire=Wire.UNSENT,
        is_visible=False,
        is_absence=False,
    )
    asked = state._replace(mutations=(*state.mutations, mutation))
    asked = _with_run(asked, worker.run, run._replace(phase=Phase.MUTATING, mutation=number))
    yield (
        f"worker {place}: write mutation {number} to the ledger",
        _with_worker(asked, place, worker._replace(stage=Stage.SEND)),
    )


def _key(model: Model, state: State) -> int:
    """The key of a request: it changes when one was used up."""
    if not model.provider.honours_keys or model.bug is Bug.KEY_NOT_KEPT:
        return len(state.mutations)
    return sum(m.status is MutationStatus.FAILED and m.wire is Wire.REFUSED for m in state.mutations)


def _send(model: Model, state: State, place: int, worker: Worker) -> Iterator[Step]:
    number = _mutation_of(state, worker)
    mutation = state.mutations[number]
    is_late = mutation.age is not Age.FRESH and model.bug is not Bug.SEND_AFTER_DEADLINE
    if mutation.wire is not Wire.UNSENT or is_late:
        yield f"worker {place}: send nothing, it is too late", _with_worker(state, place, None)
        return
    sent = _with_mutation(state, number, mutation._replace(wire=Wire.TRAVELLING))
    yield f"worker {place}: send mutation {number}", _with_worker(sent, place, worker._replace(stage=Stage.WAIT))


def _mutation_of(state: State, worker: Worker) -> int:
    """The mutation that a worker asked for: the newest of its run."""
    return max(number for number, each in enumerate(state.mutations) if each.run == worker.run)


_CALL_FACTS = CallFacts(
    timeout=timedelta(seconds=1),
    retry=MutationRetryPolicy(max_attempts=1),
    can_reconcile=False,
    attempts=1,
    time_left=timedelta(0),
)
_RESET = CallError(reading=ErrorReading(meaning=ErrorMeaning.UNKNOWN), reason="reset", error_type="Reset")
_REFUSAL = CallError(reading=ErrorReading(meaning=ErrorMeaning.REFUSED), reason="refused", error_type="Refused")


def _wait(model: Model, state: State, place: int, worker: Worker) -> Iterator[Step]:
    """The answer comes, or none does. The worker records what the domain decides."""
    number = _mutation_of(state, worker)
    ends: list[CallEnd] = [_RESET]
    if state.mutations[number].wire is Wire.APPLIED:
        ends.append(Applied())
    if state.mutations[number].wire is Wire.REFUSED:
        ends.append(_REFUSAL)
    for end in ends:
        idle = _with_worker(state, place, None)
        yield f"worker {place}: {_name(end)}", _recorded(model, idle, worker, number, end)


def _name(end: CallEnd) -> str:
    return "gets no answer" if end is _RESET else f"is answered: {'refused' if end is _REFUSAL else 'applied'}"


def _recorded(model: Model, state: State, worker: Worker, number: int, end: CallEnd) -> State:
    run, mutation = state.runs[worker.run], state.mutations[number]
    decision = decide(end, _CALL_FACTS)
    is_holder = _holds(model, run, worker) and mutation.status is MutationStatus.IN_FLIGHT
    if decision.action is NextAction.APPLIED:  # the own answer of a worker counts, also when its run was taken away
        return _applied(model, state, number) if mutation.status in UNRESOLVED else state
    if decision.action is NextAction.FAILED and decision.evidence is Evidence.REFUSED:
        return _failed(model, state, number) if is_holder or mutation.status in UNRESOLVED else state
    return _stopped(model, state, worker.run, FailureKind.TRANSIENT) if is_holder else state


def _next(model: Model, state: State, place: int, worker: Worker) -> Iterator[Step]:
    run, idle = state.runs[worker.run], _with_worker(state, place, None)
    if not _holds(model, run, worker) or run.phase is not Phase.EMITTING or state.owner != worker.run:
        yield f"worker {place}: the commit is refused", idle
        return
    done = run._replace(phase=Phase.COMMITTED, status=RunStatus.COMMITTED, lease=Lease.NONE)
    skipped = run.outcome is MutationOutcome.SKIPPED
    committed = _with_run(idle, worker.run, done)._replace(
        delivery=DeliveryStatus.SKIPPED if skipped else DeliveryStatus.CONSUMED
    )
    yield f"worker {place}: commit run {worker.run}", committed


_STAGES: Mapping[Stage, Callable[[Model, State, int, Worker], Iterator[Step]]] = {
    Stage.PREPARE: _prepare,
    Stage.ASK: _ask,
    Stage.SEND: _send,
    Stage.WAIT: _wait,
    Stage.NEXT: _next,
}


def _applied(model: Model, state: State, number: int) -> State:
    """It happened: by the call itself, by a reconcile attempt, or by an operator."""
    mutation = state.mutations[number]
    run = state.runs[mutation.run]
    known = run._replace(outcome=MutationOutcome.SUCCESS, phase=Phase.MUTATED, lease=Lease.NONE)
    done = _with_run(
        _with_mutation(state, number, mutation._replace(status=MutationStatus.APPLIED)), mutation.run, known
    )
    if run.status is RunStatus.ACTIVE:
        return _with_message(model, done, PhaseTask.NEXT, mutation.run)
    return done


def _failed(model: Model, state: State, number: int, *, is_absence: bool = False) -> State:
    """It did not happen. The run stops, or has stopped: its inputs go back, or its plan is tried again."""
    mutation = state.mutations[number]
    run = state.runs[mutation.run]
    row = mutation._replace(status=MutationStatus.FAILED, is_absence=is_absence)
    known = run._replace(outcome=MutationOutcome.FAILURE, phase=Phase.MUTATED)
    left = _with_run(_with_mutation(state, number, row), mutation.run, known)
    if run.status is RunStatus.ACTIVE:
        return _stopped(model, left, mutation.run, FailureKind.TRANSIENT)
    disposition = disposition_of(Side.BEFORE, MutationOutcome.FAILURE, model.after_failed)
    return _disposed(left, mutation.run, disposition.inputs)


def _disposed(state: State, number: int, inputs: InputAction) -> State:
    run = state.runs[number]
    if inputs is InputAction.KEEP:
        return _with_run(state, number, run._replace(retry_pending=True))
    left = _with_run(state, number, run._replace(retry_pending=False))
    if state.owner == number and state.delivery is DeliveryStatus.RESERVED:
        return left._replace(delivery=DeliveryStatus.PENDING, owner=None)
    return left


def _stopped(model: Model, state: State, number: int, kind: FailureKind) -> State:
    """Stop a run as the domain decides."""
    run = state.runs[number]
    facts = RunFacts(
        phase=run.phase,
        outcome=run.outcome,
        mutation=_status_of(state, run),
        can_reconcile=model.provider.can_reconcile,
        blamed_events=1,
        earlier_failures=0,
        after_failed=model.after_failed,
        on_uncertain=OnUncertain.CONTAIN,
        on_logic_error=OnLogicError.QUARANTINE,
        on_exhausted=OnExhausted.QUARANTINE,
    )
    decision = decide_stop(Failure(kind=kind, message="stopped"), facts, _POLICY)
    if decision.doubt is not None and run.mutation is not None:
        state = _with_mutation(state, run.mutation, state.mutations[run.mutation]._replace(status=decision.doubt))
    stopped = _with_run(state, number, run._replace(status=decision.status, lease=Lease.NONE))
    inputs = InputAction.RELEASE if model.bug is Bug.EARLY_RELEASE else decision.disposition.inputs
    return _disposed(stopped, number, inputs)


_POLICY = FailurePolicy()


def _die(_: Model, state: State) -> Iterator[Step]:
    """A process dies, or stands still until its lease has lapsed."""
    for place, worker in enumerate(state.workers):
        if worker is not None:
            yield f"kill worker {place}", _with_worker(state, place, None)
    if state.attempt is not None:
        yield "kill the reconciler", state._replace(attempt=None)
    for number, run in enumerate(state.runs):
        if run.lease is Lease.LIVE:
            yield f"the lease of run {number} lapses", _with_run(state, number, run._replace(lease=Lease.LAPSED))


def _time(model: Model, state: State) -> Iterator[Step]:
    """A deadline passes, a quiet period ends, and once the database's clock jumps ahead."""
    for number, mutation in enumerate(state.mutations):
        if mutation.age is Age.FRESH:
            aged = mutation._replace(age=Age.OVERDUE, database_age=max(mutation.database_age, Age.OVERDUE))
            yield f"the deadline of mutation {number} passes", _with_mutation(state, number, aged)
        if mutation.age is Age.OVERDUE and _can_be_quiet(model, mutation):
            aged = mutation._replace(age=Age.QUIET, database_age=Age.QUIET)
            yield f"the quiet period of mutation {number} ends", _with_mutation(state, number, aged)
        if not state.has_jumped and mutation.database_age is not Age.QUIET:
            aged = mutation._replace(database_age=Age.QUIET)
            yield "the database's clock jumps", _with_mutation(state, number, aged)._replace(has_jumped=True)


def _can_be_quiet(model: Model, mutation: Mutation) -> bool:
    """What an operation declares by its settle window: nothing travels any more, and a search finds what happened."""
    if mutation.wire is Wire.TRAVELLING:
        return False
    return mutation.wire is not Wire.APPLIED or mutation.is_visible or not model.provider.lag_is_bounded


def _world(model: Model, state: State) -> Iterator[Step]:
    """The outside system takes a request, refuses it, or never gets it; later a search finds it."""
    for number, mutation in enumerate(state.mutations):
        if mutation.wire is Wire.TRAVELLING:
            for wire in (Wire.APPLIED, Wire.REFUSED, Wire.LOST):
                is_known = (
                    wire is Wire.REFUSED and model.provider.honours_keys and mutation.key in _effects(model, state)
                )
                if not is_known:  # a key that it knows is answered with the earlier result
                    yield (
                        f"mutation {number} is {wire.value}",
                        _with_mutation(state, number, mutation._replace(wire=wire)),
                    )
        if mutation.wire is Wire.APPLIED and not mutation.is_visible:
            yield f"a search finds mutation {number}", _with_mutation(state, number, mutation._replace(is_visible=True))


def _effects(model: Model, state: State) -> frozenset[int]:
    """The effects in the outside system: one per key if it honours keys, else one per request."""
    happened = [(n, m) for n, m in enumerate(state.mutations) if m.wire is Wire.APPLIED]
    return frozenset(m.key if model.provider.honours_keys else n for n, m in happened)


def _rescue(model: Model, state: State) -> Iterator[Step]:
    """The rescuer stops a run whose lease has lapsed."""
    for number, run in enumerate(state.runs):
        if run.status is RunStatus.ACTIVE and run.lease is Lease.LAPSED:
            yield f"rescue run {number}", _stopped(model, state, number, FailureKind.CRASH)


def _reconcile(model: Model, state: State) -> Iterator[Step]:
    """The reconciler asks, and records what it was told. Between the two it may die or stand still."""
    if state.attempt is not None:
        yield "record the reconcile attempt", _verdict(model, state._replace(attempt=None), state.attempt)
        return
    for number, mutation in enumerate(state.mutations):
        if mutation.status is MutationStatus.NEEDS_RECONCILE:
            attempt = Attempt(number, mutation.is_visible, _is_quiet(model, mutation))
            yield f"reconcile mutation {number}", state._replace(attempt=attempt)
            escalated = mutation._replace(status=MutationStatus.INDETERMINATE)
            yield f"escalate mutation {number}", _with_mutation(state, number, escalated)


def _is_quiet(model: Model, mutation: Mutation) -> bool:
    if model.bug is Bug.EARLY_ABSENCE:
        return True
    by_host = mutation.age is Age.QUIET or model.bug is Bug.ONE_CLOCK
    return by_host and mutation.database_age is Age.QUIET


def _verdict(model: Model, state: State, attempt: Attempt) -> State:
    mutation = state.mutations[attempt.mutation]
    end: CallEnd = Applied() if attempt.is_found else NotFound()
    decision = decide(end, DoubtFacts(reconcile_attempts=1, max_attempts=9))
    if mutation.status not in (MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE):
        return state
    if decision.action is NextAction.APPLIED:
        return _applied(model, state, attempt.mutation)
    assert decision.action is NextAction.ABSENT
    was_quiet = attempt.was_quiet or (model.bug is Bug.STALE_ABSENCE and _is_quiet(model, mutation))
    is_open = mutation.status is MutationStatus.NEEDS_RECONCILE
    return _failed(model, state, attempt.mutation, is_absence=True) if was_quiet and is_open else state


def _operator(model: Model, state: State) -> Iterator[Step]:
    """An operator answers what only an operator can know."""
    for number, mutation in enumerate(state.mutations):
        if mutation.status is not MutationStatus.INDETERMINATE:
            continue
        happened = mutation.wire is Wire.APPLIED
        if happened:
            yield f"operator: mutation {number} happened", _applied(model, state, number)
        if _is_quiet(model, mutation) and (not happened or model.provider.operator_errs):
            yield f"operator: mutation {number} did not happen", _failed(model, state, number, is_absence=True)
        if model.provider.can_reconcile:
            again = mutation._replace(status=MutationStatus.NEEDS_RECONCILE)
            yield f"operator: try mutation {number} again", _with_mutation(state, number, again)
        skipped = _with_mutation(state, number, mutation._replace(status=MutationStatus.FAILED))
        run = skipped.runs[mutation.run]
        known = run._replace(outcome=MutationOutcome.SKIPPED, phase=Phase.MUTATED, retry_pending=True)
        yield f"operator: skip mutation {number}", _with_run(skipped, mutation.run, known)


# What must hold


def broken_rules(model: Model, state: State) -> Iterator[str]:
    """The rules that do not hold in a state."""
    yield from _broken_of_effects(model, state)
    yield from _broken_of_the_event(model, state)


def _broken_of_effects(model: Model, state: State) -> Iterator[str]:
    if len(_effects(model, state)) > 1:
        yield "an event causes at most one effect"
    if sum(m.status is MutationStatus.APPLIED for m in state.mutations) > 1:
        yield "an event is bound to at most one applied mutation"
    for mutation in state.mutations:
        if mutation.status is MutationStatus.APPLIED and mutation.wire is not Wire.APPLIED:
            yield "what the ledger calls applied has happened"
        is_wrong = mutation.is_absence and mutation.wire in (Wire.TRAVELLING, Wire.APPLIED)
        if is_wrong and not model.provider.honours_keys:
            yield "what the ledger calls absent has not happened and cannot happen any more"


def _broken_of_the_event(model: Model, state: State) -> Iterator[str]:
    committed = [run for run in state.runs if run.status is RunStatus.COMMITTED]
    if len(committed) > 1:
        yield "an event is consumed by one run"
    if (state.delivery in (DeliveryStatus.CONSUMED, DeliveryStatus.SKIPPED)) != bool(committed):
        yield "an event is consumed if and only if its run commits"
    if committed and committed[0].outcome is MutationOutcome.SUCCESS and not _effects(model, state):
        yield "a run that commits with success had its effect"
    if state.delivery is DeliveryStatus.RESERVED and not _is_owned(state):
        yield "a reserved event belongs to a run that moves, waits for a retry or waits for an outcome"


def _is_owned(state: State) -> bool:
    if state.owner is None:
        return False
    run = state.runs[state.owner]
    return run.status is RunStatus.ACTIVE or run.retry_pending or _status_of(state, run) in UNRESOLVED


def forbidden_moves(before: State, after: State) -> Iterator[str]:
    """The moves of a step that no table of the domain has."""
    for old, new in zip(before.runs, after.runs, strict=False):
        if old.phase is not new.phase and new.phase not in _reachable_phases(old.phase):
            yield f"phase {old.phase} to {new.phase}"
        if old.status is not new.status and new.status not in RUN_STATUS_TRANSITIONS[old.status]:
            yield f"status {old.status} to {new.status}"
    for was, now in zip(before.mutations, after.mutations, strict=False):
        if was.status is not now.status and now.status not in MUTATION_TRANSITIONS[was.status]:
            yield f"mutation {was.status} to {now.status}"
    if before.delivery is not after.delivery and after.delivery not in DELIVERY_TRANSITIONS[before.delivery]:
        yield f"delivery {before.delivery} to {after.delivery}"


def _reachable_phases(phase: Phase) -> frozenset[Phase]:
    """The phases that one step may lead to; a claim and its record may be one step."""
    return PHASE_TRANSITIONS[phase] | {after for each in PHASE_TRANSITIONS[phase] for after in PHASE_TRANSITIONS[each]}


# The search


@dataclass(slots=True, kw_only=True)
class Report:
    """What a search found."""

    states: int = 0
    moves: int = 0
    stuck: int = 0  #: states from which no end can be reached although the bounds leave room
    broken: str = ""
    trace: list[str] = field(default_factory=list)  #: the steps of a shortest way to what is broken
    is_complete: bool = False


def explore(model: Model, *, limit: int = 2_000_000) -> Report:
    """Visit every state, nearest first, until a rule is broken or no state is left."""
    report, came_from = Report(), {model.start: (model.start, "")}
    leads_to: dict[State, list[State]] = {}
    queue = deque([model.start])
    while queue and len(came_from) <= limit:
        state = queue.popleft()
        for rule in broken_rules(model, state):
            return _broken(report, came_from, state, rule)
        for name, after in steps(model, state):
            report.moves += 1
            if after not in came_from:
                came_from[after] = (state, name)
                queue.append(after)
            leads_to.setdefault(after, []).append(state)
            for move in forbidden_moves(state, after):
                return _broken(report, came_from, after, f"no table has the move {move}")
    report.states, report.is_complete = len(came_from), not queue
    report.stuck = len(_stuck(model, came_from, leads_to))
    return report


def _broken(report: Report, came_from: Mapping[State, tuple[State, str]], state: State, rule: str) -> Report:
    report.states, report.broken = len(came_from), rule
    while came_from[state][1]:
        state, name = came_from[state]
        report.trace.insert(0, name)
    return report


def _stuck(model: Model, states: Iterable[State], leads_to: Mapping[State, list[State]]) -> set[State]:
    """The states from which the event can never be settled, with runs and fences left to do it."""
    ends = [state for state in states if state.delivery in (DeliveryStatus.CONSUMED, DeliveryStatus.SKIPPED)]
    live, queue = set(ends), deque(ends)
    while queue:
        for before in leads_to.get(queue.popleft(), ()):
            if before not in live:
                live.add(before)
                queue.append(before)
    return {state for state in states if state not in live and _has_room(model, state)}


def _has_room(model: Model, state: State) -> bool:
    return len(state.runs) < model.max_runs and all(run.fence < model.max_claims for run in state.runs)


def main() -> int:
    """Explore the model against every provider, then with every seeded bug, and print what was found."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--runs", type=int, default=2, help="runs per event, retries among them")
    parser.add_argument("--messages", type=int, default=1, help="messages in the broker at once")
    parser.add_argument("--claims", type=int, default=4, help="claims per run")
    given = parser.parse_args()
    bounds = {"max_runs": given.runs, "max_messages": given.messages, "max_claims": given.claims}
    console, is_right = Console(highlight=False, soft_wrap=True), True
    for provider in PROVIDERS:
        for after_failed in AfterFailedMutation:
            report = explore(Model(provider=provider, after_failed=after_failed, **bounds))
            is_right = is_right and report.is_complete and not report.broken and not report.stuck
            found = report.broken or f"every rule holds, stuck: {report.stuck}"
            console.print(f"{provider.name}, {after_failed}: {report.states:,} states, {report.moves:,} moves; {found}")
            for number, name in enumerate(report.trace, 1):
                console.print(f"  {number}. {name}")
    for bug in Bug:
        broken = [r for r in (explore(Model(provider=p, bug=bug, **bounds)) for p in PROVIDERS) if r.broken]
        is_right = is_right and bool(broken)
        shortest = min(broken, key=lambda r: len(r.trace), default=None)
        found = f"broken after {len(shortest.trace)} steps: {shortest.broken}" if shortest else "NOT FOUND"
        console.print(f"seeded bug, {bug.value}: {found}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
