"""The same request for the same inputs keeps its idempotency key until the provider itself has refused it.

So a wrong "did not happen" is harmless where the provider honours keys: the repeat is answered with the old result.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from pipeline import (
    Applied,
    AuthError,
    Backoff,
    Call,
    Connector,
    FailurePolicy,
    LogicError,
    NotFound,
    PrepareResult,
    ReconcilePolicy,
    Retention,
    TransientError,
    Verdict,
    Workflow,
    mutation,
)
from pipeline.domain.policies import MutationRetryPolicy
from pipeline.domain.states import EventId, MutationId
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.testing import Inline
from pipeline.testing.inline import TESTER
from pipeline.transitions import events, resolution, workflows
from pipeline.worker.crash_points import CrashPoint
from tests.support.table_reads import rows

ONCE = MutationRetryPolicy(max_attempts=1)
POLICY = ReconcilePolicy(monitor_after=(timedelta(minutes=10), timedelta(hours=1)))
WINDOW = timedelta(minutes=1)  #: the settle window that the bank declares
DAY = timedelta(days=1)


class Bank(Connector):
    """Does a transfer once per key, answers a repeat with the old result, and keeps refusals under their key too.

    Its search lags: it finds nothing before ``is_found``. ``script`` has an error for each of the next calls, and
    whether the transfer happens first.
    """

    name = "bank"

    def __init__(self) -> None:
        self.script: list[tuple[bool, BaseException]] = []
        self.keys: list[str] = []
        self.transfers: dict[str, Any] = {}
        self.refusals: dict[str, LogicError] = {}
        self.busy_keys: list[str] = []  #: not now, once each
        self.is_found = False
        self.count = 0

    def will(self, error: BaseException, *, applies: bool = False) -> None:
        self.script.append((applies, error))

    def forget_keys(self) -> None:
        self.transfers.clear()

    def _transfer(self, call: Call) -> Any:
        key = call.idempotency_key
        self.keys.append(key)
        if key in self.refusals:
            raise self.refusals[key]
        if key in self.busy_keys:
            self.busy_keys.remove(key)
            raise TransientError("busy")
        if key in self.transfers:
            return self.transfers[key]
        applies, error = self.script.pop(0) if self.script else (True, None)
        if isinstance(error, LogicError):
            self.refusals[key] = error
        if applies:
            self.count += 1
            self.transfers[key] = {"transfer": self.count}
        if error is not None:
            raise error
        return self.transfers[key]

    @mutation(timeout=timedelta(seconds=30), settle=WINDOW, keyed=True, policy=POLICY, retry=ONCE)
    def pay(self, call: Call, *, to: str) -> Any:
        """An operation of grade A."""
        del to
        return self._transfer(call)

    @pay.reconcile
    def find(self, call: Call, *, to: str) -> Verdict:
        del to
        found = self.transfers.get(call.idempotency_key) if self.is_found else None
        return Applied(found) if found else NotFound()

    @mutation(timeout=timedelta(seconds=30), settle=WINDOW, keyed=True, retry=ONCE)
    def wire(self, call: Call, *, to: str) -> Any:
        """An operation of grade C."""
        del to
        return self._transfer(call)

    @mutation(timeout=timedelta(seconds=30), settle=WINDOW, policy=POLICY, retry=ONCE)
    def post(self, call: Call, *, to: str) -> Any:
        """An operation of grade B: the bank does every letter, whatever its key."""
        del to
        self.transfers.pop(call.idempotency_key, None)
        return self._transfer(call)

    @post.reconcile
    def find_post(self, call: Call, *, to: str) -> Verdict:
        return self.find(call, to=to)


class Payroll:
    """One workflow that pays what an event names, and remembers the results that ``next`` received."""

    def __init__(self, db: Database, operation: str = "pay", bank: Bank | None = None, **options: Any) -> None:
        self.db, self.bank = db, bank or Bank()
        self.results: list[Any] = []
        self.request: Callable[[Any], str] = lambda order: str(order.payload)
        chosen = {name: options.pop(name) for name in ("on_logic_error", "concurrency", "retention") if name in options}
        workflow = Workflow("payroll", **chosen)
        self.due = workflow.topic("due")
        payroll = self

        class Pay:
            def prepare(self, ctx: Any, state: Any) -> PrepareResult:
                del state
                found = ctx.peek(payroll.due, limit=options.get("batch", 1))
                return PrepareResult(reserve=found, data=payroll.request(found[0])) if found else PrepareResult()

            def mutate(self, ctx: Any, prepared: Any) -> Any:
                return getattr(ctx.bank, operation)(to=prepared.data)

            def next(self, ctx: Any, prepared: Any, result: Any) -> None:
                del ctx, prepared
                payroll.results.append((result.status, result.value))

        patient = FailurePolicy(max_failures=50, backoff=Backoff(base=timedelta(seconds=1), jitter=0))
        workflow.consumer(subscribes=[self.due], **{"failures": patient, **options})(Pay)
        self.inline = Inline(db, [workflow], [self.bank])

    @property
    def keys(self) -> list[str]:
        return [row.idempotency_key for row in self.inline.ledger()]

    def publish(self, *payloads: str) -> None:
        self.inline.publish(self.due, *payloads)
        self.inline.run()

    def go_on(self, by: timedelta = timedelta(minutes=2)) -> None:
        """Let time pass, and let sweeps and workers do what is due."""
        self.inline.advance(by)
        self.inline.sweeps.rescue()
        self.inline.sweeps.reconcile()
        self.inline.sweeps.tick()
        self.inline.run()

    def deny(self, *, is_refused: bool = False) -> None:
        """Let an operator say that the newest mutation did not happen."""
        with self.db.transaction() as tx:
            resolution.did_not_happen(tx, MutationId(self.inline.ledger()[-1].id), TESTER, is_refused=is_refused)
        self.inline.sweeps.tick()
        self.inline.run()

    def findings(self) -> list[str]:
        self.inline.sweeps.sessions()
        with self.db.transaction() as tx:
            return [finding.invariant for finding in invariants.findings(tx)]


def test_a_wrong_not_found_is_harmless_where_the_provider_honours_keys(db: Database) -> None:
    payroll = Payroll(db)
    payroll.bank.will(TimeoutError("no answer"), applies=True)
    payroll.publish("ada")
    payroll.go_on()
    first, second = payroll.inline.ledger()
    assert (first.status, first.resolved_by, second.status) == ("failed", "reconcile", "applied")
    assert first.idempotency_key == second.idempotency_key
    assert payroll.bank.count == 1
    assert payroll.results == [("applied", {"transfer": 1})], "the repeat is answered with the old result"


@pytest.mark.parametrize("operation", ["pay", "wire"])
def test_an_operators_wrong_did_not_happen_is_harmless_with_grades_a_and_c(db: Database, operation: str) -> None:
    payroll = Payroll(db, operation)
    payroll.bank.will(TimeoutError("no answer"), applies=True)
    payroll.publish("ada")
    payroll.inline.advance(timedelta(minutes=2))
    payroll.deny()
    assert len(set(payroll.keys)) == 1
    assert [row.status for row in payroll.inline.ledger()] == ["failed", "applied"]
    assert payroll.bank.count == 1
    assert payroll.results == [("applied", {"transfer": 1})]


def test_the_key_is_kept_through_any_number_of_weak_verdicts(db: Database) -> None:
    payroll = Payroll(db)
    for _ in range(4):
        payroll.bank.will(TimeoutError("no answer"))
    payroll.publish("ada")
    for _ in range(5):
        payroll.go_on()
    assert (len(payroll.keys), len(set(payroll.keys)), payroll.bank.count) == (5, 1, 1)


def test_a_refusal_of_the_request_gives_the_repeat_a_new_key(db: Database) -> None:
    payroll = Payroll(db, on_logic_error="quarantine", failures=FailurePolicy(quarantine_after=1))
    payroll.bank.will(LogicError("the account is empty"))
    payroll.publish("ada")
    (delivery,) = payroll.inline.deliveries(payroll.due)
    assert delivery.status == "quarantined"
    with db.transaction() as tx:
        events.release(tx, "payroll", "Pay", EventId(delivery.event_id), TESTER)
    payroll.go_on()
    first, second = payroll.inline.ledger()
    assert (first.refused, second.status) == (True, "applied")
    assert first.effect_id == second.effect_id
    assert [key.rpartition(":")[2] for key in payroll.keys] == ["0", "1"]


def test_retention_keeps_what_counts_the_keys_of_an_event_that_is_still_open(db: Database) -> None:
    month = timedelta(days=30)
    given: dict[str, Any] = {"retention": Retention(done=month, ledger=month), "on_logic_error": "quarantine"}
    payroll = Payroll(db, failures=FailurePolicy(quarantine_after=1), **given)
    payroll.bank.will(LogicError("the account is empty"))
    payroll.publish("ada")
    payroll.inline.advance(2 * month)
    payroll.inline.sweeps.retention()
    assert len(payroll.keys) == 1, "without it a repeat would have the refused key again, or that of an older request"
    (delivery,) = payroll.inline.deliveries(payroll.due)
    with db.transaction() as tx:
        events.release(tx, "payroll", "Pay", EventId(delivery.event_id), TESTER)
    payroll.go_on()
    assert [key.rpartition(":")[2] for key in payroll.keys] == ["0", "1"]
    payroll.inline.advance(2 * month)
    payroll.inline.sweeps.retention()
    payroll.inline.sweeps.retention()
    assert payroll.keys == [], "the event is done, and so is its ledger"


@pytest.mark.parametrize("error", [TransientError("busy"), AuthError("no such token")])
def test_not_now_and_not_allowed_refuse_no_request_and_keep_the_key(db: Database, error: Exception) -> None:
    payroll = Payroll(db)
    payroll.bank.will(TimeoutError("no answer"), applies=True)
    payroll.publish("ada")
    first = payroll.keys[0]
    result = payroll.bank.transfers.pop(first)
    payroll.bank.will(error)
    payroll.go_on()
    assert [row.refused for row in payroll.inline.ledger()] == [False, False]
    payroll.bank.transfers[first] = result
    with db.transaction() as tx:
        workflows.resume(tx, "payroll", TESTER)
    payroll.go_on()
    assert (set(payroll.keys), payroll.bank.count) == ({first}, 1), "the earlier request with this key was carried out"


def test_another_request_for_the_same_inputs_has_another_key(db: Database) -> None:
    payroll = Payroll(db)
    payroll.bank.will(TimeoutError("no answer"))
    payroll.publish("ada")
    payroll.request = lambda order: f"{order.payload} and company"
    payroll.go_on()
    first, second = payroll.inline.ledger()
    assert first.effect_id != second.effect_id
    assert len(set(payroll.keys)) == 2


def test_the_same_request_for_other_inputs_has_another_key(db: Database) -> None:
    payroll = Payroll(db)
    payroll.publish("ada", "ada")
    payroll.go_on()
    assert (len(set(payroll.keys)), payroll.bank.count) == (2, 2)


def test_a_run_whose_worker_died_before_the_ledger_knew_leaves_the_key_to_the_next(db: Database) -> None:
    payroll = Payroll(db)
    with payroll.inline.crash_at(CrashPoint.MUTATE_CLAIMED):
        payroll.publish("ada")
    payroll.go_on(timedelta(hours=1))
    payroll.go_on()
    assert len(payroll.inline.runs()) >= 2
    assert payroll.keys[0].endswith(":0")
    assert payroll.bank.count == 1


def test_a_request_that_waits_days_for_approval_keeps_the_key_of_the_first_try(db: Database) -> None:
    payroll = Payroll(db, "wire", requires_approval=True)
    payroll.publish("ada")
    payroll.bank.will(TimeoutError("no answer"), applies=True)
    payroll.inline.approve(payroll.inline.ledger()[0])
    payroll.go_on()
    payroll.inline.advance(timedelta(minutes=2))
    payroll.deny()
    payroll.inline.advance(3 * DAY)
    (pending,) = [row for row in payroll.inline.ledger() if row.status == "pending"]
    payroll.inline.approve(pending)
    payroll.go_on()
    assert (len(payroll.keys), len(set(payroll.keys)), payroll.bank.count) == (2, 1, 1)


def test_an_approval_that_was_never_sent_uses_no_key_up(db: Database) -> None:
    payroll = Payroll(db, "post", requires_approval=True)
    payroll.publish("ada")
    payroll.inline.approve(payroll.inline.ledger()[0])
    with payroll.inline.crash_at(CrashPoint.MUTATE_CLAIMED):
        payroll.inline.run()
    payroll.go_on(timedelta(hours=1))
    void, pending = payroll.inline.ledger()
    assert (void.resolved_by, pending.status) == ("void", "pending")
    assert void.idempotency_key == pending.idempotency_key


def test_an_operation_without_keys_gets_a_new_one_after_every_failure(db: Database) -> None:
    """The provider protects nothing there, and two keys tell the two effects apart."""
    payroll = Payroll(db, "post")
    payroll.bank.will(TimeoutError("no answer"), applies=True)
    payroll.publish("ada")
    payroll.go_on()
    assert [key.rpartition(":")[2] for key in payroll.keys] == ["0", "1"]
    assert payroll.bank.count == 2
    payroll.bank.is_found = True
    payroll.inline.advance(timedelta(minutes=11))
    payroll.inline.sweeps.reconcile()
    assert payroll.findings() == ["failed-mutations-have-no-late-effect"]
    with db.transaction() as tx:
        resolution.acknowledge(tx, MutationId(payroll.inline.ledger()[0].id), TESTER)


def test_an_effect_that_is_found_under_the_key_of_its_repeat_is_one_effect_and_no_alarm(db: Database) -> None:
    payroll = Payroll(db)
    payroll.bank.will(TimeoutError("no answer"), applies=True)
    payroll.publish("ada")
    payroll.go_on()
    payroll.bank.is_found = True
    payroll.inline.advance(timedelta(minutes=11))
    payroll.inline.sweeps.reconcile()
    first, second = payroll.inline.ledger()
    assert (first.found_late_at, first.next_monitor_at) == (None, None)
    (kept,) = rows(db, "SELECT reason FROM pipeline.audit WHERE act = 'mutation.replacement_effect_found'")
    assert kept.reason == f"run {second.run_id} sent it again under the same key, so it happened once"
    assert payroll.findings() == []


def test_a_late_answer_to_a_request_that_was_repeated_under_its_key_is_no_alarm(db: Database) -> None:
    """A worker froze with the answer; meanwhile an operator denied it and another run repeated it."""
    payroll = Payroll(db, "wire")
    frozen: list[CrashPoint] = []

    def freeze(point: CrashPoint) -> None:
        if point is CrashPoint.CALLED and not frozen:
            frozen.append(point)
            payroll.inline.advance(timedelta(minutes=15))
            payroll.inline.sweeps.rescue()
            payroll.deny()

    with payroll.inline.on_crash_points(freeze):
        payroll.publish("ada")
    payroll.go_on()
    assert [row.status for row in payroll.inline.ledger()] == ["failed", "applied"]
    assert (payroll.bank.count, payroll.findings()) == (1, [])


def test_the_order_of_a_batch_does_not_change_the_key(db: Database) -> None:
    payroll = Payroll(db, "wire", batch=2)
    payroll.bank.will(TimeoutError("no answer"), applies=True)
    payroll.publish("ada", "bob")
    payroll.inline.advance(timedelta(minutes=2))
    payroll.deny()
    assert ([len(run.event_ids) for run in payroll.inline.runs()], len(set(payroll.keys))) == ([2, 2], 1)
    assert payroll.bank.count == 1


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("fails", ["nothing", "prepare", "call"])
@pytest.mark.parametrize("later", [(), ("cy",)], ids=["alone", "beside another"])
def test_a_batch_stays_together_after_a_weak_verdict_whatever_fails_or_arrives_then(
    db: Database, later: tuple[str, ...], fails: str, concurrency: int
) -> None:
    """A half of it, or a larger batch, would be another request with another key: what happened would happen again."""
    payroll = Payroll(db, batch=3, concurrency=concurrency)
    payroll.bank.will(TimeoutError("no answer"), applies=True)
    payroll.publish("ada", "bob")
    (key,) = payroll.keys
    request, troubles = payroll.request, [RuntimeError("no such customer for now")]
    if fails == "prepare":
        payroll.request = lambda order: request(order) if not troubles else _raised(troubles.pop())
    if fails == "call":
        payroll.bank.busy_keys.append(key)
    payroll.inline.publish(payroll.due, *later)
    for _ in range(4):
        payroll.go_on()
    paid = [len(run.event_ids) for run in payroll.inline.runs() if run.status == "committed" and run.event_ids]
    assert (sorted(paid), payroll.bank.count) == ([*(1 for _ in later), 2], 1 + len(later))
    assert [row.idempotency_key for row in payroll.inline.ledger() if row.status == "applied"].count(key) == 1
    assert payroll.findings() == []


def test_events_that_stay_together_do_so_after_an_operator_forgets_their_failures(db: Database) -> None:
    payroll = Payroll(db, "wire", batch=2, failures=FailurePolicy(max_failures=1))
    payroll.bank.will(TimeoutError("no answer"), applies=True)
    payroll.publish("ada", "bob")
    payroll.bank.busy_keys += payroll.keys
    payroll.inline.advance(timedelta(minutes=2))
    payroll.deny()
    assert [row.kind for row in rows(db, "SELECT kind FROM pipeline.blocks WHERE closed_at IS NULL")] == ["internal"]
    with db.transaction() as tx:
        workflows.resume(tx, "payroll", TESTER, forget_failures=True)
    payroll.go_on()
    assert (len(set(payroll.keys)), payroll.bank.count) == (1, 1)


def test_a_plan_that_is_given_up_after_a_weak_verdict_is_quarantined_as_a_whole(db: Database) -> None:
    patience = FailurePolicy(max_failures=2)
    payroll = Payroll(
        db, "wire", batch=2, failures=patience, after_failed_mutation="mutate", on_logic_error="quarantine"
    )
    payroll.bank.will(TimeoutError("no answer"), applies=True)
    payroll.publish("ada", "bob")
    payroll.bank.busy_keys += payroll.keys * 2
    payroll.inline.advance(timedelta(minutes=2))
    payroll.deny()
    for _ in range(3):
        payroll.go_on()
    assert [row.status for row in payroll.inline.deliveries(payroll.due)] == ["quarantined"] * 2
    assert (len(set(payroll.keys)), payroll.bank.count) == (1, 1)


def _raised(error: Exception) -> Any:
    raise error


def test_a_batch_that_the_provider_has_refused_may_be_narrowed_down(db: Database) -> None:
    payroll = Payroll(db, "wire", batch=2)
    payroll.bank.will(TimeoutError("no answer"))
    payroll.publish("ada", "bob")
    payroll.inline.advance(timedelta(minutes=2))
    payroll.bank.will(TransientError("busy"))
    payroll.deny(is_refused=True)
    payroll.go_on()
    assert [len(run.event_ids) for run in payroll.inline.runs() if run.status == "committed"][:2] == [1, 1]


class ForgetfulBank(Bank):
    """Keeps keys for a day."""

    @mutation(timeout=timedelta(seconds=30), settle=WINDOW, keyed=True, key_lifetime=DAY, retry=ONCE)
    def cable(self, call: Call, *, to: str) -> Any:
        del to
        return self._transfer(call)


@pytest.mark.parametrize(("after", "numbers"), [(DAY / 2, ["0", "0"]), (2 * DAY, ["0", "1"])])
def test_a_key_that_the_provider_has_forgotten_is_used_up(db: Database, after: timedelta, numbers: list[str]) -> None:
    payroll = Payroll(db, "cable", ForgetfulBank())
    payroll.bank.will(TimeoutError("no answer"), applies=True)
    payroll.publish("ada")
    sent: Any = payroll.inline.ledger()[0]
    assert (sent.key_lifetime, sent.key_expires_at) == (DAY, sent.sent_at + DAY)
    payroll.inline.advance(after)
    payroll.deny()
    assert [key.rpartition(":")[2] for key in payroll.keys] == numbers
    newest: Any = payroll.inline.ledger()[-1]
    assert newest.key_expires_at == (sent.key_expires_at if len(set(numbers)) == 1 else newest.sent_at + DAY), (
        "a provider counts from the first request with a key"
    )


def test_a_provider_that_keeps_its_own_error_under_the_key_ends_before_an_operator(db: Database) -> None:
    payroll = Payroll(db)
    payroll.bank.will(TimeoutError("500"))
    payroll.publish("ada")
    key = payroll.keys[0]
    for _ in range(40):
        payroll.bank.will(TimeoutError("500, as before"))
        payroll.go_on()
    newest = payroll.inline.ledger()[-1]
    assert (newest.status, set(payroll.keys)) == ("indeterminate", {key})
    assert "may keep its own error under the key" in (newest.error or "")
    payroll.bank.script.clear()
    payroll.deny(is_refused=True)
    payroll.go_on()
    assert payroll.keys[-1] != key, "the operator found out that the provider has not done it"
    assert (payroll.inline.ledger()[-1].status, payroll.bank.count) == ("applied", 1)
