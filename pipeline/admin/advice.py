"""Advise an operator about a run or a mutation: a sentence, and the commands to type."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pipeline.domain.acts import state_token
from pipeline.domain.errors import EventError
from pipeline.domain.operations import DeclaredResult, ResultForm, result_form, result_options
from pipeline.domain.states import MutationStatus, Phase, RunStatus
from pipeline.domain.workflows import AfterFailedMutation, BlockKind
from pipeline.store.rows import ListedRunRow, OpenBreakerRow, UnresolvedMutationRow
from pipeline.store.schema import BreakerRow, MutationRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What happens next, and the commands that an operator can type."""

    text: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowHolds:
    """What may keep the runs of a workflow from starting or sending."""

    reason: str = ""  #: an operator's pause, maintenance or blocks; empty when it may start runs
    commands: tuple[str, ...] = ()  #: commands that lift it
    open_breakers: tuple[OpenBreakerRow, ...] = ()  #: open ones, of any operation
    is_serial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSituation:
    """The facts around a run that the advice depends on."""

    mutation: MutationRow | None
    retry: ListedRunRow | None  #: the run that retried it
    block_kinds: frozenset[str]  #: of its open blocks on the workflow
    is_in_maintenance: bool  #: the workflow
    holds: WorkflowHolds


_REASON_OPTION = '-m "why"'  #: the operator replaces the text
#: What follows did_not_happen if the outside system itself refused the request.
REFUSED_TEXT = (
    "A new run sends it again under a new key. The outside system takes it for another request: if it had happened, "
    "it happens twice."
)
#: A run whose mutation has one of these statuses waits for it.
_BLOCKING_STATUSES = (
    MutationStatus.PENDING,
    MutationStatus.IN_FLIGHT,
    MutationStatus.NEEDS_RECONCILE,
    MutationStatus.INDETERMINATE,
)
_BLOCK_ADVICE = {
    BlockKind.APPROVAL: "Credentials or permissions were refused. Fix them, then resume the workflow.",
    BlockKind.INTERNAL: "Its retries are exhausted. Fix the cause, then resume the workflow.",
}


def for_run(run: ListedRunRow, situation: RunSituation) -> Advice:
    """Advise about a run."""
    if situation.retry is not None:
        return Advice(text="Another run retried it.", commands=(show_run_command(situation.retry.id),))
    if situation.mutation is not None and (
        situation.mutation.status in _BLOCKING_STATUSES or _has_open_late_effect(situation.mutation)
    ):
        return for_mutation(situation.mutation, situation.holds)
    if run.status == RunStatus.ACTIVE:
        return _active_advice(run, situation.holds)
    return _stopped_advice(run, situation)


def for_mutation(
    row: MutationRow, holds: WorkflowHolds, resolving: Sequence[str] = (), *, declared: DeclaredResult | None = None
) -> Advice:
    """Advise about a mutation. ``resolving`` are the commands that resolve it, ``declared`` is about its result."""
    if _has_open_late_effect(row):
        text = (
            "It seems to have happened after all; mutation.found_late in the timeline has the details. Count the "
            "effects in the outside system, undo one only if there are two, then acknowledge it."
        )
        return Advice(text=text, commands=(acknowledge_command(row.id, state_token(row)),))
    status = MutationStatus(row.status)
    if status is MutationStatus.PENDING and row.approved_at is None:
        alone = f" Until then no other run starts: {row.workflow!r} has concurrency 1."
        text = "It waits for approval or rejection." + (alone if holds.is_serial else "")
        return Advice(text=text, commands=approval_commands(row.id, state_token(row)))
    if status is MutationStatus.PENDING and (until := send_condition(row, holds)):
        return Advice(text=f"It was approved; it is sent as soon as {until.text}.", commands=until.commands)
    if status is MutationStatus.INDETERMINATE:
        text = (
            "Its outcome is unknown, and only an operator can find it out. Look it up in the outside system, then "
            f"resolve it. {repeat_text(row)}{_undeclared_text(declared)}"
        )
        return Advice(text=text, commands=tuple(resolving) or (show_mutation_command(row.id),))
    return Advice(text=_STATUS_ADVICE[status])


def _undeclared_text(declared: DeclaredResult | None) -> str:
    """Say that the workflow may need a result although its operation declares none."""
    if declared is None or declared.schema is not None or declared.can_fetch:
        return ""
    return (
        " Its operation does not declare whether it has a result: if it has none, use --no-result instead of --result."
    )


