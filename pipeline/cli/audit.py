"""Command ``pipeline audit``: list what operators and sweeps did."""

from datetime import datetime
from typing import Annotated

import typer

from pipeline.admin import lookup, pages, system
from pipeline.admin.audit import AuditFilter, AuditRecord
from pipeline.cli import common, tables
from pipeline.domain.errors import InvalidInputError, quantity
from pipeline.store.database import Database


def audit(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    *,
    workflow: common.WorkflowOption = None,
    actor: Annotated[str | None, typer.Option(help="Only by this actor: a person's name, or a sweep's.")] = None,
    act: Annotated[str | None, typer.Option(help="Only this act, such as mutation.happened.")] = None,
    mutation: Annotated[str | None, typer.Option(help="Only about this mutation.")] = None,
    run: Annotated[str | None, typer.Option(help="Only about this run.")] = None,
    event: Annotated[str | None, typer.Option(help="Only about this event.")] = None,
    since: Annotated[str | None, typer.Option(help="Only from this instant on, such as '2030-12-31 14:00'.")] = None,
    until: Annotated[str | None, typer.Option(help="Only before this instant.")] = None,
    after: Annotated[
        str | None, typer.Option(help="Go on where a page ended, with the cursor that it printed.")
    ] = None,
    limit: common.Limit = 50,
    head: Annotated[
        bool, typer.Option("--head", help="Print only the newest link, to keep it elsewhere for `pipeline doctor`.")
    ] = False,
    as_json: common.AsJson = False,
) -> None:
    """List what operators and sweeps did, newest first, with who, why and to what."""
    database: Database = context.obj
    if head:
        common.print_lines(system.audit_head(database) or "Nothing is chained yet.")
        return
    with database.transaction() as tx:
        now = tx.clock()
        only = AuditFilter(
            actor=actor,
            act=act,
            workflow=workflow,
            mutation_id=lookup.find_id(tx, mutation, "mutation") if mutation else None,
            run_id=lookup.find_id(tx, run, "run") if run else None,
            event_id=lookup.parse_event_id(event) if event else None,
            since=_instant(since, now),
            until=_instant(until, now),
        )
    found = pages.audit_page(database, only, after=after, limit=limit)
    if as_json:
        common.print_json(found)
        return
    tables.print_table(
        quantity(len(found.items), "act") if found.items else "No such act.",
        ("at", "actor", "act", "about"),
        [(common.format_time(each.at), each.shown_actor, each.act, _subject(each)) for each in found.items],
        [each.reason for each in found.items],
        note="reason",
    )
    if found.next is not None:
        common.print_lines(f"There are older ones. The same command with `--after {found.next}` lists them.")


def _instant(text: str | None, now: datetime) -> datetime | None:
    """Parse an instant; without a zone it is in the zone in which instants are printed."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(
            f"{text!r} is not an instant; expected one such as 2030-12-31, '2030-12-31 14:00' or 2030-12-31T14:00:00Z."
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=now.tzinfo)


def _subject(record: AuditRecord) -> str:
    """Name the thing that an act was about: the narrowest that is known."""
    known = (("mutation", record.mutation_id), ("run", record.run_id), ("event", record.event_id))
    found = next((f"{noun} {id_}" for noun, id_ in known if id_ is not None), "")
    return ", ".join(part for part in (record.workflow, found) if part)
