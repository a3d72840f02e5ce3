"""The errors: one tree, drawn where it is defined, and messages that an operator can act on."""

import inspect
import pickle
import re
from datetime import UTC, datetime
from uuid import UUID

import pytest

from pipeline.domain import errors
from pipeline.domain.codec import missing_key
from pipeline.domain.errors import (
    AuthError,
    ClaimedNameError,
    EventError,
    HandlerError,
    IllegalTransitionError,
    InvalidInputError,
    LogicError,
    NotFoundError,
    OutdatedCodeError,
    PayloadError,
    PhaseViolationError,
    PipelineError,
    QuietPeriodError,
    RefusedError,
    ReservationError,
    SchemaVersionError,
    SecondApprovalError,
    StaleWriteError,
    StateChangedError,
    TamperedError,
    TransientError,
    UnavailableError,
    UnresolvedError,
    UnsupportedSchemaError,
)
from pipeline.domain.states import EventId

ONE, TWO = UUID(int=1), UUID(int=2)

#: What happened, what is, and what to do: words of each that must be in the message.
EXAMPLES: list[tuple[PipelineError, list[str]]] = [
    (
        PayloadError("payload of 'm-1'", "$.a is a set", "a JSON object"),
        ["payload of 'm-1'", "$.a is a set", "expected a JSON object", "Nothing was written"],
    ),
    (
        NotFoundError("workflow", "biling", ["mail", "billing"], "Nothing was published."),
        ["no workflow 'biling'", "Known: billing, mail.", "Nothing was published."],
    ),
    (
        IllegalTransitionError("mutation", ONE, verb="skip", found="applied", allowed=["pending", "indeterminate"]),
        [f"Cannot skip mutation {ONE}", "it is applied", "pending or indeterminate", "Nothing was changed"],
    ),
    (
        StaleWriteError("run", ONE, verb="commit", expected="fence 1", found="fence 2, emitting"),
        [f"commit of run {ONE}", "held as fence 1", "now fence 2, emitting", "drop this work"],
    ),
    (
        missing_key("k1"),
        ["encrypted with the key 'k1'", "does not have that key", "resume the workflow", "nothing is lost"],
    ),
    (
        TamperedError("The encrypted params 1 was changed; restore it from a backup."),
        ["encrypted params 1 was changed", "restore it"],
    ),
    (
        SecondApprovalError(ONE, act="happened", value=9000),
        [f"Mutation {ONE} has the value 9000", "happened needs two people", "another gives the same answer"],
    ),
    (
        ClaimedNameError(ONE, act="happened", value=9000, name="ada"),
        [
            f"Mutation {ONE} has the value 9000",
            "needs two people",
            "'ada' is only the name",
            "Expected an answer in the",
        ],
    ),
    (
        StateChangedError(ONE, verb="resolve", changes=["attempts was 1, is 2", "error changed, is none"]),
        [
            f"Cannot resolve mutation {ONE}",
            "(attempts was 1, is 2; error changed, is none)",
            "Nothing was changed",
            f"`pipeline mutations {ONE}`",
        ],
    ),
    (
        ReservationError(ONE, {7: "it is consumed", 3: "it was not shown"}),
        [f"Run {ONE} cannot reserve", "event 3: it was not shown; event 7: it is consumed", "only pending events"],
    ),
    (
        QuietPeriodError(ONE, datetime(2030, 1, 1, 12, tzinfo=UTC)),
        [f"Mutation {ONE}", "before 2030-01-01T12:00:00+00:00", "may still arrive", "Ask again after that"],
    ),
    (
        UnresolvedError("billing", [ONE, TWO]),
        ["'billing' cannot be resumed", f"{ONE}, {TWO} is unknown", "Resolve it first"],
    ),
    (
        OutdatedCodeError([("billing", "send")]),
        [
            "state of 'send' of workflow 'billing'",
            "may overtake each other",
            "updates would be lost",
            "Left to a worker",
        ],
    ),
    (
        SchemaVersionError("0001", "0002"),
        ["at schema version 0001", "needs 0002", "Run `pipeline db upgrade`"],
    ),
    (
        UnsupportedSchemaError("0008", "0100", "pipeline"),
        ["schema `pipeline` is at version 0008", "version 0100 or later", "drop this schema with all its data"],
    ),
    (
        UnsupportedSchemaError(None, "0100", "pipeline"),
        ["has tables or functions but no version", "expected an empty schema", "create a new database"],
    ),
    (LogicError("amount is negative", order=4711), ["amount is negative"]),
    (PhaseViolationError("publish in prepare. Publish in next"), ["publish in prepare", "Publish in next"]),
    (EventError(EventId(7), "event 7 does not fit Order"), ["event 7 does not fit Order"]),
    (TransientError("the mail server is away"), ["the mail server is away"]),
    (AuthError("the token has expired"), ["the token has expired"]),
    (UnavailableError("The database cannot be used: away."), ["cannot be used: away"]),
    (RefusedError("The database refused the events: too old."), ["refused the events: too old"]),
]
#: Classes that only gather others, or that authors raise with their own words.
GATHER = {PipelineError, InvalidInputError, HandlerError}


