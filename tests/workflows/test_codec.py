"""Encrypted workflows: nothing that the database holds can be read, and everything works as without a codec."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

from pipeline import AesGcm, Connector, PrepareResult, Workflow, mutation
from pipeline.admin import access
from pipeline.admin.bulk import BulkActs, MutationSelection
from pipeline.admin.given_results import GivenResult
from pipeline.admin.quarantine import Quarantine
from pipeline.admin.resolutions import ResolutionKind, Resolutions
from pipeline.api import Person, create
from pipeline.api import Role as ApiRole
from pipeline.client import publish
from pipeline.domain.acts import BulkAct
from pipeline.domain.codec import MARKER, Unreadable, description, is_sealed, opened, seal, unseal
from pipeline.domain.errors import InvalidInputError, MissingKeyError, TamperedError
from pipeline.domain.states import MutationId
from pipeline.domain.values import Actor, NewEvent
from pipeline.store.codecs import Codecs, published_place
from pipeline.store.database import Command, Database, Statement
from pipeline.store.reads.listings import keys_in_use
from pipeline.testing import Does, Inline, Scripted, scripted
from pipeline.transitions import events, late_effects, resolution, workflows
from tests.support.databases import stored_text

PLANTED = "planted-4711"  #: occurs in no table of an encrypted workflow
ERIN = Actor(name="erin", reason="seen at the bank")
K1, K2 = {"k1": bytes(range(32))}, {"k2": bytes(range(32, 64))}


class CarefulBank(Connector):
    """A bank whose charges two people must decide about, and that answers none."""

    name = "bank"

    @mutation(value="card", four_eyes_above=1)
    def charge(self, call: Any, *, card: int) -> Any:
        del call
        raise TimeoutError(f"no answer about {card}")


def shop(codec: Any, **options: Any) -> Workflow:
    """A workflow that has the planted text in everything that it writes."""
    workflow = Workflow("shop", codec=codec, **options)
    orders, paid = workflow.topic("orders"), workflow.topic("paid")

    @workflow.consumer(subscribes=[orders], publishes=[paid])
    class Charge:
        def prepare(self, ctx: Any, state: Any) -> PrepareResult:
            pending = ctx.peek(orders, limit=1)
            if not pending:
                return PrepareResult.nothing()
            if pending[0].payload.get("fails"):
                raise RuntimeError(f"cannot use {pending[0].payload}")
            data = {"order": pending[0].payload, "seen": (state or {}).get("seen", [])}
            return PrepareResult(reserve=pending, data=data, ui={"title": f"Charge {PLANTED}"})

        def mutate(self, ctx: Any, prepared: Any) -> Any:
            return ctx.bank.charge(card=prepared.data["order"]["card"])

        def next(self, ctx: Any, prepared: Any, result: Any) -> Any:
            ctx.publish(
                paid, message_id=f"paid {prepared.event_ids[0]}", payload=[prepared.data["order"], result.value]
            )
            return {"seen": [*prepared.data["seen"], PLANTED]}

    return workflow


@pytest.fixture
def bank() -> Scripted:
    return scripted("bank", mutations=["charge"], make_result=lambda effect: {"receipt": f"{PLANTED} {effect.key}"})


@pytest.fixture
def run(db: Database, bank: Scripted) -> Iterator[Inline]:
    made = Inline(db, [shop(AesGcm(K1))], [bank])
    yield made
    made.close()


def restarted(run: Inline, bank: Connector, codec: Any) -> Inline:
    """A new worker with other keys."""
    run.close()
    return Inline(run.db, [shop(codec)], [bank])


def in_doubt(run: Inline) -> Inline:
    """The same with a mutation that an operator must resolve."""
    silent = scripted("bank", mutations=["charge"], can_reconcile=False)
    silent.will(Does.TIMES_OUT_AFTER)
    run = restarted(run, silent, AesGcm(K1))
    run.publish(order(run), {"card": PLANTED})
    run.run()
    return run


def order(run: Inline) -> Any:
    return run.registry.workflows["shop"].topics["orders"]


def paid(run: Inline) -> Any:
    return run.registry.workflows["shop"].topics["paid"]


def sql(db: Database, statement: str) -> Any:
    with db.engine.begin() as connection:
        result = connection.execute(text(statement))
        return result.scalar() if result.returns_rows else None


def test_an_encrypted_run_reads_what_it_wrote_and_no_table_has_it(run: Inline, bank: Scripted) -> None:
    run.publish(order(run), {"card": PLANTED}, {"card": f"{PLANTED} too"})
    run.run()
    assert bank.times(card=PLANTED) == bank.times(card=f"{PLANTED} too") == 1
    assert [event.payload[1]["receipt"].startswith(PLANTED) for event in run.events(paid(run))] == [True, True]
    assert run.state(run.registry.workflows["shop"], "Charge") == {"seen": [PLANTED, PLANTED]}
    assert run.ledger()[0].headline == "m1"
    assert PLANTED not in stored_text(run.db)
    assert stored_text(run.db).count(MARKER) >= 2 * 6


def test_an_unknown_outcome_is_reconciled_and_leaves_no_text_behind(run: Inline, bank: Scripted) -> None:
    bank.will(Does.TIMES_OUT_AFTER)
    bank.cannot_tell(times=2)
    run.publish(order(run), {"card": PLANTED})
    run.run()
    run.run_until_idle()
    assert any(each.retry_of for each in run.runs())
    assert [event.payload[0] for event in run.events(paid(run))] == [{"card": PLANTED}]
    assert bank.times(card=PLANTED) == 1
    assert PLANTED not in stored_text(run.db)
    assert "the script says" not in stored_text(run.db)


def test_the_text_of_an_error_is_not_kept(run: Inline) -> None:
    run.publish(order(run), {"card": "4711", "fails": PLANTED})
    run.run()
    assert (run.runs()[0].error_type, PLANTED in stored_text(run.db)) == ("RuntimeError", False)
    assert "not kept" in str(run.runs()[0].error)


def test_an_operator_resolves_with_a_result_that_is_sealed(run: Inline) -> None:
    run = in_doubt(run)
    resolutions = Resolutions(run.db)
    (waiting,) = resolutions.unresolved_mutations()
    assert waiting.params == {"card": "•••"}  # read, and hidden as without a codec
    (candidate,) = resolutions.match_candidates("params.card")
    assert (candidate.value, candidate.is_shared) == (PLANTED, False)
    result = GivenResult(value={"receipt": PLANTED}, external_id=None, is_unchecked=True)
    resolutions.resolve(waiting.id, ResolutionKind.HAPPENED, ERIN, result=result)
    run.run_until_idle()
    assert run.events(paid(run))[0].payload[1] == {"receipt": PLANTED}
    assert PLANTED not in stored_text(run.db)


def test_a_process_without_keys_shows_ciphertext_and_records_no_result(run: Inline) -> None:
    run = in_doubt(run)
    blind = Resolutions(Database(run.db.engine, clock_offset=run.db.clock_offset))
    (waiting,) = blind.unresolved_mutations()
    assert waiting.params == {MARKER: "with key k1; this process has no such key"}
    with pytest.raises(MissingKeyError, match="k1"):
        blind.match_candidates("params.card")
    result = GivenResult(value={"receipt": PLANTED}, external_id=None, is_unchecked=True)
    with pytest.raises(MissingKeyError, match="'shop' is encrypted"):
        blind.resolve(waiting.id, ResolutionKind.HAPPENED, ERIN, result=result)
    assert PLANTED not in stored_text(run.db)
    blind.resolve(waiting.id, ResolutionKind.SKIP, ERIN)


def test_keys_rotate_while_data_of_both_exists(run: Inline, bank: Scripted) -> None:
    run.publish(order(run), {"card": PLANTED})
    run.run()
    before = run.ledger()[0]
    run.publish(order(run), {"card": "waits"})
    again = restarted(run, bank, AesGcm(K2 | K1))
    again.publish(order(again), {"card": PLANTED})
    again.run()
    assert [each.params["card"] for each in again.ledger()] == [PLANTED, "waits", PLANTED]
    assert again.ledger()[2].request_hash == before.request_hash
    keys = sql(run.db, "SELECT string_agg(params -> '$encrypted' ->> 'key', ' ' ORDER BY id) FROM pipeline.mutations")
    assert keys == "k1 k2 k2"
    assert sql(run.db, "SELECT codec_secret -> '$encrypted' ->> 'key' FROM pipeline.workflows") == "k2"
    again.close()


def test_a_lost_key_stops_runs_until_it_is_back(run: Inline, bank: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    run.publish(order(run), {"card": PLANTED})
    restarted(run, bank, AesGcm(K2 | K1)).close()  # the secret is sealed with k2 now
    with caplog.at_level("ERROR"):
        lost = restarted(run, bank, AesGcm(K2))
    assert "keys which this worker lacks: k1" in caplog.text
    lost.run()
    (stopped,) = lost.runs()
    assert (stopped.status, stopped.error_type) == ("paused:approval", "MissingKeyError")
    assert "'k1'" in str(stopped.error)
    back = restarted(lost, bank, AesGcm(K2 | K1))
    with back.db.transaction() as tx:
        workflows.resume(tx, "shop", ERIN)
    back.run()
    assert bank.times(card=PLANTED) == 1
    back.close()


def test_a_worker_without_the_keys_of_its_workflow_does_not_start(run: Inline, bank: Scripted) -> None:
    with pytest.raises(MissingKeyError, match="'k1'"):
        restarted(run, bank, AesGcm(K2))
    with pytest.raises(TamperedError, match="another key of the id 'k1'"):
        restarted(run, bank, AesGcm({"k1": bytes(32)}))
    with pytest.raises(InvalidInputError, match="declares no codec"):
        restarted(run, bank, None)


@pytest.mark.parametrize(
    "change",
    [
        "jsonb_set(payload, '{$encrypted,data}', to_jsonb('AAAA'::text))",
        "(SELECT payload FROM pipeline.events WHERE message_id = 'm2')",
    ],
    ids=["changed", "moved"],
)
def test_a_payload_that_was_changed_or_moved_is_noticed(run: Inline, bank: Scripted, change: str) -> None:
    run.publish(order(run), {"card": "first"}, {"card": "second"})
    sql(run.db, f"UPDATE pipeline.events SET payload = {change} WHERE message_id = 'm1'")
    run.run()
    assert run.runs()[0].error_type == "TamperedError"
    assert bank.effects == []


def test_a_moved_plan_result_or_request_is_noticed(run: Inline, bank: Scripted) -> None:
    run.publish(order(run), {"card": "first"}, {"card": "second"})
    run.run()
    first, second = (each.id for each in run.ledger())
    for table, column in (("mutations", "params"), ("mutations", "result"), ("runs", "prepare_result")):
        key = "id" if table == "mutations" else "mutation_id"
        source = f"(SELECT {column} FROM pipeline.{table} WHERE {key} = '{second}')"
        sql(run.db, f"UPDATE pipeline.{table} SET {column} = {source} WHERE {key} = '{first}'")
    moved, others = run.ledger()[0], run.ledger()[1]
    assert [is_sealed(value) for value in (moved.params, moved.result, others.params)] == [True, True, False]
    assert [is_sealed(row.prepare_result["data"]) for row in run.runs()[:2]] == [True, False]


def test_a_service_publishes_with_a_codec_and_is_refused_without(run: Inline, bank: Scripted) -> None:
    event = {"topic": "orders", "message_id": "m1", "payload": {"card": PLANTED}}
    with run.db.engine.begin() as connection, pytest.raises(MissingKeyError, match="Nothing was written"):
        publish(connection, "shop", [event])
    with run.db.engine.begin() as connection, pytest.raises(MissingKeyError, match="'k1'"):
        publish(connection, "shop", [event], codec=AesGcm(K2))
    with run.db.engine.begin() as connection:
        assert publish(connection, "shop", [event], codec=AesGcm(K1)).new == ("m1",)
        other = event | {"payload": {"card": f"{PLANTED} newer"}}
        assert publish(connection, "shop", [other], codec=AesGcm(K1), replace=True).replaced == ("m1",)
    run.run()
    assert bank.times(card=f"{PLANTED} newer") == 1


def test_an_event_over_http_is_stored_encrypted_and_its_key_is_in_use(run: Inline) -> None:
    run.close()
    events = "/v1/workflows/shop/topics/orders/events"
    publisher = Person(name="service", role=ApiRole.PUBLISHER, is_ambient=False)
    for codecs, status in ((None, 409), (Codecs(default=AesGcm(K1 | K2)), 201)):
        run.db.codecs = codecs
        with TestClient(create(database=run.db, identify=lambda _: publisher)) as client:
            answer = client.post(events, json={"message_id": "m1", "payload": {"card": PLANTED}})
            assert answer.status_code == status, answer.text
    assert PLANTED not in stored_text(run.db)
    with run.db.transaction() as tx:
        used = [(row.key_id, row.table_name, row.column_name, row.uses) for row in keys_in_use(tx)]
    assert used == [("k1", "events", "payload", 1), ("k1", "workflows", "codec_secret", 1)]


def test_a_payload_over_the_broker_is_opened_if_it_is_sealed_and_refused_if_not(run: Inline, bank: Scripted) -> None:
    clear = NewEvent(topic="orders", message_id="m1", payload={"card": PLANTED})
    sealed = replace(clear, payload=seal(AesGcm(K1), clear.payload, *published_place("shop", clear)))
    with run.db.transaction() as tx:
        with pytest.raises(InvalidInputError, match="in the clear; expected a BrokerClient with codec"):
            events.publish(tx, "shop", [clear], sealed_only=True)
        events.publish(tx, "shop", [sealed], sealed_only=True)
    run.run()
    assert bank.times(card=PLANTED) == 1


def test_an_encrypted_topic_whose_workflow_lost_its_secret_takes_nothing(run: Inline) -> None:
    event = NewEvent(topic="orders", message_id="m1", payload={"card": PLANTED})
    with run.db.transaction() as tx:
        events.publish(tx, "shop", [event])
        tx.codecs = None
        tx.execute(Command("UPDATE pipeline.workflows SET codec_secret = NULL"))
        with pytest.raises(MissingKeyError, match="Nothing was written"):
            events.publish(tx, "shop", [replace(event, message_id="m2")])


def test_a_payload_that_looks_encrypted_is_refused(run: Inline) -> None:
    looks_so = {MARKER: {"key": "k1", "data": "AAAA"}}
    with pytest.raises(TamperedError):
        run.publish(order(run), looks_so)
    event = {"topic": "orders", "message_id": "m1", "payload": looks_so}
    with run.db.engine.begin() as connection, pytest.raises(InvalidInputError, match="marks an encrypted value"):
        publish(connection, "shop", [event])


def test_the_hash_of_a_request_tells_nothing_without_the_secret(run: Inline) -> None:
    from pipeline.workflows.handler_types import request_hash

    run.publish(order(run), {"card": "1"})
    run.run()
    assert run.ledger()[0].request_hash != request_hash("bank", "charge", {"card": "1"})


def test_a_workflow_that_gets_a_codec_reads_what_it_wrote_before(db: Database, bank: Scripted) -> None:
    plain = Inline(db, [shop(None)], [bank])
    plain.publish(order(plain), {"card": "clear"})
    run = restarted(plain, bank, AesGcm(K1))
    run.publish(order(run), {"card": PLANTED})
    run.run()
    assert (bank.times(card="clear"), bank.times(card=PLANTED)) == (1, 1)
    run.close()


def test_an_answer_that_two_people_give_is_sealed_and_compared(run: Inline) -> None:
    run = restarted(run, CarefulBank(), AesGcm(K1))
    run.publish(order(run), {"card": 4711})
    run.run()
    resolutions = Resolutions(run.db)
    (waiting,) = resolutions.unresolved_mutations()
    result = GivenResult(value={"receipt": PLANTED}, external_id=None, is_unchecked=True)
    assert resolutions.resolve(waiting.id, ResolutionKind.HAPPENED, ERIN, result=result) is not None
    assert PLANTED not in stored_text(run.db)
    ada = Actor(name="ada", reason="seen as well")
    assert resolutions.resolve(waiting.id, ResolutionKind.HAPPENED, ada, result=result) is None
    assert run.ledger()[0].result == {"receipt": PLANTED}
    assert PLANTED not in stored_text(run.db)
    with run.db.transaction() as tx:
        (act,) = tx.all(Statement[Any]("SELECT * FROM pipeline.audit WHERE act = 'mutation.happened'"))
    assert act.evidence["result"] == {"receipt": PLANTED}


def test_a_bulk_preview_keeps_its_result_sealed(run: Inline) -> None:
    run = in_doubt(run)
    resolutions = Resolutions(run.db)
    (waiting,) = resolutions.unresolved_mutations()
    operations = BulkActs(resolutions, Quarantine(run.db))
    result = GivenResult(value={"receipt": PLANTED}, external_id=None, is_unchecked=True)
    selection = MutationSelection(ids=(waiting.id,))
    preview = operations.preview_mutations(BulkAct.HAPPENED, selection, "erin", result=result)
    assert PLANTED not in stored_text(run.db)
    operations.commit(preview.id, ERIN, count=1)
    assert run.ledger()[0].result == {"receipt": PLANTED}


def test_a_kept_answer_of_the_api_is_sealed_and_its_hash_is_keyed(run: Inline) -> None:
    hashed = "0" * 64
    assert access.begin_request(run.db, "erin", "key", hashed) is None
    access.save_answer(run.db, "erin", "key", status=200, answer={"body": PLANTED})
    again = access.begin_request(run.db, "erin", "key", hashed)
    assert again is not None
    assert (again.request_hash, again.answer) == (hashed, {"body": PLANTED})
    assert PLANTED not in stored_text(run.db)
    assert hashed not in stored_text(run.db)


def test_a_late_effect_is_recorded_sealed(run: Inline, bank: Scripted) -> None:
    bank.will(Does.TIMES_OUT_AFTER)
    bank.cannot_tell(times=1)
    run.publish(order(run), {"card": PLANTED})
    run.run()
    charge = run.ledger()[0]
    run.advance(timedelta(hours=1))
    with run.db.transaction() as tx:
        resolution.did_not_happen(tx, MutationId(charge.id), ERIN)
        late_effects.record_late_effect(tx, MutationId(charge.id), {"receipt": PLANTED}, ERIN)
    assert run.ledger()[0].late_result == {"receipt": PLANTED}
    assert PLANTED not in stored_text(run.db)
    with run.db.transaction() as tx:
        resolution.acknowledge(tx, MutationId(charge.id), ERIN)


@pytest.mark.parametrize(
    "text",
    ["", "k1", "k1:", "k1:AAAA", "k 1:" + "A" * 43 + "=", "k1:" + "A" * 43 + "=,k1:" + "A" * 43 + "="],
)
def test_keys_that_cannot_be_used_are_refused_and_not_quoted(text: str) -> None:
    with pytest.raises(InvalidInputError, match="expected") as refused:
        AesGcm.from_text(text)
    assert "AAAA" not in str(refused.value)


def test_the_newest_key_encrypts_and_a_ciphertext_belongs_to_its_context() -> None:
    keys = "# made by hand\nk2:" + "B" * 43 + "=\nk1:" + "A" * 43 + "="
    codec, old = AesGcm.from_text(keys), AesGcm.from_text(keys.splitlines()[2])
    sealed = seal(codec, {"a": [1, 2.5, None, "ä"]}, "payload", 1)
    assert (sealed[MARKER]["key"], unseal(codec, sealed, "payload", 1)) == ("k2", {"a": [1, 2.5, None, "ä"]})
    assert seal(codec, 1, "payload", 1) != seal(codec, 1, "payload", 1)
    with pytest.raises(TamperedError):
        unseal(codec, sealed, "payload", 2)
    with pytest.raises(MissingKeyError, match="'k2'"):
        unseal(old, sealed, "payload", 1)
    assert unseal(codec, seal(old, "x", "state", 7), "state", 7) == "x"


@pytest.mark.parametrize("inner", [None, {}, {"key": "k1"}, {"key": 1, "data": "AAAA"}, {"key": "k1", "data": "?"}])
def test_an_envelope_in_another_form_is_refused_without_a_crash(inner: Any) -> None:
    with pytest.raises((TamperedError, MissingKeyError)):
        unseal(AesGcm(K1), {MARKER: inner}, "payload", 1)


def test_a_value_that_only_mentions_the_marker_is_no_sealed_one() -> None:
    value = {MARKER: "a note", "more": 1}
    assert opened(value) is value


def test_a_changed_value_is_described_as_changed() -> None:
    changed = Unreadable({MARKER: {"key": "k1", "data": "?"}}, TamperedError("it was changed"))
    assert description(changed) == {MARKER: "with key k1; it was changed"}
