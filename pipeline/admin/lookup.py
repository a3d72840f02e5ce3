"""Find things by what an operator types: names with a suggestion, ids by their first digits."""

from collections.abc import Iterable
from uuid import UUID

from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.store.database import Transaction
from pipeline.store.reads import traces, work
from pipeline.text import parse_id, printable_text

_MIN_DIGITS = 4
_UUID_DIGITS = 32
_TABLES = {"run": "runs", "mutation": "mutations"}


def require_workflow(tx: Transaction, name: str) -> str:
    """Return the name if there is such a workflow; else raise."""
    known = work.workflow_names(tx)
    if name not in known:
        raise NotFoundError("workflow", name, known)
    return name


def require_handler(tx: Transaction, workflow_name: str, name: str) -> str:
    """Return the name if the workflow has such a handler; else raise."""
    known = [row.name for row in work.handlers(tx, require_workflow(tx, workflow_name))]
    if name not in known:
        raise NotFoundError(f"handler of workflow {workflow_name!r} named", name, known)
    return name


def require_topic(tx: Transaction, workflow_name: str, name: str) -> str:
    """Return the name if the workflow has such a topic; else raise."""
    known = [row.name for row in work.topics(tx, require_workflow(tx, workflow_name))]
    if name not in known:
        raise NotFoundError(f"topic of workflow {workflow_name!r} named", name, known)
    return name


def find_id(tx: Transaction, text: str, noun: str) -> UUID:
    """Find the id of a run or a mutation by the whole id or its first digits."""
    span = id_range(text)
    if span is None:
        raise InvalidInputError(
            f"{text!r} is not the id of a {noun}; expected a UUID as the lists show it, or at least its first "
            f"{_MIN_DIGITS} digits."
        )
    found = traces.ids_between(tx, _TABLES[noun], *span)
    if not found:
        raise NotFoundError(noun, text, hint=f"`pipeline {_TABLES[noun]}` lists them.")
    if len(found) > 1:
        raise InvalidInputError(f"{text!r} begins the ids of several {noun}s: {id_list(found)}. Type more of it.")
    return found[0]


def id_range(text: str) -> tuple[UUID, UUID] | None:
    """Return the smallest and the largest id with these first digits; None if impossible."""
    digits = text.strip().lower().replace("-", "")
    if not _MIN_DIGITS <= len(digits) <= _UUID_DIGITS or not set(digits) <= set("0123456789abcdef"):
        return None
    return UUID(digits.ljust(_UUID_DIGITS, "0")), UUID(digits.ljust(_UUID_DIGITS, "f"))


def id_list(ids: Iterable[object], limit: int = 5) -> str:
    """Format a few ids for a sentence."""
    known = [str(id_) for id_ in ids]
    return ", ".join(known[:limit]) + (", …" if len(known) > limit else "")


def parse_event_id(text: str) -> int:
    """Parse the id of an event."""
    number = parse_id(text.strip())
    if number is None:
        raise InvalidInputError(
            f"{printable_text(text)!r} is not the id of an event; expected a number as `pipeline events` shows it."
        )
    return number
