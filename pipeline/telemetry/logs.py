"""Format log lines as JSON objects, or as text for a terminal or a developer.

Ids and the current trace are fields. Extra fields of other packages are kept if they are short scalars; arguments,
payloads and other structures never are.
"""

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from opentelemetry import trace

from pipeline.text import single_line, visible_text

#: What happened, by transition. A transition that is missing here is not shown, unless it is a warning.
_OUTCOMES: Mapping[str, str] = {
    "mutation.applied": "applied",
    "mutation.failed": "did not happen",
    "mutation.doubted": "unknown, is reconciled",
    "mutation.escalated": "unknown, waits for an operator",
    "mutation.skipped": "skipped",
    "mutation.approved": "approved",
    "mutation.rejected": "rejected",
    "mutation.found_late": "late effect found",
    "run.mutated": "nothing to send",
    "run.stopped": "stopped",
    "event.quarantined": "quarantined",
    "event.released": "released",
    "event.skipped": "skipped",
    "workflow.registered": "registered",
    "workflow.renamed": "renamed",
    "workflow.paused": "paused",
    "workflow.resumed": "resumed",
    "workflow.blocked": "blocked",
    "workflow.unblocked": "no longer blocked",
    "workflow.maintenance_entered": "maintenance begins",
    "workflow.maintenance_exited": "maintenance ends",
    "breaker.opened": "circuit breaker opened",
    "breaker.closed": "circuit breaker closed",
}
#: Celery reports every task there, sweeps included.
_CHATTER = ("celery.app.trace", "celery.worker.consumer", "celery.worker.request", "celery.worker.strategy")
_DETAILS = ("status", "kind", "version", "actor")
_MINUTE = 60


def is_shown(record: logging.LogRecord) -> bool:
    """Return whether a record is worth a line."""
    if record.levelno >= logging.WARNING:
        return True
    transition = getattr(record, "transition", None)
    return not record.name.startswith(_CHATTER) if transition is None else transition in _OUTCOMES


class ShortFormatter(logging.Formatter):
    """Format a transition as a short line; leave every other record to another formatter."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self.inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        outcome = _OUTCOMES.get(getattr(record, "transition", ""))
        return self.inner.format(record) if outcome is None else _short_line(vars(record), outcome)


def _short_line(fields: Mapping[str, Any], outcome: str) -> str:
    """Return workflow, subject, operation, outcome and duration, as far as they are known."""
    operation = ".".join(str(fields[name]) for name in ("connector", "operation") if name in fields)
    parts = (fields.get("workflow"), _subject(fields), operation, outcome + _details(fields), _duration(fields))
    return "  ".join(single_line(part) for part in parts if part)


def _subject(fields: Mapping[str, Any]) -> str:
    """Name the input, else the event, else the handler."""
    if "message_id" in fields:
        others = fields["inputs"] - 1
        return f"{fields['message_id']} and {others} more" if others else str(fields["message_id"])
    if "event_id" in fields:
        return f"event {fields['event_id']}"
    return str(fields.get("handler", ""))


def _details(fields: Mapping[str, Any]) -> str:
    found = [str(fields[name]) for name in _DETAILS if fields.get(name)]
    resolver = fields.get("resolved_by")
    found += [f"by {resolver}"] if resolver not in (None, "call") else []
    return f" ({', '.join(found)})" if found else ""


def _duration(fields: Mapping[str, Any]) -> str:
    seconds = fields.get("duration")
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < _MINUTE else f"{seconds / _MINUTE:.0f} min"


MAX_FIELDS, MAX_FIELD_LENGTH = 24, 200
MAX_MESSAGE_LENGTH, MAX_STACK_LENGTH = 4_000, 16_000
#: Celery logs the arguments of tasks there, at level DEBUG.
QUIET_LOGGERS = ("celery.pool", "celery.worker.strategy")

_LINE_BREAKS = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")

_KEPT = "\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  #: the line breaks, which ``PrettyFormatter`` splits at

#: Attributes of every record; all others are extra fields.
_STANDARD_ATTRIBUTES = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}


def set_format(handlers: list[logging.Handler], form: str) -> None:
    """Set the format of handlers.

    ``json`` replaces their own format. ``pretty`` adds the trace to it. ``short`` keeps it for all lines but those of
    transitions, and hides the lines of single steps and tasks.
    """
    for handler in handlers:
        if form == "json":
            handler.setFormatter(JsonFormatter())
        elif not isinstance(handler.formatter, PrettyFormatter | ShortFormatter):
            pretty = PrettyFormatter(handler.formatter or logging.Formatter())
            handler.setFormatter(ShortFormatter(pretty) if form == "short" else pretty)
        if form == "short":
            handler.addFilter(is_shown)


def set_level(name: str | None) -> None:
    """Set the level of our own logger; None keeps it. Quiet loggers never go below INFO."""
    if name is not None:
        logging.getLogger("pipeline").setLevel(name.upper())
    for quiet in map(logging.getLogger, QUIET_LOGGERS):
        if quiet.getEffectiveLevel() < logging.INFO:
            quiet.setLevel(logging.INFO)


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _shorten(record.getMessage(), MAX_MESSAGE_LENGTH),
            "process": record.process,
        }
        line |= _trace_fields(record)
        for name, value in _extra_fields(record):
            line.setdefault(name, value)
        if record.exc_info and record.exc_info[0] is not None:
            line["error_type"] = record.exc_info[0].__qualname__
            line["stack"] = _shorten(self.formatException(record.exc_info)[-MAX_STACK_LENGTH:], MAX_STACK_LENGTH)
        return json.dumps(line, default=str)  # in ASCII, so that no character ends the line


class PrettyFormatter(logging.Formatter):
    """Append the trace to the first line of another formatter, and indent the others."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self.inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines."""
        first, *rest = _LINE_BREAKS.split(self.inner.format(_with_visible_message(record)))
        traced = _trace_fields(record)
        name = f" trace_id={traced['trace_id']}" if traced else ""
        return "\n".join(
            [first + name, *(f"    {line}" for line in rest)]
        )  # indented, so that no text can fake a log line


def _with_visible_message(record: logging.LogRecord) -> logging.LogRecord:
    """Return the record with hidden characters of its message escaped; a formatter may add colours to it."""
    message = record.getMessage()
    visible = visible_text(message, keep=_KEPT)
    return record if visible == message else logging.makeLogRecord({**vars(record), "msg": visible, "args": None})


def _trace_fields(record: logging.LogRecord) -> Mapping[str, str]:
    """Return the trace that the record names, else the current one."""
    if hasattr(record, "trace_id"):
        return {"trace_id": str(record.trace_id), "span_id": str(getattr(record, "span_id", ""))}
    of = trace.get_current_span().get_span_context()
    return {"trace_id": f"{of.trace_id:032x}", "span_id": f"{of.span_id:016x}"} if of.is_valid else {}


def _extra_fields(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    """Yield the extra fields: scalars only, at most ``MAX_FIELDS``."""
    found = 0
    for name, value in vars(record).items():
        if name in _STANDARD_ATTRIBUTES or not isinstance(value, str | int | float | UUID | datetime | None):
            continue
        found += 1
        if found > MAX_FIELDS:
            return
        yield name, value if _is_plain(value) else _shorten(str(value), MAX_FIELD_LENGTH)


def _is_plain(value: object) -> bool:
    """Return whether the value is a number or null, which JSON keeps short."""
    return value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _shorten(text: str, longest: int) -> str:
    whole = text.encode("utf-8", "replace").decode()  # replaces lone surrogates
    return whole if len(whole) <= longest else f"{whole[: longest - 1]}…"
