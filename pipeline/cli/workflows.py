"""``pipeline workflows``, ``pause``, ``resume`` and ``maintenance``: how workflows stand, and their switches."""

from collections.abc import Callable
from datetime import datetime
from enum import StrEnum
from typing import Annotated

import typer

from pipeline.admin import lookup
from pipeline.admin import workflows as client
from pipeline.admin.controls import Switches, Turned
from pipeline.admin.workflows import Workflow, WorkflowDetail
from pipeline.cli import common, tables
from pipeline.domain.values import Person
from pipeline.store.database import Database
from pipeline.store.reads.listings import MOST_COUNTED

Name = Annotated[str, typer.Argument(help="Which workflow.", autocompletion=common.workflow_names)]


class Direction(StrEnum):
    """Into maintenance, or out of it."""

    ENTER = "enter"
    EXIT = "exit"


def workflows(
    context: typer.Context,
    name: Annotated[
        list[str] | None,
        typer.Argument(help="Show this one. Without it, list them all.", autocompletion=common.workflow_names),
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """List workflows: how each stands, why, and what waits. With a name, everything about that one."""
    database: Database = context.obj
    wanted = common.one(name)
    if wanted is not None:
        found = client.detail(database, wanted)
        common.as_json(found.as_dict()) if as_json else _show(found, database)
        return
    every = client.listed(database)
    if as_json:
        common.as_json([each.as_dict() for each in every])
    elif every:
        _list(every, database)
    else:
        common.say(
            "No workflow has been registered yet. A worker registers those of PIPELINE_WORKFLOWS when it starts."
        )


def pause(
    context: typer.Context,
    name: Name,
    reason: common.AnyReason = "",
    by: common.By = "",
    as_json: common.AsJson = False,
) -> None:
    """Start no run of a workflow until it is resumed. Runs in the air go on."""
    _turn(context, lambda switches, who: switches.pause(name, who), common.person(by, reason), as_json=as_json)


def resume(
    context: typer.Context,
    name: Name,
    reason: common.AnyReason = "",
    by: common.By = "",
    as_json: common.AsJson = False,
) -> None:
    """Let a workflow go on: lifts a pause and the blocks that wait for a person, and forgets past failures."""
    _turn(context, lambda switches, who: switches.resume(name, who), common.person(by, reason), as_json=as_json)


def maintenance(
    context: typer.Context,
    direction: Annotated[Direction, typer.Argument(help="enter: start nothing. exit: the code was mended.")],
    name: Name,
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; it is kept in the audit. Needed to enter.")] = "",
    by: common.By = "",
    as_json: common.AsJson = False,
) -> None:
    """Hold a workflow back until its code has changed, or say that it was mended."""
    who = common.person(by, reason)
    if direction is Direction.ENTER:
        _turn(context, lambda switches, person: switches.enter_maintenance(name, person), who, as_json=as_json)
    else:
        _turn(context, lambda switches, person: switches.exit_maintenance(name, person), who, as_json=as_json)


def _turn(context: typer.Context, act: Callable[[Switches, Person], Turned], who: Person, *, as_json: bool) -> None:
    bell = common.Bell()
    turned = act(Switches(context.obj, bell.workflow), who)
    if as_json:
        common.as_json({**turned.as_dict(), "is_rung": bell.heard})
    else:
        common.say(turned.what, turned.follows, bell.words())


def _list(every: list[Workflow], database: Database) -> None:
    with database.transaction() as tx:
        now = tx.clock()
    tables.listed(
        lookup.many(len(every), "workflow"),
        ("name", "status", "since", "runs", "waiting", "oldest", "aside", "version"),
        [
            (
                each.name,
                _status(each),
                common.age(each.since, now),
                f"{each.in_the_air}/{each.concurrency}",
                counted(each.waiting),
                common.age(each.oldest_at, now),
                each.quarantined or "",
                each.version,
            )
            for each in every
        ],
        [each.why for each in every],
        note="why",
    )


def _show(found: WorkflowDetail, database: Database) -> None:
    with database.transaction() as tx:
        now = tx.clock()
    each = found.workflow
    tables.fields(
        ("workflow", each.name),
        ("status", _status(each)),
        ("why", each.why),
        ("since", common.moment(each.since)),
        ("runs", f"{each.in_the_air} in the air, at most {each.concurrency}"),
        ("version", each.version),
        ("on uncertain", found.on_uncertain),
        ("on wrong code", found.on_logic_error),
    )
    _list_handlers(found, now)
    tables.listed(
        "\ntopics", ("name", "consumers"), [(t.name, ", ".join(t.consumers) or "nobody") for t in found.topics]
    )
    if found.blocks:
        rows = [(block.run_id, block.kind, common.age(block.since, now)) for block in found.blocks]
        tables.listed("\nblocks", ("run", "kind", "age"), rows, [block.reason for block in found.blocks], note="reason")
    if found.acts:
        acts = [(common.moment(act.at), act.act, act.actor) for act in found.acts]
        tables.listed("\nlast acts", ("at", "act", "by"), acts, [act.reason for act in found.acts], note="reason")


def _list_handlers(found: WorkflowDetail, now: datetime) -> None:
    tables.listed(
        "\nhandlers",
        ("name", "kind", "runs", "waiting", "reserved", "aside", "oldest", "failures"),
        [
            (
                handler.name + (" (gone from the code)" if handler.is_retired else ""),
                handler.kind,
                handler.in_the_air,
                counted(handler.waiting),
                handler.reserved,
                handler.quarantined,
                common.age(handler.oldest_at, now),
                handler.failures,
            )
            for handler in found.handlers
        ],
        [_when(handler) for handler in found.handlers],
        note="next",
    )


def _when(handler: client.Handler) -> str:
    parts = [
        f"next run {common.moment(handler.next_run_at)}" if handler.next_run_at else "",
        f"tried again at {common.moment(handler.retry_at)}" if handler.retry_at else "",
        f"wakes at {common.moment(handler.wake_at)}" if handler.wake_at else "",
    ]
    return ", ".join(part for part in parts if part)


def _status(workflow: Workflow) -> str:
    return f"{workflow.status}, maintenance" if workflow.is_in_maintenance else workflow.status


def counted(count: int) -> str:
    """A count that stopped where counting does says that it is at least that."""
    return f"{count}+" if count >= MOST_COUNTED else str(count)
