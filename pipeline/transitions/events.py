"""Events are published, and operators may quarantine, release or skip one delivery.

Publishing is idempotent by message id: the first write wins and a repeat is a no-op. What happens
to an event inside a run (reserve, consume, release, transfer) belongs to that run's verbs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pipeline.domain.errors import IllegalTransitionError, InvalidInputError, NotFoundError, StaleWriteError
from pipeline.domain.payloads import checked_json, checked_name, storable_text
from pipeline.domain.states import DeliveryStatus, EventId, MutationStatus, RunStatus
from pipeline.domain.values import DEFAULT_LIMITS, Actor, Limits, NewEvent, checked_header
from pipeline.store.database import Statement, Transaction, encode_row_parts, encode_rows
from pipeline.store.reads import work
from pipeline.store.rows import NamedTopicRow, RunWithMutationRow
from pipeline.store.schema import DeliveryRow, RunRow
from pipeline.store.writes import events as event_store
from pipeline.store.writes import mutations as mutation_store
from pipeline.store.writes import runs as run_store
from pipeline.store.writes import workflows as workflow_store
from pipeline.telemetry import spans
from pipeline.transitions import audit, payload_schemas
from pipeline.transitions.mutation_log import log_mutation

#: Topics by workflow and name, as this process last read them. A publish that can use them reads nothing.
_REMEMBERED: dict[str, dict[str, NamedTopicRow]] = {}
_MAX_READS = 10  #: of topics, while one deploy after another changes them
_NOT_IN_DOUBT = (MutationStatus.PENDING, MutationStatus.APPLIED, MutationStatus.FAILED)
_EVENT_IDS_END = 2**63  #: ids fit into eight bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishResult:
    """What a publish wrote: ids by message id. A message id that is missing was there before."""

    new: dict[tuple[str, str], EventId]
    replaced: dict[tuple[str, str], EventId]


def publish(
    tx: Transaction,
    workflow: str,
    events: Sequence[NewEvent],
    *,
    replace: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> PublishResult:
    """Add events to topics of a workflow and hand them to its consumers.

    Payloads of topics that declare a schema must fit it. With ``replace`` the payload (and the title, if
    one is given) of an event that no run can have seen yet is rewritten; one that a run may have seen
    keeps what that run saw. Keys never change. A former name of the workflow or of a topic means the present one, for
    as long as the code declares the rename.
    """
    checked_name(workflow, what="workflow name")
    if not events:
        return PublishResult(new={}, replaced={})
    facts = _deduplicate(events, replace=replace)
    rows = event_rows(facts, limits)
    if replace:  # a deploy locks them before the workflow too, and the names that are read next stay as they are
        tx.all(workflow_store.SHARE_SUBSCRIPTIONS, workflow=workflow)
    topics = (not replace and _remembered_topics(workflow, events)) or _checked_topics(tx, workflow, events)
    if replace:  # no run is created between the read and the write
        tx.all(workflow_store.LOCK_WORKFLOWS, names=[_workflow_of(topics)])
    for _ in range(_MAX_READS):
        ids = _insert(tx, facts, rows, topics)
        if ids is not None:
            break
        topics = _checked_topics(tx, workflow, events)
    else:
        raise StaleWriteError(
            "workflow", workflow, verb="publish", expected="topics as they were just read", found="others, each time"
        )
    new = _as_given(facts, rows, ids)
    repeats = [row for row in rows if (row["topic"], row["message_id"]) not in ids] if replace else ()
    rewritten: dict[tuple[str, str], EventId] = {}
    for part in encode_row_parts(repeats):
        rewritten |= _by_message(tx.all(event_store.REPLACE, workflow=_workflow_of(topics), rows=part))
    if new:
        repeated = len(rows) - len(new)
        tx.log_on_commit("event.published", workflow=_workflow_of(topics), events=len(new), repeats=repeated)
    return PublishResult(new=new, replaced=_as_given(facts, rows, rewritten))


def _insert(
    tx: Transaction, facts: Sequence[NewEvent], rows: Sequence[dict[str, Any]], topics: Mapping[str, NamedTopicRow]
) -> dict[tuple[str, str], EventId] | None:
    """Insert what is not there yet, under the present names of the topics. Return ids by these names.

    None, and nothing is inserted, if a topic is not as given any more. The first part of many holds all topics for the
    others.
    """
    for row, event in zip(rows, facts, strict=True):
        row["topic"] = topics[event.topic].name
    known = {row.name: {"name": row.name, "schema_digest": row.schema_digest} for row in topics.values()}
    given = {"workflow": _workflow_of(topics), "topics": encode_rows([*known.values()])}
    ids: dict[tuple[str, str], EventId] = {}
    for part in encode_row_parts(rows):
        answer = tx.all(event_store.PUBLISH, rows=part, **given)
        if answer and answer[0].id is None:
            return None
        ids |= _by_message(answer)
    return ids


def _as_given(
    facts: Sequence[NewEvent], rows: Sequence[Mapping[str, Any]], ids: Mapping[tuple[str, str], EventId]
) -> dict[tuple[str, str], EventId]:
    """Ids by the names that the publisher gave."""
    return {
        (event.topic, event.message_id): ids[present]
        for event, row in zip(facts, rows, strict=True)
        if (present := (row["topic"], row["message_id"])) in ids
    }


def _deduplicate(events: Sequence[NewEvent], *, replace: bool) -> Sequence[NewEvent]:
    """Each fact once: of several with one name the first counts, and with ``replace`` the last, as one by one."""
    facts: dict[tuple[str, str], NewEvent] = {}
    for event in events:
        name = (event.topic, event.message_id)
        facts[name] = event if replace else facts.get(name, event)
    return list(facts.values())


def _remembered_topics(workflow: str, events: Sequence[NewEvent]) -> dict[str, NamedTopicRow] | None:
    """The topics as this process read them last; None if they have to be read (again) to publish these events.

    They may have changed since. The insert compares them, and a refusal is based on topics that were read for it.
    """
    declared = _REMEMBERED.get(workflow, {})
    try:
        return _topics_of(declared, events)
    except (KeyError, InvalidInputError):
        return None


def _checked_topics(tx: Transaction, workflow: str, events: Sequence[NewEvent]) -> dict[str, NamedTopicRow]:
    """Read the topics. Nothing is published unless every topic is known and every payload fits its own."""
    declared = work.topics_by_name(tx, workflow)
    _refuse_old_snapshot({row.isolation for row in declared.values()})
    if declared:
        _REMEMBERED[workflow] = declared
    try:
        return _topics_of(declared, events)
    except KeyError as unknown:
        raise unknown_topic_error(tx, workflow, unknown.args[0]) from None


def _topics_of(declared: Mapping[str, NamedTopicRow], events: Sequence[NewEvent]) -> dict[str, NamedTopicRow]:
    """The topics of these events by name, all checked. A ``KeyError`` names the first one that is not declared."""
    topics: dict[str, NamedTopicRow] = {}
    validators: dict[str, Any] = {}
    for event in events:
        name = event.topic
        if name not in topics:
            topics[name] = declared[name]
            validators[name] = _validator_of(topics[name])
        _check_event(topics[name], validators[name], event)
    return topics


def _validator_of(topic: NamedTopicRow) -> Any | None:
    """What checks the payloads of a topic; None if it takes any."""
    return None if topic.schema is None else payload_schemas.validator_of(topic.schema)


def _workflow_of(topics: Mapping[str, NamedTopicRow]) -> str:
    """The present name of the workflow that these topics are of."""
    return next(iter(topics.values())).workflow


def check_event(topic: NamedTopicRow, event: NewEvent) -> None:
    """Refuse an event for a topic that the newest code has no more, or with a payload that does not fit."""
    _check_event(topic, _validator_of(topic), event)


def _check_event(topic: NamedTopicRow, validator: Any | None, event: NewEvent) -> None:
    if topic.retired:
        raise InvalidInputError(
            f"Topic {event.topic!r} of workflow {topic.workflow!r} is gone from the code of its workers: no consumer "
            "would get the event. Publish to another topic, or declare it again; if it has a new name, declare that "
            f"with renamed_from={event.topic!r}. Nothing was published."
        )
    if validator is not None:
        what = f"payload of {event.message_id!r}"
        payload_schemas.check_payload(validator, event.payload, what=what, topic=event.topic)


def _refuse_old_snapshot(levels: set[str]) -> None:
    """A stricter transaction reads the subscriptions, schemas and runs of its first statement, not those of now."""
    for level in levels - {*event_store.LEVELS_WITH_NEW_SNAPSHOTS}:
        raise InvalidInputError(
            f"Events cannot be published in a transaction of isolation level {level.upper()}: it does not see "
            "consumers that registered after its first statement, and they would never get the events. Expected "
            "READ COMMITTED; begin the transaction with that level, or publish after its commit with a DatabaseClient "
            "or a BrokerClient. Nothing was published."
        )


def skip(tx: Transaction, workflow: str, handler: str, event_id: EventId, by: Actor) -> DeliveryRow:
    """Skip an event for an operator. No run may hold it."""
    needs = [DeliveryStatus.PENDING, DeliveryStatus.QUARANTINED]
    return _act_on_delivery(tx, event_store.SKIP_ONE, (workflow, handler, event_id), by, "skip", needs)


def quarantine(tx: Transaction, workflow: str, handler: str, event_id: EventId, by: Actor) -> DeliveryRow:
    """Quarantine a pending event for an operator."""
    target = (workflow, handler, event_id)
    return _act_on_delivery(
        tx, event_store.QUARANTINE_ONE, target, by, "quarantine", [DeliveryStatus.PENDING], error=by.reason
    )


def release(tx: Transaction, workflow: str, handler: str, event_id: EventId, by: Actor) -> DeliveryRow:
    """Release a quarantined event for an operator. It counts as new, without failures."""
    target = (workflow, handler, event_id)
    return _act_on_delivery(tx, event_store.RELEASE_ONE, target, by, "release", [DeliveryStatus.QUARANTINED])


def skip_with_run(tx: Transaction, workflow: str, handler: str, event_id: EventId, by: Actor) -> None:
    """Skip an event for an operator, and end the run of a retired handler that holds it.

    Runs of a handler that is gone from the code use no capacity, but their inputs stay reserved until the handler
    comes back under its name or an operator ends them. All inputs of the run end with it: they are consumed if its
    mutation happened, else skipped. A request that was not sent is void. Refused

    - while the outcome of its mutation is unknown,
    - while its request waits for approval,
    - while a worker holds the run.
    """
    key = {"workflow": workflow, "handler": handler, "event_id": event_id}
    found = tx.first(run_store.RUN_OF_RETIRED_HANDLER, **key)
    if found is None:
        skip(tx, workflow, handler, event_id, by)
        return
    workflow_store.lock_workflows_of_runs(tx, [str(found.id)])
    run = tx.first(run_store.LOCK_RUN_OF_RETIRED_HANDLER, id=found.id)
    if run is None:
        return  # ended meanwhile, and all its inputs with it
    _refuse_unresolved_run(run, event_id)
    for row in run_store.execute_ids(tx, mutation_store.VOID, [run.id]):
        log_mutation(tx, "mutation.failed", row, resolved_by="void")
    reason = storable_text(by.reason or f"its handler is gone from the code; skipped by {by.name}")
    ended = tx.first(run_store.END_RUN_OF_RETIRED_HANDLER, id=run.id, error=reason)
    assert ended is not None
    _end_inputs_of_run(tx, ended, happened=run.mutation_status == MutationStatus.APPLIED)
    audit.record(tx, by, "event.skip", workflow=workflow, run_id=run.id, event_id=event_id)
    tx.log_on_commit(
        "run.stopped", run_id=run.id, workflow=workflow, handler=handler, phase=ended.phase, status=ended.status
    )
    tx.log_on_commit("event.skipped", workflow=workflow, handler=handler, event_id=event_id, actor=by.name)


def event_rows(events: Sequence[NewEvent], limits: Limits, *, run_id: UUID | None = None) -> list[dict[str, Any]]:
    """Checked rows for the insert: nothing is written unless every event can be.

    What comes from outside belongs to the trace it is published in, unless it names another.
    """
    here = spans.current_traceparent() if run_id is None else None
    return [
        {
            "n": number,
            "run": run_id,
            **checked_header(event),
            "payload": checked_json(event.payload, what=f"payload of {event.message_id!r}", limit=limits.payload),
            "traceparent": here if event.traceparent is None else checked_name(event.traceparent, what="traceparent"),
        }
        for number, event in enumerate(events)
    ]


def unknown_topic_error(tx: Transaction, workflow: str, topic: str) -> NotFoundError:
    """The error for a publish that found no such topic, or no such workflow at all."""
    known = [row.name for row in work.topics(tx, workflow) if not row.retired]
    names = work.workflow_names(tx)
    if not known and workflow not in names:
        return NotFoundError("workflow", workflow, names, "No worker has registered it. Nothing was published.")
    return NotFoundError(f"topic of workflow {workflow!r} named", topic, known, "Nothing was published.")


def _by_message(rows: Sequence[Any]) -> dict[tuple[str, str], EventId]:
    return {(row.topic, row.message_id): EventId(row.id) for row in rows}


def _act_on_delivery(
    tx: Transaction,
    statement: Statement[DeliveryRow],
    target: tuple[str, str, EventId],
    by: Actor,
    verb: str,
    needs: Sequence[DeliveryStatus],
    **params: Any,
) -> DeliveryRow:
    """Do an operator's act on one delivery, or raise with the state it is in."""
    workflow, handler, event_id = target
    row = work.handler(tx, workflow, handler)
    if row is None and work.workflow(tx, workflow) is None:
        raise NotFoundError("workflow", workflow, work.workflow_names(tx))
    if row is None:
        known = [known.name for known in work.handlers(tx, workflow)]
        raise NotFoundError(f"handler of workflow {workflow!r} named", handler, known)
    key = {"event_id": event_id, "handler_id": row.id}
    found = tx.first(event_store.LOCK_ONE, **key) if event_id < _EVENT_IDS_END else None
    if found is None:
        raise NotFoundError(f"event for handler {handler!r} with id", event_id)
    done = tx.first(statement, **key, **params)
    if done is None:
        offered = ", offered to a run" if found.offered_to else ""
        raise IllegalTransitionError("event", event_id, verb=verb, found=f"{found.status}{offered}", allowed=needs)
    audit.record(tx, by, f"event.{verb}", workflow=workflow, event_id=event_id)
    tx.log_on_commit(_TRANSITION_NAMES[verb], workflow=workflow, handler=handler, event_id=event_id, actor=by.name)
    return done


