"""Commands ``pipeline mutations``, ``resolve``, ``resolve-from``, ``approve``, ``reject`` and ``acknowledge``."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer

from pipeline.admin import lookup, provider_export
from pipeline.admin import mutations as client
from pipeline.admin.advice import send_condition
from pipeline.admin.attention import incident_mutations
from pipeline.admin.bulk import BulkActs, BulkPreview, ImportOptions, MutationSelection
from pipeline.admin.given_results import GivenResult
from pipeline.admin.mutations import MutationDetail
from pipeline.admin.provider_export import RowResults
from pipeline.admin.quarantine import Quarantine
from pipeline.admin.resolutions import (
    KEY,
    MutationFilter,
    MutationSummary,
    ResolutionKind,
    Resolutions,
)
from pipeline.admin.workflows import workflow_holds
from pipeline.cli import common, tables
from pipeline.cli.runs import print_advice, print_timeline
from pipeline.domain.acts import BulkAct
from pipeline.domain.errors import InvalidInputError, quantity
from pipeline.domain.payloads import parsed_json
from pipeline.domain.states import MutationStatus
from pipeline.domain.values import Actor

OperationOption = Annotated[str | None, typer.Option(help="Only of this operation, as connector.operation.")]
IncidentOption = Annotated[
    str | None, typer.Option("--incident", help="Only of this incident, as `pipeline attention` names it.")
]
IfState = Annotated[
    str | None, typer.Option("--if-state", help="Only if the mutation is still in this state, as --json shows it.")
]
NoResult = Annotated[bool, typer.Option("--no-result", help="With happened: it has no result; `next` gets none.")]
Unchecked = Annotated[
    bool, typer.Option("--unchecked", help="Record the result although it does not fit, or cannot be checked.")
]
Refused = Annotated[
    bool,
    typer.Option(
        "--refused", help="With did_not_happen: the outside system itself refused it; a repeat gets a new key."
    ),
]
PreviewOption = Annotated[
    str | None, typer.Option(help="Commit exactly this preview of many, by the id that was printed with it.")
]
MutationArgument = Annotated[str, typer.Argument(help="Id of the mutation, or its first digits.")]

_MAX_AT_ONCE = 10_000  #: mutations resolved by one command
_RESOLVED = (MutationStatus.APPLIED, MutationStatus.FAILED)
_CONSEQUENCES = {
    ResolutionKind.HAPPENED: "`next` runs with that result; nothing is sent again.",
    ResolutionKind.DID_NOT_HAPPEN: "Its events are released, and a new run sends it again.",
    ResolutionKind.SKIP: "Its events are skipped, and `next` runs with the outcome `skipped`.",
    ResolutionKind.TRY_AGAIN: "The reconciler asks the outside system again, with a new budget.",
}


def mutations(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    mutation: Annotated[
        list[str] | None, typer.Argument(help="Show this mutation, by its id or its first digits.")
    ] = None,
    *,
    workflow: common.WorkflowOption = None,
    status: Annotated[MutationStatus, typer.Option(help="Only of this status.")] = MutationStatus.INDETERMINATE,
    incident: IncidentOption = None,
    result: Annotated[bool, typer.Option("--result", help="Show the result; it may hold personal data.")] = False,
    limit: common.Limit = 100,
    recent: common.Recent = 10_000,
    as_json: common.AsJson = False,
) -> None:
    """List mutations that wait for an operator, or of another status. With an id: its timeline and what to do."""
    resolutions = Resolutions(context.obj)
    wanted = common.single_argument(mutation)
    if wanted is not None:
        detail = client.detail(resolutions, wanted, with_result=result)
        common.print_json(detail) if as_json else _print_detail(detail, result=result)
        return
    _check_workflow(resolutions, workflow)
    only = MutationFilter(workflow=workflow, statuses=(status,))
    is_resolved = status in _RESOLVED
    if incident is not None:
        listed = incident_mutations(resolutions, incident)
    elif is_resolved:
        listed = resolutions.resolved_mutations(only, limit=limit + 1, recent=recent)
    else:
        listed = resolutions.unresolved_mutations(only, limit=limit + 1)
    found, is_more = tables.first_rows(listed, limit)
    if as_json:
        common.print_json(found)
        return
    _print_mutations(
        tables.count_text(f"{len(found)} {status}", "newest" if is_resolved else "oldest", is_more=is_more), found
    )


def resolve(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    resolution: Annotated[ResolutionKind, typer.Argument(help="What became of the mutation, or what to do with it.")],
    mutation: Annotated[
        str | None, typer.Argument(help="Id of the mutation. Without it, all that the options select.")
    ] = None,
    *,
    reason: common.Reason = "",
    by: common.By = "",
    result: Annotated[str | None, typer.Option(help="With happened: its result, as JSON.")] = None,
    external_id: Annotated[
        str | None, typer.Option(help="With happened: the outside system's id, by which its result is fetched.")
    ] = None,
    no_result: NoResult = False,
    unchecked: Unchecked = False,
    refused: Refused = False,
    if_state: IfState = None,
    workflow: common.WorkflowOption = None,
    operation: OperationOption = None,
    incident: IncidentOption = None,
    preview: PreviewOption = None,
    yes: common.Yes = False,
    as_json: common.AsJson = False,
) -> None:
    """Resolve an indeterminate mutation, or many at once.

    happened needs its result: --result, --external-id or --no-result. did_not_happen shows the request and asks first.
    Many are previewed first: the preview is frozen for an hour, and one that changed meanwhile is refused.
    """
    wake_ups, who = common.WakeUps(), common.actor(by, reason)
    resolutions = _resolutions(context, wake_ups, is_fetching=external_id is not None)
    given = _given_result(result, external_id, is_none=no_result, is_unchecked=unchecked)
    if mutation is not None:
        _resolve_one(resolutions, wake_ups, who, (mutation, resolution, given, refused, if_state, yes, as_json))
        return
    if sum((workflow is not None or operation is not None, incident is not None, preview is not None)) != 1:
        raise InvalidInputError(
            "No mutation was selected, or in several ways; expected an id, --incident, --preview, or --workflow and "
            "--operation."
        )
    if external_id is not None or if_state is not None or refused:
        raise InvalidInputError(
            "--external-id, --refused and --if-state are about one mutation; expected its id with them."
        )
    _check_workflow(resolutions, workflow)
    acts, is_more = _bulk_acts(resolutions, wake_ups), False
    if preview is not None:
        frozen = _shown_preview(acts, preview, BulkAct(resolution))
    else:
        selection, is_more = _selection(resolutions, workflow, operation, incident)
        frozen = acts.preview_mutations(BulkAct(resolution), selection, who.name, result=given)
    _print_or_commit(acts, frozen, who, (yes, as_json, is_more), _commit_command(f"resolve {resolution}", frozen, who))
    common.print_lines("" if as_json else wake_ups.text())


def _resolve_one(
    resolutions: Resolutions,
    wake_ups: common.WakeUps,
    who: Actor,
    options: tuple[str, ResolutionKind, GivenResult | None, bool, str | None, bool, bool],
) -> None:
    mutation, resolution, given, refused, if_state, yes, as_json = options
    mutation_id = _find_id(resolutions, mutation)
    state = if_state
    if resolution is ResolutionKind.DID_NOT_HAPPEN:
        shown = resolutions.mutation(mutation_id)
        if refused:
            shown = replace(shown, after_did_not_happen=shown.after_refusal)
        state = shown.state if if_state is None else if_state
        _confirm_repeat(resolutions, shown, _require_reason(who), yes=yes, as_json=as_json)
    resolutions.resolve(mutation_id, resolution, who, result=given, is_refused=refused, state=state)
    _print_act(mutation_id, resolution, _CONSEQUENCES[resolution], wake_ups, as_json=as_json)


def _selection(
    resolutions: Resolutions, workflow: str | None, operation: str | None, incident: str | None
) -> tuple[MutationSelection, bool]:
    """Return an incident, or the oldest mutations that match, and whether there are more."""
    if incident is not None:
        return MutationSelection(incident=incident), False
    selected = resolutions.unresolved_mutations(_filter(workflow, operation), limit=_MAX_AT_ONCE + 1)
    found, is_more = tables.first_rows(selected, _MAX_AT_ONCE)
    if not found:
        raise InvalidInputError("No mutation that waits matches. Nothing was changed.")
    return MutationSelection(ids=tuple(each.id for each in found)), is_more


def resolve_from(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    export: Annotated[
        Path | None,
        typer.Argument(
            help="A .csv or .jsonl export of the provider; not with --preview.", exists=True, dir_okay=False
        ),
    ] = None,
    *,
    column: Annotated[str, typer.Option(help="The column that identifies a mutation.")] = KEY,
    match_by: Annotated[str, typer.Option(help=f"What that column holds: {KEY}, or params.<name>.")] = KEY,
    complete: Annotated[bool, typer.Option("--complete", help="Mutations missing in the file did not happen.")] = False,
    external_id: Annotated[
        str | None, typer.Option(help="The column with the outside system's id, by which results are fetched.")
    ] = None,
    result_column: Annotated[str | None, typer.Option(help="The column with the result; as JSON in a .csv.")] = None,
    no_result: NoResult = False,
    unchecked: Unchecked = False,
    reason: common.Reason = "",
    by: common.By = "",
    workflow: common.WorkflowOption = None,
    operation: OperationOption = None,
    recent: common.Recent = 1_000_000,
    preview: PreviewOption = None,
    yes: common.Yes = False,
    as_json: common.AsJson = False,
) -> None:
    """Resolve mutations by an export of the provider: a mutation in the file happened.

    Say where its result is: --external-id, --result-column or --no-result. What matches is previewed first: the preview
    is frozen for an hour, and --preview commits exactly it, without the file.
    """
    if (export is None) is (preview is None):
        raise InvalidInputError("Expected a provider's export, or --preview with the id of an earlier preview of one.")
    _check_one(external_id, result_column, no_result or None)
    results = RowResults(
        column=result_column, external_id_column=external_id, is_none=no_result, is_unchecked=unchecked
    )
    wake_ups, who = common.WakeUps(), common.actor(by, reason)
    resolutions = _resolutions(context, wake_ups, is_fetching=external_id is not None or preview is not None)
    _check_workflow(resolutions, workflow)
    acts = _bulk_acts(resolutions, wake_ups)
    if export is None:
        found = _shown_preview(acts, preview or "", BulkAct.IMPORT)
    else:
        options = ImportOptions(
            column=column,
            match_by=match_by,
            results=results,
            is_complete=complete,
            only=_filter(workflow, operation),
            recent=recent,
        )
        found = acts.preview_import(provider_export.read_rows(export), options, who.name, name=export.name)
    if not as_json:
        _print_matches(found)
    if found.left_out.get("possibly_shared"):
        typer.echo(
            f"The ledger has more than its newest {recent} rows. An older row may have the same {match_by}, "
            f"so nothing is resolved by it: search more rows with --recent, or match by {KEY}.",
            err=True,
        )
    _print_or_commit(acts, found, who, (yes, as_json, False), _commit_command("resolve-from", found, who))
    common.print_lines("" if as_json else wake_ups.text())


def approve(
    context: typer.Context,
    mutation: MutationArgument,
    *,
    reason: common.OptionalReason = "",
    by: common.By = "",
    if_state: IfState = None,
    as_json: common.AsJson = False,
) -> None:
    """Approve exactly the request that `pipeline mutations ID` shows. A changed request is not sent."""
    wake_ups = common.WakeUps()
    resolutions = _resolutions(context, wake_ups)
    found = resolutions.mutation(_find_id(resolutions, mutation))
    resolutions.approve(found, common.actor(by, reason), state=if_state)
    with resolutions.db.transaction() as tx:
        until = send_condition(found, workflow_holds(tx, found.workflow))
    after = f", as soon as {until.text}" if until else ""
    consequence = f"{found.headline}: exactly this request is sent, once{after}."
    _print_act(found.id, "approved", consequence, wake_ups, as_json=as_json)


def reject(
    context: typer.Context,
    mutation: MutationArgument,
    reason: common.Reason = "",
    by: common.By = "",
    if_state: IfState = None,
    as_json: common.AsJson = False,
) -> None:
    """Reject a request that was not sent yet, also an approved one. Its events are skipped."""
    wake_ups, who = common.WakeUps(), _require_reason(common.actor(by, reason))
    resolutions = _resolutions(context, wake_ups)
    mutation_id = _find_id(resolutions, mutation)
    resolutions.reject(mutation_id, who, state=if_state)
    _print_act(mutation_id, "rejected", _CONSEQUENCES[ResolutionKind.SKIP], wake_ups, as_json=as_json)


def acknowledge(
    context: typer.Context,
    mutation: MutationArgument,
    reason: common.Reason = "",
    by: common.By = "",
    if_state: IfState = None,
    as_json: common.AsJson = False,
) -> None:
    """Record that a late effect was dealt with; it is no longer reported."""
    wake_ups, who = common.WakeUps(), _require_reason(common.actor(by, reason))
    resolutions = _resolutions(context, wake_ups)
    mutation_id = _find_id(resolutions, mutation)
    resolutions.acknowledge(mutation_id, who, state=if_state)
    _print_act(
        mutation_id,
        "acknowledged",
        "The doctor and `pipeline attention` no longer report it.",
        wake_ups,
        as_json=as_json,
    )


def _resolutions(context: typer.Context, wake_ups: common.WakeUps, *, is_fetching: bool = False) -> Resolutions:
    """Return the resolutions; with the workflows' code, if a result is fetched by it."""
    code = common.load_registry() if is_fetching else None
    return Resolutions(context.obj, code, wake_ups.wake_workflow, wake_ups.dispatch_run)


