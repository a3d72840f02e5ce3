"""What the connector sql makes of errors and broken lines, and which settings it refuses."""

import multiprocessing
import re
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from pipeline.connectors.sdk import Call
from pipeline.connectors.sql import Sql, create_effects_table, query, transaction
from pipeline.domain.errors import InvalidInputError, LogicError, TransientError
from pipeline.domain.reconciliation import Applied, ErrorMeaning, NotFound, Retry
from tests.connectors.http_server import ask, call, do, unused_port
from tests.connectors.sql_database import Bank, Step, booking, count, cutting, dripping, inside, outcome, terminate

PAGE = "docs/reference/connectors-sql.md"
FORBIDDEN = "CREATE ROLE nobody_special; SET LOCAL ROLE nobody_special; SELECT * FROM bookings"


def fails(connection: Connection, _: Call) -> None:
    connection.execute(text("INSERT INTO bookings (account, cents) VALUES ('secret-account', 13)"))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (fails, ErrorMeaning.REFUSED),
        (lambda c, _: c.execute(text("SELECT nonsense")), ErrorMeaning.REFUSED),
        (lambda c, _: c.execute(text("SELECT 1/0")), ErrorMeaning.REFUSED),
        (lambda c, _: c.execute(text("INSERT INTO children VALUES (7)")) and None, ErrorMeaning.REFUSED),
        (lambda c, _: booking(c) or object(), ErrorMeaning.REFUSED),
        (lambda c, _: booking(c) or [][1], ErrorMeaning.REFUSED),
        (lambda c, _: c.execute(text(FORBIDDEN)), ErrorMeaning.DENIED),
        (lambda c, _: c.execute(text("DO 'BEGIN RAISE serialization_failure; END'")), ErrorMeaning.NOT_NOW),
        (lambda c, _: c.rollback(), ErrorMeaning.UNKNOWN),
        (lambda c, _: c.execute(text("ROLLBACK")) and None, ErrorMeaning.REFUSED),
    ],
    ids=["check", "syntax", "data", "at commit", "no json", "a bug", "no right", "another chosen", "ended", "undone"],
)
def test_an_error_before_the_commit_means_not_done(
    bank: Bank, judge: Engine, step: Step, expected: ErrorMeaning
) -> None:
    bank.step = step
    meaning, message = outcome(bank, "run", call("k"))
    assert meaning is expected
    assert message.startswith(("bank.run", "result of bank.run"))
    assert "secret-account" not in message
    assert isinstance(ask(bank, "run", call("k")), NotFound)
    assert (count(judge), count(judge, "pipeline_effects")) == (0, 0)


def test_a_function_that_commits_by_itself_is_in_doubt_and_reconcile_finds_its_effect(
    bank: Bank, judge: Engine
) -> None:
    def step(connection: Connection, _: Call) -> None:
        booking(connection)
        connection.commit()

    bank.step = step
    meaning, message = outcome(bank, "run", call("k"))
    assert meaning is ErrorMeaning.UNKNOWN
    assert "ended its own transaction" in message
    assert ask(bank, "run", call("k")) == Applied(None)
    assert count(judge) == 1


def test_errors_do_not_show_redacted_values(bank: Bank) -> None:
    class Typed(Bank):
        @transaction(redact=["account"])
        def misuse(self, connection: Connection, call: Call, *, account: str) -> None:  # noqa: ARG002
            connection.execute(text("SELECT CAST(:account AS integer)"), {"account": account})

    typed = Typed(engine=bank.engine)
    meaning, message = outcome(typed, "misuse", account="4111-1111")
    assert meaning is ErrorMeaning.REFUSED
    assert "invalid input syntax" in message
    assert "4111" not in message


def test_a_backend_killed_in_the_middle_did_nothing(bank: Bank, judge: Engine) -> None:
    with inside(bank, call("k", 20), lambda c, _: c.execute(text("SELECT 1")) and None) as (ended, go_on, backend):
        terminate(judge, f"pid = {backend[0]}")
        go_on.set()
        error = ended.exception(60)
    assert isinstance(error, TransientError)
    assert isinstance(ask(bank, "run", call("k")), NotFound)
    assert count(judge) == 0


def test_a_backend_killed_at_commit_leaves_a_doubt_that_a_reconcile_resolves(bank: Bank, judge: Engine) -> None:
    bank.step = lambda c, _: c.execute(text("INSERT INTO slow VALUES (1)")) and None
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(do, bank, "run", call("k", 20))
        terminate(judge, "query = 'COMMIT' AND wait_event = 'PgSleep'")
        error = ended.exception(60)
    assert error is not None
    assert Bank.operations()["run"].reading(error).meaning is ErrorMeaning.UNKNOWN
    assert isinstance(ask(bank, "run", call("k")), NotFound)
    assert count(judge, "slow") == 0


