"""An end that cannot be judged or kept is one mutation's own trouble: the answers of the others are written down."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from pipeline import Call, Connector, MutationRetryPolicy, Workflow, mutation
from pipeline.domain.reconciliation import ErrorMeaning, ErrorReading
from pipeline.store.database import Database
from pipeline.store.schema import MutationRow
from pipeline.testing import Inline

LONG = timedelta(minutes=1)
ONCE = MutationRetryPolicy(max_attempts=1)


class Closed(dict[str, Any]):
    """A lazy answer of a provider's library that cannot be read any more."""

    def items(self) -> Any:
        raise RuntimeError("the proxy is closed")


class Sly(dict[str, Any]):
    """An answer that can be read once."""

    reads = 0

    def items(self) -> Any:
        Sly.reads += 1
        return super().items() if Sly.reads < 2 else [(1j, 1j)]


def refused() -> Any:
    raise OSError("come back later")


def outcomes(db: Database, end: Callable[[], Any], **switches: Any) -> dict[str, Any]:
    """Three healthy mutations and one with an unusual end, in one cohort; their rows by operation."""

    class Shop(Connector):
        name = "shop"

        @mutation(timeout=LONG, settle=timedelta(0))
        def go(self, call: Call, *, n: int) -> int:
            del self, call
            return n

        @mutation(timeout=LONG, settle=timedelta(0), retry=ONCE, **switches)
        def odd(self, call: Call, *, n: int) -> Any:
            del self, call, n
            return end()

        def scrub(self, text: str) -> str:
            if "unspeakable" in text:
                raise RuntimeError("no words")
            return super().scrub(text)

    workflow = Workflow("w", on_uncertain="contain", concurrency=10)
    topic = workflow.topic("t")

    @workflow.effect(topic)
    def effect(ctx: Any, event: Any) -> Any:
        n = event.payload["n"]
        return ctx.shop.go(n=n) if n else ctx.shop.odd(n=n)

    run = Inline(db, [workflow], [Shop()])
    run.publish(topic, *({"n": n} for n in range(4)))
    run.run()
    rows = run.ledger()
    assert [row.status for row in rows if row.operation == "go"] == ["applied"] * 3
    (odd,) = [row for row in rows if row.operation == "odd"]
    return {name: getattr(odd, name) for name in MutationRow.__annotations__}


@pytest.mark.parametrize("outcome", [ErrorMeaning.NOT_NOW, "not now"])
def test_a_reading_with_a_pause_in_seconds_is_understood(db: Database, outcome: Any) -> None:
    row = outcomes(db, refused, errors=lambda _: ErrorReading(meaning=outcome, after=5))  # type: ignore[arg-type]
    assert (row["status"], row["resolved_by"]) == ("failed", "call")


@pytest.mark.parametrize("reading", [ErrorReading(meaning="perhaps"), ErrorReading(meaning=None)])  # type: ignore[arg-type]
def test_a_reading_that_is_none_leaves_the_outcome_unknown(db: Database, reading: ErrorReading) -> None:
    row = outcomes(db, refused, errors=lambda _: reading)
    assert row["status"] == "indeterminate"


@pytest.mark.parametrize("answer", [Closed(a=1), Sly(a=1)])
def test_a_result_that_cannot_be_stored_is_described_because_it_happened(db: Database, answer: Any) -> None:
    Sly.reads = 0
    row = outcomes(db, lambda: answer)
    assert row["status"] == "applied"
    assert row["result"] == {"a": 1} or "unstorable" in row["result"]


def test_an_end_that_cannot_be_judged_is_a_doubt_of_its_own(db: Database) -> None:
    def unspeakable() -> Any:
        raise OSError("unspeakable")

    row = outcomes(db, unspeakable)
    assert (row["status"], "could not be judged" in row["error"]) == ("indeterminate", True)
    assert "unspeakable" not in row["error"]
