"""The fast check of the invariants finds what the slow one finds."""

from typing import Any

import pytest
from sqlalchemy import text

from pipeline.store.database import Database, Statement
from pipeline.store.reads import invariants
from pipeline.store.reads.invariants import Severity
from pipeline.testing import databases

_FUTURE_SWEEP = text(
    "INSERT INTO pipeline.sweeps (name, last_run_at) VALUES ('recover', pipeline.clock() + interval '1 day')"
)
_LOST_RUN = text("""
    INSERT INTO pipeline.runs (id, workflow, handler_id, session_id, phase, status, offered, event_ids)
    VALUES (pipeline.uuid7(), 'gone', 1, pipeline.uuid7(), 'prepared', 'active', ARRAY[4711], ARRAY[4711])
""")


@pytest.mark.broken_on_purpose
def test_the_fast_check_of_the_invariants_lists_what_the_queries_find(db: Database) -> None:
    with db.transaction() as tx:
        assert databases.invariant_findings(tx) == []
        tx.execute(text("SET LOCAL session_replication_role = replica"))  # no constraint refuses these rows
        tx.execute(_FUTURE_SWEEP)
        assert [found.severity for found in databases.invariant_findings(tx)] == [Severity.OVERDUE]
        assert databases.invariant_findings(tx, Severity.BROKEN) == []
        tx.execute(_LOST_RUN)
        found = databases.invariant_findings(tx)
        assert found == invariants.findings(tx)
        assert {each.severity for each in found} == set(Severity)
        assert {each.severity for each in databases.invariant_findings(tx, Severity.BROKEN)} == {Severity.BROKEN}


def test_no_row_is_left_in_any_table(db: Database) -> None:
    with db.transaction() as tx:
        tx.execute(_FUTURE_SWEEP)
    databases.delete_all_rows(db)
    with db.transaction() as tx:
        assert tx.all(Statement[Any]("SELECT FROM pipeline.sweeps")) == []
