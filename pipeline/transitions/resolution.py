"""Acts of an operator on a mutation: approve, reject, resolve, try again, acknowledge.

An operator acts on what was shown. Each act may carry the token of that state (``domain.acts``). The mutation
is locked, and the act is refused if it is in another state.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.domain.acts import ProposedAct, state_changes, state_token
from pipeline.domain.codec import seal
from pipeline.domain.errors import (
    ClaimedNameError,
    InvalidInputError,
    NotFoundError,
    PipelineError,
    SecondApprovalError,
    StaleWriteError,
    StateChangedError,
)
from pipeline.domain.payloads import checked_name, storable_text
from pipeline.domain.states import Evidence, MutationId, MutationStatus, Resolver
from pipeline.domain.values import Actor, AppliedMutation, FailedMutation
from pipeline.store.codecs import codec_for
from pipeline.store.database import Transaction
from pipeline.store.reads import access, work
from pipeline.store.rows import RunMutationRow
from pipeline.store.schema import MutationRow, ProposalRow
from pipeline.store.writes import events as event_store
from pipeline.store.writes import housekeeping as housekeeping_store
from pipeline.store.writes import mutations as mutation_store
from pipeline.store.writes import runs as run_store
from pipeline.store.writes import sessions as session_store
from pipeline.store.writes import workflows as workflow_store
from pipeline.transitions import audit
from pipeline.transitions.mutations import (
    IN_DOUBT,
    apply,
    fail,
    illegal_transition,
    log_mutation,
    record_time_to_resolution,
)


def missing_confirmation(
    tx: Transaction, mutation_id: MutationId, act: ProposedAct, answer: Mapping[str, Any], by: Actor
) -> PipelineError | None:
    """Confirm the same proposal of another person in the same state. Return the error if a high value has none.

    The caller raises it after its own checks, so that only an answer that would be accepted is proposed. A name that
    nobody authenticated neither proposes nor confirms: one person could give two of them.
    """
    row = tx.first(mutation_store.LOCK, id=mutation_id)
    if row is None or row.four_eyes_value is None:
        return None
    if by.is_claimed:
        return ClaimedNameError(mutation_id, act=act, value=row.four_eyes_value, name=by.name)
    open_one = access.open_proposal(tx, mutation_id)
    is_same = (
        open_one is not None
        and open_one.proposed_by.casefold() != by.name.casefold()  # a token and a login may write one name in two ways
        and (open_one.act, open_one.state) == (act, state_token(row))
        and open_one.answer == _plain(answer)
    )
    if open_one is None or not is_same:
        return SecondApprovalError(mutation_id, act=act, value=row.four_eyes_value)
    tx.execute(mutation_store.CONFIRM_PROPOSAL, id=open_one.id, by=by.name)
    return None


def propose(
    tx: Transaction, mutation_id: MutationId, act: ProposedAct, answer: Mapping[str, Any], by: Actor, *, state: str
) -> ProposalRow:
    """Propose an answer in the state that was shown. It replaces an earlier proposal, and changes nothing else."""
    row = tx.first(mutation_store.LOCK, id=mutation_id)
    if row is None:
        raise NotFoundError("mutation", mutation_id, hint="Nothing was changed.")
    if by.is_claimed:
        raise ClaimedNameError(mutation_id, act=act, value=row.four_eyes_value, name=by.name)
    if changes := state_changes(state, row):
        raise StateChangedError(mutation_id, verb=f"propose {act} for", changes=changes)
    made = tx.one(
        mutation_store.REPLACE_PROPOSAL,
        mutation_id=mutation_id,
        act=str(act),
        answer=json.dumps(_sealed(tx, row.workflow, mutation_id, answer)),
        state=state,
        proposed_by=by.name,
        reason=by.reason,
    )
    audit.record(tx, by, f"mutation.propose {act}", **audit.subject_of(row))
    log_mutation(tx, "mutation.proposed", row, actor=by.name)
    return made


def _sealed(tx: Transaction, workflow: str, mutation_id: MutationId, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as it is stored: the result of an encrypted workflow is sealed."""
    codec = codec_for(tx, workflow) if answer.get("result") is not None else None
    sealed = {} if codec is None else {"result": seal(codec, answer["result"], "proposal", mutation_id, "result")}
    return {**answer, **sealed}


