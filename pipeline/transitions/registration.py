"""Bring the tables of a workflow in line with what its code declares."""

import base64
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pipeline.domain.codec import key_id_of, seal
from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.domain.operations import OperationSpec
from pipeline.domain.payloads import checked_json, checked_name
from pipeline.domain.renames import NameKind, in_present_names, rename_problem
from pipeline.domain.values import DEFAULT_LIMITS, HandlerSpec, WorkflowSpec
from pipeline.domain.workflows import HandlerKind, StartAt, count_problem
from pipeline.store.codecs import Codecs
from pipeline.store.database import Transaction, encode_rows
from pipeline.store.reads import work
from pipeline.store.rows import OpenBackfillRow
from pipeline.store.schema import WorkflowRow
from pipeline.store.writes import handlers as handler_store
from pipeline.store.writes import workflows as workflow_store
from pipeline.transitions import renames
from pipeline.transitions.renames import PlannedRenames

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
    renamed: tuple[str, ...] = ()  #: descriptions of what was moved to a new name
    present_name: str = ""  #: of the workflow, if older code has a former one: nothing was registered


def register(tx: Transaction, spec: WorkflowSpec, *, page_size: int = BACKFILL_PAGE_SIZE) -> Registration:
    """Bring workflow, topics, handlers and subscriptions in line with what the code declares.

    An operator's pause, blocks, states and maintenance are left as they are. A handler that is gone
    from the code is retired, never deleted. A consumer that joins a topic with ``earliest`` gets
    every event that topic has ever had: the first ``page_size`` now, the others by ``backfill_page``. New code may want
    events that the old code declined: they are offered again.

    Older code takes nothing away, and gets back what newer code had taken from it: events that are
    published while it serves must reach its handlers. Of a lower version, it changes nothing else. Of
    the same version, as while a release rolls out or after it was rolled back, its settings hold. What it has under a
    former name is what newer code has under the present one: older code registers no former name again.
    """
    _check_spec(spec)
    for name in sorted({spec.name, spec.renamed_from} - {""}):
        tx.all(workflow_store.LOCK_REGISTRATION, name=name)
    present = work.present_names(tx, NameKind.WORKFLOW).get(spec.name)
    if present is not None and not spec.renamed_from:
        return _left_to_newer_code(tx, spec, present)
    change = _change(tx, spec)
    _lock_subscriptions(tx, change)
    if change.is_offering_again:
        _offer_again(tx, change.renames)
    if change.is_lower:
        _restore(tx, change.spec)
    else:
        _update_to_spec(tx, change)
    _save_secret(tx, change)
    _subscribe(tx, change.spec, is_removing=not change.is_older)
    for joined in work.open_backfills(tx, spec.name) if change.resubscribed else ():
        _fill(tx, joined, page_size)
    if change.is_offering_again:
        tx.execute(handler_store.CLEAR_IDLE, workflow=spec.name)
    if change.missing:
        tx.log_on_commit("workflow.restored", workflow=spec.name, version=spec.version)
    return change.result


def is_replaced(tx: Transaction, specs: Sequence[WorkflowSpec]) -> bool:
    """Return whether newer code of one of these workflows is registered. No other registration runs meanwhile."""
    for name in sorted(spec.name for spec in specs):
        tx.all(workflow_store.LOCK_REGISTRATION, name=name)
    for spec in specs:
        known = work.workflow(tx, spec.name)
        if known is None or known.version > spec.version or _was_replaced(known, spec):
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """What a declaration changes."""

    spec: WorkflowSpec  #: in the present names
    before: WorkflowRow | None
    renames: PlannedRenames
    is_lower: bool  #: than the registered version
    is_older: bool  #: than the registered code
    missing: tuple[str, ...]  #: of what older code needs
    resubscribed: bool

    @property
    def is_new_code(self) -> bool:
        return self.before is not None and not self.is_lower and self.before.fingerprint != self.spec.fingerprint

    @property
    def is_offering_again(self) -> bool:
        changes = self.is_new_code or self.resubscribed or bool(self.missing) or bool(self.renames.descriptions)
        return self.before is not None and changes

    @property
    def result(self) -> Registration:
        version = self.before.version if self.before is not None and self.is_lower else self.spec.version
        return Registration(
            version=version,
            is_older=self.is_older,
            is_new_code=self.is_new_code,
            restored=self.missing,
            renamed=self.renames.descriptions,
        )


