"""Bring the tables of a workflow in line with what its code declares."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from pipeline.domain.errors import InvalidInputError, UnknownError
from pipeline.domain.payloads import checked_json, checked_name
from pipeline.domain.values import DEFAULT_LIMITS, HandlerSpec, WorkflowSpec
from pipeline.domain.workflows import MOST_AT_ONCE, HandlerKind, StartAt
from pipeline.store.database import Transaction, encoded
from pipeline.store.reads import work
from pipeline.store.writes import handlers as handler_store
from pipeline.store.writes import workflows as workflow_store

#: How many releases of one version are told apart: more do not run side by side.
_REMEMBERED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """How a registration went."""

    version: int  #: that is registered now
    is_older: bool = False  #: than what was registered before: nothing was taken away
    is_new_code: bool = False  #: other code of this version, or of a higher one, than was registered last
    given_back: tuple[str, ...] = ()  #: in words, what older code has and newer code had taken away


def register(tx: Transaction, spec: WorkflowSpec) -> Registered:
    """Bring workflow, topics, handlers and subscriptions in line with what the code declares.

    A person's pause, blocks, states and maintenance are left as they are. A handler that is gone
    from the code is retired, never deleted. A consumer that joins a topic with ``earliest`` gets
    every event that topic has ever had. New code may want what the old one declined: it looks again.

    Older code takes nothing away, and gets back what newer code had taken from it: events that are
    published while it serves must reach its handlers. Of a lower version, it changes nothing else. Of
    the same version, as while a release rolls out or after it was rolled back, its settings hold.
    """
    _check(spec)
    tx.all(workflow_store.LOCK_REGISTRATION, name=spec.name)
    _refuse_other_kind(tx, spec)
    before = work.workflow(tx, spec.name)
    is_lower = before is not None and before.version > spec.version
    is_older = is_lower or (before is not None and _was_replaced(before, spec))
    missing = _missing(tx, spec) if is_older else []
    declared, existing = _declared(spec), work.subscribed(tx, spec.name)
    resubscribed = not declared <= existing if is_older else declared != existing
    if resubscribed:
        tx.run(workflow_store.LOCK_SUBSCRIPTIONS)  # before any row: a committing worker takes them in this order too
    if is_lower:
        _give_back(tx, spec)
    else:
        _bring_in_line(tx, spec, before, retires=not is_older)
    _subscribe(tx, spec, takes_away=not is_older)
    is_new_code = before is not None and not is_lower and before.fingerprint != spec.fingerprint
    if before is not None and (is_new_code or resubscribed or missing):
        tx.run(handler_store.LOOK_AGAIN, workflow=spec.name)
    if missing:
        tx.announce("workflow.restored", workflow=spec.name, version=spec.version)
    version = before.version if before is not None and is_lower else spec.version
    return Registered(version=version, is_older=is_older, is_new_code=is_new_code, given_back=tuple(missing))


def _declared(spec: WorkflowSpec) -> set[tuple[str, str]]:
    return {(topic, handler.name) for handler in spec.handlers for topic in handler.subscribes}


def _refuse_other_kind(tx: Transaction, spec: WorkflowSpec) -> None:
    """A consumer cannot become a producer of the same name: its runs and events would belong to nobody."""
    known = {row.name: row.kind for row in work.handlers(tx, spec.name)}
    for handler in spec.handlers:
        if known.get(handler.name, handler.kind) != handler.kind:
            raise InvalidInputError(
                f"Handler {handler.name!r} of workflow {spec.name!r} was a {known[handler.name]} and is declared as a "
                f"{handler.kind}; expected the same kind. Give the new one another name."
            )


def _was_replaced(before: Row[Any], spec: WorkflowSpec) -> bool:
    """Whether this code was registered before at this version, and newer code has taken its place since."""
    is_known = before.version == spec.version and spec.fingerprint in before.releases
    return is_known and spec.fingerprint != before.releases[-1]


def _releases(before: Row[Any] | None, spec: WorkflowSpec) -> list[str]:
    """The releases of this version that were ever registered, oldest first. Of rows from before this was kept: one."""
    known = [] if before is None or before.version != spec.version else list(before.releases or [before.fingerprint])
    return known if spec.fingerprint in known else [*known, spec.fingerprint][-_REMEMBERED:]


def _missing(tx: Transaction, spec: WorkflowSpec) -> list[str]:
    """What older code declares and nobody serves any more, in words."""
    served = {row.name for row in work.handlers(tx, spec.name) if not row.retired}
    gone = [handler.name for handler in spec.handlers if handler.name not in served]
    unheard = sorted(_declared(spec) - work.subscribed(tx, spec.name))
    topics = [f"topic {topic!r} of {name!r}" for topic, name in unheard if name not in gone]
    return [*(f"the handler {name!r}" for name in gone), *topics]


def _give_back(tx: Transaction, spec: WorkflowSpec) -> None:
    """Add what is not there, or is retired. What newer code has as well stays as that one wants it."""
    tx.all(workflow_store.LOCK, names=[spec.name])
    tx.run(workflow_store.ADD_TOPICS, workflow=spec.name, rows=_topic_rows(spec))
    tx.run(handler_store.GIVE_BACK_HANDLERS, workflow=spec.name, rows=_handler_rows(spec))


def _bring_in_line(tx: Transaction, spec: WorkflowSpec, before: Row[Any] | None, *, retires: bool) -> None:
    """Let the workflow, its topics and its handlers be what the code says."""
    tx.run(
        workflow_store.UPSERT,
        name=spec.name,
        version=spec.version,
        fingerprint=spec.fingerprint,
        releases=_releases(before, spec),
        concurrency=spec.concurrency,
        on_uncertain=spec.on_uncertain,
        on_logic_error=spec.on_logic_error,
        keep_done=spec.retention.done,
        keep_ledger=spec.retention.ledger,
        archives=spec.retention.archive,
    )
    tx.all(workflow_store.LOCK, names=[spec.name])
    tx.run(workflow_store.UPSERT_TOPICS, workflow=spec.name, rows=_topic_rows(spec))
    tx.run(handler_store.UPSERT_HANDLERS, workflow=spec.name, rows=_handler_rows(spec))
    if retires:
        tx.run(handler_store.RETIRE_HANDLERS, workflow=spec.name, names=[handler.name for handler in spec.handlers])
    tx.announce("workflow.registered", workflow=spec.name, version=spec.version)


def _subscribe(tx: Transaction, spec: WorkflowSpec, *, takes_away: bool) -> None:
    """Change who listens to what. Publishers are held off only when something really changes."""
    handlers: dict[str, Row[Any]] = {row.name: row for row in work.handlers(tx, spec.name)}
    declared = {
        (topic, handlers[handler.name].id): handler for handler in spec.handlers for topic in handler.subscribes
    }
    existing = work.subscriptions(tx, spec.name)
    for topic, handler_id in existing - set(declared) if takes_away else ():
        tx.run(workflow_store.DELETE_SUBSCRIPTION, workflow=spec.name, topic=topic, handler_id=handler_id)
    for (topic, handler_id), handler in declared.items():
        if (topic, handler_id) in existing:
            continue
        row = {"workflow": spec.name, "topic": topic, "handler_id": handler_id}
        tx.run(workflow_store.INSERT_SUBSCRIPTION, **row)
        if handler.start_at is StartAt.EARLIEST:
            tx.run(workflow_store.BACKFILL, **row)


def _check(spec: WorkflowSpec) -> None:
    checked_name(spec.name, what="workflow name")
    topics = [checked_name(topic.name, what=f"topic of workflow {spec.name!r}") for topic in spec.topics]
    names = [checked_name(handler.name, what=f"handler of workflow {spec.name!r}") for handler in spec.handlers]
    for noun, given in (("topic", topics), ("handler", names)):
        doubled = sorted({name for name in given if given.count(name) > 1})
        if doubled:
            raise InvalidInputError(
                f"Workflow {spec.name!r} declares the {noun} {doubled[0]!r} twice; expected each name once."
            )
    for topic in spec.topics:
        checked_json(topic.schema, what=f"schema of topic {topic.name!r}", limit=DEFAULT_LIMITS.payload)
    _check_count(f"concurrency of workflow {spec.name!r}", spec.concurrency)
    for handler in spec.handlers:
        _check_handler(spec.name, handler, topics)


def _check_handler(workflow: str, handler: HandlerSpec, topics: Sequence[str]) -> None:
    _check_count(f"batch of handler {handler.name!r} of workflow {workflow!r}", handler.batch)
    if handler.kind is HandlerKind.PRODUCER and handler.subscribes:
        raise InvalidInputError(
            f"Producer {handler.name!r} of workflow {workflow!r} subscribes to {handler.subscribes[0]!r}; "
            "expected no subscription: a handler that consumes events is a consumer."
        )
    for topic in handler.subscribes:
        if topic not in topics:
            raise UnknownError(f"topic of workflow {workflow!r} named", topic, topics)


def _check_count(what: str, value: int) -> None:
    if not 1 <= value <= MOST_AT_ONCE:
        raise InvalidInputError(f"The {what} is {value}; expected a number from 1 to {MOST_AT_ONCE}.")


def _topic_rows(spec: WorkflowSpec) -> str:
    return encoded([{"name": topic.name, "schema": topic.schema} for topic in spec.topics])


def _handler_rows(spec: WorkflowSpec) -> str:
    return encoded([_handler_row(handler) for handler in spec.handlers])


def _handler_row(handler: HandlerSpec) -> dict[str, Any]:
    return {
        "name": handler.name,
        "kind": handler.kind,
        "batch": handler.batch,
        "ordered": handler.ordered,
        "after_failed_mutation": handler.after_failed_mutation,
        "failure_policy": handler.failure_policy.model_dump(mode="json"),
        "schedule": handler.schedule,
        "first_run_at": handler.first_run_at,
    }
