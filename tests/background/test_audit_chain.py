"""The audit is append-only and its acts are chained, and the doctor finds every act that was tampered with."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from pipeline.admin import system
from pipeline.background import doctor, pruner
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.store.reads.invariants import AUDIT_CHAIN
from pipeline.transitions import audit
from tests.factories import a_workflow
from tests.support.table_reads import rows

REFUSED = r"never changed|never deleted|by retention only"
ADA = Actor(name="ada", reason="why not")


def acts(db: Database, *names: str) -> list[int]:
    for name in names:
        with db.transaction() as tx:
            audit.record(tx, ADA, name, workflow="billing")
    return [row.id for row in rows(db, "SELECT id FROM pipeline.audit ORDER BY id")]


def chained(db: Database) -> list[int]:
    """The acts in the order of the chain."""
    statement = "SELECT audit_id FROM pipeline.audit_links WHERE position IS NOT NULL ORDER BY position"
    return [row.audit_id for row in rows(db, statement)]


def found(db: Database, recent: int = 10_000) -> list[tuple[str, str]]:
    with db.transaction() as tx:
        everything = invariants.findings(tx, recent=recent)
    return [(finding.subject, finding.detail) for finding in everything if finding.invariant == AUDIT_CHAIN]


def as_owner(db: Database, *statements: str) -> None:
    """Run statements as an owner of the schema who switches its triggers off."""
    tables = ("audit", "audit_links", "mutations")
    with db.engine.begin() as connection:
        for table in tables:
            connection.execute(text(f"ALTER TABLE pipeline.{table} DISABLE TRIGGER USER"))
        for statement in statements:
            connection.exec_driver_sql(statement)
        for table in tables:
            connection.execute(text(f"ALTER TABLE pipeline.{table} ENABLE TRIGGER USER"))


def test_acts_are_sealed_in_order_and_nothing_is_written_when_all_are(db: Database) -> None:
    made = acts(db, "one", "two", "three")
    assert doctor.chain(db, page=2).counts == {"chained": 3}
    assert doctor.chain(db).counts == {}
    assert (chained(db), found(db)) == (made, [])
    position, _, hash_ = (system.audit_head(db) or "").partition(":")
    assert (position, len(hash_)) == ("3", 64)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE pipeline.audit SET reason = 'x'",
        "UPDATE pipeline.audit SET reason = 'x' WHERE false",
        "DELETE FROM pipeline.audit",
        "TRUNCATE pipeline.audit",
        "UPDATE pipeline.audit_links SET hash = 'x'",
        "DELETE FROM pipeline.audit_links",
        "TRUNCATE pipeline.audit_links",
        "DELETE FROM pipeline.mutations",
        "TRUNCATE pipeline.mutations CASCADE",
    ],
)
def test_the_database_refuses_to_change_the_audit_and_to_empty_the_ledger(db: Database, statement: str) -> None:
    acts(db, "one")
    doctor.chain(db)
    with db.engine.connect() as connection, pytest.raises(DBAPIError, match=REFUSED):
        connection.execute(text(statement))


@pytest.mark.broken_on_purpose
@pytest.mark.parametrize(
    ("tamper", "first", "says"),
    [
        ("UPDATE pipeline.audit SET actor = 'eve' WHERE id = {1}", 1, "changed after it was chained"),
        ("UPDATE pipeline.audit SET claimed = true WHERE id = {1}", 1, "changed after it was chained"),
        ("UPDATE pipeline.audit SET at = at + interval '1 microsecond' WHERE id = {1}", 1, "changed after"),
        ("DELETE FROM pipeline.audit WHERE id = {1}", 1, "deleted, and not by retention"),
        ("DELETE FROM pipeline.audit_links WHERE audit_id = {1}", 2, "the links between 1 and 3 are gone"),
        (
            "DELETE FROM pipeline.audit WHERE id <= {1}; DELETE FROM pipeline.audit_links WHERE audit_id <= {1}",
            2,
            "the links before its own, 3, are gone",
        ),
        (  # in between, with the links behind it moved: the first that moved does not follow
            "UPDATE pipeline.audit_links SET position = position + 100 WHERE position > 1;"
            "UPDATE pipeline.audit_links SET position = position - 99 WHERE position > 100;"
            "INSERT INTO pipeline.audit_links SELECT 4711, 2, row_hash, hash, chained_at FROM pipeline.audit_links "
            "WHERE position = 1; INSERT INTO pipeline.audit (id, actor, act) OVERRIDING SYSTEM VALUE "
            "VALUES (4711, 'eve', 'x')",
            None,
            "act 4711: its link 2 does not follow from the one before",
        ),
        (  # re-ordered: two acts have changed their links
            "UPDATE pipeline.audit_links SET position = 100 WHERE position = 2;"
            "UPDATE pipeline.audit_links SET position = 2 WHERE position = 3;"
            "UPDATE pipeline.audit_links SET position = 3 WHERE position = 100",
            2,
            "its link 2 does not follow from the one before",
        ),
        (  # the act changed, and its own link recomputed: the next link does not follow
            "UPDATE pipeline.audit SET actor = 'eve' WHERE id = {1};"
            "UPDATE pipeline.audit_links s SET row_hash = pipeline.audit_row_hash({1}), hash = pipeline.link_hash("
            "(SELECT hash FROM pipeline.audit_links WHERE position = 1), pipeline.audit_row_hash({1}), 2, chained_at) "
            "WHERE position = 2",
            2,
            "its link 3 does not follow from the one before",
        ),
    ],
)
def test_the_doctor_names_the_first_act_that_does_not_fit(
    db: Database, tamper: str, first: int | None, says: str
) -> None:
    made = acts(db, "one", "two", "three", "four")
    doctor.chain(db)
    as_owner(db, tamper.replace("{1}", str(made[1])))
    subject, detail = found(db)[0]
    assert first is None or subject == f"act {made[first]}"
    assert says in f"{subject}: {detail}"


@pytest.mark.broken_on_purpose
def test_an_act_that_was_written_afterwards_is_found(db: Database) -> None:
    acts(db, "one")
    doctor.chain(db)
    db.advance_clock(timedelta(hours=3))
    acts(db, "two")
    doctor.chain(db)
    assert found(db) == []
    as_owner(db, "INSERT INTO pipeline.audit (actor, act, at) VALUES ('eve', 'x', now() - interval '1 hour')")
    ((subject, detail),) = found(db)
    assert "around the links" in detail
    as_owner(db, f"INSERT INTO pipeline.audit_links (audit_id) VALUES ({subject.removeprefix('act ')})")
    doctor.chain(db)
    assert [(subject, "was not there when others were chained" in detail) for subject, detail in found(db)] == [
        (subject, True)
    ]


def test_an_act_of_a_slow_transaction_is_sealed_behind_those_that_were_faster(db: Database) -> None:
    with db.transaction() as slow:
        audit.record(slow, ADA, "slow")
        (fast,) = acts(db, "fast")
        doctor.chain(db)
        assert chained(db) == [fast]
    doctor.chain(db)
    assert (chained(db), found(db)) == ([fast, fast - 1], [])


def test_two_sweeps_at_once_make_one_chain(db: Database) -> None:
    made = acts(db, *(f"act {n}" for n in range(40)))
    with ThreadPoolExecutor(4) as pool:
        counts = pool.map(lambda _: doctor.chain(db, page=3).counts.get("chained", 0), range(4))
    assert (sum(counts), chained(db), found(db)) == (40, made, [])


def test_retention_leaves_the_seals_and_an_act_that_names_what_it_deleted(db: Database) -> None:
    a_workflow(db)
    with db.transaction() as tx:
        tx.execute(text("UPDATE pipeline.workflows SET keep_done = '1 day', keep_ledger = '1 day'"))
    made = acts(db, "one", "two")
    doctor.chain(db)
    noted = system.audit_head(db)
    db.advance_clock(timedelta(days=2))
    late = acts(db, "three")[-1]
    pruner.prune(db)
    kept = rows(db, "SELECT id, actor, act, evidence FROM pipeline.audit ORDER BY id")
    assert [(row.actor, row.act) for row in kept] == [("ada", "three"), ("retention", "audit.prune")]
    assert kept[-1].evidence == {"ids": made}
    doctor.chain(db)
    assert (chained(db), found(db)) == ([*made, late, kept[-1].id], [])
    assert system.findings(db, noted_head=noted, allowed_unsafe_settings=["fsync", "synchronous_commit"]) == []


@pytest.mark.broken_on_purpose
def test_only_a_head_that_was_kept_elsewhere_shows_that_the_newest_acts_are_gone(db: Database) -> None:
    made = acts(db, "one", "two", "three")
    doctor.chain(db)
    noted = system.audit_head(db)
    assert noted is not None
    as_owner(
        db,
        f"DELETE FROM pipeline.audit WHERE id = {made[-1]}; DELETE FROM pipeline.audit_links WHERE position = 3",
    )
    assert found(db) == []

    def missing(head: str) -> list[str]:
        return [each.detail for each in system.findings(db, noted_head=head) if each.subject == "link 3"]

    assert "newer acts are gone, or an older backup was restored" in missing(noted)[0]
    acts(db, "another")
    doctor.chain(db)
    assert "has another" in missing(noted)[0]
    with pytest.raises(InvalidInputError, match="audit --head"):
        system.findings(db, noted_head="three")