def _end_inputs_of_run(tx: Transaction, run: RunRow, *, happened: bool) -> None:
    if happened:
        run_store.execute_ids(tx, event_store.CONSUME_INPUTS, [run.id])
        return
    kept = {"run": run.id, "handler_id": run.handler_id, "events": run.event_ids, "quarantine": False}
    for row in event_store.release_inputs(tx, [kept]):
        tx.first(event_store.SKIP_ONE, event_id=row.event_id, handler_id=run.handler_id)


def _refuse_unresolved_run(run: RunWithMutationRow, event_id: EventId) -> None:
    asks = run.status == RunStatus.PAUSED_APPROVAL and run.finished_at is None
    unknown = run.mutation_status is not None and run.mutation_status not in _NOT_IN_DOUBT
    if run.lease_expires_at is None and not asks and not unknown:
        return
    doubt = f"mutation {run.mutation_id} is {run.mutation_status or MutationStatus.PENDING}"
    found = f"held by run {run.id}, which " + ("a worker has" if run.lease_expires_at else f"waits: {doubt}")
    allowed = ["answered first: reject its request, or resolve its mutation"]
    raise IllegalTransitionError("event", event_id, verb="skip", found=found, allowed=allowed)


_TRANSITION_NAMES = {"skip": "event.skipped", "quarantine": "event.quarantined", "release": "event.released"}
