"""What to do next about a run or a mutation: a sentence, and the commands it comes down to."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from pipeline.client import commands
from pipeline.domain.mutations import MutationStatus
from pipeline.domain.runs import RunStatus
from pipeline.domain.workflows import BlockKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What follows, and what a person can type about it."""

    words: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What stands around a run."""

    mutation: Row[Any] | None
    carried: Row[Any] | None  #: the run that carried it forward
    blocks: frozenset[str]  #: by which it holds its workflow back
    is_in_maintenance: bool  #: its workflow


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
        return for_mutation(around.mutation)
    if run.status == RunStatus.ACTIVE:
        return _active(run)
    return _stopped(run, around)


def for_mutation(row: Row[Any]) -> Advice:
    """What follows a mutation as it stands."""
    if _has_surfaced(row):
        words = "It happened after all. Undo one of the two effects on the other side, then acknowledge it."
        return Advice(words=words, commands=(commands.acknowledge(row.id),))
    status = MutationStatus(row.status)
    if status is MutationStatus.PENDING and row.approved_at is None:
        return Advice(words="It waits to be allowed or refused.", commands=commands.approve(row.id))
    if status is MutationStatus.INDETERMINATE:
        words = "Nobody can know but a person. Look it up on the other side, then say what you found."
        return Advice(words=words, commands=commands.resolve(row.id, can_try_again=row.reconcilable))
    return Advice(words=_BY_ITSELF[status])


_BY_ITSELF = {
    MutationStatus.PENDING: "It was allowed; a worker sends it.",
    MutationStatus.IN_FLIGHT: "It is on its way; a worker waits for the answer.",
    MutationStatus.NEEDS_RECONCILE: "Nobody knows yet; the background asks the outside system again.",
    MutationStatus.APPLIED: "Nothing. It happened.",
    MutationStatus.FAILED: "Nothing. It did not happen, and what follows from that goes on by itself.",
}


def _has_surfaced(row: Row[Any]) -> bool:
    return row.surfaced_at is not None and row.acknowledged_by is None


def _active(run: Row[Any]) -> Advice:
    if run.is_leased:
        return Advice(words=f"Nothing. {run.worker} holds it.")
    if run.lease_expires_at is not None:
        return Advice(words="Its worker gives no sign of life; the rescue sweep stops it and its work goes on.")
    words = f"It waits for a worker that knows {run.workflow!r}. If it stays like this, start one, and beat."
    return Advice(words=words, commands=("celery -A pipeline worker", "pipeline doctor"))


def _stopped(run: Row[Any], around: Around) -> Advice:
    for kind, words in _BLOCKED.items():
        if kind in around.blocks:
            return Advice(words=words, commands=(commands.resume(run.workflow),))
    if run.status == RunStatus.FAILED_LOGIC and around.is_in_maintenance:
        words = "The code is wrong. Deploy mended code, which ends maintenance by itself, or end it by hand."
        return Advice(words=words, commands=(commands.exit_maintenance(run.workflow),))
    if run.status == RunStatus.COMMITTED:
        return Advice(words="Nothing. It is done.")
    if run.retry_pending:
        return Advice(words="Its outcome is known: a new run carries it forward, unless its workflow waits.")
    return Advice(words="Nothing. Its inputs were handed back, for another run or into quarantine.")
