"""Format transitions as short lines for a developer: `receipts  order-4711  mail.send  applied  12 ms`.

Only transitions that change what a developer expects are shown. Steps of every run and Celery's tasks are left out.
Warnings, errors and lines of other packages stay as they are.
"""

import logging
from collections.abc import Mapping
from typing import Any

from pipeline.text import single_line

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
