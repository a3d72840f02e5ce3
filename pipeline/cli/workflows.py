"""Commands ``pipeline workflows``, ``pause``, ``resume`` and ``maintenance``: show and control workflows."""

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from typing import Annotated

import typer

from pipeline.admin import workflows as client
from pipeline.admin.controls import ControlResult, WorkflowControls
from pipeline.admin.workflows import WorkflowDetail, WorkflowSummary
from pipeline.cli import common, tables
from pipeline.domain.errors import quantity
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from pipeline.store.reads.listings import MAX_COUNTED

WorkflowArgument = Annotated[str, typer.Argument(help="Which workflow.", autocompletion=common.complete_workflow)]


class MaintenanceAction(StrEnum):
    """Enter maintenance, or leave it."""

    ENTER = "enter"
    EXIT = "exit"


def workflows(
    context: typer.Context,
    name: Annotated[
        list[str] | None,
        typer.Argument(help="Show this workflow. Without it, list all.", autocompletion=common.complete_workflow),
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """List workflows with status, reason and backlog. With a name: everything about that one."""
    database: Database = context.obj
    wanted = common.single_argument(name)
    if wanted is not None:
        found = client.detail(database, wanted)
        common.print_json(found) if as_json else _print_workflow(found, database)
        return
    every = client.list_workflows(database)
    if as_json:
        common.print_json(every)
    elif every:
        _print_workflows(every, database)
    else:
        common.print_lines(
            "No workflow is registered yet. A worker registers those of PIPELINE_WORKFLOWS when it starts."
        )


def pause(
    context: typer.Context,
    name: WorkflowArgument,
    reason: common.OptionalReason = "",
    by: common.By = "",
    as_json: common.AsJson = False,
) -> None:
    """Start no run of a workflow until it is resumed. Active runs continue."""
    _apply_control(context, lambda controls, who: controls.pause(name, who), common.actor(by, reason), as_json=as_json)


def resume(
    context: typer.Context,
    name: WorkflowArgument,
    reason: common.OptionalReason = "",
    by: common.By = "",
    as_json: common.AsJson = False,
) -> None:
    """Resume a workflow. Lifts its pause and the blocks that wait for an operator.

    If a block is lifted, the failures so far are forgotten.
    """
    _apply_control(context, lambda controls, who: controls.resume(name, who), common.actor(by, reason), as_json=as_json)


def maintenance(
    context: typer.Context,
    action: Annotated[MaintenanceAction, typer.Argument(help="enter: start no run. exit: the code was fixed.")],
    name: WorkflowArgument,
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why. Kept in the audit. Required to enter.")] = "",
    by: common.By = "",
    as_json: common.AsJson = False,
) -> None:
    """Start no run of a workflow until new code is deployed, or end that."""
    who = common.actor(by, reason)
    if action is MaintenanceAction.ENTER:
        _apply_control(context, lambda controls, by: controls.enter_maintenance(name, by), who, as_json=as_json)
    else:
        _apply_control(context, lambda controls, by: controls.exit_maintenance(name, by), who, as_json=as_json)


def _apply_control(
    context: typer.Context, act: Callable[[WorkflowControls, Actor], ControlResult], who: Actor, *, as_json: bool
) -> None:
    wake_ups = common.WakeUps()
    result = act(WorkflowControls(context.obj, wake_ups.wake_workflow), who)
    if as_json:
        common.print_json({**asdict(result), "is_notified": wake_ups.is_notified})
    else:
        common.print_lines(result.message, result.consequence, wake_ups.text())


def _print_workflows(every: list[WorkflowSummary], database: Database) -> None:
    with database.transaction() as tx:
        now = tx.clock()
    tables.print_table(
        quantity(len(every), "workflow"),
        ("name", "status", "since", "runs", "waiting", "oldest", "quarantined", "version"),
        [
            (
                each.name,
                _status_text(each),
                common.age(each.since, now),
                f"{each.active_runs}/{each.concurrency}",
                capped_count(each.waiting),
                common.age(each.oldest_at, now),
                each.quarantined or "",
                each.version,
            )
            for each in every
        ],
        [each.reason for each in every],
        note="reason",
    )


def _print_workflow(found: WorkflowDetail, database: Database) -> None:
    with database.transaction() as tx:
        now = tx.clock()
    each = found.workflow
    tables.print_fields(
        ("workflow", each.name),
        ("status", _status_text(each)),
        ("reason", each.reason),
        ("since", common.format_time(each.since)),
        ("runs", f"{each.active_runs} active, at most {each.concurrency}"),
        ("version", each.version),
        ("on uncertain", found.on_uncertain),
        ("on logic error", found.on_logic_error),
        ("on exhausted", found.on_exhausted),
    )
    _print_handlers(found, now)
    tables.print_table(
        "\ntopics", ("name", "consumers"), [(t.name, ", ".join(t.consumers) or "none") for t in found.topics]
    )
    if found.blocks:
        rows = [(block.run_id, block.kind, common.age(block.since, now)) for block in found.blocks]
        tables.print_table(
            "\nblocks", ("run", "kind", "age"), rows, [block.reason for block in found.blocks], note="reason"
        )
    if found.acts:
        acts = [(common.format_time(act.at), act.act, act.actor) for act in found.acts]
        tables.print_table("\nlast acts", ("at", "act", "by"), acts, [act.reason for act in found.acts], note="reason")


def _print_handlers(found: WorkflowDetail, now: datetime) -> None:
    tables.print_table(
        "\nhandlers",
        ("name", "kind", "runs", "waiting", "reserved", "quarantined", "oldest", "failures"),
        [
            (
                handler.name + (" (no longer in the code)" if handler.is_retired else ""),
                handler.kind,
                handler.active_runs,
                capped_count(handler.waiting),
                handler.reserved,
                handler.quarantined,
                common.age(handler.oldest_at, now),
                handler.failures,
            )
            for handler in found.handlers
        ],
        [_next_times(handler) for handler in found.handlers],
        note="next",
    )


def _next_times(handler: client.HandlerSummary) -> str:
    parts = [
        f"next run {common.format_time(handler.next_run_at)}" if handler.next_run_at else "",
        f"retry at {common.format_time(handler.retry_at)}" if handler.retry_at else "",
        f"wakes at {common.format_time(handler.wake_at)}" if handler.wake_at else "",
    ]
    return ", ".join(part for part in parts if part)


def _status_text(workflow: WorkflowSummary) -> str:
    return f"{workflow.status}, maintenance" if workflow.is_in_maintenance else workflow.status


def capped_count(count: int) -> str:
    """Format a count; ``+`` marks one that reached the limit of counting."""
    return f"{count}+" if count >= MAX_COUNTED else str(count)