def _change(tx: Transaction, spec: WorkflowSpec) -> _Change:
    stored_as = renames.stored_workflow(tx, spec)
    before = work.workflow(tx, stored_as)
    is_lower = before is not None and before.version > spec.version
    is_older = is_lower or (before is not None and _was_replaced(before, spec))
    _refuse_without_codec(before, spec)
    if is_older:
        _refuse_rename_by_older_code(spec, stored_as, before)
        topics, handlers = (work.present_names(tx, kind, spec.name) for kind in (NameKind.TOPIC, NameKind.HANDLER))
        spec = in_present_names(spec, topics, handlers)
        planned = PlannedRenames(stored_as=spec.name, name=spec.name)
    else:
        planned = renames.plan(tx, spec, stored_as)
    _refuse_other_kind(tx, spec, planned)
    declared, existing = _declared_subscriptions(spec), _existing_subscriptions(tx, planned)
    return _Change(
        spec=spec,
        before=before,
        renames=planned,
        is_lower=is_lower,
        is_older=is_older,
        missing=tuple(_missing_parts(tx, spec)) if is_older else (),
        resubscribed=not declared <= existing if is_older else declared != existing,
    )


def _lock_subscriptions(tx: Transaction, change: _Change) -> None:
    """Wait for open publishers before any row is locked: publishers and committing workers keep this order too.

    A publisher locks a former name before the present one. A deploy that takes a rename back declares the former one.
    """
    if not change.resubscribed and not change.renames.descriptions:
        return
    for name in dict.fromkeys((change.spec.name, change.renames.stored_as)):
        tx.all(workflow_store.LOCK_SUBSCRIPTIONS, workflow=name)
    tx.all(workflow_store.LOCK_BACKFILL)


def _offer_again(tx: Transaction, planned: PlannedRenames) -> None:
    """Move what is renamed, and offer events that the old code declined."""
    tx.all(workflow_store.LOCK_WORKFLOWS, names=[planned.stored_as])
    renames.move_work(tx, planned)
    tx.execute(handler_store.RESET_DECLINED, workflow=planned.stored_as)
    renames.move_names(tx, planned)


def _left_to_newer_code(tx: Transaction, spec: WorkflowSpec, present: str) -> Registration:
    """Register nothing for older code that has a former name of the workflow. Unknown code is refused."""
    newer = work.workflow(tx, present)
    if newer is not None and newer.version <= spec.version and spec.fingerprint not in newer.known_fingerprints:
        raise InvalidInputError(
            f"Workflow {spec.name!r} was renamed to {present!r}, and this code was never registered. To go back to "
            f"{spec.name!r}, declare it with renamed_from={present!r}. To use the name for another workflow, first "
            f"deploy {present!r} without renamed_from={spec.name!r}."
        )
    return Registration(
        version=newer.version if newer is not None else spec.version, is_older=True, present_name=present
    )


def _refuse_rename_by_older_code(spec: WorkflowSpec, stored_as: str, before: WorkflowRow | None) -> None:
    if before is not None and stored_as != spec.name:
        raise InvalidInputError(
            f"Workflow {spec.name!r} is declared with version {spec.version} and as renamed from {stored_as!r}, which "
            f"is registered with version {before.version}; expected at least that version. Nothing was moved."
        )


def _existing_subscriptions(tx: Transaction, planned: PlannedRenames) -> set[tuple[str, str]]:
    """Which handlers listen to which topics, in the names that the code declares."""
    topics, handlers = planned.names(NameKind.TOPIC), planned.names(NameKind.HANDLER)
    existing = work.subscriptions_by_name(tx, planned.stored_as)
    return {(topics.get(topic, topic), handlers.get(handler, handler)) for topic, handler in existing}


def _declared_subscriptions(spec: WorkflowSpec) -> set[tuple[str, str]]:
    return {(topic, handler.name) for handler in spec.handlers for topic in handler.subscribes}