@pytest.mark.parametrize("hears", [True, False], ids=["COMMIT arrived", "COMMIT was lost"])
def test_a_connection_cut_at_commit_leaves_a_doubt_that_a_reconcile_resolves(
    bank: Bank, url: str, judge: Engine, hears: bool
) -> None:
    with cutting(url, hears=hears) as through:
        cut = Bank(through)
        meaning, message = outcome(cut, "book", call("k"), account="a", cents=5)
        cut.engine.dispose()
    assert meaning is ErrorMeaning.UNKNOWN
    assert "COMMIT was sent" in message
    verdict = ask(bank, "book", call("k"), account="a", cents=5)
    assert verdict == Applied({"key": "k", "cents": 5}) if hears else isinstance(verdict, NotFound)
    assert count(judge) == int(hears)


def test_a_server_that_answers_byte_by_byte_is_cut_off_at_the_deadline(url: str, judge: Engine) -> None:
    """In the work, and when the pool asks whether a connection lives. Nothing was committed either time."""
    with dripping(url) as (through, is_slow):
        held = Bank(through)

        def step(connection: Connection, call: Call) -> Any:
            booking(connection)
            is_slow.set()
            return connection.execute(text("SELECT repeat('x', 1000000)")).scalar()

        held.step = step
        meaning, message = outcome(held, "run", call("k", 0.5))
        assert (meaning, "Nothing was done" in message) == (ErrorMeaning.NOT_NOW, True)
        is_slow.clear()
        do(held, "book", call("well"), account="a", cents=5)
        is_slow.set()
        assert outcome(held, "book", call("ping", 0.5), account="a", cents=5)[0] is ErrorMeaning.NOT_NOW
        held.engine.dispose()
    assert count(judge) == 1
    assert isinstance(ask(Bank(url), "run", call("k")), NotFound)


def test_an_answer_without_end_is_cut_off_in_bounded_memory(url: str, judge: Engine) -> None:
    """In the work and in a read. About 10 MB come in a second, and 300 MB would."""
    endless = text("SELECT repeat('x', 100000) FROM generate_series(1, 3000) WHERE pg_sleep(0.01) IS NOT NULL")
    held = Bank(url, max_answer_bytes=1_000_000)
    held.step = lambda connection, _: booking(connection) or (connection.execute(endless).all() and None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    meaning, message = outcome(held, "run", call("k", 90))
    assert (meaning, "more than 1000000 bytes" in message) == (ErrorMeaning.REFUSED, True)
    assert "select fewer rows" in message
    with pytest.raises(LogicError, match="more than 1000000 bytes"):
        do(held, "wrong", statement=str(endless))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000, "kB; far from the whole answer"
    assert count(judge) == 0
    assert isinstance(ask(Bank(url), "run", call("k")), NotFound)
    for number in range(3):  # the limit is of one call, not of a connection that many calls use
        held.step = lambda connection, _: len(connection.execute(text("SELECT repeat('x', 900000)")).scalar_one())
        assert do(held, "run", call(f"well-{number}", 90)) == 900_000
    held.engine.dispose()


def test_at_a_closed_port_nothing_was_done(url: str) -> None:
    away = Bank(make_url(url).set(port=unused_port()).render_as_string(hide_password=False))
    meaning, message = outcome(away, "book", account="a", cents=5)
    assert meaning is ErrorMeaning.NOT_NOW
    assert str(make_url(url).password) not in message
    assert isinstance(ask(away, "book", account="a", cents=5), Retry)
    with pytest.raises(TransientError):
        do(away, "total", account="a")


def test_a_wrong_password_is_denied_and_stays_hidden(url: str) -> None:
    wrong = Bank(SecretStr(make_url(url).set(password="hunter2hunter2").render_as_string(hide_password=False)))
    meaning, message = outcome(wrong, "book", account="a", cents=5)
    assert meaning is ErrorMeaning.DENIED, message
    assert isinstance(ask(wrong, "book", account="a", cents=5), Retry)
    assert "hunter2" not in f"{message} {wrong!r} {vars(wrong)!r} {wrong.engine!r}"
    assert "hunter2" not in wrong.scrub("it was hunter2hunter2")


def test_without_the_table_nothing_is_done_and_the_error_names_the_remedy(url: str, judge: Engine) -> None:
    elsewhere = Bank(url, schema="elsewhere")
    meaning, message = outcome(elsewhere, "book", account="a", cents=5)
    assert meaning is ErrorMeaning.REFUSED
    assert "create_effects_table" in message
    assert count(judge) == 0
    assert isinstance(ask(elsewhere, "book", account="a", cents=5), Retry)
    with judge.begin() as connection:
        connection.execute(text("CREATE SCHEMA elsewhere"))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: elsewhere.create_table(), range(8)))
    do(elsewhere, "book", account="a", cents=5)
    assert (count(judge, "elsewhere.pipeline_effects"), count(judge, "pipeline_effects")) == (1, 0)
    elsewhere.engine.dispose()