def _find_id(resolutions: Resolutions, text: str) -> UUID:
    with resolutions.db.transaction() as tx:
        return lookup.find_id(tx, text, "mutation")


def _check_workflow(resolutions: Resolutions, workflow: str | None) -> None:
    if workflow is not None:
        with resolutions.db.transaction() as tx:
            lookup.require_workflow(tx, workflow)


def _require_reason(who: Actor) -> Actor:
    if not who.reason:
        raise InvalidInputError(f"{who.name} gave no reason; expected one (-m), for the audit.")
    return who


def _filter(workflow: str | None, operation: str | None) -> MutationFilter:
    connector, _, name = (operation or "").partition(".")
    return MutationFilter(workflow=workflow, connector=connector or None, operation=name or None)


def _print_act(mutation_id: UUID, what: str, consequence: str, wake_ups: common.WakeUps, *, as_json: bool) -> None:
    if as_json:
        common.print_json(
            {"mutation": mutation_id, "act": what, "consequence": consequence, "is_notified": wake_ups.is_notified}
        )
    else:
        common.print_lines(f"{mutation_id}: {what}", consequence, wake_ups.text())


def _bulk_acts(resolutions: Resolutions, wake_ups: common.WakeUps) -> BulkActs:
    return BulkActs(resolutions, Quarantine(resolutions.db, wake_ups.wake_workflow))