def _refuse_other_kind(tx: Transaction, spec: WorkflowSpec, planned: PlannedRenames) -> None:
    """A consumer cannot become a producer of the same name: its runs and events would have no handler."""
    names = planned.names(NameKind.HANDLER)
    known = {names.get(row.name, row.name): row.kind for row in work.handlers(tx, planned.stored_as)}
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


def _refuse_without_codec(before: WorkflowRow | None, spec: WorkflowSpec) -> None:
    """An encrypted workflow stays encrypted: code without its codec could read nothing of it."""
    if before is not None and before.codec_secret is not None and spec.codec is None:
        raise InvalidInputError(
            f"Workflow {spec.name!r} is encrypted, and this code declares no codec for it; expected "
            f"Workflow({spec.name!r}, codec=...). To end the encryption, give the code a workflow of another name."
        )


def _save_secret(tx: Transaction, change: _Change) -> None:
    """Make the secret of an encrypted workflow, or seal it with the newest key. Refuse a codec that cannot open it."""
    codec, stored = change.spec.codec, None if change.before is None else change.before.codec_secret
    if codec is None:
        return
    secret = secrets.token_bytes(32) if stored is None else Codecs(default=codec).open_secret(stored)
    if stored is None or key_id_of(stored) != codec.key_id:
        sealed = seal(codec, base64.b64encode(secret).decode(), "secret")
        tx.execute(workflow_store.SET_CODEC_SECRET, name=change.spec.name, secret=json.dumps(sealed))


def _restore(tx: Transaction, spec: WorkflowSpec) -> None:
    """Add what is not there, or is retired. What newer code has as well stays as that one wants it."""
    tx.all(workflow_store.LOCK_WORKFLOWS, names=[spec.name])
    tx.execute(workflow_store.ADD_TOPICS, workflow=spec.name, rows=_topic_rows(spec))
    tx.execute(handler_store.RESTORE_HANDLERS, workflow=spec.name, rows=_handler_rows(spec))


def _update_to_spec(tx: Transaction, change: _Change) -> None:
    """Let the workflow, its topics and its handlers be what the code says. Only the newest code removes any."""
    spec = change.spec
    tx.execute(
        workflow_store.UPSERT_WORKFLOW,
        name=spec.name,
        version=spec.version,
        fingerprint=spec.fingerprint,
        known_fingerprints=_known_fingerprints(change.before, spec),
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
    if not change.is_older:
        renames.save(tx, change.renames, spec, is_new_code=change.is_new_code)
        tx.execute(workflow_store.RETIRE_TOPICS, workflow=spec.name, names=[topic.name for topic in spec.topics])
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
    problem = rename_problem(spec)
    if problem:
        raise InvalidInputError(f"{problem}.")
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
    is_encrypted = spec.codec is not None
    rows = [{"name": topic.name, "schema": topic.schema, "is_encrypted": is_encrypted} for topic in spec.topics]
    return encode_rows(rows)


def _handler_rows(spec: WorkflowSpec) -> str:
    return encode_rows([handler_store.declared_values(handler) for handler in spec.handlers])


_FIELDS = tuple(each.name for each in fields(OperationSpec))


def register_operations(tx: Transaction, specs: Sequence[OperationSpec], workflows: Sequence[WorkflowSpec]) -> bool:
    """Write operations that are new or have changed. Returns whether anything was written.

    ``workflows`` are the registered workflows of the same code. If newer code of one of them is registered, only
    operations that are missing are added: older code never replaces what newer code declares.
    """
    for spec in specs:
        for name in ("connector", "operation"):
            checked_name(getattr(spec, name), what=name)
        for schema in (spec.params_schema, spec.result_schema):
            checked_json(schema, what=f"schema of {spec.connector}.{spec.operation}", limit=DEFAULT_LIMITS.payload)
    if not specs:
        return False
    rows = encode_rows([{name: getattr(spec, name) for name in _FIELDS} for spec in specs])
    can_replace = not is_replaced(tx, workflows)
    written = tx.all(workflow_store.UPSERT, rows=rows, can_replace=can_replace)
    for row in written:
        tx.log_on_commit("operation.registered", connector=row.connector, operation=row.operation)
    return bool(written)
