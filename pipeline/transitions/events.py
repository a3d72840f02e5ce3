"""Events are published, and operators may quarantine, release or skip one delivery.

Publishing is idempotent by message id: the first write wins and a repeat is a no-op. What happens
to an event inside a run (reserve, consume, release, transfer) belongs to that run's verbs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pipeline.domain.codec import is_sealed, seal
from pipeline.domain.errors import IllegalTransitionError, InvalidInputError, NotFoundError, StaleWriteError
from pipeline.domain.payloads import checked_json, checked_name, storable_text
from pipeline.domain.states import DeliveryStatus, EventId, MutationStatus, RunStatus
from pipeline.domain.values import DEFAULT_LIMITS, Actor, Limits, NewEvent, checked_header
from pipeline.store.codecs import codec_for, refusal
from pipeline.store.database import Statement, Transaction, encode_row_parts, encode_rows
from pipeline.store.functions import LEVELS_WITH_NEW_SNAPSHOTS
from pipeline.store.reads import work
from pipeline.store.rows import NamedTopicRow, RunWithMutationRow
from pipeline.store.schema import DeliveryRow, RunRow
from pipeline.store.writes import events as event_store
from pipeline.store.writes import mutations as mutation_store
from pipeline.store.writes import runs as run_store
from pipeline.store.writes import workflows as workflow_store
from pipeline.telemetry import spans
from pipeline.transitions import audit, payload_schemas
from pipeline.transitions.mutations import log_mutation

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
    sealed_only: bool = False,
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
    facts = [_received(tx, workflow, event) for event in _deduplicate(events, replace=replace)]
    rows = event_rows(facts, limits)
    topics = _remembered_topics(tx, workflow, facts) or _checked_topics(tx, workflow, facts)
    _refuse_clear(topics, events if sealed_only else ())
    for _ in range(_MAX_READS):
        published = _insert(tx, facts, rows, topics, replace=replace)
        if published is not None:
            break
        topics = _checked_topics(tx, workflow, facts)
    else:
        raise StaleWriteError(
            "workflow", workflow, verb="publish", expected="topics as they were just read", found="others, each time"
        )
    new = _as_given(facts, rows, {name: id for name, (id, is_new) in published.items() if is_new})
    replaced = _as_given(facts, rows, {name: id for name, (id, is_new) in published.items() if not is_new})
    if new:
        repeated = len(rows) - len(new)
        tx.log_on_commit("event.published", workflow=_workflow_of(topics), events=len(new), repeats=repeated)
    return PublishResult(new=new, replaced=replaced)


def _insert(
    tx: Transaction,
    facts: Sequence[NewEvent],
    rows: Sequence[dict[str, Any]],
    topics: Mapping[str, NamedTopicRow],
    *,
    replace: bool,
) -> dict[tuple[str, str], tuple[EventId, bool]] | None:
    """Insert what is not there yet, under the present names of the topics. With ``replace`` rewrite the others.

    Return ids by these names, each with whether it is new. None, and nothing is written, if a topic is not as given any
    more. The first part of many holds all topics for the others.
    """
    for row, event in zip(rows, facts, strict=True):
        row["topic"] = topics[event.topic].name
        row["payload"] = _stored_payload(tx, topics[event.topic], event)
    known = {row.name: {"name": row.name, "schema_digest": row.schema_digest} for row in topics.values()}
    given = {"workflow": _workflow_of(topics), "topics": encode_rows([*known.values()]), "is_replacing": replace}
    published: dict[tuple[str, str], tuple[EventId, bool]] = {}
    for part in encode_row_parts(rows):
        for answer in tx.all(event_store.PUBLISH, rows=part, **given):
            if answer.id is None:
                return None
            published[answer.topic, answer.message_id] = (EventId(answer.id), answer.is_new)
    return published


def _received(tx: Transaction, workflow: str, event: NewEvent) -> NewEvent:
    """Open the payload of an event that a ``BrokerClient`` sealed for the way to a worker."""
    if tx.codecs is None or not is_sealed(event.payload):
        return event
    return dataclasses.replace(event, payload=tx.codecs.open_published(workflow, event))


def _refuse_clear(topics: Mapping[str, NamedTopicRow], events: Sequence[NewEvent]) -> None:
    """Refuse a payload of an encrypted topic that came over the broker in the clear."""
    for event in events:
        if topics[event.topic].is_encrypted and not is_sealed(event.payload):
            raise InvalidInputError(
                f"Topic {event.topic!r} takes encrypted payloads only, and that of {event.message_id!r} came over the "
                "broker in the clear; expected a BrokerClient with codec=... Nothing was published."
            )


def _stored_payload(tx: Transaction, topic: NamedTopicRow, event: NewEvent) -> Any:
    """Return the payload as it is stored: that of an encrypted topic is sealed, or refused."""
    if not topic.is_encrypted:
        return event.payload
    codec = codec_for(tx, topic.workflow)
    if codec is None:
        raise refusal(topic.workflow)
    return seal(codec, event.payload, "payload", topic.uid, event.message_id)


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


def _remembered_topics(tx: Transaction, workflow: str, events: Sequence[NewEvent]) -> dict[str, NamedTopicRow] | None:
    """The topics as this process read them last; None if they have to be read (again) to publish these events.

    They may have changed since. The insert compares them, and a refusal is based on topics that were read for it.
    """
    declared = _REMEMBERED.get(workflow, {})
    try:
        topics = _topics_of(declared, events)
    except (KeyError, InvalidInputError):
        return None
    return None if tx.codecs is None and any(topic.is_encrypted for topic in topics.values()) else topics


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
    for level in levels - {*LEVELS_WITH_NEW_SNAPSHOTS}:
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
