"""The connector sql against a real Postgres: one effect per key, exact answers about it, and what its errors say."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from pipeline.connectors import Call, Grade
from pipeline.domain.errors import LogicError, TransientError
from pipeline.domain.reconciliation import Applied, ErrorMeaning, NotFound, Retry
from tests.connectors.http_server import ask, call, do, with_time
from tests.connectors.sql_database import Bank, booking, count, ends, inside, is_blocked, outcome
from tests.support.wait import wait_for


def test_a_transaction_is_an_ordinary_operation_of_grade_a() -> None:
    book, total = Bank.operations()["book"], Bank.operations()["total"]
    assert (book.grade, book.settle, book.timeout) == (Grade.A, timedelta(0), timedelta(seconds=9))
    assert book.parameters == ("account", "cents")
    assert book.headline({"account": "a", "cents": 5}) == "book 5"
    assert total.parameters == ("account",)
    assert not total.is_mutation
    with pytest.raises(LogicError, match="book was given a wrong cents"):
        book.to_stored_params({"account": "a", "cents": "many"})


def test_an_effect_and_its_key_are_one_transaction(bank: Bank, judge: Engine) -> None:
    assert do(bank, "book", account="a", cents=5) == {"key": "billing:1", "cents": 5}
    assert do(bank, "total", account="a") == 5
    with judge.connect() as connection:
        (row,) = connection.execute(text("SELECT key, operation, result, at FROM pipeline_effects"))
    assert tuple(row)[:3] == ("billing:1", "bank.book", {"key": "billing:1", "cents": 5})
    assert row.at is not None


def test_the_same_key_gives_the_same_result_and_does_nothing_again(bank: Bank, judge: Engine) -> None:
    first = do(bank, "book", account="a", cents=5)
    assert do(bank, "book", account="a", cents=5) == first
    assert ask(bank, "book", account="a", cents=5) == Applied(first)
    assert count(judge) == 1
    assert outcome(bank, "run")[0] is ErrorMeaning.REFUSED  # the key of another operation


def test_an_unused_key_is_not_found(bank: Bank, judge: Engine) -> None:
    assert isinstance(ask(bank, "book", account="a", cents=5), NotFound)
    assert count(judge, "pipeline_effects") == 0
    do(bank, "book", account="a", cents=5)
    assert count(judge) == 1


def test_of_many_callers_with_one_key_exactly_one_has_the_effect(bank: Bank, judge: Engine) -> None:
    with ThreadPoolExecutor(8) as threads:
        ended = list(threads.map(lambda _: do(bank, "book", call("k"), account="a", cents=5), range(24)))
    assert ended == [{"key": "k", "cents": 5}] * 24
    assert count(judge) == 1


@pytest.mark.parametrize("commits", [True, False], ids=["it commits", "it fails"])
def test_a_second_caller_waits_for_the_first(bank: Bank, judge: Engine, commits: bool) -> None:
    other = Bank(engine=bank.engine)
    other.step = lambda connection, _: booking(connection) or "second"
    with ThreadPoolExecutor(1) as thread, inside(bank, call("k", 20), ends(commits)) as (first, go_on, backend):
        second = thread.submit(do, other, "run", call("k", 20))
        wait_for(lambda: is_blocked(judge, backend[0]))
        go_on.set()
        assert second.result(30) == ("first" if commits else "second")
        assert isinstance(first.exception(30), type(None) if commits else LogicError)
    assert count(judge) == 1


@pytest.mark.parametrize("commits", [True, False], ids=["it commits", "it fails"])
def test_a_reconcile_waits_for_an_open_transaction(bank: Bank, judge: Engine, commits: bool) -> None:
    with ThreadPoolExecutor(1) as thread, inside(bank, call("k", 20), ends(commits)) as (_, go_on, backend):
        verdict = thread.submit(ask, bank, "run", call("k", 20))
        wait_for(lambda: is_blocked(judge, backend[0]))
        assert not verdict.done()
        go_on.set()
        assert isinstance(verdict.result(30), Applied if commits else NotFound)
    assert count(judge) == int(commits)


def test_a_reconcile_that_cannot_wait_longer_means_retry(bank: Bank, judge: Engine) -> None:
    with inside(bank, call("k", 90), ends(True)) as (first, go_on, _):
        began = time.monotonic()
        assert isinstance(ask(bank, "run", call("k", 0.6)), Retry)
        assert time.monotonic() - began < 45  # the first could go on for twice as long
        go_on.set()
        assert first.result(30) == "first"
    assert ask(bank, "run", call("k")) == Applied("first")
    assert isinstance(ask(bank, "run", call("k", -1)), Retry)


def test_a_second_caller_that_cannot_wait_longer_is_in_doubt(bank: Bank) -> None:
    other = Bank(engine=bank.engine)

    def impatient(seconds: float) -> None:
        meaning, message = outcome(other, "run", call("k", seconds))
        assert meaning is ErrorMeaning.UNKNOWN
        assert "may be carrying out the same call" in message

    with inside(bank, call("k", 90), ends(True)):
        with_time(impatient)


@pytest.mark.parametrize(
    ("at", "is_worked"), [("INSERT INTO pipeline_effects", False), ("UPDATE pipeline_effects", True)]
)
def test_a_key_that_is_claimed_after_the_deadline_is_rolled_back(
    bank: Bank, judge: Engine, at: str, is_worked: bool
) -> None:
    worked: list[bool] = []
    frozen: list[Call] = []

    def freeze(*args: Any) -> None:
        """The process stands still before it reads the clock."""
        if at in args[2] and frozen:
            threading.Event().wait(frozen.pop().remaining.total_seconds() + 0.1)

    event.listen(bank.engine, "after_cursor_execute", freeze)

    def step(connection: Connection, _: Call) -> None:
        worked.append(True)
        booking(connection)

    def held(seconds: float) -> None:
        worked.clear()
        to = call("k", seconds)
        frozen[:] = [to]
        assert outcome(bank, "run", to)[0] is ErrorMeaning.NOT_NOW
        assert (bool(worked), frozen) == (is_worked, [])

    bank.step = step
    with_time(held)
    assert isinstance(ask(bank, "run", call("k")), NotFound)
    assert (count(judge), count(judge, "pipeline_effects")) == (0, 0)


def test_nothing_is_sent_once_the_deadline_has_passed(bank: Bank, judge: Engine) -> None:
    assert outcome(bank, "book", call(seconds=-1), account="a", cents=5)[0] is ErrorMeaning.NOT_NOW
    assert count(judge) == 0


@pytest.mark.parametrize("statements", [1, 120], ids=["in one statement", "in many"])
def test_work_that_takes_too_long_is_stopped_at_the_deadline(bank: Bank, judge: Engine, statements: int) -> None:
    def step(connection: Connection, _: Call) -> None:
        booking(connection)
        for _each in range(statements):
            connection.execute(text("SELECT pg_sleep(:s)"), {"s": 60 / statements})

    bank.step = step
    began = time.monotonic()
    assert outcome(bank, "run", call("k", 1.2))[0] is ErrorMeaning.NOT_NOW
    assert time.monotonic() - began < 40
    assert count(judge) == 0
    assert isinstance(ask(bank, "run", call("k")), NotFound)


def test_an_idle_client_loses_its_transaction_soon_after_the_deadline(bank: Bank, judge: Engine) -> None:
    def silent(seconds: float) -> None:
        with inside(bank, call("k", seconds), ends(True)) as (first, go_on, _):
            assert isinstance(ask(bank, "run", call("k", 60)), NotFound)
            go_on.set()
            assert isinstance(first.exception(30), TransientError)

    with_time(silent)
    assert count(judge) == 0
