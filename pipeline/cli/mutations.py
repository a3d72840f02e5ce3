"""``pipeline mutations``, ``resolve``, ``approve``, ``reject`` and ``acknowledge``: the desk, from a shell."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer

from pipeline.admin import lookup, provider_export
from pipeline.admin import mutations as client
from pipeline.admin.advice import waits_until
from pipeline.admin.mutations import MutationDetail
from pipeline.admin.provider_export import Preview
from pipeline.admin.resolutions import KEY, Answer, Desk, Filter, Given, Question, given_to_all
from pipeline.admin.workflows import holding
from pipeline.cli import common, tables
from pipeline.cli.runs import advised, timeline
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.states import MutationStatus
from pipeline.domain.values import Person

Operation = Annotated[str | None, typer.Option(help="Only of this operation, as connector.operation.")]
Which = Annotated[str, typer.Argument(help="Which mutation, by its id or how that begins.")]

_MOST = 10_000  #: answers given at once
_SETTLED = (MutationStatus.APPLIED, MutationStatus.FAILED)
_FOLLOWS = {
    Answer.HAPPENED: "`next` runs with that result; nothing is sent again.",
    Answer.DID_NOT_HAPPEN: "What it was about is released, and a fresh run does it, under a new key.",
    Answer.SKIP: "Its events are skipped, and `next` runs and is told so.",
    Answer.TRY_AGAIN: "The background asks the outside system again, with a fresh budget.",
}


def mutations(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    mutation: Annotated[list[str] | None, typer.Argument(help="Show this one, by its id or how that begins.")] = None,
    *,
    workflow: common.Workflow = None,
    status: Annotated[MutationStatus, typer.Option(help="Which ones.")] = MutationStatus.INDETERMINATE,
    result: Annotated[bool, typer.Option("--result", help="Show what came back; it may hold personal data.")] = False,
    limit: common.Limit = 100,
    recent: common.Recent = 10_000,
    as_json: common.AsJson = False,
) -> None:
    """List mutations that wait for a person, or those of another status. With an id: its timeline, and what to do."""
    desk = Desk(context.obj, common.operations())
    wanted = common.one(mutation)
    if wanted is not None:
        detail = client.detail(desk, wanted, result=result)
        common.as_json(detail.as_dict()) if as_json else _show(detail, result=result)
        return
    _check_workflow(desk, workflow)
    only = Filter(workflow=workflow, statuses=(status,))
    is_settled = status in _SETTLED
    found, is_more = tables.first(
        desk.settled(only, limit=limit + 1, recent=recent) if is_settled else desk.questions(only, limit=limit + 1),
        limit,
    )
    if as_json:
        common.as_json([question.as_dict() for question in found])
        return
    _list(tables.count(f"{len(found)} {status}", "newest" if is_settled else "oldest", is_more=is_more), found)


def resolve(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    answer: Annotated[Answer, typer.Argument(help="What happened to it, or what to do.")],
    mutation: Annotated[str | None, typer.Argument(help="Which one. Without it, all that the options name.")] = None,
    *,
    reason: common.Reason = "",
    by: common.By = "",
    result: Annotated[str | None, typer.Option(help="With happened: its result, as JSON.")] = None,
    workflow: common.Workflow = None,
    operation: Operation = None,
    yes: common.Yes = False,
    as_json: common.AsJson = False,
) -> None:
    """Settle a mutation that nobody else can settle, or many at once."""
    bell, who = common.Bell(), common.person(by, reason)
    desk = _desk(context, bell)
    value = _result(result)
    if mutation is not None:
        mutation_id = _id(desk, mutation)
        desk.answer(mutation_id, answer, who, result=value)
        _said(mutation_id, answer, _FOLLOWS[answer], bell, as_json=as_json)
        return
    if workflow is None and operation is None:
        raise InvalidInputError("Nothing says which mutations; give an id, --workflow or --operation.")
    _check_workflow(desk, workflow)
    found, is_more = tables.first(desk.questions(_filter(workflow, operation), limit=_MOST + 1), _MOST)
    _give(desk, given_to_all(found, answer, value), who, (yes, as_json, is_more))
    common.say("" if as_json else bell.words())


def resolve_from(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    export: Annotated[
        Path, typer.Argument(help="A .csv or .jsonl file of the provider's.", exists=True, dir_okay=False)
    ],
    *,
    column: Annotated[str, typer.Option(help="The column that names a mutation.")] = KEY,
    to: Annotated[str, typer.Option(help=f"What of ours it holds: {KEY}, or params.<name>.")] = KEY,
    complete: Annotated[bool, typer.Option("--complete", help="What is not in the file did not happen.")] = False,
    reason: common.Reason = "",
    by: common.By = "",
    workflow: common.Workflow = None,
    operation: Operation = None,
    recent: common.Recent = 1_000_000,
    yes: common.Yes = False,
    as_json: common.AsJson = False,
) -> None:
    """Settle mutations by a provider's own records: what is in the file happened."""
    bell = common.Bell()
    desk = _desk(context, bell)
    _check_workflow(desk, workflow)
    asked, is_more = tables.first(
        desk.asked_by(to, _filter(workflow, operation), limit=_MOST + 1, recent=recent), _MOST
    )
    found = provider_export.preview(asked, provider_export.read(export), column, complete=complete)
    if not as_json:
        _say(found)
    if any(item.is_beyond for item in asked):
        typer.echo(
            f"The ledger reaches further back than its newest {recent} rows. An older one may have the same {to}, so "
            f"nothing is answered by it: look further with --recent, or match by {KEY}.",
            err=True,
        )
    who = replace(common.person(by, reason), evidence={"export": export.name, "column": column, "complete": complete})
    _give(desk, list(found.given), who, (yes, as_json, is_more))
    common.say("" if as_json else bell.words())