def drawn() -> dict[str, str | None]:
    """The tree in the module's docstring: class name and parent's name."""
    parents: dict[int, str] = {}
    tree: dict[str, str | None] = {}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"(?P<stem>(?:[│ ] {3})*(?:[├└]── )?)(?P<name>[A-Z]\w*Error)\b", line)
        if found:
            depth = len(found["stem"]) // 4
            parents[depth] = found["name"]
            tree[found["name"]] = parents.get(depth - 1)
    return tree


def classes() -> list[type[PipelineError]]:
    found = inspect.getmembers(errors, inspect.isclass)
    return [cls for _, cls in found if issubclass(cls, PipelineError) and cls.__module__ == errors.__name__]


def test_the_tree_that_is_drawn_is_the_tree_of_the_classes() -> None:
    real = {cls.__name__: None if cls is PipelineError else cls.__bases__[0].__name__ for cls in classes()}
    assert drawn() == real


def test_every_error_of_the_tree_has_a_meaning() -> None:
    lines = [line for line in (errors.__doc__ or "").splitlines() if "── " in line]
    assert all(re.search(r"Error {2,}\w", line) for line in lines)


@pytest.mark.parametrize("cls", classes())
def test_every_error_has_one_parent_and_a_sentence_of_its_own(cls: type[PipelineError]) -> None:
    assert len(cls.__bases__) == 1
    assert "__doc__" in vars(cls)
    assert (cls.__doc__ or "").endswith(".")


def test_every_error_that_is_raised_has_an_example_here() -> None:
    assert {type(error) for error, _ in EXAMPLES} | GATHER == set(classes())


@pytest.mark.parametrize(("error", "words"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_a_message_names_what_was_asked_what_was_found_and_what_is_allowed(
    error: PipelineError, words: list[str]
) -> None:
    for part in words:
        assert part in str(error)


def test_errors_have_their_subject_as_fields() -> None:
    payload = PayloadError("what", "problem", "expected")
    assert (payload.what, payload.problem, payload.expected) == ("what", "problem", "expected")
    unknown = NotFoundError("run", ONE)
    assert (unknown.noun, unknown.key, unknown.known) == ("run", ONE, ())
    illegal = IllegalTransitionError("run", ONE, verb="commit", found="pending", allowed=iter(["emitting"]))
    assert (illegal.noun, illegal.key, illegal.verb, illegal.found) == ("run", ONE, "commit", "pending")
    assert illegal.allowed == ("emitting",)
    stale = StaleWriteError("run", ONE, verb="commit", expected=1, found=2)
    assert (stale.noun, stale.key, stale.verb, stale.expected, stale.found) == ("run", ONE, "commit", 1, 2)
    assert ReservationError(ONE, {1: "gone"}).refused == {1: "gone"}
    assert QuietPeriodError(ONE, datetime(2030, 1, 1, tzinfo=UTC)).mutation_id == ONE
    assert UnresolvedError("billing", iter([ONE])).mutations == (ONE,)
    assert SchemaVersionError(None, "0002").found is None
    assert LogicError("no", order=4711).fields == {"order": 4711}


def test_an_unknown_name_without_neighbours_or_hint_is_still_a_sentence() -> None:
    assert str(NotFoundError("run", ONE)) == f"There is no run '{ONE}'."


def test_a_database_that_was_never_migrated_is_named_as_such() -> None:
    assert "at schema version none" in str(SchemaVersionError(None, "0002"))


def test_an_event_that_is_named_twice_is_refused_once_in_order() -> None:
    assert "(event 1: a; event 2: b)" in str(ReservationError(ONE, {2: "b", 1: "a"}))


def crosses(error: PipelineError) -> bool:
    try:
        copy = pickle.loads(pickle.dumps(error))
    except TypeError:
        return False
    return (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_every_error_crosses_a_process_boundary_unchanged() -> None:
    assert [type(error).__name__ for error, _ in EXAMPLES if not crosses(error)] == []
