"""``pipeline mutations`` and ``pipeline resolve``: the desk, from a shell."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli import shown
from pipeline.client import exports
from pipeline.client.desk import KEY, Answer, Desk, Filter, Question, given_to_all
from pipeline.client.exports import Preview
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.mutations import MutationStatus

Workflow = Annotated[str | None, typer.Option(help="Only of this workflow.")]
Operation = Annotated[str | None, typer.Option(help="Only of this operation, as connector.operation.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without this, it is only shown what would be done.")]


def mutations(
    context: typer.Context,
    workflow: Workflow = None,
    status: Annotated[MutationStatus, typer.Option(help="Which ones.")] = MutationStatus.INDETERMINATE,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 100,
    as_json: shown.AsJson = False,
) -> None:
    """List mutations that wait for a person, or those of another status."""
    found = _desk(context).questions(Filter(workflow=workflow, statuses=(status,)), limit=limit)
    if as_json:
        shown.as_json([question.as_dict() for question in found])
        return
    columns = ("id", "workflow", "what", "events", "since", "why")
    shown.table(f"{len(found)} {status}", columns, [_row(question) for question in found])


def resolve(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    answer: Annotated[Answer, typer.Argument(help="What happened to it, or what to do.")],
    mutation: Annotated[str | None, typer.Argument(help="Which one. Without it, all that the options name.")] = None,
    *,
    reason: shown.Reason = "",
    by: shown.By = "",
    result: Annotated[str | None, typer.Option(help="With happened: its result, as JSON.")] = None,
    workflow: Workflow = None,
    operation: Operation = None,
    yes: Yes = False,
) -> None:
    """Settle a mutation that nobody else can settle, or many at once."""
    desk, who = _desk(context), shown.person(by, reason)
    value = _result(result)
    if mutation is not None:
        desk.answer(shown.uuid(mutation), answer, who, result=value)
        typer.echo(f"{mutation}: {answer}")
        return
    if workflow is None and operation is None:
        raise InvalidInputError("Nothing says which mutations; give an id, --workflow or --operation.")
    found = desk.questions(_filter(workflow, operation), limit=10_000)
    _give(desk, given_to_all(found, answer, value), who, yes=yes)


def resolve_from(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    export: Annotated[
        Path, typer.Argument(help="A .csv or .jsonl file of the provider's.", exists=True, dir_okay=False)
    ],
    *,
    column: Annotated[str, typer.Option(help="The column that names a mutation.")] = KEY,
    to: Annotated[str, typer.Option(help=f"What of ours it holds: {KEY}, or params.<name>.")] = KEY,
    complete: Annotated[bool, typer.Option("--complete", help="What is not in the file did not happen.")] = False,
    reason: shown.Reason = "",
    by: shown.By = "",
    workflow: Workflow = None,
    operation: Operation = None,
    yes: Yes = False,
) -> None:
    """Settle mutations by a provider's own records: what is in the file happened."""
    desk = _desk(context)
    asked = desk.asked_by(to, _filter(workflow, operation))
    found = exports.preview(asked, exports.read(export), column, complete=complete)
    _say(found)
    who = replace(shown.person(by, reason), evidence={"export": export.name, "column": column, "complete": complete})
    _give(desk, list(found.given), who, yes=yes)


def _desk(context: typer.Context) -> Desk:
    return Desk(context.obj, shown.registry())


def _filter(workflow: str | None, operation: str | None) -> Filter:
    connector, _, name = (operation or "").partition(".")
    return Filter(workflow=workflow, connector=connector or None, operation=name or None)


def _give(desk: Desk, given: list[Any], who: Any, *, yes: bool) -> None:
    columns = ("id", "workflow", "what", "events", "since", "why", "answer")
    shown.table(f"{len(given)} answers", columns, [(*_row(item.question), item.answer) for item in given])
    if not yes:
        typer.echo("Nothing was changed. Repeat with --yes to give these answers.")
        return
    settled = desk.settle(given, who)
    typer.echo(f"{len(settled.taken)} settled, {len(settled.refused)} refused")
    for mutation, words in settled.refused.items():
        typer.echo(f"{mutation}: {words}")
    if settled.refused:
        raise typer.Exit(1)


def _say(found: Preview) -> None:
    typer.echo(
        f"{len(found.given)} answered, {len(found.unanswered)} not in the file, {len(found.ambiguous)} ambiguous, "
        f"{found.unmatched} rows about nothing that is asked"
    )


def _row(question: Question) -> tuple[object, ...]:
    wait = f" (not before {question.quiet_until:%H:%M:%S})" if question.quiet_until else ""
    what = f"{question.connector}.{question.operation}: {question.title}"
    events = ", ".join(question.message_ids)
    return question.id, question.workflow, what, events, f"{question.since:%Y-%m-%d %H:%M}{wait}", question.error or ""


def _result(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f'--result is no JSON: {error}. Expected for example \'{{"id": "ch_1"}}\'.') from None