def release_text(row: UnresolvedMutationRow) -> str:
    """Say what becomes of the inputs after did_not_happen."""
    if row.retired:
        return "Its events are released. The code no longer has its handler, so nothing is sent until it is back."
    if row.after_failed_mutation == AfterFailedMutation.MUTATE:
        return "A new run tries the same plan again."
    return "Its events are released, and a new run prepares them again."


def repeat_text(row: MutationRow) -> str:
    """Say what a repeat after did_not_happen would do, if it had happened after all."""
    if not row.keyed:
        return (
            "After did_not_happen a new run sends it again under a new key. The outside system honours no keys: if it "
            "had happened, it happens twice."
        )
    if row.key_expires_at is None:
        return (
            "After did_not_happen a new run sends it again under the same key. The outside system honours keys: if it "
            "had happened, the repeat is answered with the old result, for as long as the key is kept."
        )
    return (
        "After did_not_happen a new run sends it again. The outside system keeps its key until "
        f"{row.key_expires_at:%Y-%m-%d %H:%M %Z}: until then a repeat of what had happened is answered with the old "
        "result, and after that it happens twice."
    )


def send_condition(asked: Any, holding: WorkflowHolds) -> Advice | None:
    """Return what must happen before an approved request is sent; None: only a worker is needed."""
    for row in holding.open_breakers:
        if (row.connector, row.operation) == (asked.connector, asked.operation):
            text = f"the breaker of {asked.connector}.{asked.operation} is closed ({_breaker_reason(row)})"
            return Advice(text=text, commands=(close_breaker_command(row.connector, row.operation),))
    if holding.reason:
        return Advice(text=f"{asked.workflow!r} continues ({holding.reason})", commands=holding.commands)
    return None


def describe_breakers(rows: Sequence[BreakerRow]) -> str:
    """List operations with an open circuit breaker, each with the reason."""
    return ", ".join(f"{row.connector}.{row.operation} ({_breaker_reason(row)})" for row in rows)


def _breaker_reason(breaker: BreakerRow) -> str:
    return breaker.reason or f"opened by {breaker.opened_by}"


_STATUS_ADVICE = {
    MutationStatus.PENDING: "It was approved; a worker sends it.",
    MutationStatus.IN_FLIGHT: "It was sent; a worker waits for the answer.",
    MutationStatus.NEEDS_RECONCILE: "Its outcome is in doubt; the reconciler asks the outside system.",
    MutationStatus.APPLIED: "Nothing. It happened.",
    MutationStatus.FAILED: "Nothing. It did not happen, and the workflow continues without help.",
}


def _has_open_late_effect(row: MutationRow) -> bool:
    return row.found_late_at is not None and row.acknowledged_by is None


def _active_advice(run: ListedRunRow, holding: WorkflowHolds) -> Advice:
    if run.is_leased:
        return Advice(text=f"Nothing. {run.worker} holds it.")
    if run.lease_expires_at is not None:
        return Advice(text="Its lease expired; the rescue sweep stops it, and its work continues.")
    start = ("celery -A pipeline worker", "pipeline doctor")
    if holding.open_breakers and run.phase == Phase.PREPARED and run.event_ids:
        text = (
            f"It waits to send. Open breakers: {describe_breakers(holding.open_breakers)}. If it needs one of these, "
            f"it continues when that breaker is closed; if not, it waits for a worker that knows {run.workflow!r}."
        )
        close = (close_breaker_command(row.connector, row.operation) for row in holding.open_breakers)
        return Advice(text=text, commands=(*close, *start))
    text = f"It waits for a worker that knows {run.workflow!r}. If it stays like this, start one, and beat."
    return Advice(text=text, commands=start)


def _stopped_advice(run: ListedRunRow, around: RunSituation) -> Advice:
    for kind, text in _BLOCK_ADVICE.items():
        if kind in around.block_kinds:
            resume = resume_command(run.workflow)
            if kind is not BlockKind.INTERNAL or run.retry_pending or not run.event_ids:
                return Advice(text=text, commands=(resume,))
            text += " If only its inputs fail, quarantine them first."
            return Advice(text=text, commands=(add_to_quarantine_command(run), resume))
    if run.status == RunStatus.FAILED_LOGIC and around.is_in_maintenance:
        return _maintenance_advice(run)
    if run.status == RunStatus.COMMITTED:
        return Advice(text="Nothing. It is done.")
    return _released_advice(run, around.holds)