def approve(
    context: typer.Context,
    mutation: Which,
    reason: common.AnyReason = "",
    by: common.By = "",
    unseen: Annotated[
        bool, typer.Option("--unseen", help="Although its parameters cannot be shown here, without its code.")
    ] = False,
    as_json: common.AsJson = False,
) -> None:
    """Allow exactly the request that `pipeline mutations ID` shows. One that changed meanwhile is not sent."""
    bell = common.Bell()
    desk = _desk(context, bell)
    question = desk.question(_id(desk, mutation))
    if question.is_hidden and not unseen:
        raise InvalidInputError(
            f"What {question.connector}.{question.operation} would send cannot be shown here, because its code is not "
            "here. Look at it and allow it where PIPELINE_WORKFLOWS names the code, or allow it unseen with --unseen. "
            "Nothing was changed."
        )
    desk.approve(question, common.person(by, reason))
    with desk.db.transaction() as tx:
        until = waits_until(question, holding(tx, question.workflow))
    after = f", as soon as {until.words}" if until else ""
    follows = f"{question.title}: exactly this request is sent, once{after}."
    _said(question.id, "approved", follows, bell, as_json=as_json)


def reject(
    context: typer.Context,
    mutation: Which,
    reason: common.Reason = "",
    by: common.By = "",
    as_json: common.AsJson = False,
) -> None:
    """Refuse a request, also one that was allowed and not sent yet: it is never sent, and its events are skipped."""
    bell, who = common.Bell(), _with_reason(common.person(by, reason))
    desk = _desk(context, bell)
    mutation_id = _id(desk, mutation)
    desk.reject(mutation_id, who)
    _said(mutation_id, "rejected", _FOLLOWS[Answer.SKIP], bell, as_json=as_json)


def acknowledge(
    context: typer.Context,
    mutation: Which,
    reason: common.Reason = "",
    by: common.By = "",
    as_json: common.AsJson = False,
) -> None:
    """Say that an effect which surfaced late was dealt with; nobody is reminded of it any more."""
    bell, who = common.Bell(), _with_reason(common.person(by, reason))
    desk = _desk(context, bell)
    mutation_id = _id(desk, mutation)
    desk.acknowledge(mutation_id, who)
    _said(
        mutation_id, "acknowledged", "The doctor and `pipeline attention` speak of it no more.", bell, as_json=as_json
    )


def _desk(context: typer.Context, bell: common.Bell) -> Desk:
    return Desk(context.obj, common.registry(), bell.workflow, bell.run)


