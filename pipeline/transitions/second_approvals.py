"""Let two people decide about a mutation of a high value: one proposes an answer, another gives the same.

The operation declares above which value (``four_eyes_above``), and the ledger keeps the value with the mutation. The
functions that answer call ``missing_confirmation``, so that no caller can leave it out.
"""

import json
from collections.abc import Mapping
from typing import Any

from pipeline.domain.errors import NotFoundError, SecondApprovalError, StateChangedError
from pipeline.domain.mutation_state import state_changes, state_token
from pipeline.domain.second_approvals import ProposedAct
from pipeline.domain.states import MutationId
from pipeline.domain.values import Actor
from pipeline.store.database import Transaction
from pipeline.store.reads import requests
from pipeline.store.schema import ProposalRow
from pipeline.store.writes import mutations as mutation_store
from pipeline.store.writes import proposals as proposal_store
from pipeline.transitions import audit
from pipeline.transitions.mutation_log import log_mutation


def missing_confirmation(
    tx: Transaction, mutation_id: MutationId, act: ProposedAct, answer: Mapping[str, Any], by: Actor
) -> SecondApprovalError | None:
    """Confirm the same proposal of another person in the same state. Return the error if a high value has none.

    The caller raises it after its own checks, so that only an answer that would be accepted is proposed.
    """
    row = tx.first(mutation_store.LOCK, id=mutation_id)
    if row is None or row.four_eyes_value is None:
        return None
    open_one = requests.open_proposal(tx, mutation_id)
    is_same = (
        open_one is not None
        and open_one.proposed_by != by.name
        and (open_one.act, open_one.state) == (act, state_token(row))
        and open_one.answer == _plain(answer)
    )
    if open_one is None or not is_same:
        return SecondApprovalError(mutation_id, act=act, value=row.four_eyes_value)
    tx.execute(proposal_store.CONFIRM_PROPOSAL, id=open_one.id, by=by.name)
    return None


def propose(
    tx: Transaction, mutation_id: MutationId, act: ProposedAct, answer: Mapping[str, Any], by: Actor, *, state: str
) -> ProposalRow:
    """Propose an answer in the state that was shown. It replaces an earlier proposal, and changes nothing else."""
    row = tx.first(mutation_store.LOCK, id=mutation_id)
    if row is None:
        raise NotFoundError("mutation", mutation_id, hint="Nothing was changed.")
    if changes := state_changes(state, row):
        raise StateChangedError(mutation_id, verb=f"propose {act} for", changes=changes)
    made = tx.one(
        proposal_store.REPLACE_PROPOSAL,
        mutation_id=mutation_id,
        act=str(act),
        answer=json.dumps(_plain(answer)),
        state=state,
        proposed_by=by.name,
        reason=by.reason,
    )
    audit.record(tx, by, f"mutation.propose {act}", **audit.subject_of(row))
    log_mutation(tx, "mutation.proposed", row, actor=by.name)
    return made


def _plain(answer: Mapping[str, Any]) -> Any:
    """Return an answer as the database returns it."""
    return json.loads(json.dumps(dict(answer)))
