"""``pipeline attention``, ``quarantine`` and ``trace``: what waits for a person, and what led to what."""

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from pipeline.admin import attention as client
from pipeline.admin import lookup
from pipeline.admin import trace as admin_trace
from pipeline.admin.attention import AttentionItem
from pipeline.admin.quarantine import Quarantine, QuarantineAction, QuarantineEntry, QuarantineFilter
from pipeline.admin.resolutions import Resolutions
from pipeline.admin.trace import Trace, TraceNode
from pipeline.cli import common, tables
from pipeline.config import EXIT_ATTENTION
from pipeline.domain.errors import quantity
from pipeline.store.database import Database

_UNLIMITED_WIDTH = 10_000  #: no line is cut: whoever is narrower wraps it, and an id can still be copied

quarantine = typer.Typer(
    help="Events that were set aside: look at them, hand them back, or go on without them.", no_args_is_help=True
)

HandlerOption = Annotated[str | None, typer.Option(help="Only for this handler; needs --workflow.")]
WaitingOption = Annotated[bool, typer.Option("--waiting", help="Those that wait for the handler, not those set aside.")]
EventIds = Annotated[
    list[str] | None, typer.Argument(help="Which events, by id. Without them, all that the options name.")
]


def attention(
    context: typer.Context,
    workflow: common.WorkflowOption = None,
    limit: common.Limit = 100,
    recent: Annotated[
        int, typer.Option(min=1, help="How many of the newest runs the doctor looks back over.")
    ] = 10_000,
    check: Annotated[bool, typer.Option("--check", help=f"Exit with {EXIT_ATTENTION} when something waits.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """List everything that waits for a person, oldest first, each with the exact commands to type."""
    database: Database = context.obj
    if workflow is not None:
        with database.transaction() as tx:
            lookup.require_workflow(tx, workflow)
    desk = Resolutions(database, common.registry_or_none())
    found, more = _limit_per_kind(client.items(desk, workflow=workflow, limit=limit + 1, recent=recent), limit)
    items = [*found, *_dead_letters()]
    if as_json:
        common.print_json(items)
    elif not items:
        common.print_lines("Nothing waits for a person.")
    else:
        _print_items(items, more, database)
    if check and items:
        raise typer.Exit(EXIT_ATTENTION)


def trace(
    context: typer.Context,
    id_: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="An event id, message id, run id, mutation id, idempotency key, or what the outside system called "
            "its result. If it is several things, put event:, message:, run:, mutation:, key: or external: before it.",
        ),
    ],
    recent: common.Recent = admin_trace.RECENT,
    limit: Annotated[
        int, typer.Option(min=1, max=5_000, help="How many things to show at most.")
    ] = admin_trace.MAX_NODES,
    as_json: common.AsJson = False,
) -> None:
    """Show everything an input caused, both ways: from where it began down to what followed."""
    found = admin_trace.trace(context.obj, id_, recent=recent, max_nodes=limit)
    if as_json:
        common.print_json(found)
    else:
        _print_trace(found)


@quarantine.command("list")
def list_(
    context: typer.Context,
    workflow: common.WorkflowOption = None,
    handler: HandlerOption = None,
    waiting: WaitingOption = False,
    limit: common.Limit = 100,
    as_json: common.AsJson = False,
) -> None:
    """List events that were set aside, oldest first, with the error that did it."""
    database: Database = context.obj
    which = QuarantineFilter(workflow=workflow, handler=handler, is_waiting=waiting)
    found, is_more = tables.first_rows(Quarantine(database).entries(which, limit=limit + 1), limit)
    if as_json:
        common.print_json(found)
    elif found:
        _print_entries(tables.count_text(quantity(len(found), "event"), "oldest", is_more=is_more), found, database)
    else:
        common.print_lines("Nothing waits there." if waiting else "Nothing was set aside.")


@quarantine.command()
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
    """Hand events back to their consumers; they count as new, with their failures forgotten."""
    which = QuarantineFilter(workflow=workflow, handler=handler, event_ids=_ids(events))
    _act_on_entries(context, QuarantineAction.RELEASE, which, limit, (reason, by, yes, as_json))


@quarantine.command()
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
    """Go on without events: no run of that consumer ever takes them."""
    which = QuarantineFilter(workflow=workflow, handler=handler, event_ids=_ids(events), is_waiting=waiting)
    _act_on_entries(context, QuarantineAction.SKIP, which, limit, (reason, by, yes, as_json))


@quarantine.command()
def add(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    events: Annotated[list[str], typer.Argument(help="Which events, by id.")],
    *,
    workflow: Annotated[str, typer.Option(help="The workflow of the handler.")],
    handler: Annotated[str, typer.Option(help="For which handler.")],
    reason: common.Reason = "",
    by: common.By = "",
    yes: common.Yes = False,
    as_json: common.AsJson = False,
) -> None:
    """Set events aside that wait for a handler."""
    which = QuarantineFilter(workflow=workflow, handler=handler, event_ids=_ids(events), is_waiting=True)
    _act_on_entries(context, QuarantineAction.ADD, which, len(events), (reason, by, yes, as_json))


_PAST_TENSE = {
    QuarantineAction.ADD: "set aside",
    QuarantineAction.RELEASE: "released",
    QuarantineAction.SKIP: "skipped",
}


def _act_on_entries(
    context: typer.Context,
    verb: QuarantineAction,
    which: QuarantineFilter,
    limit: int,
    options: tuple[str, str, bool, bool],
) -> None:
    """Show what would be done; do it only when asked to."""
    reason, by, yes, as_json = options
    wake_ups, database = common.WakeUps(), context.obj
    desk = Quarantine(database, wake_ups.wake_workflow)
    found = desk.entries(which, limit=limit + 1)
    selected, is_more = (found, False) if which.event_ids else tables.first_rows(found, limit)
    done = desk.act(verb, selected, common.actor(by, reason)) if yes else None
    if as_json:
        updated, refused = (done.updated, done.refused) if done else ([], {})
        selected_ids = [each.event_id for each in selected]
        result = {"selected": selected_ids, "is_done": yes, "updated": updated, "refused": refused}
        common.print_json({**result, "is_more": is_more, "is_notified": wake_ups.is_notified})
    elif not selected:
        common.print_lines("No such event: nothing was changed. `pipeline events ID` shows how one stands.")
    else:
        many = f"{quantity(len(selected), 'event')} to be {_PAST_TENSE[verb]}"
        _print_entries(tables.count_text(many, "oldest", is_more=is_more), selected, database)
        if done is None:
            common.print_lines("Nothing was changed. Repeat with --yes to do it.")
        else:
            common.print_lines(f"{len(done.updated)} {_PAST_TENSE[verb]}, {len(done.refused)} refused", wake_ups.text())
            common.print_lines(*(f"{subject}: {words}" for subject, words in done.refused.items()))
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


def _dead_letters() -> list[AttentionItem]:
    """The messages that workers refused, as one item. The broker is asked, but not waited for."""
    from pipeline.tasks import dead_letter  # Celery is slow to import

    count = dead_letter.dead_letter_depth()
    if count is None:
        typer.echo(
            "The broker does not say whether messages were refused; `pipeline dead-letters list` asks again.", err=True
        )
    return [client.dead_letters(count)] if count else []


def _limit_per_kind(items: list[AttentionItem], limit: int) -> tuple[list[AttentionItem], list[str]]:
    """The oldest of each kind, at most so many, and the kinds of which there are more."""
    kept: dict[str, list[AttentionItem]] = {}
    for item in items:
        kept.setdefault(item.kind, []).append(item)
    first = {id(item) for each in kept.values() for item in each[:limit]}
    return [item for item in items if id(item) in first], [kind for kind, of in kept.items() if len(of) > limit]


def _print_items(items: list[AttentionItem], more: list[str], database: Database) -> None:
    with database.transaction() as tx:
        now = tx.clock()
    things = "1 thing waits" if len(items) == 1 else f"{len(items)} things wait"
    also = f"; of these kinds there are more: {', '.join(more)}" if more else ""
    common.print_lines(f"{things} for a person, oldest first{also}.")
    for item in items:
        # when an event was set aside is not kept: the age is its own
        counted = "oldest" if item.kind == "quarantined" else "for"
        since = f"  {counted} {common.age(item.since, now)}" if item.since else ""
        of = f" of {item.workflow}" if item.workflow and item.subject != f"workflow {item.workflow}" else ""
        common.print_lines(f"\n{item.kind}  {item.subject}{of}{since}")
        common.print_lines(f"  {common.printable(item.reason)}", *(f"    {command}" for command in item.commands))


def _print_trace(found: Trace) -> None:
    """Each thing on a line of its own, ids whole: the terminal may wrap it, nothing is folded."""
    for root in found.roots:
        tree = Tree(_label(root), guide_style="dim")
        _add_children(tree, root)
        Console(highlight=False, width=_UNLIMITED_WIDTH, soft_wrap=True).print(tree)
    if found.is_partial:
        common.print_lines("There is more than is shown; --limit shows it.")


def _add_children(tree: Tree, node: TraceNode) -> None:
    for child in node.children:
        _add_children(tree.add(_label(child)), child)


def _label(node: TraceNode) -> Text:
    line = Text(no_wrap=True, overflow="ignore")
    line.append(f"{node.kind} ", style="dim").append(node.id, style="bold" if node.is_match else "")
    line.append(f"  {common.printable(node.description)}  ").append(f"[{node.status}]", style="cyan")
    if node.is_match:
        line.append("  <- this", style="bold green")
    return line
