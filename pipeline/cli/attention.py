"""``pipeline attention``, ``quarantine`` and ``trace``: what waits for a person, and what led to what."""

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from pipeline.admin import attention as client
from pipeline.admin import lookup
from pipeline.admin import trace as admin_trace
from pipeline.admin.attention import Item
from pipeline.admin.quarantine import Quarantine, SetAside, Verb, Which
from pipeline.admin.resolutions import Desk
from pipeline.admin.trace import Node, Trace
from pipeline.cli import common, tables
from pipeline.config import EXIT_WAITING
from pipeline.store.database import Database

_ENDLESS = 10_000  #: no line is cut: whoever is narrower wraps it, and an id can still be copied

quarantine = typer.Typer(
    help="Events that were set aside: look at them, hand them back, or go on without them.", no_args_is_help=True
)

Handler = Annotated[str | None, typer.Option(help="Only for this handler; needs --workflow.")]
Waiting = Annotated[bool, typer.Option("--waiting", help="Those that wait for the handler, not those set aside.")]
EventIds = Annotated[
    list[str] | None, typer.Argument(help="Which events, by id. Without them, all that the options name.")
]


def attention(
    context: typer.Context,
    workflow: common.Workflow = None,
    limit: common.Limit = 100,
    recent: Annotated[
        int, typer.Option(min=1, help="How many of the newest runs the doctor looks back over.")
    ] = 10_000,
    check: Annotated[bool, typer.Option("--check", help=f"Exit with {EXIT_WAITING} when something waits.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """List everything that waits for a person, oldest first, each with the exact commands to type."""
    database: Database = context.obj
    if workflow is not None:
        with database.transaction() as tx:
            lookup.workflow(tx, workflow)
    desk = Desk(database, common.operations())
    found, more = _of_each(client.items(desk, workflow=workflow, limit=limit + 1, recent=recent), limit)
    items = [*found, *_refused()]
    if as_json:
        common.as_json([item.as_dict() for item in items])
    elif not items:
        common.say("Nothing waits for a person.")
    else:
        _show(items, more, database)
    if check and items:
        raise typer.Exit(EXIT_WAITING)


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
    most: Annotated[
        int, typer.Option(min=1, max=5_000, help="How many things to show at most.")
    ] = admin_trace.MOST_NODES,
    as_json: common.AsJson = False,
) -> None:
    """Show everything an input caused, both ways: from where it began down to what followed."""
    found = admin_trace.trace(context.obj, id_, recent=recent, most=most)
    if as_json:
        common.as_json(found.as_dict())
    else:
        _draw(found)


@quarantine.command("list")
def list_(
    context: typer.Context,
    workflow: common.Workflow = None,
    handler: Handler = None,
    waiting: Waiting = False,
    limit: common.Limit = 100,
    as_json: common.AsJson = False,
) -> None:
    """List events that were set aside, oldest first, with the error that did it."""
    database: Database = context.obj
    which = Which(workflow=workflow, handler=handler, waiting=waiting)
    found, is_more = tables.first(Quarantine(database).listed(which, limit=limit + 1), limit)
    if as_json:
        common.as_json([each.as_dict() for each in found])
    elif found:
        _list(tables.count(lookup.many(len(found), "event"), "oldest", is_more=is_more), found, database)
    else:
        common.say("Nothing waits there." if waiting else "Nothing was set aside.")


@quarantine.command()
def release(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    events: EventIds = None,
    *,
    workflow: common.Workflow = None,
    handler: Handler = None,
    reason: common.AnyReason = "",
    by: common.By = "",
    limit: common.Limit = 1_000,
    yes: common.Yes = False,
    as_json: common.AsJson = False,
) -> None:
    """Hand events back to their consumers; they count as new, with their failures forgotten."""
    which = Which(workflow=workflow, handler=handler, event_ids=_ids(events))
    _act(context, Verb.RELEASE, which, limit, (reason, by, yes, as_json))


@quarantine.command()
def skip(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    events: EventIds = None,
    *,
    workflow: common.Workflow = None,
    handler: Handler = None,
    waiting: Waiting = False,
    reason: common.Reason = "",
    by: common.By = "",
    limit: common.Limit = 1_000,
    yes: common.Yes = False,
    as_json: common.AsJson = False,
) -> None:
    """Go on without events: no run of that consumer ever takes them."""
    which = Which(workflow=workflow, handler=handler, event_ids=_ids(events), waiting=waiting)
    _act(context, Verb.SKIP, which, limit, (reason, by, yes, as_json))


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
    which = Which(workflow=workflow, handler=handler, event_ids=_ids(events), waiting=True)
    _act(context, Verb.ADD, which, len(events), (reason, by, yes, as_json))


_PAST = {Verb.ADD: "set aside", Verb.RELEASE: "released", Verb.SKIP: "skipped"}


def _act(context: typer.Context, verb: Verb, which: Which, limit: int, options: tuple[str, str, bool, bool]) -> None:
    """Show what would be done; do it only when asked to."""
    reason, by, yes, as_json = options
    bell, database = common.Bell(), context.obj
    desk = Quarantine(database, bell.workflow)
    found = desk.listed(which, limit=limit + 1)
    chosen, is_more = (found, False) if which.event_ids else tables.first(found, limit)
    done = desk.act(verb, chosen, common.person(by, reason)) if yes else None
    if as_json:
        taken, refused = (done.taken, done.refused) if done else ([], {})
        chosen_ids = [each.event_id for each in chosen]
        told = {"chosen": chosen_ids, "is_done": yes, "taken": taken, "refused": refused}
        common.as_json({**told, "is_more": is_more, "is_rung": bell.heard})
    elif not chosen:
        common.say("No such event: nothing was changed. `pipeline events ID` shows how one stands.")
    else:
        many = f"{lookup.many(len(chosen), 'event')} to be {_PAST[verb]}"
        _list(tables.count(many, "oldest", is_more=is_more), chosen, database)
        if done is None:
            common.say("Nothing was changed. Repeat with --yes to do it.")
        else:
            common.say(f"{len(done.taken)} {_PAST[verb]}, {len(done.refused)} refused", bell.words())
            common.say(*(f"{subject}: {words}" for subject, words in done.refused.items()))
            if is_more:
                common.say_more(len(chosen))
    if done is not None and (done.refused or is_more):
        raise typer.Exit(1)


def _ids(events: list[str] | None) -> tuple[int, ...]:
    return tuple(lookup.event_id(event) for event in events or ())


def _list(title: str, found: list[SetAside], database: Database) -> None:
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
    tables.listed(title, columns, rows, [each.error or each.title or "" for each in found], note="why")


def _refused() -> list[Item]:
    """The messages that workers refused, as one item. The broker is asked, but not waited for."""
    from pipeline.tasks import dead_letter  # Celery is slow to import

    count = dead_letter.depth()
    if count is None:
        typer.echo(
            "The broker does not say whether messages were refused; `pipeline refused list` asks again.", err=True
        )
    return [client.refused(count)] if count else []


def _of_each(items: list[Item], limit: int) -> tuple[list[Item], list[str]]:
    """The oldest of each kind, at most so many, and the kinds of which there are more."""
    kept: dict[str, list[Item]] = {}
    for item in items:
        kept.setdefault(item.kind, []).append(item)
    first = {id(item) for each in kept.values() for item in each[:limit]}
    return [item for item in items if id(item) in first], [kind for kind, of in kept.items() if len(of) > limit]


def _show(items: list[Item], more: list[str], database: Database) -> None:
    with database.transaction() as tx:
        now = tx.clock()
    things = "1 thing waits" if len(items) == 1 else f"{len(items)} things wait"
    also = f"; of these kinds there are more: {', '.join(more)}" if more else ""
    common.say(f"{things} for a person, oldest first{also}.")
    for item in items:
        # when an event was set aside is not kept: the age is its own
        counted = "oldest" if item.kind == "quarantined" else "for"
        since = f"  {counted} {common.age(item.since, now)}" if item.since else ""
        of = f" of {item.workflow}" if item.workflow and item.subject != f"workflow {item.workflow}" else ""
        common.say(f"\n{item.kind}  {item.subject}{of}{since}")
        common.say(f"  {common.printable(item.why)}", *(f"    {command}" for command in item.commands))


def _draw(found: Trace) -> None:
    """Each thing on a line of its own, ids whole: the terminal may wrap it, nothing is folded."""
    for root in found.roots:
        tree = Tree(_label(root), guide_style="dim")
        _grow(tree, root)
        Console(highlight=False, width=_ENDLESS, soft_wrap=True).print(tree)
    if found.is_partial:
        common.say("There is more than is shown; --most shows it.")


def _grow(tree: Tree, node: Node) -> None:
    for child in node.children:
        _grow(tree.add(_label(child)), child)


def _label(node: Node) -> Text:
    line = Text(no_wrap=True, overflow="ignore")
    line.append(f"{node.kind} ", style="dim").append(node.id, style="bold" if node.is_asked else "")
    line.append(f"  {common.printable(node.words)}  ").append(f"[{node.status}]", style="cyan")
    if node.is_asked:
        line.append("  <- this", style="bold green")
    return line
