"""Habits of the source: one writer, no printing, no leftovers."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.domain.states import DeliveryStatus, MutationOutcome, MutationStatus, Phase, Resolver, RunStatus
from pipeline.domain.workflows import DesiredStatus, HandlerKind
from pipeline.store import schema
from tests.support.source_code import ROOT, label, modules, texts

#: The store, a connector whose effects are rows of another database, and the databases of a benchmark and of a peer.
WRITERS = (
    "pipeline/store/writes/",
    "pipeline/connectors/sql.py",
    "pipeline/bench/installation.py",
    "pipeline/chaos/celery_chain.py",
    "pipeline/store/functions.py",
)
TABLES = {table.name for table in schema.metadata.tables.values()}

#: SQL that changes rows, in any case and over line breaks. Row locks and triggers are no such thing.
WRITE = re.compile(
    r"\b(INSERT\s+INTO|DELETE\s+FROM|MERGE\s+INTO|TRUNCATE\s+\w+|COPY\s+\S+\s+FROM|UPDATE\s+(ONLY\s+)?\S+\s+((AS\s+)?\w+\s+)?SET)\b",
    re.IGNORECASE,
)
LEFTOVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|HA" + r"CK|XX" + r"X)\b(?!\(#\d+\))")

#: Members that a statement must take from their enum, and where SQL may name one as text: what it shows to people.
MEMBERS = {
    str(member)
    for enum in (
        Phase,
        RunStatus,
        MutationStatus,
        DeliveryStatus,
        MutationOutcome,
        Resolver,
        DesiredStatus,
        HandlerKind,
    )
    for member in enum
} - {""}
SQL_TEXT = re.compile(r"(?<!SELECT )'([a-z_:]+)'")

#: Modules whose statements may read the audit: what operators are shown, what is checked, and what is pruned.
AUDIT_READERS = {
    "pipeline/store/functions.py",
    "pipeline/store/reads/attention.py",
    "pipeline/store/reads/gauges.py",
    "pipeline/store/reads/invariants.py",
    "pipeline/store/reads/listings.py",
    "pipeline/store/reads/pages.py",
    "pipeline/store/writes/housekeeping.py",
}
AUDIT_READ = re.compile(r"\b(FROM|JOIN|USING)\s+pipeline\.audit\b", re.IGNORECASE)

Check = Callable[[str], list[str]]


def sql_writes(source: str) -> list[str]:
    found = ((line, WRITE.search(text)) for line, text in texts(ast.parse(source)))
    return [f"line {line}: {match[0]}" for line, match in found if match]


def built_writes(source: str) -> list[str]:
    """Statements put together by SQLAlchemy: its functions imported, or a table's own methods called."""
    verbs = {"insert", "update", "delete"}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sqlalchemy":
            found += [f"line {node.lineno}: {alias.name}" for alias in node.names if alias.name in verbs]
        elif isinstance(node, ast.Attribute) and node.attr in verbs:
            owner = ast.unparse(node.value)
            if owner.split(".")[-1] in {*TABLES, "sqlalchemy", "sa"}:
                found.append(f"line {node.lineno}: {owner}.{node.attr}")
    return found


def status_literals(source: str) -> list[str]:
    """Statuses, phases and kinds that SQL names as text instead of taking them from their enum."""
    found = ((line, name) for line, text in texts(ast.parse(source)) for name in SQL_TEXT.findall(text))
    return [f"line {line}: {name}" for line, name in found if name in MEMBERS]


def audit_reads(source: str) -> list[str]:
    return [f"line {line}" for line, text in texts(ast.parse(source)) if AUDIT_READ.search(text)]


def prints(source: str) -> list[str]:
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [f"line {node.lineno}" for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]


def leftovers(source: str) -> list[str]:
    lines = enumerate(source.splitlines(), start=1)
    return [f"line {number}: {line.strip()}" for number, line in lines if LEFTOVER.search(line)]


def offenders(check: Check, paths: list[Path]) -> dict[str, list[str]]:
    """What a check finds, by module."""
    return {label(path): found for path in paths if (found := check(path.read_text()))}


def test_nothing_is_left_for_later() -> None:
    assert offenders(leftovers, modules("pipeline", "tests", "tools")) == {}


@pytest.mark.parametrize("check", [sql_writes, built_writes, prints], ids=lambda check: check.__name__)
def test_nothing_writes_rows_but_the_store_and_nothing_prints(check: Check) -> None:
    assert offenders(check, [path for path in modules("pipeline") if not label(path).startswith(WRITERS)]) == {}


def test_statuses_in_sql_come_from_their_enums() -> None:
    assert offenders(status_literals, modules("pipeline/store")) == {}


def test_no_decision_reads_the_audit() -> None:
    found = offenders(audit_reads, modules("pipeline"))
    assert set(found) <= AUDIT_READERS, "state that a decision needs is a column; the audit is for people"
    assert found


def test_the_search_sees_the_writes_where_they_are() -> None:
    statements = [path for path in modules("pipeline/store/writes") if path.name != "__init__.py"]
    assert [label(path) for path in statements if not sql_writes(path.read_text())] == []


def test_nothing_is_left_for_later_without_an_issue() -> None:
    files = [ROOT / name for name in ("Makefile", "pyproject.toml", "README.md")]
    for folder in ("migrations", "docs", "deploy"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md", ".yml"}]
    assert offenders(leftovers, files) == {}


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (sql_writes, "q = 'insert into runs values (1)'"),
        (sql_writes, "q = f'''\nUPDATE\n  {table} r\nSET phase = 1'''"),
        (sql_writes, "q = 'WITH x AS (UPDATE pipeline.runs AS r SET a = 1) SELECT 1'"),
        (sql_writes, "q = 'Delete\\nFrom only events'"),
        (sql_writes, "q = 'TRUNCATE pipeline.runs'"),
        (built_writes, "from sqlalchemy import select, update"),
        (built_writes, "from sqlalchemy.dialects.postgresql import insert"),
        (built_writes, "schema.runs.insert().values(a=1)"),
        (built_writes, "import sqlalchemy as sa\nsa.delete(x)"),
        (status_literals, "q = \"SELECT 1 FROM pipeline.runs WHERE status = 'active'\""),
        (status_literals, "q = f\"phase IN ('mutated', '{Phase.EMITTING}')\""),
        (audit_reads, "q = 'SELECT act FROM pipeline.audit WHERE true'"),
        (audit_reads, "q = 'SELECT 1 FROM x JOIN\\n pipeline.audit a ON true'"),
        (prints, "def f():\n    print('x')"),
        (leftovers, "x = 1  # TO" + "DO: later"),
        (leftovers, "# FIX" + "ME(someone)"),
    ],
)
def test_a_broken_convention_is_found(check: Check, source: str) -> None:
    assert check(source)


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (sql_writes, '"""UPDATE runs SET phase = 1"""\nq = "SELECT 1 FROM runs FOR NO KEY UPDATE SKIP LOCKED"'),
        (sql_writes, "q = 'CREATE TRIGGER t BEFORE UPDATE OF phase ON runs FOR EACH ROW'"),
        (built_writes, "values.update(a=1); names.insert(0, 'x')"),
        (status_literals, "q = f\"SELECT 'approval' AS kind FROM pipeline.runs WHERE status = '{RunStatus.ACTIVE}'\""),
        (audit_reads, "q = 'INSERT INTO pipeline.audit (act) VALUES (1)'"),
        (prints, "echo('x')"),
        (leftovers, "# TO" + "DO(#12): later"),
    ],
)
def test_a_good_habit_is_left_alone(check: Check, source: str) -> None:
    assert check(source) == []
