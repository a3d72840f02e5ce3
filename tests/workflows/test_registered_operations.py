"""Workers register what their code declares about operations, and older code replaces nothing."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from pipeline import Call, Connector, PrepareResult, Workflow, mutation, read
from pipeline.admin.operations import grade_of, registered_operations
from pipeline.domain.errors import PayloadError
from pipeline.domain.operations import MAX_MESSAGE_IDS, OperationSpec
from pipeline.store.database import Database, Statement
from pipeline.testing import Inline
from pipeline.transitions.registration import register_operations

_VERSIONS = Statement[Any](
    "SELECT operation, CAST(xmin AS text) AS version FROM pipeline.operations ORDER BY operation"
)


def started(db: Database, shows: str, *, code: str = "", version: int = 1, more: bool = False) -> Inline:
    """A worker of one release starts."""

    class Pay(Connector):
        name = "pay"

        @mutation(
            timeout=timedelta(seconds=3),
            settle=timedelta(seconds=2),
            keyed=True,
            key_lifetime=timedelta(days=1),
            redact=["note"],
            shown=["pin"],
            shows=shows,
            look_up="https://pay.example/{key}",
            value="cents",
            four_eyes_above=Decimal("99.5"),
        )
        def charge(self, call: Call, *, order: str, cents: int, note: str = "", pin: str = "") -> dict[str, str]:
            del call, order, cents, note, pin
            return {}

        @charge.fetch
        def get(self, call: Call, *, external_id: str) -> Any: ...

        @read
        def balance(self) -> int:
            return 0

        if more:

            @mutation()
            def refund(self, call: Call, *, when: Callable[[], None]) -> None: ...

    shop = Workflow("shop", version=version)
    shop.effect(shop.topic("orders"))(lambda ctx, event: None)
    return Inline(db, [shop], [Pay()], code_version=code)


def shown(db: Database) -> dict[str, str]:
    return {each.operation: each.shows for each in registered_operations(db)}


def test_everything_that_is_declared_is_registered(db: Database) -> None:
    started(db, "Charge {cents}")
    balance, charge = registered_operations(db)
    assert (balance.name, balance.is_mutation, grade_of(balance)) == ("pay.balance", False, None)
    assert (charge.name, grade_of(charge), charge.keyed, charge.key_lifetime) == (
        "pay.charge",
        "C",
        True,
        timedelta(days=1),
    )
    assert (charge.redact, charge.shown, charge.shows) == (("note",), ("pin",), "Charge {cents}")
    assert (charge.look_up, charge.can_fetch, charge.can_reconcile) == ("https://pay.example/{key}", True, False)
    assert (charge.timeout, charge.settle) == (timedelta(seconds=3), timedelta(seconds=2))
    assert (charge.value, charge.four_eyes_above) == ("cents", Decimal("99.5"))
    assert charge.params_schema["properties"]["cents"]["type"] == "integer"
    assert charge.result_schema["type"] == "object"


def test_a_restart_of_the_same_code_writes_nothing(db: Database) -> None:
    started(db, "Charge")
    with db.transaction() as tx:
        before = [tuple(row) for row in tx.all(_VERSIONS)]
    started(db, "Charge")
    with db.transaction() as tx:
        assert [tuple(row) for row in tx.all(_VERSIONS)] == before
    started(db, "Charge {cents}", code="2")
    with db.transaction() as tx:
        after = [tuple(row) for row in tx.all(_VERSIONS)]
    assert (after[0] == before[0], after[1] == before[1]) == (True, False), "only what changed is written"


@pytest.mark.parametrize("newer", [{"code": "2"}, {"version": 2}], ids=["newer code", "higher version"])
def test_older_code_replaces_nothing_and_adds_what_is_missing(db: Database, newer: dict[str, Any]) -> None:
    started(db, "old", code="1")
    started(db, "new", **newer)
    started(db, "old", code="1", more=True)
    assert shown(db) == {"balance": "", "charge": "new", "refund": ""}


def test_a_type_without_a_schema_leaves_the_parameters_undescribed(db: Database) -> None:
    started(db, "Charge", more=True)
    assert [each.params_schema is None for each in registered_operations(db)] == [False, False, True]


def test_an_operation_that_the_code_no_longer_has_stays_registered(db: Database) -> None:
    started(db, "Charge", more=True)
    started(db, "Charge", code="2")
    assert set(shown(db)) == {"balance", "charge", "refund"}


def test_nothing_is_registered_for_no_operation_and_a_wrong_one_is_refused(db: Database) -> None:
    spans: dict[str, Any] = {"timeout": timedelta(1), "settle": timedelta(0)}
    with db.transaction() as tx:
        assert not register_operations(tx, [], [])
        assert register_operations(tx, [OperationSpec(connector="a", operation="b", **spans)], [])
        with pytest.raises(PayloadError, match="connector"):
            register_operations(tx, [OperationSpec(connector="", operation="b", **spans)], [])
        with pytest.raises(PayloadError, match=r"schema of a\.b"):
            register_operations(tx, [OperationSpec(connector="a", operation="b", params_schema=object(), **spans)], [])


def test_older_code_that_has_a_former_name_of_its_workflow_replaces_nothing(db: Database) -> None:
    def release(name: str, shows: str, **options: Any) -> None:
        class Mail(Connector):
            name = "mail"

            @mutation(shows=shows)
            def send(self, call: Call, *, to: str) -> None: ...

        workflow = Workflow(name, **options)
        workflow.effect(workflow.topic("orders"), name="post")(lambda ctx, event: None)
        Inline(db, [workflow], [Mail()])

    release("shop", "old")
    release("store", "new", renamed_from="shop")
    release("shop", "old")
    assert shown(db) == {"send": "new"}


def test_the_ledger_keeps_the_first_message_ids_of_a_large_batch_and_counts_all(db: Database) -> None:
    class Mail(Connector):
        name = "mail"

        @mutation()
        def send(self, call: Call, *, count: int) -> None: ...

    shop = Workflow("shop")
    orders = shop.topic("orders")

    @shop.consumer(subscribes=[orders], batch=120)
    class Send:
        def prepare(self, ctx: Any, _: Any) -> PrepareResult:
            return PrepareResult(reserve=ctx.peek(orders, limit=120))

        def mutate(self, ctx: Any, prepared: Any) -> Any:
            return ctx.mail.send(count=len(prepared.event_ids))

        def next(self, ctx: Any, prepared: Any, result: Any) -> None: ...

    run = Inline(db, [shop], [Mail()])
    run.publish(orders, *range(120))
    run.run()
    (row,) = run.ledger()
    assert (len(row.message_ids), row.message_count) == (MAX_MESSAGE_IDS, 120)
    assert row.headline.endswith(" and 117 more")
