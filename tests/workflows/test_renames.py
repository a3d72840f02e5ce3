"""A workflow, a topic or a handler gets another name, and nothing that waits is left behind."""

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from pipeline import DeclarationError, Topic, Workflow
from pipeline.admin.plan import Planner
from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.domain.states import PhaseTask
from pipeline.domain.values import NewEvent
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.testing import Does, Inline, scripted
from pipeline.transitions import events, runs
from pipeline.workflows.registry import Registry
from tests.factories import LEASE, SOMEBODY
from tests.support.scripted_consumers import take_one
from tests.support.table_reads import one, rows


class Release:
    """One release of a workflow: topics, and a consumer of the first of them that sends a mail for each event."""

    def __init__(
        self, workflow: str = "payments", topic: str = "orders", handler: str = "Send", **options: Any
    ) -> None:
        former: Mapping[str, str] = options.pop("former", {})
        producer = options.pop("producer", "poll")
        self.workflow = Workflow(workflow, renamed_from=former.get("workflow", ""), **options)
        self.topic: Topic = self.workflow.topic(topic, renamed_from=former.get("topic", ""))
        self.sent: Topic = self.workflow.topic("sent")
        self.mail = scripted("mail", mutations=("send",))
        members = {
            "prepare": lambda _, ctx, state: take_one(ctx, self.topic),
            "mutate": lambda _, ctx, prepared: ctx.mail.send(n=prepared.data["n"]),
            "next": lambda _, ctx, prepared, result: self._next(ctx, prepared),
        }
        declare = self.workflow.consumer(
            subscribes=[self.topic], publishes=[self.sent], renamed_from=former.get("handler", "")
        )
        declare(type(handler, (), members))
        poll = self.workflow.producer(
            cron="0 0 29 2 *",
            publishes=[self.topic],
            name=producer,
            renamed_from=former.get("producer", ""),
        )
        poll(lambda ctx, state: None)

    def _next(self, ctx: Any, prepared: Any) -> dict[str, Any]:
        ctx.publish(self.sent, message_id=f"sent:{prepared.data['n']}", payload=prepared.data)
        return {"last": prepared.data["n"]}

    def started(self, db: Database, code_version: str = "") -> Inline:
        """A worker of this release starts."""
        return Inline(db, [self.workflow], [self.mail], code_version=code_version)


OLD = {"workflow": "payments", "topic": "orders", "handler": "Send"}
#: What each kind of rename declares, and the names that it leads to.
RENAMES: dict[str, dict[str, Any]] = {
    "workflow": {"workflow": "billing", "former": {"workflow": "payments"}},
    "topic": {"topic": "orders.paid", "former": {"topic": "orders"}},
    "handler": {"handler": "SendInvoice", "former": {"handler": "Send"}},
    "all": {
        "workflow": "billing",
        "topic": "orders.paid",
        "handler": "SendInvoice",
        "former": {"workflow": "payments", "topic": "orders", "handler": "Send"},
    },
}


def publish(db: Database, workflow: str, topic: str, *numbers: int) -> Any:
    new = [NewEvent(topic=topic, message_id=f"m{n}", payload={"n": n}) for n in numbers]
    with db.transaction() as tx:
        return events.publish(tx, workflow, new)


def statuses(db: Database) -> dict[str, int]:
    found = rows(db, "SELECT status, count(*) AS n FROM pipeline.deliveries GROUP BY status")
    return {row.status: row.n for row in found}


@pytest.mark.parametrize("kind", RENAMES)
def test_a_rename_takes_waiting_events_runs_and_state_along(db: Database, kind: str) -> None:
    old = Release()
    before = old.started(db)
    publish(db, "payments", "orders", 0)
    before.run_until_idle()
    publish(db, "payments", "orders", *range(1, 6))
    handler = one(db, "SELECT id, uid, state FROM pipeline.handlers WHERE name = 'Send'")
    new = Release(**RENAMES[kind])
    after = new.started(db)
    kept = one(db, f"SELECT id, uid, state FROM pipeline.handlers WHERE name = '{new_name(kind, 'handler')}'")
    assert (kept.id, kept.uid, kept.state) == (handler.id, handler.uid, {"last": 0})
    after.run_until_idle()
    assert statuses(db) == {"consumed": 6}
    assert len(new.mail.effects) == 5
    assert one(db, "SELECT count(*) AS n FROM pipeline.handlers WHERE kind = 'consumer'").n == 1


