"""Command ``pipeline quarantine``: list quarantined events, release or skip them."""

from typing import Annotated

import typer

from pipeline.admin import lookup
from pipeline.admin.quarantine import Quarantine, QuarantineAction, QuarantineEntry, QuarantineFilter
from pipeline.cli import common, tables
from pipeline.cli.commands import CommandGroup
from pipeline.domain.errors import quantity
from pipeline.store.database import Database

app = CommandGroup(
    help="Quarantined events: list them, release them to their consumers, or skip them.", no_args_is_help=True
)

HandlerOption = Annotated[str | None, typer.Option(help="Only for this handler; needs --workflow.")]
WaitingOption = Annotated[
    bool, typer.Option("--waiting", help="Events that wait for the handler instead of quarantined ones.")
]
EventIds = Annotated[list[str] | None, typer.Argument(help="Ids of events. Without them, all that the options select.")]


@app.command("list")
def list_(
    context: typer.Context,
    workflow: common.WorkflowOption = None,
    handler: HandlerOption = None,
    waiting: WaitingOption = False,
    limit: common.Limit = 100,
    as_json: common.AsJson = False,
) -> None:
    """List quarantined events, oldest first, with the error that caused it."""
    database: Database = context.obj
    which = QuarantineFilter(workflow=workflow, handler=handler, is_waiting=waiting)
    found, is_more = tables.first_rows(Quarantine(database).entries(which, limit=limit + 1), limit)
    if as_json:
        common.print_json(found)
    elif found:
        _print_entries(tables.count_text(quantity(len(found), "event"), "oldest", is_more=is_more), found, database)
        common.print_lines("`pipeline events ID` shows the history of one: its runs, each with its error.")
    else:
        common.print_lines("No event waits for it." if waiting else "No event is quarantined.")


@app.command()
def release(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    events: EventIds = None,
    *,
    workflow: common.WorkflowOption = None,
    handler: HandlerOption = None,
    reason: common.OptionalReason = "",
    by: common.By = "",
    limit: common.Limit = 1_000,
    yes: common.Yes = False,
    as_json: common.AsJson = False,
) -> None:
    """Release events to their consumers. They count as new; their failures are reset."""
    which = QuarantineFilter(workflow=workflow, handler=handler, event_ids=_ids(events))
    _act_on_entries(context, QuarantineAction.RELEASE, which, limit, (reason, by, yes, as_json))


@app.command()
def skip(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    events: EventIds = None,
    *,
    workflow: common.WorkflowOption = None,
    handler: HandlerOption = None,
    waiting: WaitingOption = False,
    reason: common.Reason = "",
    by: common.By = "",
    limit: common.Limit = 1_000,
    yes: common.Yes = False,
    as_json: common.AsJson = False,
) -> None:
    """Skip events: no run of that consumer ever takes them."""
    which = QuarantineFilter(workflow=workflow, handler=handler, event_ids=_ids(events), is_waiting=waiting)
    _act_on_entries(context, QuarantineAction.SKIP, which, limit, (reason, by, yes, as_json))


@app.command()
def add(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    events: Annotated[list[str], typer.Argument(help="Ids of events.")],
    *,
    workflow: Annotated[str, typer.Option(help="The workflow of the handler.")],
    handler: Annotated[str, typer.Option(help="The handler that must not take them.")],
    reason: common.Reason = "",
    by: common.By = "",
    yes: common.Yes = False,
    as_json: common.AsJson = False,
) -> None:
    """Quarantine events that wait for a handler."""
    which = QuarantineFilter(workflow=workflow, handler=handler, event_ids=_ids(events), is_waiting=True)
    _act_on_entries(context, QuarantineAction.ADD, which, len(events), (reason, by, yes, as_json))


_PAST_TENSE = {
    QuarantineAction.ADD: "quarantined",
    QuarantineAction.RELEASE: "released",
    QuarantineAction.SKIP: "skipped",
}


def _act_on_entries(
    context: typer.Context,
    action: QuarantineAction,
    which: QuarantineFilter,
    limit: int,
    options: tuple[str, str, bool, bool],
) -> None:
    """Show what would be done; do it only with --yes."""
    reason, by, yes, as_json = options
    wake_ups, database = common.WakeUps(), context.obj
    client = Quarantine(database, wake_ups.wake_workflow)
    found = client.entries(which, limit=limit + 1)
    selected, is_more = (found, False) if which.event_ids else tables.first_rows(found, limit)
    done = client.act(action, selected, common.actor(by, reason)) if yes else None
    if as_json:
        updated, refused = (done.updated, done.refused) if done else ([], {})
        selected_ids = [each.event_id for each in selected]
        result = {"selected": selected_ids, "is_done": yes, "updated": updated, "refused": refused}
        common.print_json({**result, "is_more": is_more, "is_notified": wake_ups.is_notified})
    elif not selected:
        common.print_lines("No such event: nothing was changed. `pipeline events ID` shows the state of one.")
    else:
        count = f"{quantity(len(selected), 'event')} to be {_PAST_TENSE[action]}"
        _print_entries(tables.count_text(count, "oldest", is_more=is_more), selected, database)
        if done is None:
            common.print_lines("Nothing was changed. Repeat with --yes to do it.")
        else:
            counts = f"{len(done.updated)} {_PAST_TENSE[action]}, {len(done.refused)} refused"
            common.print_lines(counts, wake_ups.text())
            common.print_lines(*(f"{subject}: {text}" for subject, text in done.refused.items()))
            if is_more:
                common.print_more_note(len(selected))
    if done is not None and (done.refused or is_more):
        raise typer.Exit(1)


def _ids(events: list[str] | None) -> tuple[int, ...]:
    return tuple(lookup.parse_event_id(event) for event in events or ())


def _print_entries(title: str, found: list[QuarantineEntry], database: Database) -> None:
    with database.transaction() as tx:
        now = tx.clock()
    rows = [
        (
            each.event_id,
            each.message_id,
            f"{each.workflow}/{each.handler}",
            each.failures,
            common.age(each.created_at, now),
        )
        for each in found
    ]
    columns = ("event", "message id", "handler", "failures", "age")
    tables.print_table(title, columns, rows, [each.error or each.title or "" for each in found], note="reason")
