"""Log one line per transition, named like the verb that made it.

Lines are queued on the transaction and written after its commit, so that no line is about a transition that was
rolled back. Ids are fields. Payloads never appear.
"""

import logging
from collections.abc import Mapping
from typing import Any

from pipeline.telemetry import spans

logger = logging.getLogger("pipeline")

#: Every transition, and what it means to an operator who reads the log.
TRANSITIONS: Mapping[str, str] = {
    "event.published": "events became pending for their consumers",
    "event.released": "an operator released a quarantined event",
    "event.quarantined": "an event was quarantined, by an operator or by the run that failed because of it",
    "event.skipped": "an operator skipped an event",
    "run.started": "the scheduler created a run",
    "run.claimed": "a worker took a run for one phase",
    "run.prepared": "inputs are reserved and the plan is saved",
    "run.mutating": "the mutation is in the ledger and is about to be sent",
    "run.mutated": "the mutate phase is over and its outcome is known",
    "run.committed": "outputs published, inputs consumed, state saved",
    "run.stopped": "a run failed or was paused; its inputs went where the mutation boundary says",
    "run.narrowed": "a failure names no event; the inputs are offered again in smaller slices",
    "run.retried": "a new run retries a stopped one",
    "run.handed_back": "a worker gave its run back before it shut down",
    "mutation.approved": "an operator approved exactly this request",
    "mutation.rejected": "an operator rejected the request; the run continues without it",
    "mutation.sent": "an approved mutation is about to be sent",
    "mutation.proposed": "an answer about a high value waits for a second person to confirm it",
    "mutation.applied": "the effect happened",
    "mutation.failed": "the effect did not happen",
    "mutation.doubted": "the outcome is unknown; the reconciler asks the outside system",
    "mutation.escalated": "the outcome stays unknown; an operator must resolve it",
    "mutation.skipped": "an operator chose to continue without the effect",
    "mutation.reconcile_retried": "an operator asked for new reconcile attempts",
    "workflow.registered": "a workflow's handlers and topics were brought up to date",
    "workflow.restored": "handlers or topics that newer code had removed were restored for older code",
    "workflow.renamed": "a workflow, topic or handler has a new name, and everything that belongs to it was moved",
    "operation.registered": "a worker declared an operation that is new or has changed",
    "workflow.backfilled": "earlier events were delivered to a consumer that has joined a topic",
    "workflow.paused": "an operator paused a workflow",
    "workflow.resumed": "an operator resumed a workflow",
    "workflow.blocked": "the system starts no runs of a workflow",
    "workflow.unblocked": "the cause of a block is gone",
    "workflow.maintenance_entered": "the code is wrong or cannot use an event; no run starts until that is fixed",
    "workflow.maintenance_exited": "the workflow may start runs again",
    "mutation.found_late": "an effect was found after its mutation was resolved as failed",
    "mutation.acknowledged": "an operator has dealt with a late effect",
    "breaker.opened": "no new mutation of an operation is started until a probe succeeds",
    "breaker.closed": "mutations of an operation start again",
    "session.finished": "a group of runs ended",
    "token.created": "an API token was created",
    "token.revoked": "an API token was revoked, and the logins that were opened with it ended",
    "login.opened": "a person logged in to the console",
    "login.ended": "a person logged out of the console",
}


#: Logged as warnings: something waits for an operator from now on.
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
    """Refuse an unknown name before anything is written: it is a bug."""
    if name not in TRANSITIONS:
        raise LookupError(f"{name!r} is not a transition; add it to pipeline.telemetry.transition_log.TRANSITIONS")


def is_written(name: str) -> bool:
    """Whether the level of the log shows this transition. An unknown name is a bug and raises."""
    check_name(name)
    return logger.isEnabledFor(logging.INFO) or name in NEEDS_OPERATOR


def write(name: str, fields: Mapping[str, Any]) -> None:
    """Write one transition to the log."""
    if is_written(name):
        shown = "".join(f" {field}={value}" for field, value in fields.items())
        of = spans.bound_run(fields.get("run_id"))
        traced = {} if of is None else {"trace_id": f"{of.trace_id:032x}", "span_id": f"{of.span_id:016x}"}
        level = logging.WARNING if name in NEEDS_OPERATOR else logging.INFO
        logger.log(level, "%s%s", name, shown, extra={"transition": name, **fields, **traced})