def new_name(kind: str, what: str) -> str:
    return str(RENAMES[kind].get(what, OLD[what]))


@pytest.mark.parametrize("kind", RENAMES)
def test_the_second_worker_of_a_rename_finds_it_done_and_the_audit_has_it_once(db: Database, kind: str) -> None:
    Release().started(db)
    publish(db, "payments", "orders", 1, 2)
    first = Release(**RENAMES[kind])
    first.started(db)
    acts = rows(db, "SELECT act, workflow, actor, evidence FROM pipeline.audit ORDER BY id")
    assert [row.act.partition(".")[2] for row in acts] == ["rename"] * len(RENAMES[kind]["former"])
    assert {row.evidence["to"] for row in acts} == {new_name(kind, what) for what in RENAMES[kind]["former"]}
    assert {(row.workflow, row.actor) for row in acts} == {(new_name(kind, "workflow"), "deployment")}
    Release(**RENAMES[kind]).started(db)
    assert len(rows(db, "SELECT id FROM pipeline.audit")) == len(acts)


def test_a_plan_lists_what_the_next_worker_would_move_and_moves_nothing(db: Database) -> None:
    Release().started(db)
    publish(db, "payments", "orders", 1, 2)
    new = Release(**RENAMES["all"])
    registry = Registry(workflows={"billing": new.workflow})
    planner = Planner(db, registry, step_limit=timedelta(seconds=5))
    assert [(each.kind, each.former, each.name, each.waiting) for each in planner.renames("billing")] == [
        ("workflow", "payments", "billing", 2),
        ("topic", "orders", "orders.paid", 2),
        ("handler", "Send", "SendInvoice", 2),
    ]
    assert [row.name for row in rows(db, "SELECT name FROM pipeline.workflows")] == ["payments"]
    new.started(db)
    assert planner.renames("billing") == []


@pytest.mark.parametrize("kind", RENAMES)
def test_a_publisher_with_the_former_name_reaches_the_renamed_one(db: Database, kind: str) -> None:
    Release().started(db)
    publish(db, "payments", "orders", 1)
    new = Release(**RENAMES[kind])
    run = new.started(db)
    published = publish(db, "payments", "orders", 1, 2)  # the first is a repeat
    assert [name for name in published.new] == [("orders", "m2")]
    run.run_until_idle()
    assert statuses(db) == {"consumed": 2}
    found = rows(db, "SELECT DISTINCT workflow, topic FROM pipeline.events WHERE topic <> 'sent'")
    assert [(row.workflow, row.topic) for row in found] == [(new_name(kind, "workflow"), new_name(kind, "topic"))]


def test_a_payload_is_replaced_under_the_former_names(db: Database) -> None:
    Release().started(db)
    publish(db, "payments", "orders", 1)
    Release(**RENAMES["all"]).started(db)
    with db.transaction() as tx:
        new = [NewEvent(topic="orders", message_id="m1", payload={"n": 7})]
        assert list(events.publish(tx, "payments", new, replace=True).replaced) == [("orders", "m1")]
    assert one(db, "SELECT payload FROM pipeline.events").payload == {"n": 7}


