"""Define every error that this package raises on purpose.

PipelineError
├── InvalidInputError           what was handed in cannot be accepted; nothing was written
│   ├── PayloadError            not JSON, or larger than its limit
│   └── NotFoundError           no such workflow, topic, handler, event, run or mutation
├── IllegalTransitionError      a move that does not exist from here: a bug in the caller
├── StaleWriteError             the row moved on first: harmless, drop the work
├── StateChangedError           the mutation is no longer in the state that the answer was formed on
├── ReservationError            an event that cannot be reserved was asked for
├── QuietPeriodError            absence is not evidence yet: ask again later
├── SecondApprovalError         another person must confirm the answer first
├── ClaimedNameError            of two people who must decide, one is not authenticated
├── UnresolvedError             refused while a mutation's outcome is unknown
├── OutdatedCodeError           older code would replace a state that newer code merges
├── SchemaVersionError          the database does not have the tables this version expects
│   └── UnsupportedSchemaError  no migration leads from this database to this version
├── UnavailableError            the database or the broker cannot be reached by a publisher
├── RefusedError                the database refuses the events of a publisher
└── HandlerError                raised by handlers and connectors to say what kind of failure it is
    ├── LogicError              the code is wrong: do not try again
    │   ├── PhaseViolationError  a handler did what its phase must not do
    │   ├── EventError          one event cannot be used, and it is known which
    │   └── TamperedError       an encrypted value was changed or moved
    ├── TransientError          an outside system fails for now: try again
    └── AuthError               an operator must act
        └── MissingKeyError     an encrypted value cannot be read without its key
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Any
from uuid import UUID

from pipeline.domain.states import EventId


class PipelineError(Exception):
    """Base of everything raised on purpose. Survives pickling, whatever its constructor takes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class InvalidInputError(PipelineError):
    """What was handed in cannot be accepted. Nothing was written."""


class PayloadError(InvalidInputError):
    """A value that cannot be stored: not JSON, or larger than its limit."""

    def __init__(self, what: str, problem: str, expected: str) -> None:
        self.what, self.problem, self.expected = what, problem, expected
        super().__init__(f"{what}: {problem}; expected {expected}. Nothing was written.")


class NotFoundError(InvalidInputError):
    """A name or id that nothing is known by."""

    def __init__(self, noun: str, key: object, known: Iterable[str] = (), hint: str = "") -> None:
        self.noun, self.key, self.known = noun, key, tuple(known)
        near = get_close_matches(str(key), self.known, n=1)
        parts = [
            f"There is no {noun} {str(key)!r}.",
            f"Known: {', '.join(sorted(self.known))}." if self.known else "",
            f"Did you mean {near[0]!r}?" if near else "",
            hint,
        ]
        super().__init__(" ".join(part for part in parts if part))


class IllegalTransitionError(PipelineError):
    """A move that does not exist from where the row stands. The row is unchanged."""

    def __init__(self, noun: str, key: UUID | str | int, *, verb: str, found: str, allowed: Iterable[str]) -> None:
        self.noun, self.key, self.verb, self.found = noun, key, verb, found
        self.allowed = tuple(allowed)
        super().__init__(
            f"Cannot {verb} {noun} {key}: it is {found}; "
            f"{verb} needs it to be {' or '.join(self.allowed)}. Nothing was changed."
        )


class StaleWriteError(PipelineError):
    """The row moved on before this write arrived: another holder, or a recovery. Drop the work."""

    def __init__(self, noun: str, key: UUID | str | int, *, verb: str, expected: object, found: object) -> None:
        self.noun, self.key, self.verb, self.expected, self.found = noun, key, verb, expected, found
        super().__init__(
            f"{verb} of {noun} {key} came too late: it was held as {expected}, it is now {found}. "
            "Nothing was changed; drop this work: the worker that moved the row goes on with it."
        )


class StateChangedError(PipelineError):
    """An answer was formed on a state in which the mutation no longer is. The mutation is unchanged."""

    def __init__(self, mutation_id: UUID, *, verb: str, changes: Iterable[str]) -> None:
        self.mutation_id, self.verb, self.changes = mutation_id, verb, tuple(changes)
        super().__init__(
            f"Cannot {verb} mutation {mutation_id}: it has changed since it was shown ({'; '.join(self.changes)}). "
            f"Nothing was changed. Read it again with `pipeline mutations {mutation_id}`, then decide."
        )


class ReservationError(PipelineError):
    """A prepare asked for events it cannot have. No event of that run was reserved."""

    def __init__(self, run_id: UUID, refused: Mapping[int, str], *, is_race: bool = False) -> None:
        self.run_id, self.refused, self.is_race = run_id, dict(refused), is_race
        reasons = "; ".join(f"event {event}: {why}" for event, why in sorted(self.refused.items()))
        super().__init__(
            f"Run {run_id} cannot reserve what its prepare returned ({reasons}). "
            "A prepare may reserve only pending events it was shown by peek. Nothing was reserved."
        )


