"""The code in the guides runs, and names every option of the package."""

import re
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from pipeline.store.database import Database
from pipeline.testing import Does, Inline, assert_consumed, scripted
from pipeline.testing.inline import describe_state
from pipeline.workflows import declaration_checks

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


class OrderPaid(BaseModel):
    """As in the example."""

    order: str
    email: str


@pytest.fixture
def guides(project: Path) -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in (project / "docs/guides").glob("*.md")}


def blocks(page: str) -> Iterator[str]:
    yield from BLOCK.findall(page)


def test_the_consumer_of_the_guide_runs_as_it_is_printed(db: Database, guides: dict[str, str]) -> None:
    names: dict[str, Any] = {"OrderPaid": OrderPaid, "timedelta": timedelta}
    for block in blocks(guides["write-a-consumer"]):
        exec(block, names)
    orders = [{"id": 1, "order": "1", "email": "a@example.org"}, {"id": 2, "order": "2", "email": "b@example.org"}]
    shop = scripted("shop", reads={"paid_orders": lambda since: [order for order in orders if order["id"] > since]})
    mail, crm, sms = scripted("mail"), scripted("crm", mutations=["upsert"]), scripted("sms")
    run = Inline(db, [names["receipts"]], [shop, mail, crm, sms])
    run.run()
    assert_consumed(run, names["paid"])
    assert mail.times(to="a@example.org") == mail.times(to="b@example.org") == 1, describe_state(run)
    assert crm.times(id="1", status="paid") == 1
    assert run.state(names["receipts"], "poll_shop") == {"since": 2}
    assert [row.cost for row in run.runs() if row.handler == "text_customer"] == [Decimal("0.05")] * 2
    assert sorted(event.message_id for event in run.events(names["sent"])) == ["receipt:1", "receipt:2"]


def test_every_option_of_a_consumer_is_in_the_guide(guides: dict[str, str]) -> None:
    assert [
        name for name in declaration_checks.CONSUMER_OPTIONS if f"| `{name}` |" not in guides["write-a-consumer"]
    ] == []


def test_the_tests_of_the_guide_are_those_that_we_run(project: Path, guides: dict[str, str]) -> None:
    run = {line.strip() for line in (project / "examples/test_receipts.py").read_text(encoding="utf-8").splitlines()}
    tests = [block for block in blocks(guides["test-your-workflow"]) if "def test_" in block]
    shown = [line.strip() for block in tests for line in block.splitlines() if line.startswith("    ")]
    assert len(tests) == 3
    assert [line for line in shown if line not in run and "OrderPaid(" not in line] == []


def test_every_behaviour_of_a_scripted_connector_is_in_the_guide(guides: dict[str, str]) -> None:
    assert [does.name for does in Does if does.name not in guides["test-your-workflow"]] == []
