"""The rules of LIFECYCLE about mutate and next that only a whole run shows."""

from typing import Any

import pytest

from pipeline import PrepareResult, Workflow
from pipeline.store.database import Database
from pipeline.testing import Inline, scripted
from pipeline.worker.crash_points import CrashPoint
from tests.support.rule import rule


@rule("L-19", "L-20", "L-26")
def test_a_mutation_is_sent_after_mutate_has_returned_and_its_result_reaches_next(db: Database) -> None:
    seen: list[Any] = []
    mail = scripted("mail", mutations=["send"])
    workflow = Workflow("shop")
    orders = workflow.topic("orders")

    class Send:
        def prepare(self, ctx: Any, state: Any) -> PrepareResult:
            del state
            return PrepareResult(reserve=ctx.peek(orders, limit=1))

        def mutate(self, ctx: Any, prepared: Any) -> Any:
            del prepared
            asked = ctx.mail.send(n=1)
            seen.append(("asked", len(mail.effects)))
            return asked

        def next(self, ctx: Any, prepared: Any, result: Any) -> None:
            del ctx, prepared
            seen.append((str(result.status), result.applied, result.value is not None))

    with pytest.warns(UserWarning, match="code after it requested"):
        workflow.consumer(subscribes=[orders])(Send)
    run = Inline(db, [workflow], [mail])
    run.publish(orders, {})
    sent_at: list[int] = []
    with run.on_crash_points(
        lambda point: sent_at.append(len(mail.effects)) if point is CrashPoint.IN_FLIGHT else None
    ):
        run.run()
    assert seen == [("asked", 0), ("applied", True, True)]
    assert sent_at == [0], "in the ledger before the world can see it"
    assert len(mail.effects) == 1