class QuietPeriodError(PipelineError):
    """'It did not happen' cannot be taken yet: the request may still be travelling."""

    def __init__(self, mutation_id: UUID, until: datetime) -> None:
        self.mutation_id, self.until = mutation_id, until
        super().__init__(
            f"Mutation {mutation_id} cannot be resolved as not happened before {until.isoformat()}: "
            "until then the request may still arrive. Ask again after that, or say that it happened."
        )


class SecondApprovalError(PipelineError):
    """The value of a mutation is so high that another person must confirm the answer. Nothing was changed."""

    def __init__(self, mutation_id: UUID, *, act: str, value: object) -> None:
        self.mutation_id, self.act, self.value = mutation_id, act, value
        super().__init__(
            f"Mutation {mutation_id} has the value {value}, so {act} needs two people: one proposes it, and another "
            "gives the same answer. Nothing was changed."
        )


class ClaimedNameError(PipelineError):
    """Two people must decide about the value of a mutation, and nothing authenticated this one. Nothing was changed."""

    def __init__(self, mutation_id: UUID, *, act: str, value: object, name: str) -> None:
        self.mutation_id, self.act, self.value, self.name = mutation_id, act, value, name
        super().__init__(
            f"Mutation {mutation_id} has the value {value}, so {act} needs two people, and {name!r} is only the name "
            "that this command was given. Expected an answer in the console or over the HTTP API, from two people who "
            "have logged in or use an API token. Nothing was changed."
        )


class UnresolvedError(PipelineError):
    """Refused because an operator must first resolve a mutation whose outcome is unknown."""

    def __init__(self, workflow: str, mutations: Iterable[UUID]) -> None:
        self.workflow, self.mutations = workflow, tuple(mutations)
        listed = ", ".join(str(mutation) for mutation in self.mutations)
        super().__init__(
            f"Workflow {workflow!r} cannot be resumed: the outcome of mutation {listed} is unknown. "
            "Resolve it first (happened, did not happen, skip or try again); the block lifts by itself."
        )


class OutdatedCodeError(PipelineError):
    """Code that replaces its state, because it runs one by one, met a workflow whose runs may overtake each other."""

    def __init__(self, handlers: Iterable[tuple[str, str]]) -> None:
        self.handlers = tuple(handlers)  #: as (workflow, name)
        shown = ", ".join(f"{name!r} of workflow {workflow!r}" for workflow, name in self.handlers)
        super().__init__(
            f"This code replaces the state of {shown}, and newer code is registered whose runs may overtake "
            "each other: updates would be lost. Left to a worker that has the newer code. Nothing was changed."
        )


class SchemaVersionError(PipelineError):
    """The database is not at the version this code was written for."""

    def __init__(self, found: str | None, expected: str, *, is_newer: bool = False) -> None:
        self.found, self.expected, self.is_newer = found, expected, is_newer
        what_to_do = (
            "It was migrated by newer code: deploy that code here too."
            if is_newer
            else "Run `pipeline db upgrade` against it."
        )
        super().__init__(
            f"The database is at schema version {found or 'none'}, this code needs {expected}. {what_to_do}"
        )


class UnsupportedSchemaError(SchemaVersionError):
    """The schema comes from before the first release or from other code, and no migration leads from it."""

    def __init__(self, found: str | None, expected: str, schema: str) -> None:
        super().__init__(found, expected)
        state = (
            f"schema `{schema}` has tables or functions but no version"
            if found is None
            else f"schema `{schema}` is at version {found}, from before the first release"
        )
        self.args = (
            f"The {state}; expected an empty schema or version {expected} or later: create a new database, or drop "
            f"this schema with all its data, and run `pipeline db upgrade` again.",
        )


class UnavailableError(PipelineError):
    """The database or the broker cannot be reached. Trying again is safe: a message id counts once."""


class RefusedError(PipelineError):
    """The database refuses the events. Trying again does not help."""


class HandlerError(PipelineError):
    """What a handler or a connector raises to name the kind of its failure."""

    def __init__(self, message: str, **fields: Any) -> None:
        self.fields = fields
        super().__init__(message)


class LogicError(HandlerError):
    """The code is wrong: the same run would fail the same way."""


class PhaseViolationError(LogicError):
    """A handler did what its phase must not do. Refused, and the run fails even if the handler goes on."""


class EventError(LogicError):
    """One event cannot be used: it can be set aside, and the others go on."""

    def __init__(self, event_id: EventId, message: str, **fields: Any) -> None:
        self.event_id = event_id
        super().__init__(message, **fields)


class TransientError(HandlerError):
    """An outside system fails for now: another run may succeed."""


class AuthError(HandlerError):
    """Credentials or permissions are missing: an operator must act."""


class TamperedError(LogicError):
    """An encrypted value is not what was encrypted for its place: changed, moved, or of another key."""

    event_id: EventId  #: of the payload that it is about; missing if it is about something else


class MissingKeyError(AuthError):
    """A process lacks the key of an encrypted value, or the codec of its workflow."""


def quantity(count: int, noun: str) -> str:
    """A count with its noun, for messages: 1 event, 2 events, 2 batches."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"


def _rebuild(kind: type[PipelineError], args: tuple[Any, ...], fields: dict[str, Any]) -> PipelineError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error
