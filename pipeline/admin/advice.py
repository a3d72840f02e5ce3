"""What to do next about a run or a mutation: a sentence, and the commands it comes down to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from pipeline.admin import commands
from pipeline.domain.errors import EventError
from pipeline.domain.states import MutationStatus, Phase, RunStatus
from pipeline.domain.workflows import BlockKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What follows, and what a person can type about it."""

    words: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What may keep the work of a workflow from going on."""

    why: str = ""  #: a person's pause, maintenance or blocks; empty when it may start runs
    commands: tuple[str, ...] = ()  #: what lets it go on
    breakers: tuple[Row[Any], ...] = ()  #: open ones, of any operation
    has_one_place: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What stands around a run."""

    mutation: Row[Any] | None
    carried: Row[Any] | None  #: the run that carried it forward
    blocks: frozenset[str]  #: by which it holds its workflow back
    is_in_maintenance: bool  #: its workflow
    holding: Holding


#: While its mutation stands like this, a run can do nothing else.
_OPEN = (
    MutationStatus.PENDING,
    MutationStatus.IN_FLIGHT,
    MutationStatus.NEEDS_RECONCILE,
    MutationStatus.INDETERMINATE,
)
_BLOCKED = {
    BlockKind.APPROVAL: "Credentials or permissions were refused. Mend them, then let the workflow go on.",
    BlockKind.INTERNAL: "Its retries are exhausted. Mend the cause, then let the workflow go on.",
}


def for_run(run: Row[Any], around: Around) -> Advice:
    """What follows a run as it stands."""
    if around.carried is not None:
        return Advice(words="Another run carried it forward.", commands=(commands.show_run(around.carried.id),))
    if around.mutation is not None and (around.mutation.status in _OPEN or _has_surfaced(around.mutation)):
        return for_mutation(around.mutation, around.holding)
    if run.status == RunStatus.ACTIVE:
        return _active(run, around.holding)
    return _stopped(run, around)


def for_mutation(row: Row[Any], holding: Holding, *, can_look: bool = False) -> Advice:
    """What follows a mutation as it stands; ``can_look``: its operation can reconcile by now."""
    if _has_surfaced(row):
        words = (
            "It seems to have happened after all; mutation.surfaced says what is known. Count the effects on the other "
            "side, undo one only if there are two, then acknowledge it."
        )
        return Advice(words=words, commands=(commands.acknowledge(row.id),))
    status = MutationStatus(row.status)
    if status is MutationStatus.PENDING and row.approved_at is None:
        alone = f" Until then nothing else starts: it holds the only place of {row.workflow!r}."
        words = "It waits to be allowed or refused." + (alone if holding.has_one_place else "")
        return Advice(words=words, commands=commands.approve(row.id))
    if status is MutationStatus.PENDING and (until := waits_until(row, holding)):
        return Advice(words=f"It was allowed; it is sent as soon as {until.words}.", commands=until.commands)
    if status is MutationStatus.INDETERMINATE:
        words = (
            "Nobody can know but a person. Look it up on the other side, then say what you found. After did_not_happen "
            "a new run sends it under a new key: if it had happened, it happens twice, even where keys are honoured."
        )
        return Advice(words=words, commands=commands.resolve(row.id, can_try_again=can_look or row.reconcilable))
    return Advice(words=_BY_ITSELF[status])


def waits_until(asked: Any, holding: Holding) -> Advice | None:
    """What must happen before a request that was allowed is sent; None: nothing but a worker."""
    for row in holding.breakers:
        if (row.connector, row.operation) == (asked.connector, asked.operation):
            words = f"the breaker of {asked.connector}.{asked.operation} is closed ({_reason(row)})"
            return Advice(words=words, commands=(commands.close_breaker(row.connector, row.operation),))
    if holding.why:
        return Advice(words=f"{asked.workflow!r} goes on ({holding.why})", commands=holding.commands)
    return None


def open_breakers(rows: Sequence[Row[Any]]) -> str:
    """Operations that start nothing new, each with the reason."""
    return ", ".join(f"{row.connector}.{row.operation} ({_reason(row)})" for row in rows)


def _reason(breaker: Row[Any]) -> str:
    return breaker.reason or f"opened by {breaker.opened_by}"


_BY_ITSELF = {
    MutationStatus.PENDING: "It was allowed; a worker sends it.",
    MutationStatus.IN_FLIGHT: "It is on its way; a worker waits for the answer.",
    MutationStatus.NEEDS_RECONCILE: "Nobody knows yet; the background asks the outside system again.",
    MutationStatus.APPLIED: "Nothing. It happened.",
    MutationStatus.FAILED: "Nothing. It did not happen, and what follows from that goes on by itself.",
}


def _has_surfaced(row: Row[Any]) -> bool:
    return row.surfaced_at is not None and row.acknowledged_by is None


def _active(run: Row[Any], holding: Holding) -> Advice:
    if run.is_leased:
        return Advice(words=f"Nothing. {run.worker} holds it.")
    if run.lease_expires_at is not None:
        return Advice(words="Its worker gives no sign of life; the rescue sweep stops it and its work goes on.")
    start = ("celery -A pipeline worker", "pipeline doctor")
    if holding.breakers and run.phase == Phase.PREPARED and run.event_ids:
        words = (
            f"It waits to send. Open breakers: {open_breakers(holding.breakers)}. If it asks for one of these, "
            f"it goes on when that breaker is closed; if not, it waits for a worker that knows {run.workflow!r}."
        )
        close = (commands.close_breaker(row.connector, row.operation) for row in holding.breakers)
        return Advice(words=words, commands=(*close, *start))
    words = f"It waits for a worker that knows {run.workflow!r}. If it stays like this, start one, and beat."
    return Advice(words=words, commands=start)


def _stopped(run: Row[Any], around: Around) -> Advice:
    for kind, words in _BLOCKED.items():
        if kind in around.blocks:
            return Advice(words=words, commands=(commands.resume(run.workflow),))
    if run.status == RunStatus.FAILED_LOGIC and around.is_in_maintenance:
        return _in_maintenance(run)
    if run.status == RunStatus.COMMITTED:
        return Advice(words="Nothing. It is done.")
    return _handed_on(run, around.holding)


def _in_maintenance(run: Row[Any]) -> Advice:
    leave = commands.exit_maintenance(run.workflow)
    if run.error_type != EventError.__qualname__:
        words = "The code is wrong. Deploy mended code, which ends maintenance by itself, or end it by hand."
        return Advice(words=words, commands=(leave,))
    words = (
        "The event that the error names cannot be used. Skip it, as it waits, and end maintenance by hand; or deploy "
        "code that takes it, which ends maintenance by itself."
    )
    return Advice(words=words, commands=(commands.quarantine("list", run.workflow, run.handler, waiting=True), leave))


def _handed_on(run: Row[Any], holding: Holding) -> Advice:
    words = "Its inputs were handed back, for another run or into quarantine."
    if run.retry_pending:
        words = "Its outcome is known: a new run carries it forward."
    if holding.why:
        words += f" No run starts until {run.workflow!r} goes on ({holding.why})."
        return Advice(words=words, commands=holding.commands)
    return Advice(words=words if run.retry_pending else f"Nothing. {words}")