def _commit_command(command: str, preview: BulkPreview, who: Actor) -> str:
    return f"pipeline {command} --preview {preview.id} -m {shlex.quote(who.reason or 'why')} --yes"


def _shown_preview(acts: BulkActs, text: str, act: BulkAct) -> BulkPreview:
    """Return a preview that was frozen earlier; refuse one of another act."""
    try:
        found = acts.preview(UUID(text))
    except ValueError:
        raise InvalidInputError(f"{text!r} is not the id of a preview; expected a UUID as it was printed.") from None
    if found.act != act:
        raise InvalidInputError(f"The preview {text} is of {found.act}; expected one of {act}.")
    return found


def _print_or_commit(
    acts: BulkActs, preview: BulkPreview, who: Actor, options: tuple[bool, bool, bool], again: str
) -> None:
    """Commit a frozen preview with --yes; else print it, and what commits it."""
    yes, as_json, is_more = options
    is_done = yes and preview.count > 0
    found = acts.commit(preview.id, who, count=preview.count) if is_done else preview
    if as_json:
        chosen = [{"mutation": item.subject, "kind": item.act} for item in preview.items]
        result = {"resolutions": chosen, "preview": preview.id, "is_done": is_done, "updated": found.updated}
        common.print_json({**result, "refused": found.refused, "is_more": is_more})
    else:
        title = tables.count_text(quantity(preview.count, "resolution"), "first", is_more=is_more)
        rows = [(item.subject, item.workflow, item.act) for item in preview.items]
        notes = [item.headline for item in preview.items]
        tables.print_table(title, ("id", "workflow", "resolution"), rows, notes, note="details")
        if is_done:
            common.print_lines(f"{len(found.updated)} resolved, {len(found.refused)} refused")
            common.print_lines(*(f"{mutation}: {text}" for mutation, text in found.refused.items()))
            if is_more:
                common.print_more_note(preview.count)
        else:
            common.print_lines(*(f"{mutation} would be refused: {text}" for mutation, text in found.refused.items()))
            common.print_lines(f"Nothing was changed. Exactly these are resolved by: {again}")
    if is_done and (found.refused or is_more):
        raise typer.Exit(1)


