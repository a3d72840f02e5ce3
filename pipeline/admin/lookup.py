"""Finding things by what people type: names with a guess at what was meant, ids by how they begin."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import NoReturn
from uuid import UUID

from pipeline.domain.errors import InvalidInputError, UnknownError
from pipeline.store.database import Transaction
from pipeline.store.reads import traces, work

_SHORTEST = 4
_LENGTH = 32
_TABLES = {"run": "runs", "mutation": "mutations"}


def workflow(tx: Transaction, name: str) -> str:
    """The name of a workflow that exists."""
    known = work.workflow_names(tx)
    if name not in known:
        unknown("workflow", name, known)
    return name


def handler(tx: Transaction, workflow_name: str, name: str) -> str:
    """The name of a handler of a workflow that exists."""
    known = [row.name for row in work.handlers(tx, workflow(tx, workflow_name))]
    if name not in known:
        unknown(f"handler of workflow {workflow_name!r} named", name, known)
    return name


def topic(tx: Transaction, workflow_name: str, name: str) -> str:
    """The name of a topic of a workflow that exists."""
    known = [row.name for row in work.topics(tx, workflow(tx, workflow_name))]
    if name not in known:
        unknown(f"topic of workflow {workflow_name!r} named", name, known)
    return name


def unknown(noun: str, key: object, known: Iterable[str]) -> NoReturn:
    """Say that there is no such thing, and which one may have been meant."""
    names = list(known)
    near = get_close_matches(str(key), names, n=1)
    raise UnknownError(noun, key, names, f"Did you mean {near[0]!r}?" if near else "")


def uuid(tx: Transaction, text: str, noun: str) -> UUID:
    """The id of a run or a mutation that exists, from the whole of it or from how it begins."""
    span = span_of(text)
    if span is None:
        raise InvalidInputError(
            f"{text!r} is not the id of a {noun}; expected a UUID as the lists show it, or at least its first "
            f"{_SHORTEST} digits."
        )
    found = traces.ids_between(tx, _TABLES[noun], *span)
    if not found:
        raise UnknownError(noun, text, hint=f"`pipeline {_TABLES[noun]}` lists those that are there.")
    if len(found) > 1:
        raise InvalidInputError(f"{text!r} begins the ids of several {noun}s: {listed(found)}. Type more of it.")
    return found[0]


def span_of(text: str) -> tuple[UUID, UUID] | None:
    """The smallest and the largest id that begins like this; None when no id can."""
    digits = text.strip().lower().replace("-", "")
    if not _SHORTEST <= len(digits) <= _LENGTH or not set(digits) <= set("0123456789abcdef"):
        return None
    return UUID(digits.ljust(_LENGTH, "0")), UUID(digits.ljust(_LENGTH, "f"))


def listed(ids: Iterable[object], most: int = 5) -> str:
    """A few ids in a sentence."""
    known = [str(id_) for id_ in ids]
    return ", ".join(known[:most]) + (", …" if len(known) > most else "")


def many(count: int, noun: str) -> str:
    """A count with its noun: 1 event, 2 events."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def event_id(text: str) -> int:
    """The id of an event, as people type it."""
    if not text.strip().isdecimal() or int(text) >= 2**63:
        raise InvalidInputError(f"{text!r} is not the id of an event; expected a number as `pipeline events` shows it.")
    return int(text)