def _id(desk: Desk, text: str) -> UUID:
    with desk.db.transaction() as tx:
        return lookup.uuid(tx, text, "mutation")


def _check_workflow(desk: Desk, workflow: str | None) -> None:
    if workflow is not None:
        with desk.db.transaction() as tx:
            lookup.workflow(tx, workflow)


def _with_reason(who: Person) -> Person:
    if not who.reason:
        raise InvalidInputError(f"{who.name} gave no reason; expected one (-m), for whoever reads the audit later.")
    return who


def _filter(workflow: str | None, operation: str | None) -> Filter:
    connector, _, name = (operation or "").partition(".")
    return Filter(workflow=workflow, connector=connector or None, operation=name or None)


def _said(mutation_id: UUID, what: str, follows: str, bell: common.Bell, *, as_json: bool) -> None:
    if as_json:
        common.as_json({"mutation": mutation_id, "act": what, "follows": follows, "is_rung": bell.heard})
    else:
        common.say(f"{mutation_id}: {what}", follows, bell.words())


def _give(desk: Desk, given: list[Given], who: Person, options: tuple[bool, bool, bool]) -> None:
    yes, as_json, is_more = options
    settled = desk.settle(given, who) if yes else None
    if as_json:
        answers = [{"mutation": item.question.id, "answer": item.answer} for item in given]
        taken, refused = (settled.taken, settled.refused) if settled else ([], {})
        told = {str(mutation): words for mutation, words in refused.items()}
        common.as_json({"given": answers, "is_done": yes, "taken": taken, "refused": told, "is_more": is_more})
    else:
        title = tables.count(f"{len(given)} answers", "first", is_more=is_more)
        _list(title, [item.question for item in given], [str(item.answer) for item in given])
        if settled is None:
            common.say("Nothing was changed. Repeat with --yes to give these answers.")
        else:
            common.say(f"{len(settled.taken)} settled, {len(settled.refused)} refused")
            common.say(*(f"{mutation}: {words}" for mutation, words in settled.refused.items()))
            if is_more:
                common.say_more(len(given))
    if settled is not None and (settled.refused or is_more):
        raise typer.Exit(1)


def _say(found: Preview) -> None:
    typer.echo(
        f"{len(found.given)} answered, {len(found.unanswered)} not in the file, {len(found.ambiguous)} ambiguous, "
        f"{found.unmatched} rows about nothing that is asked"
    )


def _list(title: str, found: list[Question], answers: list[str] | None = None) -> None:
    columns = ("id", "workflow", "operation", "since", *(("answer",) if answers else ()))
    rows = [
        (
            question.id,
            question.workflow,
            f"{question.connector}.{question.operation}",
            f"{question.since:%Y-%m-%d %H:%M}",
            *((answers[number],) if answers else ()),
        )
        for number, question in enumerate(found)
    ]
    tables.listed(title, columns, rows, [_words(question) for question in found], note="what")


def _words(question: Question) -> str:
    until = question.quiet_until
    wait = f"did_not_happen is refused before {until:%H:%M:%S}: it may still arrive" if until else ""
    parts = (question.title, f"events {', '.join(question.message_ids)}", question.error, wait)
    return "; ".join(part for part in parts if part)


def _show(found: MutationDetail, *, result: bool) -> None:
    question = found.question
    tables.fields(
        ("mutation", question.id),
        ("what", question.title),
        ("operation", f"{question.connector}.{question.operation}"),
        ("status", question.status),
        ("error", question.error),
        ("run", question.run_id),
        ("of", f"{question.workflow}/{question.handler}"),
        ("events", ", ".join(question.message_ids)),
        ("key", question.idempotency_key),
        ("request", question.request_hash),
        *((f"  {name}", value) for name, value in question.params.items()),
        ("attempts", question.attempts),
        ("looks", question.looks),
    )
    timeline(found.timeline)
    if result:
        common.say("\nresult")
        common.as_json(found.result)
    advised(found.advice)


def _result(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f'--result is no JSON: {error}. Expected for example \'{{"id": "ch_1"}}\'.') from None