def _print_matches(found: BulkPreview) -> None:
    left = found.left_out
    typer.echo(
        f"{found.count} matched, {left.get('not_in_export', 0)} not in the file, {left.get('ambiguous', 0)} ambiguous, "
        f"{left.get('unmatched_rows', 0)} rows without a mutation"
    )


def _print_mutations(title: str, found: list[MutationSummary], kinds: list[str] | None = None) -> None:
    columns = ("id", "workflow", "operation", "since", *(("resolution",) if kinds else ()))
    rows = [
        (
            each.id,
            each.workflow,
            f"{each.connector}.{each.operation}",
            f"{each.since:%Y-%m-%d %H:%M}",
            *((kinds[number],) if kinds else ()),
        )
        for number, each in enumerate(found)
    ]
    tables.print_table(title, columns, rows, [_mutation_note(each) for each in found], note="details")


def _mutation_note(mutation: MutationSummary) -> str:
    until = mutation.quiet_until
    wait = f"did_not_happen is refused before {until:%H:%M:%S}: it may still arrive" if until else ""
    parts = (mutation.headline, f"events {message_ids_text(mutation)}", mutation.error, wait)
    return "; ".join(part for part in parts if part)


def message_ids_text(mutation: MutationSummary) -> str:
    """List the message ids of the inputs that the ledger keeps, and how many more there are."""
    more = mutation.message_count - len(mutation.message_ids)
    return ", ".join(mutation.message_ids) + (f" and {more} more" if more > 0 else "")


