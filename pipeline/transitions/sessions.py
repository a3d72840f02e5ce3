"""Sessions group runs for operators. No decision depends on them.

The first run that starts opens a session, and the first run that stops ends it as failed. A sweep finishes the sessions
whose runs have all committed.
"""

from collections.abc import Sequence
from uuid import UUID

from pipeline.domain.states import SessionId
from pipeline.domain.workflows import SessionResult
from pipeline.store.database import Transaction
from pipeline.store.writes import sessions as session_store


def finish(tx: Transaction, ids: Sequence[UUID]) -> tuple[SessionId, ...]:
    """End sessions in which no run is left to go on, with their count and cost; leave the others open.

    A run that stopped has ended its session as failed already, so what is open here went well. A session whose
    workflow another transaction holds stays open too.
    """
    asked = [str(id_) for id_ in ids]
    wanted = [str(row.id) for row in tx.all(session_store.LOCK_WORKFLOWS_OF_SESSIONS, ids=asked)]
    tx.all(session_store.LOCK_SESSIONS, ids=wanted)
    finished = tx.all(session_store.FINISH_SESSIONS, ids=wanted)
    for row in finished:
        tx.log_on_commit("session.finished", session_id=row.id, workflow=row.workflow, result=SessionResult.COMPLETED)
    return tuple(SessionId(row.id) for row in finished)
