"""Asking a consumer to end: from another thread, from a signal, politely and now."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.consumer_engine.attempts import StopToken
from pipeline.consumer_engine.consumer import stopped_by_signals
from pipeline.consumer_engine.lifecycle import Ending, ItemStatus, Step
from pipeline.consumer_engine.policies import EmptyQueuePolicy, RetryPolicy
from tests.consumer_engine.scripted_tasks import (
    AsyncRun,
    Batches,
    Cut,
    Does,
    Run,
    Script,
    ScriptRun,
    check,
    item,
    items,
    policy,
    run_script,
)
from tests.support.rule import rule
from tests.support.wait import wait_for

#: Beside pauses and bodies that are longer by far.
SOON, BODY = 40, 60


def asked(variant: Run, script: Script, source: Batches, chosen: Any, when: Callable[[], Any], **how: Any) -> ScriptRun:
    """Run, and ask to end from another thread once ``when`` holds; ``then`` is set when that is done."""
    task = variant.task(script)
    then = how.pop("then", threading.Event())

    def ask() -> None:
        wait_for(when)
        task.stop(**how)
        then.set()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        return run_script(variant, script, source, chosen, task=task)
    finally:
        asking.join()


@rule("E-24")
@check("E23")
def test_a_pause_after_an_empty_fetch_ends_on_a_stop_request(variant: Run) -> None:
    source = Cut([])
    run = asked(
        variant,
        Script(),
        source,
        policy(streaming=True, empty=EmptyQueuePolicy(backoff=60, backoff_cap=0)),
        lambda: source.asked,
    )
    assert (run.report.ending, run.report.processed, run.error) == (Ending.STOPPED, 0, None)
    assert run.seconds < SOON
    assert len(source.asked) == 1


@check("E23")
def test_fetched_items_are_settled_and_nothing_more_is_fetched(variant: Run) -> None:
    was_asked = threading.Event()
    script = Script(always={Step.PROCESS: Does(takes=BODY, until=was_asked)})
    source = Cut(items(50))
    run = asked(variant, script, source, policy(concurrency=2, size=6), lambda: script.begun, then=was_asked)
    assert (run.report.succeeded, run.report.unfinished, run.report.ending) == (6, 0, Ending.STOPPED)
    assert len(source.asked) == 1


@rule("E-22")
@check("E23")
def test_pauses_between_attempts_are_cut_short_but_the_attempts_are_made(variant: Run) -> None:
    script = Script().will_process("t-0", Does(raises=OSError("busy")), Does(raises=OSError("busy")), Does(returns=1))
    retry = RetryPolicy(max_attempts=3, backoff=60)
    run = asked(variant, script, Cut(items(1)), policy(process=retry), lambda: script.begun)
    assert run.seconds < SOON
    assert script.count(Step.PROCESS) == 3
    assert run.statuses == [ItemStatus.SUCCESS]


@check("E23")
def test_a_failed_fetch_is_not_retried_after_a_stop_request(variant: Run) -> None:
    source = Batches(*[Does(raises=OSError("busy"))] * 9)
    retry = RetryPolicy(max_attempts=9, backoff=60)
    run = asked(variant, Script(), source, policy(fetch=retry), lambda: source.asked)
    assert (run.report.ending, run.error) == (Ending.STOPPED, None)
    assert run.seconds < SOON
    assert len(source.asked) == 1


@check("E23")
def test_items_that_arrive_during_a_stop_request_are_settled(variant: Run) -> None:
    was_asked = threading.Event()
    source = Batches(Does(takes=BODY, until=was_asked, returns=items(2)), items(2, start=2))
    run = asked(variant, Script(), source, policy(), lambda: source.asked, then=was_asked)
    assert (run.report.succeeded, run.report.ending, len(source.asked)) == (2, Ending.STOPPED, 1)


@rule("E-24")
@pytest.mark.parametrize("now", [False, True])
@check("E19", "E23")
def test_the_wait_for_a_bounded_fetch_ends_soon_after_a_stop_request_without_an_error(
    variant: Run, now: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source = Batches(Does(takes=BODY, returns=items(1)))
    chosen = policy(streaming=True, fetch=RetryPolicy(timeout=60))
    run = asked(variant, Script(), source, chosen, lambda: source.asked, now=now)
    assert (run.error, run.report.ending, run.report.fetched) == (None, Ending.STOPPED, 0)
    assert run.seconds < SOON
    assert "gave up its fetch after a stop request: it did not return" in caplog.text


@check("E23")
def test_a_bounded_fetch_that_is_nearly_done_is_not_lost_on_a_stop_request(
    variant: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.consumer_engine.lifecycle.GRACE", float(BODY))
    was_asked = threading.Event()
    source = Batches(Does(takes=BODY, until=was_asked, returns=items(2)))
    chosen = policy(streaming=True, fetch=RetryPolicy(timeout=60))
    run = asked(variant, Script(), source, chosen, lambda: source.asked, then=was_asked)
    assert (run.report.succeeded, run.report.ending) == (2, Ending.STOPPED)


@rule("E-24")
@pytest.mark.parametrize("limit", [None, 0.4])
@check("E19", "E23")
def test_a_fetch_that_fails_or_is_late_after_a_stop_request_is_given_up_and_logged(
    variant: Run, limit: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    task = variant.task(Script())
    fails = Does(takes=0.1 if limit is None else BODY, raises=OSError("the client is closing"))
    source = AsksFirst(task, fails)
    run = run_script(variant, task.script, source, policy(fetch=RetryPolicy(timeout=limit)), task=task)
    assert (run.error, run.report.ending) == (None, Ending.STOPPED)
    assert "gave up its fetch after a stop request" in caplog.text
    assert ("the client is closing" in caplog.text) is (limit is None)


class AsksFirst(Batches):
    """A source whose task is asked to end when a fetch has begun, and not a moment later."""

    def __init__(self, task: Any, *given: Does) -> None:
        super().__init__(*given)
        self.task = task

    def _next(self, batch_size: int, extra: dict[str, Any]) -> Any:
        self.task.stop()
        return super()._next(batch_size, extra)


def test_with_asyncio_stop_now_also_cancels_a_fetch_without_a_limit() -> None:
    source = Batches(Does(takes=BODY))
    run = asked(AsyncRun(), Script(), source, policy(), lambda: source.asked, now=True)
    assert (run.error, run.report.ending, run.seconds < SOON) == (None, Ending.STOPPED, True)


@check("E23")
def test_stop_now_during_a_fetch_starts_none_of_its_items(variant: Run) -> None:
    script, chosen = Script(), policy(concurrency=4)
    task = variant.task(script)
    source = Batches(Does(act=lambda: task.stop(now=True), returns=items(4)))
    run = run_script(variant, script, source, chosen, task=task)
    assert script.begun == []
    if variant.name == "threads":  # with asyncio the fetch itself is left
        assert (run.report.unfinished, run.report.fetched) == (4, 4)
    assert (run.report.processed, run.report.ending) == (0, Ending.STOPPED)
    wait_for(lambda: len(task._state.in_flight) == 0)


@check("E23")
def test_the_pauses_of_a_single_item_end_on_a_stop_request(variant: Run) -> None:
    script = Script().will_process("t-0", Does(raises=OSError("busy")), Does(returns=1))
    task = variant.task(script)
    task.policy = policy(process=RetryPolicy(max_attempts=2, backoff=60))
    threading.Timer(0.2, task.stop).start()
    begun = time.monotonic()
    assert variant.process(task, item("t-0")).status is ItemStatus.SUCCESS
    assert time.monotonic() - begun < SOON


def test_stop_now_stays_and_a_finished_loop_leaves_no_listener() -> None:
    received: list[int] = []
    stop = StopToken()
    with stop.subscribe(lambda: received.append(1)):
        stop.request(now=True)
        stop.request()
    assert stop.is_immediate
    stop.request()
    assert received == [1, 1]


@check("E21", "E23")
def test_deferred_items_are_settled_too_after_a_stop_request(variant: Run) -> None:
    was_asked = threading.Event()
    script = Script(always={Step.PROCESS: Does(takes=BODY, until=was_asked)})
    same = [item("same") for _ in range(4)]
    run = asked(variant, script, Batches(same), policy(concurrency=2), lambda: script.begun, then=was_asked)
    assert (run.report.succeeded, run.report.unfinished, run.report.ending) == (4, 0, Ending.STOPPED)
    assert script.overlaps == 0


@check("E23")
def test_stop_now_leaves_the_open_items(variant: Run) -> None:
    freed = threading.Event()
    script = Script(always={Step.PROCESS: Does(takes=BODY, until=freed)})
    run = asked(variant, script, Cut(items(9)), policy(concurrency=2, size=5), lambda: len(script.begun) == 2, now=True)
    assert run.seconds < SOON
    assert (run.report.unfinished, run.report.processed, run.report.ending) == (5, 0, Ending.STOPPED)
    assert getattr(variant, "orphans", []) == []
    freed.set()
    wait_for(lambda: not any(script.running.values()))
    assert script.count(Step.PROCESS) == 2
    assert (script.count(Step.SUCCESS), script.count(Step.EXCEPTION)) == (0, 0)
    wait_for(lambda: len(run.task._state.in_flight) == 0)


@check("E23")
def test_a_task_with_a_stop_request_before_its_start_does_nothing(variant: Run) -> None:
    script, source = Script(), Cut(items(3))
    task = variant.task(script)
    task.stop()
    task.stop()
    run = run_script(variant, script, source, policy(), task=task)
    assert (run.report.processed, run.report.ending, source.asked) == (0, Ending.STOPPED, [])


def test_the_first_signal_stops_the_second_stops_now_and_the_handlers_are_restored() -> None:
    class Asked:
        def __init__(self) -> None:
            self.received = StopToken()

        def stop(self, *, now: bool = False) -> None:
            self.received.request(now=now)

    task, before = Asked(), signal.getsignal(signal.SIGTERM)
    with stopped_by_signals(task):
        signal.raise_signal(signal.SIGTERM)
        assert (task.received.is_requested, task.received.is_immediate) == (True, False)
        signal.raise_signal(signal.SIGINT)
        assert task.received.is_immediate
    assert signal.getsignal(signal.SIGTERM) is before


PROGRAM = """
import asyncio, sys, threading
from datetime import UTC, datetime
from pathlib import Path
from pipeline.consumer_engine.consumer import AsyncConsumerMixin, ConsumerMixin
from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.consumer_engine.consumer import stopped_by_signals
from pipeline.consumer_engine.transactions import Transaction

