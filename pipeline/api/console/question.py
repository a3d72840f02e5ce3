"""The question: one mutation whose outcome is unknown, or that waits for approval, with the answers to it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from starlette.datastructures import FormData

from pipeline.admin.given_results import NO_RESULT, GivenResult
from pipeline.admin.mutations import MutationDetail
from pipeline.admin.resolutions import MutationSummary, ResolutionKind
from pipeline.api import rendering
from pipeline.api.console.page import field
from pipeline.api.console.result_form import ResultQuestion, result_question, typed_result
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.operations import ResultForm
from pipeline.domain.states import MutationStatus

#: Facts about a grade, for a person who never saw one.
GRADES = {
    "A": "honours keys and can be asked",
    "B": "can be asked, honours no keys",
    "C": "honours keys, cannot be asked",
    "D": "honours no keys, cannot be asked",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One way to resolve, with what follows it."""

    kind: ResolutionKind
    title: str
    consequence: str
    submit: str  #: text of the button
    is_possible: bool = True
    not_before: datetime | None = None
    sends_again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How far a request got."""

    title: str
    at: datetime | None
    note: str = ""
    state: str = "done"  #: done, unknown, failed or open


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the page asks about a mutation."""

    ask: str  #: the question after the headline
    kind: str  #: unknown, approval, late_effect, waiting or over
    confirm: str  #: the text that an operator types before it is sent again
    result: ResultQuestion
    answers: tuple[Answer, ...]
    steps: tuple[Step, ...]


def asked(detail: MutationDetail) -> Asked:
    """Return what is asked about a mutation in its present state."""
    mutation = detail.mutation
    kind = _kind(detail)
    return Asked(
        ask=_ASKS[kind],
        kind=kind,
        confirm=confirm_text(mutation),
        result=result_question(mutation.declared_result),
        answers=tuple(_answers(mutation)) if kind == "unknown" else (),
        steps=tuple(_steps(detail)),
    )


def known_facts(detail: MutationDetail, now: datetime) -> list[str]:
    """Return what is known about a request whose outcome is unknown, one sentence each."""
    mutation, sent = detail.mutation, _entry(detail, "sent")
    facts = [f"Sent at {rendering.instant(sent.at, now)} UTC." if sent else "It may have been sent."]
    facts += rendering.clauses(mutation.error or "no clear answer came")
    if not mutation.can_try_again:
        facts.append("The connector cannot ask whether it happened.")
    return facts


def confirm_text(mutation: MutationSummary) -> str:
    """Return what an operator types before the one act that sends again: a message id, else the end of the key."""
    return mutation.message_ids[0] if mutation.message_ids else mutation.idempotency_key[-8:]


def given_result(question: ResultQuestion, form: FormData) -> GivenResult:
    """Return the result that the form gives: by an id, explicitly none, or field by field."""
    external_id = field(form, "external_id")
    is_unchecked = field(form, "unchecked") == "yes"
    if external_id:
        return GivenResult(external_id=external_id, is_unchecked=is_unchecked)
    if field(form, "no_result") == "yes" or question.form is ResultForm.NO_RESULT:
        return GivenResult(is_unchecked=is_unchecked) if is_unchecked else NO_RESULT
    texts: Mapping[str, str] = {name: value for name, value in form.items() if isinstance(value, str)}
    return GivenResult(value=typed_result(question, texts), is_unchecked=is_unchecked)


def check_confirmation(mutation: MutationSummary, form: FormData) -> None:
    """Refuse to send again unless the operator typed which one."""
    expected = confirm_text(mutation)
    if field(form, "confirm") != expected:
        raise InvalidInputError(
            f"This sends the request again, and {expected!r} was not typed to confirm it. Nothing was changed."
        )


_ASKS = {
    "unknown": "did it happen?",
    "approval": "may it be sent?",
    "late_effect": "is it there twice?",
    "waiting": "",
    "over": "",
}


def _kind(detail: MutationDetail) -> str:
    mutation = detail.mutation
    if mutation.status == MutationStatus.INDETERMINATE:
        return "unknown"
    if mutation.status == MutationStatus.PENDING and not _entry(detail, "approved"):
        return "approval"
    if _entry(detail, "late effect found") and not _entry(detail, "mutation.acknowledge"):
        return "late_effect"
    is_over = mutation.status in (MutationStatus.APPLIED, MutationStatus.FAILED)
    return "over" if is_over else "waiting"


def _answers(mutation: MutationSummary) -> Iterator[Answer]:
    yield Answer(
        kind=ResolutionKind.HAPPENED,
        title="It happened",
        consequence="The run continues with the result that you give. Nothing is sent.",
        submit="Record that it happened",
    )
    yield Answer(
        kind=ResolutionKind.DID_NOT_HAPPEN,
        title="It did not happen",
        consequence=mutation.after_did_not_happen.replace("After did_not_happen a new", "A new"),
        submit="Record that it did not, and send again",
        is_possible=mutation.quiet_until is None,
        not_before=mutation.quiet_until,
        sends_again=True,
    )
    yield Answer(
        kind=ResolutionKind.SKIP,
        title="Skip it",
        consequence="The workflow continues without it, whatever happened. Nothing is sent.",
        submit="Skip it",
    )
    yield Answer(
        kind=ResolutionKind.TRY_AGAIN,
        title="Ask again",
        consequence="The connector asks the outside system again, with a new budget of attempts. Nothing is sent."
        if mutation.can_try_again
        else "Not possible: this operation cannot be asked about its effects.",
        submit="Ask again",
        is_possible=mutation.can_try_again,
    )


def _steps(detail: MutationDetail) -> Iterator[Step]:
    mutation = detail.mutation
    for name, title in (("requested", "Recorded"), ("approved", "Approved"), ("sent", "Sent")):
        if found := _entry(detail, name):
            yield Step(title=title, at=found.at, note=f"attempt {mutation.attempts}" if title == "Sent" else "")
    if doubted := _entry(detail, "in doubt"):
        yield Step(title="No clear answer", at=doubted.at, note=mutation.error_class, state="unknown")
    if mutation.reconcile_attempts:
        times = mutation.reconcile_attempts
        yield Step(title="Asked afterwards", at=None, note=f"{times} times" if times > 1 else "once", state="unknown")
    yield from _last_step(detail)


def _last_step(detail: MutationDetail) -> Iterator[Step]:
    status, by = detail.mutation.status, f"by {detail.resolved_by}"
    if status == MutationStatus.INDETERMINATE or (status == MutationStatus.PENDING and not _entry(detail, "approved")):
        yield Step(title="You decide", at=None, state="open")
    elif status == MutationStatus.APPLIED:
        yield Step(title="It happened", at=detail.resolved_at, note=by)
    elif status == MutationStatus.FAILED:
        yield Step(title="It did not happen", at=detail.resolved_at, note=by, state="failed")


def _entry(detail: MutationDetail, description: str) -> Any:
    return next((each for each in detail.timeline if each.description == description and not each.is_planned), None)
