"""The connector of the guide works as it is printed, and the guide names every option there is."""

import inspect
import re
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from pipeline import Workflow, mutation
from pipeline.admin.resolutions import ResolutionKind
from pipeline.store.database import Database
from pipeline.testing import Inline, assert_consumed


class Provider:
    """What the connector of the guide speaks to: busy once, silent once, honest when asked."""

    def __init__(self) -> None:
        self.charges: dict[str, dict[str, Any]] = {}
        self.asked = 0

    @property
    def is_busy(self) -> bool:
        return False

    def balance(self, account: str) -> int:
        return len(account)

    def charge(self, *, key: str, cents: int, card: str) -> dict[str, Any]:
        self.asked += 1
        self.charges[key] = {"id": f"ch_{len(self.charges)}", "cents": cents}
        if self.asked == 1:
            raise TimeoutError(f"no answer for {card}")
        return self.charges[key]

    def find(self, *, key: str) -> dict[str, Any] | None:
        return self.charges.get(key)


def test_the_connector_of_the_guide_runs_as_it_is_printed(db: Database, project: Path) -> None:
    page = (project / "docs/guides/write-a-connector.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    provider = Provider()
    payments = names["Payments"](provider, SecretStr("sk_live"))
    shop = Workflow("shop", concurrency=4)
    orders = shop.topic("orders")
    shop.effect(orders)(lambda ctx, order: ctx.payments.charge(order=order.payload, cents=5, card="4111 1111"))
    run = Inline(db, [shop], [payments])
    run.publish(orders, "o1", "o2")
    run.run()
    assert_consumed(run, orders)
    assert len(provider.charges) == 2
    (title,) = {row.headline for row in run.ledger() if row.params["order"] == "o1"}
    assert title == "Charge 5 cents for order o1"
    assert payments.operations()["charge"].grade == "A"


def test_every_option_of_a_mutation_and_every_verdict_is_in_the_guides(project: Path) -> None:
    page = (project / "docs/guides/write-a-connector.md").read_text(encoding="utf-8")
    options = [name for name, each in inspect.signature(mutation).parameters.items() if each.kind is each.KEYWORD_ONLY]
    assert [name for name in options if f"| `{name}` |" not in page] == []
    desk = (project / "docs/guides/resolve-unknown-outcomes.md").read_text(encoding="utf-8")
    assert [answer for answer in ResolutionKind if f"pipeline resolve {answer} ID" not in desk] == []