def _plain(answer: Mapping[str, Any]) -> Any:
    """Return an answer as the database returns it."""
    return json.loads(json.dumps(dict(answer)))


def acknowledge(tx: Transaction, mutation_id: MutationId, by: Actor, *, state: str | None = None) -> MutationRow:
    """Acknowledge a late effect for an operator; the doctor no longer reports it."""
    _lock_in_state(tx, mutation_id, state, "acknowledge")
    row = tx.first(mutation_store.ACKNOWLEDGE, id=mutation_id, by=by.name)
    if row is None:
        raise illegal_transition(
            _mutation_row(tx, mutation_id), "acknowledge", ["found late, and not acknowledged yet"]
        )
    log_mutation(tx, "mutation.acknowledged", row, actor=by.name)
    audit.record(tx, by, "mutation.acknowledge", **audit.subject_of(row))
    return row


def note(tx: Transaction, mutation_id: MutationId, by: Actor) -> None:
    """Add a note of an operator to the audit of a mutation. Its state stays."""
    if not by.reason:
        raise InvalidInputError(f"{by.name} gave an empty note; expected a text.")
    row = _mutation_row(tx, mutation_id)
    audit.record(tx, by, "mutation.note", **audit.subject_of(row))


def happened(
    tx: Transaction, mutation_id: MutationId, by: Actor, result: Any = None, *, state: str | None = None
) -> MutationRow:
    """Resolve a mutation for an operator: it happened, with this result."""
    _lock_in_state(tx, mutation_id, state, "resolve")
    missing = missing_confirmation(tx, mutation_id, ProposedAct.HAPPENED, {"result": result}, by)
    workflow = "" if tx.codecs is None else _mutation_row(tx, mutation_id).workflow
    item = AppliedMutation(mutation_id=mutation_id, result=result, resolved_by=Resolver.OPERATOR, workflow=workflow)
    row = apply(tx, [item]).only()
    if missing is not None:
        raise missing
    audit.record(tx, by, "mutation.happened", **audit.subject_of(row))
    return row


def did_not_happen(
    tx: Transaction, mutation_id: MutationId, by: Actor, *, is_refused: bool = False, state: str | None = None
) -> MutationRow:
    """Resolve a mutation for an operator: it did not happen. Refused in the quiet period.

    ``is_refused``: the provider itself says that it refused the request, so a repeat gets a new idempotency key.
    """
    _lock_in_state(tx, mutation_id, state, "resolve")
    answer = {"is_refused": is_refused}
    missing = missing_confirmation(tx, mutation_id, ProposedAct.DID_NOT_HAPPEN, answer, by)
    error = by.reason or f"{by.name} says it did not happen"
    evidence = Evidence.REFUSED if is_refused else Evidence.ABSENCE
    item = FailedMutation(mutation_id=mutation_id, error=error, evidence=evidence, resolved_by=Resolver.OPERATOR)
    row = fail(tx, [item]).only()
    if missing is not None:
        raise missing
    who = replace(by, evidence={**(by.evidence or {}), "refused": True}) if is_refused else by
    audit.record(tx, who, "mutation.did_not_happen", **audit.subject_of(row))
    return row


def skip(tx: Transaction, mutation_id: MutationId, by: Actor, *, state: str | None = None) -> MutationRow:
    """Skip a mutation for an operator: its events are skipped, and ``next`` runs with that status."""
    _lock_in_state(tx, mutation_id, state, "skip")
    row = _resolve_as_skipped(tx, mutation_id, by, "skip", IN_DOUBT)
    log_mutation(tx, "mutation.skipped", row, actor=by.name)
    record_time_to_resolution(tx, row, "skipped")
    audit.record(tx, by, "mutation.skip", **audit.subject_of(row))
    return row


def reject(tx: Transaction, mutation_id: MutationId, by: Actor, *, state: str | None = None) -> MutationRow:
    """Reject a request for an operator, or withdraw its approval before it was sent: it is skipped."""
    _lock_in_state(tx, mutation_id, state, "reject")
    row = _resolve_as_skipped(tx, mutation_id, by, "reject", [MutationStatus.PENDING])
    log_mutation(tx, "mutation.rejected", row, actor=by.name)
    audit.record(tx, by, "mutation.reject", **audit.subject_of(row))
    return row