@pytest.mark.parametrize("kind", RENAMES)
def test_an_old_worker_that_restarts_registers_no_former_name_again(
    db: Database, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    old = Release()
    old.started(db)
    new = Release(**RENAMES[kind])
    after = new.started(db)
    names = names_of(db)
    with caplog.at_level(logging.WARNING):
        again = Inline(db, [old.workflow], [old.mail])
    assert names_of(db) == names
    assert "newer code" in caplog.text
    publish(db, "payments", "orders", 1, 2)
    again.run()
    after.run_until_idle()
    assert statuses(db) == {"consumed": 2}
    assert len(new.mail.effects) + len(old.mail.effects) == 2


def names_of(db: Database) -> Any:
    return [
        rows(db, "SELECT name FROM pipeline.workflows ORDER BY 1"),
        rows(db, "SELECT workflow, name FROM pipeline.topics WHERE NOT retired ORDER BY 1, 2"),
        rows(db, "SELECT workflow, name FROM pipeline.handlers WHERE NOT retired ORDER BY 1, 2"),
        rows(db, "SELECT workflow, topic, handler_id FROM pipeline.subscriptions ORDER BY 1, 2, 3"),
    ]


@pytest.mark.parametrize("kind", RENAMES)
def test_an_old_worker_that_still_runs_declines_nothing_of_what_was_renamed(db: Database, kind: str) -> None:
    """Its prepare would find no event of the former topic, and call its consumer idle."""
    old = Release()
    before = old.started(db)
    publish(db, "payments", "orders", 1)
    before.scheduler.schedule(["payments"])
    new = Release(**RENAMES[kind])
    after = new.started(db)
    before.run()  # the message of the old worker's own run among them
    after.advance(after.sweeps.redispatch_after * 2)
    after.run_until_idle()
    assert statuses(db) == {"consumed": 1}
    assert len(new.mail.effects) + len(old.mail.effects) == 1


def test_a_worker_that_is_choosing_from_a_renamed_topic_loses_its_run_to_one_that_knows_the_name(db: Database) -> None:
    old = Release()
    before = old.started(db)
    publish(db, "payments", "orders", 1)
    before.scheduler.schedule(["payments"])
    (run,) = rows(db, "SELECT id FROM pipeline.runs")
    with db.transaction() as tx:
        (held,) = runs.claim(tx, PhaseTask.PREPARE, [run.id], lease_duration=LEASE, worker="old").claimed
    new = Release(**RENAMES["topic"])
    after = new.started(db)
    taken = one(db, "SELECT fence, lease_expires_at FROM pipeline.runs")
    assert (taken.fence, taken.lease_expires_at) == (held.fence + 1, None)
    after.run_until_idle()
    assert statuses(db) == {"consumed": 1}


@pytest.mark.parametrize("kind", RENAMES)
def test_a_request_that_is_repeated_after_a_rename_is_the_same_effect(db: Database, kind: str) -> None:
    """So its idempotency key is kept wherever the ledger keeps it."""
    old = Release()
    before = old.started(db)
    publish(db, "payments", "orders", 1)
    old.mail.will(Does.REFUSES)
    before.run_until_idle()
    new = Release(**RENAMES[kind])
    new.started(db).run_until_idle()
    found = rows(db, "SELECT workflow, effect_id, status FROM pipeline.mutations ORDER BY id")
    assert [row.status for row in found] == ["failed", "applied"]
    assert len({row.effect_id for row in found}) == 1
    assert {row.workflow for row in found} == {new_name(kind, "workflow")}


def test_code_with_the_former_name_that_was_never_registered_takes_the_rename_back(db: Database) -> None:
    Release().started(db, code_version="1")
    publish(db, "payments", "orders", 1)
    Release(topic="orders.paid", handler="SendInvoice", former={"topic": "orders", "handler": "Send"}).started(
        db, code_version="2"
    )
    reverted = Release()
    run = reverted.started(db, code_version="3")
    run.run_until_idle()
    assert statuses(db) == {"consumed": 1}
    assert [row.name for row in rows(db, "SELECT name FROM pipeline.handlers WHERE kind = 'consumer'")] == ["Send"]


def test_a_workflow_that_goes_back_to_its_former_name_must_say_so(db: Database) -> None:
    Release().started(db, code_version="1")
    Release(**RENAMES["workflow"]).started(db, code_version="2")
    with pytest.raises(InvalidInputError, match=r"was renamed to 'billing'.*declare it with renamed_from='billing'"):
        Release().started(db, code_version="3")
    Release(former={"workflow": "billing"}).started(db, code_version="3")
    assert [row.name for row in rows(db, "SELECT name FROM pipeline.workflows")] == ["payments"]


def test_a_workflow_that_was_renamed_twice_is_reached_by_its_last_former_name(db: Database) -> None:
    Release().started(db)
    Release("billing", former={"workflow": "payments"}).started(db)
    Release("invoices", former={"workflow": "billing"}).started(db)
    publish(db, "billing", "orders", 1)
    with pytest.raises(NotFoundError, match=r"no workflow 'payments'"):
        publish(db, "payments", "orders", 2)
    assert one(db, "SELECT workflow FROM pipeline.events").workflow == "invoices"


def test_a_rename_that_newer_code_declares_no_more_frees_the_former_name(db: Database) -> None:
    Release().started(db, code_version="1")
    Release(**RENAMES["topic"]).started(db, code_version="2")
    Release(topic="orders.paid").started(db, code_version="3")
    with pytest.raises(NotFoundError, match=r"named 'orders'.*Did you mean 'orders.paid'"):
        publish(db, "payments", "orders", 1)


@pytest.mark.parametrize("kind", ["workflow", "topic", "handler"])
def test_a_rename_is_refused_while_both_names_exist_and_the_former_one_has_work(db: Database, kind: str) -> None:
    Release().started(db, code_version="1")
    publish(db, "payments", "orders", 1)
    given = RENAMES[kind]
    forgotten = Release(**{**given, "former": {}})
    forgotten.started(db, code_version="2")  # without renamed_from: the event waits under the former name
    with pytest.raises(InvalidInputError, match=r"both exist; 1 events wait .*Nothing was moved"):
        Release(**given).started(db, code_version="3")
    with db.transaction() as tx:
        for row in rows(
            db,
            "SELECT d.event_id, h.workflow FROM pipeline.deliveries d, pipeline.handlers h "
            "WHERE h.id = d.handler_id AND d.status = 'pending'",
        ):
            events.skip(tx, row.workflow, "Send", row.event_id, SOMEBODY)
    Release(**given).started(db, code_version="3")


def test_a_lower_version_renames_no_workflow(db: Database) -> None:
    Release(version=2).started(db)
    with pytest.raises(InvalidInputError, match=r"registered with version 2; expected at least that version"):
        Release(version=1, **RENAMES["workflow"]).started(db)


def test_a_consumer_cannot_be_renamed_from_a_producer(db: Database) -> None:
    Release().started(db)
    with pytest.raises(InvalidInputError, match=r"'SendInvoice'.*was a producer"):
        Release(handler="SendInvoice", former={"handler": "poll"}, producer="other").started(db)


def test_a_producer_keeps_its_next_slot_when_it_is_renamed(db: Database) -> None:
    Release().started(db)
    slot = one(db, "SELECT id, next_run_at FROM pipeline.handlers WHERE name = 'poll'")
    Release(producer="ask", former={"producer": "poll"}).started(db)
    assert one(db, "SELECT id, next_run_at FROM pipeline.handlers WHERE name = 'ask'") == slot


@pytest.mark.parametrize(
    ("declare", "problem"),
    [
        (lambda: Workflow("a", renamed_from="a"), "renamed from itself"),
        (lambda: Workflow("a").topic("t", renamed_from="t"), "renamed from itself"),
        (lambda: Workflow("a").topic("t", renamed_from=" "), "renamed_from of 't'"),
        (lambda: Release(handler="Send", former={"handler": "Send"}), "renamed from itself"),
        (lambda: Release(former={"producer": "poll"}), "renamed from itself"),
    ],
)
def test_a_wrong_rename_is_refused_where_it_is_declared(declare: Any, problem: str) -> None:
    with pytest.raises(DeclarationError, match=problem):
        declare()


def test_a_former_name_that_is_declared_as_well_is_refused(db: Database) -> None:
    with pytest.raises(InvalidInputError, match=r"renamed from 'sent', which is declared as well"):
        Release(former={"topic": "sent"}).started(db)


def test_publishing_to_what_no_worker_has_registered_is_refused_with_the_known_names(db: Database) -> None:
    Release().started(db, code_version="1")
    with pytest.raises(NotFoundError, match=r"no workflow 'payment'. Known: payments. Did you mean 'payments'"):
        publish(db, "payment", "orders", 1)
    with pytest.raises(NotFoundError, match=r"named 'order'. Known: orders, sent. Did you mean 'orders'"):
        publish(db, "payments", "order", 1)


def test_publishing_to_a_topic_that_is_gone_from_the_code_is_refused(db: Database) -> None:
    """It would reach no consumer. A rename that was not declared looks like this."""
    Release().started(db, code_version="1")
    Release(topic="orders.paid").started(db, code_version="2")
    with pytest.raises(InvalidInputError, match=r"'orders'.* gone from the code.*renamed_from='orders'"):
        publish(db, "payments", "orders", 1)
    Release().started(db, code_version="1")  # older code needs it again
    publish(db, "payments", "orders", 1)
    with db.transaction() as tx:
        assert {row.name: row.retired for row in work.topics(tx, "payments")} == {
            "orders": False,
            "orders.paid": False,
            "sent": False,
        }
