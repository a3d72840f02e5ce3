"""What the system says about itself: one line per transition, named like the verb that made it.

Lines are queued on the transaction and said when it has committed, so a line is never about
something that did not happen. Ids are fields; payloads never appear.
"""

import logging
from collections.abc import Mapping
from typing import Any

from pipeline.telemetry.tracing import context

logger = logging.getLogger("pipeline")

#: Every transition, and what it means to the person who reads it in a log.
TRANSITIONS: Mapping[str, str] = {
    "event.published": "events became pending for their consumers",
    "event.released": "a person handed a quarantined event back",
    "event.quarantined": "an event was set aside, by a person or by the run that failed because of it",
    "event.skipped": "a person chose to go on without an event",
    "run.started": "the scheduler created a run",
    "run.claimed": "a worker took a run for one phase",
    "run.prepared": "inputs are reserved and the plan is saved",
    "run.mutating": "the mutation is in the ledger and is about to be sent",
    "run.mutated": "the mutate phase is over and its outcome is known",
    "run.committed": "outputs published, inputs consumed, state saved",
    "run.stopped": "a run failed or was paused; its inputs went where the mutation boundary says",
    "run.retried": "a new run carries a stopped one forward",
    "run.handed_back": "a worker gave its run back before it shut down",
    "mutation.approved": "a person allowed exactly this request",
    "mutation.rejected": "a person refused the request; the run goes on without it",
    "mutation.sent": "an approved mutation is about to be sent",
    "mutation.applied": "the effect happened",
    "mutation.failed": "the effect did not happen",
    "mutation.doubted": "nobody knows whether the effect happened; the background is asking",
    "mutation.escalated": "nobody can know whether the effect happened; a person must settle it",
    "mutation.skipped": "a person chose to go on without the effect",
    "mutation.reconcile_retried": "a person asked the background to look again",
    "workflow.registered": "a workflow's handlers and topics were brought up to date",
    "workflow.restored": "older code got back handlers or topics that newer code had taken away",
    "workflow.paused": "a person paused a workflow",
    "workflow.resumed": "a person resumed a workflow",
    "workflow.blocked": "the system holds a workflow back",
    "workflow.unblocked": "the cause of a block is gone",
    "workflow.maintenance_entered": "the code is wrong or cannot use an event; nothing starts until that is mended",
    "workflow.maintenance_exited": "the workflow may start runs again",
    "mutation.found_late": "an effect that was settled as not having happened was found after all",
    "mutation.acknowledged": "a person has dealt with an effect that surfaced late",
    "breaker.opened": "no new mutation of an operation is started until a probe succeeds",
    "breaker.closed": "mutations of an operation go on",
    "session.finished": "a group of runs ended",
}


#: Said as warnings: from here on something stands still until a person acts.
NEEDS_OPERATOR = frozenset(
    {
        "mutation.escalated",
        "mutation.found_late",
        "breaker.opened",
        "workflow.blocked",
        "workflow.maintenance_entered",
        "event.quarantined",
    }
)


def check_name(name: str) -> None:
    """Refuse a name that is not in the table: a bug, to be found before anything is written."""
    if name not in TRANSITIONS:
        raise LookupError(f"{name!r} is not a transition; add it to pipeline.telemetry.transition_log.TRANSITIONS")


def write(name: str, fields: Mapping[str, Any]) -> None:
    """Write one transition to the log."""
    check_name(name)
    if logger.isEnabledFor(logging.INFO) or name in NEEDS_OPERATOR:
        shown = "".join(f" {field}={value}" for field, value in fields.items())
        of = context.bound_run(fields.get("run_id"))
        traced = {} if of is None else {"trace_id": f"{of.trace_id:032x}", "span_id": f"{of.span_id:016x}"}
        level = logging.WARNING if name in NEEDS_OPERATOR else logging.INFO
        logger.log(level, "%s%s", name, shown, extra={"transition": name, **fields, **traced})
