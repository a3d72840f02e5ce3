"""Bring the tables of a workflow in line with what its code declares."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.domain.payloads import checked_json, checked_name
from pipeline.domain.values import DEFAULT_LIMITS, HandlerSpec, WorkflowSpec
from pipeline.domain.workflows import HandlerKind, StartAt, count_problem
from pipeline.store.database import Transaction, encode_rows
from pipeline.store.reads import work
from pipeline.store.rows import OpenBackfillRow
from pipeline.store.schema import WorkflowRow
from pipeline.store.writes import handlers as handler_store
from pipeline.store.writes import workflows as workflow_store

#: How many fingerprints of one version are known: more deployments do not run side by side.
_MAX_FINGERPRINTS = 20
#: How many earlier events one transaction delivers: about a tenth of a second.
BACKFILL_PAGE_SIZE = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """How a registration went."""

    version: int  #: that is registered now
    is_older: bool = False  #: than what was registered before: nothing was taken away
    is_new_code: bool = False  #: other code of this version, or of a higher one, than was registered last
    restored: tuple[str, ...] = ()  #: descriptions of what older code has and newer code had removed


def register(tx: Transaction, spec: WorkflowSpec, *, page_size: int = BACKFILL_PAGE_SIZE) -> Registration:
    """Bring workflow, topics, handlers and subscriptions in line with what the code declares.

    An operator's pause, blocks, states and maintenance are left as they are. A handler that is gone
    from the code is retired, never deleted. A consumer that joins a topic with ``earliest`` gets
    every event that topic has ever had: the first ``page_size`` now, the others by ``backfill_page``. New code may want
    events that the old code declined: they are offered again.

    Older code takes nothing away, and gets back what newer code had taken from it: events that are
    published while it serves must reach its handlers. Of a lower version, it changes nothing else. Of
    the same version, as while a release rolls out or after it was rolled back, its settings hold.
    """
    _check_spec(spec)
    tx.all(workflow_store.LOCK_REGISTRATION, name=spec.name)
    _refuse_other_kind(tx, spec)
    before = work.workflow(tx, spec.name)
    is_lower = before is not None and before.version > spec.version
    is_older = is_lower or (before is not None and _was_replaced(before, spec))
    missing = _missing_parts(tx, spec) if is_older else []
    declared, existing = _declared_subscriptions(spec), work.subscriptions_by_name(tx, spec.name)
    resubscribed = not declared <= existing if is_older else declared != existing
    if resubscribed:  # before any row: publishers and committing workers take them in this order too
        tx.all(workflow_store.LOCK_SUBSCRIPTIONS, workflow=spec.name)
        tx.all(workflow_store.LOCK_BACKFILL)
    is_new_code = before is not None and not is_lower and before.fingerprint != spec.fingerprint
    is_offering_again = before is not None and (is_new_code or resubscribed or bool(missing))
    if is_offering_again:
        tx.all(workflow_store.LOCK_WORKFLOWS, names=[spec.name])
        tx.execute(handler_store.RESET_DECLINED, workflow=spec.name)
    if is_lower:
        _restore(tx, spec)
    else:
        _update_to_spec(tx, spec, before, is_retiring=not is_older)
    _subscribe(tx, spec, is_removing=not is_older)
    for joined in work.open_backfills(tx, spec.name) if resubscribed else ():
        _fill(tx, joined, page_size)
    if is_offering_again:
        tx.execute(handler_store.CLEAR_IDLE, workflow=spec.name)
    if missing:
        tx.log_on_commit("workflow.restored", workflow=spec.name, version=spec.version)
    version = before.version if before is not None and is_lower else spec.version
    return Registration(version=version, is_older=is_older, is_new_code=is_new_code, restored=tuple(missing))


def _declared_subscriptions(spec: WorkflowSpec) -> set[tuple[str, str]]:
    return {(topic, handler.name) for handler in spec.handlers for topic in handler.subscribes}


def _refuse_other_kind(tx: Transaction, spec: WorkflowSpec) -> None:
    """A consumer cannot become a producer of the same name: its runs and events would have no handler."""
    known = {row.name: row.kind for row in work.handlers(tx, spec.name)}
    for handler in spec.handlers:
        if known.get(handler.name, handler.kind) != handler.kind:
            raise InvalidInputError(
                f"Handler {handler.name!r} of workflow {spec.name!r} was a {known[handler.name]} and is declared as a "
                f"{handler.kind}; expected the same kind. Give the new one another name."
            )


def _was_replaced(before: WorkflowRow, spec: WorkflowSpec) -> bool:
    """Whether this code was registered before at this version, and newer code has taken its place since."""
    is_known = before.version == spec.version and spec.fingerprint in before.known_fingerprints
    return is_known and spec.fingerprint != before.known_fingerprints[-1]


def _known_fingerprints(before: WorkflowRow | None, spec: WorkflowSpec) -> list[str]:
    """The releases of this version that were ever registered, oldest first. Of rows from before this was kept: one."""
    known = (
        []
        if before is None or before.version != spec.version
        else list(before.known_fingerprints or [before.fingerprint])
    )
    return known if spec.fingerprint in known else [*known, spec.fingerprint][-_MAX_FINGERPRINTS:]


def _missing_parts(tx: Transaction, spec: WorkflowSpec) -> list[str]:
    """Describe what older code declares and no registered code has any more."""
    served = {row.name for row in work.handlers(tx, spec.name) if not row.retired}
    gone = [handler.name for handler in spec.handlers if handler.name not in served]
    unheard = sorted(_declared_subscriptions(spec) - work.subscriptions_by_name(tx, spec.name))
    topics = [f"topic {topic!r} of {name!r}" for topic, name in unheard if name not in gone]
    return [*(f"the handler {name!r}" for name in gone), *topics]


def _restore(tx: Transaction, spec: WorkflowSpec) -> None:
    """Add what is not there, or is retired. What newer code has as well stays as that one wants it."""
    tx.all(workflow_store.LOCK_WORKFLOWS, names=[spec.name])
    tx.execute(workflow_store.ADD_TOPICS, workflow=spec.name, rows=_topic_rows(spec))
    tx.execute(handler_store.RESTORE_HANDLERS, workflow=spec.name, rows=_handler_rows(spec))


def _update_to_spec(tx: Transaction, spec: WorkflowSpec, before: WorkflowRow | None, *, is_retiring: bool) -> None:
    """Let the workflow, its topics and its handlers be what the code says."""
    tx.execute(
        workflow_store.UPSERT_WORKFLOW,
        name=spec.name,
        version=spec.version,
        fingerprint=spec.fingerprint,
        known_fingerprints=_known_fingerprints(before, spec),
        concurrency=spec.concurrency,
        on_uncertain=spec.on_uncertain,
        on_logic_error=spec.on_logic_error,
        on_exhausted=spec.on_exhausted,
        keep_done=spec.retention.done,
        keep_ledger=spec.retention.ledger,
        archives=spec.retention.archive,
    )
    tx.all(workflow_store.LOCK_WORKFLOWS, names=[spec.name])
    tx.execute(workflow_store.UPSERT_TOPICS, workflow=spec.name, rows=_topic_rows(spec))
    tx.execute(handler_store.UPSERT_HANDLERS, workflow=spec.name, rows=_handler_rows(spec))
    if is_retiring:
        tx.execute(handler_store.RETIRE_HANDLERS, workflow=spec.name, names=[handler.name for handler in spec.handlers])
    tx.log_on_commit("workflow.registered", workflow=spec.name, version=spec.version)


def _subscribe(tx: Transaction, spec: WorkflowSpec, *, is_removing: bool) -> None:
    """Change who listens to what. Publishers of this workflow wait only if something really changes."""
    handlers = {row.name: row for row in work.handlers(tx, spec.name)}
    declared = {
        (topic, handlers[handler.name].id): handler for handler in spec.handlers for topic in handler.subscribes
    }
    existing = work.subscriptions(tx, spec.name)
    for topic, handler_id in existing - set(declared) if is_removing else ():
        tx.execute(workflow_store.DELETE_SUBSCRIPTION, workflow=spec.name, topic=topic, handler_id=handler_id)
    for (topic, handler_id), handler in declared.items():
        if (topic, handler_id) in existing:
            continue
        row = {"workflow": spec.name, "topic": topic, "handler_id": handler_id}
        is_backfilled = handler.start_at is StartAt.EARLIEST
        tx.execute(workflow_store.INSERT_SUBSCRIPTION, **row, is_backfilled=is_backfilled)


def backfill_page(tx: Transaction, workflow: str, *, page_size: int = BACKFILL_PAGE_SIZE) -> bool:
    """Deliver the next earlier events to a consumer that has joined a topic of this workflow.

    Returns whether more may be left. The position is stored with the subscription, so a backfill that was interrupted
    is continued by any later call. Registrations and pages of one workflow are one after the other.
    """
    tx.all(workflow_store.LOCK_REGISTRATION, name=workflow)
    tx.all(workflow_store.LOCK_BACKFILL)
    joined = work.open_backfills(tx, workflow)
    if joined:
        _fill(tx, joined[0], page_size)
    return bool(joined)


def _fill(tx: Transaction, joined: OpenBackfillRow, page_size: int) -> None:
    page = tx.one(
        workflow_store.BACKFILL_PAGE,
        workflow=joined.workflow,
        topic=joined.topic,
        handler_id=joined.handler_id,
        after=joined.backfill_after,
        until=joined.backfill_until,
        limit=page_size,
    )
    tx.log_on_commit(
        "workflow.backfilled",
        workflow=joined.workflow,
        handler_id=joined.handler_id,
        events=page.delivered,
        is_done=page.is_done,
    )


def _check_spec(spec: WorkflowSpec) -> None:
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
            raise NotFoundError(f"topic of workflow {workflow!r} named", topic, topics)


def _check_count(what: str, value: int) -> None:
    problem = count_problem(value)
    if problem:
        raise InvalidInputError(f"The {what} is {value}; {problem}.")


def _topic_rows(spec: WorkflowSpec) -> str:
    return encode_rows([{"name": topic.name, "schema": topic.schema} for topic in spec.topics])


def _handler_rows(spec: WorkflowSpec) -> str:
    return encode_rows([handler_store.declared_values(handler) for handler in spec.handlers])