def _maintenance_advice(run: ListedRunRow) -> Advice:
    leave = exit_maintenance_command(run.workflow)
    if run.error_type != EventError.__qualname__:
        text = "The code is wrong. Deploy fixed code, which ends maintenance by itself, or end it by hand."
        return Advice(text=text, commands=(leave,))
    text = (
        "The event that the error names cannot be used. Skip it and end maintenance by hand; or deploy code that "
        "takes it, which ends maintenance by itself."
    )
    return Advice(text=text, commands=(quarantine_command("list", run.workflow, run.handler, waiting=True), leave))


def _released_advice(run: ListedRunRow, holding: WorkflowHolds) -> Advice:
    text = "Its inputs were released for another run, or quarantined."
    if run.retry_pending:
        text = "Its outcome is known: a new run retries it from there."
    if holding.reason:
        text += f" No run starts until {run.workflow!r} continues ({holding.reason})."
        return Advice(text=text, commands=holding.commands)
    return Advice(text=text if run.retry_pending else f"Nothing. {text}")


def show_run_command(run_id: UUID | str) -> str:
    """Return the command that shows a run."""
    return f"pipeline runs {run_id}"


def show_workflow_command(workflow: str) -> str:
    """Return the command that shows a workflow."""
    return f"pipeline workflows {shlex.quote(workflow)}"


def show_mutation_command(mutation_id: UUID | str) -> str:
    """Return the command that shows a mutation."""
    return f"pipeline mutations {mutation_id}"


def resolve_commands(
    mutation_id: UUID | str, state: str, declared: DeclaredResult | None, *, can_try_again: bool
) -> tuple[str, ...]:
    """Return the commands that resolve a mutation. Each is refused when the mutation is no longer in this state."""
    kinds = ("did_not_happen", "skip", *(("try_again",) if can_try_again else ()))
    options = f"--if-state {state} {_REASON_OPTION}"
    happened = f"pipeline resolve happened {mutation_id} {result_options(declared)} {options}"
    return (happened, *(f"pipeline resolve {kind} {mutation_id} {options}" for kind in kinds))


def incident_commands(incident_id: str, declared: DeclaredResult | None, *, can_try_again: bool) -> tuple[str, ...]:
    """Return the commands that list and resolve an incident. Each shows first what it would do.

    ``happened`` is among them only if the operation has no result: one result is not that of many mutations.
    """
    kinds = [f"happened {result_options(declared)}"] if result_form(declared) is ResultForm.NO_RESULT else []
    kinds += ["did_not_happen", "skip", *(["try_again"] if can_try_again else [])]
    resolve = (f"pipeline resolve {kind} --incident {incident_id} {_REASON_OPTION}" for kind in kinds)
    return (f"pipeline mutations --incident {incident_id}", *resolve)


def approval_commands(mutation_id: UUID | str, state: str) -> tuple[str, ...]:
    """Return the commands that approve and reject a request."""
    return tuple(f"pipeline {verb} {mutation_id} --if-state {state} {_REASON_OPTION}" for verb in ("approve", "reject"))


def acknowledge_command(mutation_id: UUID | str, state: str) -> str:
    """Return the command that acknowledges a late effect."""
    return f"pipeline acknowledge {mutation_id} --if-state {state} {_REASON_OPTION}"


def pause_command(workflow: str) -> str:
    """Return the command that pauses a workflow."""
    return f"pipeline pause {shlex.quote(workflow)} {_REASON_OPTION}"


def resume_command(workflow: str) -> str:
    """Return the command that resumes a workflow."""
    return f"pipeline resume {shlex.quote(workflow)} {_REASON_OPTION}"


def exit_maintenance_command(workflow: str) -> str:
    """Return the command that ends maintenance."""
    return f"pipeline maintenance exit {shlex.quote(workflow)} {_REASON_OPTION}"


def quarantine_command(verb: str, workflow: str, handler: str, *, waiting: bool = False) -> str:
    """Return a quarantine command for the events of one handler."""
    which = f"--workflow {shlex.quote(workflow)} --handler {shlex.quote(handler)}" + (" --waiting" if waiting else "")
    return f"pipeline quarantine {verb} {which}" + ("" if verb == "list" else f" {_REASON_OPTION}")


def add_to_quarantine_command(run: ListedRunRow) -> str:
    """Return the command that quarantines the released inputs of a run."""
    handler = f"--workflow {shlex.quote(run.workflow)} --handler {shlex.quote(run.handler)}"
    return f"pipeline quarantine add {' '.join(map(str, run.event_ids))} {handler} {_REASON_OPTION}"


def close_breaker_command(connector: str, operation: str) -> str:
    """Return the command that closes a circuit breaker."""
    return f"pipeline breaker close {shlex.quote(f'{connector}.{operation}')} {_REASON_OPTION}"