def _print_detail(found: MutationDetail, *, result: bool) -> None:
    mutation = found.mutation
    tables.print_fields(
        ("headline", mutation.headline),
        ("mutation", mutation.id),
        ("operation", f"{mutation.connector}.{mutation.operation}"),
        ("grade", mutation.grade),
        ("status", mutation.status),
        ("state", mutation.state),
        ("error", mutation.error),
        ("run", mutation.run_id),
        ("of", f"{mutation.workflow}/{mutation.handler}"),
        ("events", message_ids_text(mutation)),
        ("key", mutation.idempotency_key),
        ("look up", mutation.look_up),
        ("request", mutation.request_hash),
        *((f"  {name}", value) for name, value in mutation.params.items()),
        ("attempts", mutation.attempts),
        ("reconcile attempts", mutation.reconcile_attempts),
    )
    print_timeline(found.timeline)
    if result:
        common.print_lines("\nresult")
        common.print_json(found.result)
    print_advice(found.advice)


def _given_result(
    text: str | None, external_id: str | None, *, is_none: bool, is_unchecked: bool
) -> GivenResult | None:
    """Return the result that the options give; None: they give none."""
    _check_one(text, external_id, is_none or None)
    if text is None and external_id is None and not is_none:
        return None
    return GivenResult(value=_parse_result(text), external_id=external_id, is_unchecked=is_unchecked)


def _check_one(*options: object) -> None:
    if sum(option is not None for option in options) > 1:
        raise InvalidInputError("The result was given in several ways; expected one of them. Nothing was changed.")


def _confirm_repeat(resolutions: Resolutions, found: MutationSummary, who: Actor, *, yes: bool, as_json: bool) -> None:
    """Show what follows did_not_happen, and ask."""
    if not yes and not sys.stdin.isatty():
        raise InvalidInputError(
            f"{who.name} cannot be asked, because this is no terminal, and did_not_happen may send "
            f"{found.connector}.{found.operation} again; expected --yes. Nothing was changed."
        )
    with resolutions.db.transaction() as tx:
        holds = workflow_holds(tx, found.workflow)
    typer.echo(_repeat_preview(found, holds.reason), err=as_json)
    if not yes and not typer.confirm("Resolve it as not happened?", err=as_json):
        raise InvalidInputError(f"{who.name} did not confirm. Nothing was changed.")


def _repeat_preview(found: MutationSummary, hold: str) -> str:
    """Describe the request, its grade, and what follows if it is resolved as not happened."""
    quiet = f"Refused before {found.quiet_until:%H:%M:%S}: the request may still arrive." if found.quiet_until else ""
    fields = {
        "headline": found.headline,
        "mutation": found.id,
        "operation": f"{found.connector}.{found.operation}, grade {found.grade}",
        "of": f"{found.workflow}/{found.handler}, events {message_ids_text(found)}",
        "key": found.idempotency_key,
        "error": found.error,
        **{f"  {name}": value for name, value in found.params.items()},
        "follows": found.after_did_not_happen,
        "hold": f"Nothing is sent until the workflow continues: {hold}" if hold else "",
        "quiet": quiet,
    }
    return "\n".join(f"{name:<11}{common.printable(value)}" for name, value in fields.items() if value)


def _parse_result(text: str | None) -> Any:
    return None if text is None else parsed_json(text, what="--result", expected='for example \'{"id": "ch_1"}\'')