def approve(
    tx: Transaction, mutation_id: MutationId, by: Actor, *, request_hash: str, state: str | None = None
) -> MutationRow:
    """Approve exactly the request with this hash for an operator; the run returns to the mutate task.

    Its session may have ended meanwhile. The run joins the open session of its workflow.
    """
    asked = checked_name(request_hash, what="request hash")
    found = _mutation_row(tx, mutation_id)
    tx.all(workflow_store.LOCK_WORKFLOWS, names=[found.workflow])
    _lock_in_state(tx, mutation_id, state, "approve")
    answer = {"request_hash": asked}
    missing = missing_confirmation(tx, mutation_id, ProposedAct.APPROVE, answer, by)
    row = tx.first(mutation_store.APPROVE, id=mutation_id, request_hash=asked, approved_by=by.name)
    if row is None:
        found = _mutation_row(tx, mutation_id)
        if found.status == MutationStatus.PENDING and found.request_hash != request_hash:
            raise StaleWriteError(
                "mutation", mutation_id, verb="approve", expected=request_hash, found=found.request_hash
            )
        raise illegal_transition(found, "approve", [f"{MutationStatus.PENDING} and not approved yet"])
    if missing is not None:
        raise missing
    session_id = tx.one(session_store.OPEN_SESSION, workflow=row.workflow).id
    tx.execute(session_store.JOIN_SESSION, run_id=row.run_id, session_id=session_id)
    log_mutation(tx, "mutation.approved", row, actor=by.name)
    audit.record(tx, by, "mutation.approve", **audit.subject_of(row))
    return row


def try_again(
    tx: Transaction, mutation_id: MutationId, by: Actor, *, can_reconcile: bool = False, state: str | None = None
) -> MutationRow:
    """Let the reconciler try again for an operator, with a fresh budget.

    ``can_reconcile``: the operation can reconcile by now.
    """
    _lock_in_state(tx, mutation_id, state, "try again")
    row = tx.first(mutation_store.TRY_AGAIN, id=mutation_id, can_reconcile=can_reconcile)
    tx.execute(housekeeping_store.DELETE_NOTICE, kind="indeterminate", subject=f"mutation {mutation_id}")
    if row is None:
        found = _mutation_row(tx, mutation_id)
        needs = [f"{MutationStatus.INDETERMINATE} and of an operation that can reconcile"]
        raise illegal_transition(found, "try again", needs)
    log_mutation(tx, "mutation.reconcile_retried", row, actor=by.name)
    audit.record(tx, by, "mutation.try_again", **audit.subject_of(row))
    return row


def _resolve_as_skipped(
    tx: Transaction, mutation_id: MutationId, by: Actor, verb: str, needs: Sequence[MutationStatus]
) -> MutationRow:
    found = _mutation_row(tx, mutation_id)
    if found.status not in needs:
        raise illegal_transition(found, verb, needs)
    row = tx.first(mutation_store.SKIP, id=mutation_id, error=storable_text(by.reason or f"{verb} by {by.name}"))
    if row is None:
        raise illegal_transition(_mutation_row(tx, mutation_id), verb, needs)
    run_store.execute_ids(tx, event_store.SKIP_INPUTS, [row.run_id])
    return row


def _lock_in_state(tx: Transaction, mutation_id: MutationId, state: str | None, verb: str) -> None:
    """Lock the mutation, and refuse the act if it is no longer in the state that was shown. None: any state."""
    row = None if state is None else tx.first(mutation_store.LOCK, id=mutation_id)
    if row is not None and state is not None and (changes := state_changes(state, row)):
        raise StateChangedError(mutation_id, verb=verb, changes=changes)


def _mutation_row(tx: Transaction, mutation_id: MutationId) -> RunMutationRow:
    rows = work.mutations(tx, [mutation_id])
    if not rows:
        raise NotFoundError("mutation", mutation_id, hint="Nothing was changed.")
    return rows[0]