def tell(text):
    sys.stdout.write(text + "\\n"); sys.stdout.flush()

def batch():
    return [Transaction(transaction_id=str(n), created_at=datetime(2030, 1, 1, tzinfo=UTC)) for n in range(3)]

class Source:
    given = False
    def fetch_transactions(self, size):
        given, self.given = self.given, True
        if given:
            tell("nothing")
        return [] if given else batch()
    async def fetch_transactions_async(self, size):
        return self.fetch_transactions(size)

class Threaded(ConsumerMixin):
    def process_transaction(self, transaction):
        tell("begun")
        while Path(sys.argv[2]).exists():
            threading.Event().wait(0.02)

class Awaited(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        tell("begun")
        while Path(sys.argv[2]).exists():
            await asyncio.sleep(0.02)

streaming = ConsumerPolicy.model_validate({"loop": {"streaming": True, "batch": {"size": 3},
    "concurrency": {"value": 3}, "empty_queue": {"backoff": 60, "backoff_cap": 0}}})
if sys.argv[1] == "threads":
    task = Threaded()
    with stopped_by_signals(task):
        report = task.consume_transactions(source=Source(), policy=streaming)
else:
    task = Awaited()
    with stopped_by_signals(task):
        report = asyncio.run(task.consume_transactions(source=Source(), policy=streaming))
tell(f"{report.succeeded} {report.ending}")
"""


@pytest.mark.parametrize("wait", ["at work", "at rest"])
@check("E23")
def test_a_real_process_settles_its_items_after_sigterm(variant: Run, wait: str, project: Path, tmp_path: Path) -> None:
    held = tmp_path / "held"  # as long as it is there, nothing ends
    if wait == "at work":
        held.touch()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, variant.name, str(held)], cwd=project, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline() == "begun\n"
        if wait == "at rest":
            assert process.stdout.readline() == "nothing\n"
        sent = time.monotonic()
        process.send_signal(signal.SIGTERM)
        held.unlink(missing_ok=True)
        assert process.stdout.readline() == "3 stopped\n"
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - sent < 40  # it would rest for a minute