def test_an_engine_without_transactions_is_refused(url: str, judge: Engine) -> None:
    alone = Bank(engine=create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT"))
    assert outcome(alone, "book", account="a", cents=5)[0] is ErrorMeaning.REFUSED
    assert count(judge) == 0


def test_a_read_that_fails_leaves_nothing_in_doubt_and_what_it_writes_is_undone(bank: Bank, judge: Engine) -> None:
    with pytest.raises(LogicError, match=r"bank.wrong: UndefinedColumn"):
        do(bank, "wrong", statement="SELECT nonsense")
    do(bank, "wrong", statement="INSERT INTO bookings (account, cents) VALUES ('a', 1)")
    assert count(judge) == 0


def test_a_forked_process_makes_connections_of_its_own(bank: Bank, judge: Engine) -> None:
    given = Bank(engine=create_engine(bank.engine.url, pool_size=1, max_overflow=0))
    for each in (bank, given):
        each.step = lambda connection, _: connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        parent, child = call(f"parent {each is bank}"), call(f"child {each is bank}", 60)
        do(each, "run", parent)
        process = multiprocessing.get_context("fork").Process(target=do, args=(each, "run", child))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        first, second = ask(each, "run", parent).result, ask(each, "run", child).result
        assert first != second
        assert do(each, "run", call(f"again {each is bank}")) == first
    given.engine.dispose()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bank(), "one of the two"),
        (lambda: Bank("sqlite://", engine=create_engine("sqlite://")), "one of the two"),
        (lambda: Bank("no url hunter2"), "cannot be read"),
        (lambda: transaction()(lambda self, call, *, cents: None), "expected `def` with"),
        (lambda: query(lambda self, *, cents: None), "expected `def` with"),
    ],
)
def test_an_invalid_declaration_is_refused_at_its_line(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        make()
    assert "hunter2" not in str(caught.value)


def test_an_async_function_is_refused() -> None:
    async def later(self: Sql, connection: Connection, call: Call) -> None:
        """Never called."""

    with pytest.raises(InvalidInputError, match="expected `def` with"):
        transaction()(later)


def test_other_databases_have_one_effect_per_key_too(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'target.db'}")
    create_effects_table(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE bookings (account text, cents integer CHECK (cents <> 13))"))
    light = Bank(engine=engine)
    assert isinstance(ask(light, "book", account="a", cents=5), NotFound)
    assert outcome(light, "book", account="a", cents=13)[0] is ErrorMeaning.REFUSED
    first = do(light, "book", account="a", cents=5)
    assert do(light, "book", account="a", cents=5) == first
    assert ask(light, "book", account="a", cents=5) == Applied(first)
    assert count(engine) == 1
    engine.dispose()


def test_the_example_of_the_page_works(project: Path, url: str, judge: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEDGER_URL", url)
    with judge.begin() as connection:
        connection.execute(text("CREATE TABLE accounts (id text PRIMARY KEY, cents integer NOT NULL)"))
        connection.execute(text("INSERT INTO accounts VALUES ('a', 0)"))
    (code,) = re.findall(r"```python\n(.*?)```", (project / PAGE).read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, PAGE, "exec"), names)
    ledger = names["ledger"]
    for _ in range(2):
        assert do(ledger, "book", account="a", cents=5) == {"balance": 5}
    assert ask(ledger, "book", account="a", cents=5) == Applied({"balance": 5})
    assert do(ledger, "balance", account="a") == 5
    ledger.engine.dispose()


def test_the_statement_of_the_page_makes_the_same_table(project: Path, url: str, judge: Engine) -> None:
    (statement,) = re.findall(r"```sql\n(.*?)```", (project / PAGE).read_text(encoding="utf-8"), re.DOTALL)
    columns = text(
        "SELECT column_name, data_type, is_nullable, column_default, character_maximum_length"
        " FROM information_schema.columns WHERE table_name = 'pipeline_effects' AND table_schema = :s ORDER BY 1"
    )
    with judge.begin() as connection:
        connection.execute(text("CREATE SCHEMA by_hand; SET LOCAL search_path = by_hand"))
        connection.execute(text(statement))
        by_hand, made = (connection.execute(columns, {"s": schema}).all() for schema in ("by_hand", "public"))
        assert by_hand == made
