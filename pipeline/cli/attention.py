"""Commands ``pipeline attention`` and ``trace``: list what waits for an operator, show causes and effects."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from pipeline.admin import attention as client
from pipeline.admin import lookup
from pipeline.admin import trace as admin_trace
from pipeline.admin.attention import AttentionItem, Incident, open_incidents
from pipeline.admin.resolutions import Resolutions
from pipeline.admin.trace import Trace, TraceNode
from pipeline.cli import common, tables
from pipeline.config import EXIT_ATTENTION
from pipeline.store.database import Database

_UNLIMITED_WIDTH = 10_000  #: no line is cut: a narrower terminal wraps it, and ids can be copied


def attention(
    context: typer.Context,
    workflow: common.WorkflowOption = None,
    limit: common.Limit = 100,
    recent: Annotated[int, typer.Option(min=1, help="How many of the newest runs the doctor checks.")] = 10_000,
    check: Annotated[bool, typer.Option("--check", help=f"Exit with {EXIT_ATTENTION} when something waits.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """List everything that waits for an operator, alike questions as one, each with the commands to type."""
    database: Database = context.obj
    if workflow is not None:
        with database.transaction() as tx:
            lookup.require_workflow(tx, workflow)
    resolutions = Resolutions(database)
    found, more = _limit_per_kind(client.items(resolutions, workflow=workflow, limit=limit + 1, recent=recent), limit)
    items = [*found, *_dead_letters()]
    if as_json:
        common.print_json(items)
    elif not items:
        common.print_lines("Nothing waits for an operator.")
    else:
        _print_items(items, open_incidents(resolutions, workflow=workflow), more, database)
    if check and items:
        raise typer.Exit(EXIT_ATTENTION)


def trace(
    context: typer.Context,
    id_: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="An event id, message id, run id, mutation id, idempotency key, or the outside system's id of the "
            "result. If it is ambiguous, put event:, message:, run:, mutation:, key: or external: before it.",
        ),
    ],
    recent: common.Recent = admin_trace.RECENT,
    limit: Annotated[
        int, typer.Option(min=1, max=5_000, help="How many nodes to show at most.")
    ] = admin_trace.MAX_NODES,
    as_json: common.AsJson = False,
) -> None:
    """Show everything that led to a thing, and everything that followed from it."""
    found = admin_trace.trace(context.obj, id_, recent=recent, max_nodes=limit)
    if as_json:
        common.print_json(found)
    else:
        _print_trace(found)


def _dead_letters() -> list[AttentionItem]:
    """Return the refused messages as one item; a broker that does not answer is not waited for."""
    from pipeline.tasks import dead_letter  # Celery is slow to import

    count = dead_letter.dead_letter_depth()
    if count is None:
        typer.echo(
            "The broker did not answer, so refused messages are unknown; `pipeline dead-letters list` asks again.",
            err=True,
        )
    return [client.dead_letters(count)] if count else []


def _limit_per_kind(items: list[AttentionItem], limit: int) -> tuple[list[AttentionItem], list[str]]:
    """Keep at most ``limit`` items of each kind, the oldest; return also the kinds with more."""
    kept: dict[str, list[AttentionItem]] = {}
    for item in items:
        kept.setdefault(item.kind, []).append(item)
    first = {id(item) for each in kept.values() for item in each[:limit]}
    return [item for item in items if id(item) in first], [kind for kind, of in kept.items() if len(of) > limit]


def _print_items(items: list[AttentionItem], incidents: list[Incident], more: list[str], database: Database) -> None:
    """Print incidents first, then the items that belong to none. Only a terminal gets colour."""
    with database.transaction() as tx:
        now = tx.clock()
    out = Console(highlight=False, width=_UNLIMITED_WIDTH, soft_wrap=True)
    waiting = "1 item waits" if len(items) == 1 else f"{len(items)} items wait"
    also = f"; there are more of: {', '.join(more)}" if more else ""
    common.print_lines(f"{waiting} for an operator, oldest first{also}.")
    for incident in incidents:
        _print_incident(out, incident, now)
    for item in items:
        if item.incident is None:
            _print_item(out, item, now)


def _print_incident(out: Console, incident: Incident, now: datetime) -> None:
    span = f"{incident.first_at:%H:%M} to {incident.last_at:%H:%M}"
    error = f"  {incident.error_class}" if incident.error_class else ""
    line = Text("\n").append(f"{incident.count} of {incident.operation}", style=tables.KIND_STYLES["indeterminate"])
    out.print(line.append(common.printable(f"  {span}{error}  for {common.age(incident.first_at, now)}")))
    rest = incident.count - len(incident.headlines)
    sample = "; ".join(incident.headlines) + (f"; and {rest} more" if rest > 0 else "")
    _print_details(out, sample, f"incident {incident.id} of {', '.join(incident.workflows)}", incident.commands)


def _print_item(out: Console, item: AttentionItem, now: datetime) -> None:
    """Print what is asked about first, and ids last."""
    # the instant of quarantine is not stored: the age is the event's
    counted = "oldest" if item.kind == "quarantined" else "for"
    since = f"  {counted} {common.age(item.since, now)}" if item.since else ""
    of = f" of {item.workflow}" if item.workflow and item.subject != f"workflow {item.workflow}" else ""
    line = Text("\n").append(item.kind, style=tables.KIND_STYLES.get(item.kind, ""))
    out.print(line.append("  ").append(common.printable(item.headline), style="bold").append(since))
    _print_details(out, item.reason, f"{item.subject}{of}", item.commands)


def _print_details(out: Console, reason: str, subject: str, commands: Sequence[str]) -> None:
    out.print(Text(f"  {common.printable(reason)}"))
    out.print(Text(f"  {common.printable(subject)}", style="dim"))
    for command in commands:
        out.print(Text(f"    {common.printable(command)}", style="cyan"))


def _print_trace(found: Trace) -> None:
    """Print each node on its own line with its whole id; only the terminal wraps."""
    for root in found.roots:
        tree = Tree(_label(root), guide_style="dim")
        _add_children(tree, root)
        Console(highlight=False, width=_UNLIMITED_WIDTH, soft_wrap=True).print(tree)
    if found.is_partial:
        common.print_lines("There is more; --limit shows it.")


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
