"""The spans of a call that outlives its task."""

import threading
from datetime import timedelta
from uuid import UUID

from pipeline.store.database import Database
from pipeline.worker.settings import WorkerPolicy
from tests.support.recorded_spans import Seen, span_id
from tests.support.scripted_consumers import Shop


def test_the_phase_of_a_call_that_outlives_its_task_ends_with_its_outcome(db: Database, seen: Seen) -> None:
    shop, go_on = Shop(), threading.Event()
    shop.mail.make_result = lambda _: go_on.wait(60)
    run = shop.started(db, policy=WorkerPolicy(straggler_wait=timedelta(0)))
    run.scheduler.schedule(["shop"])
    ids = [UUID(id_) for id_ in run.messages.popleft().run_ids]
    run.runner.prepare(ids)
    assert not run.runner.mutate(ids, lambda _: None).continuing
    assert not seen.named("mutate")
    go_on.set()
    run.runner.stragglers.wait()
    call, phase = seen.one("mail.send"), seen.one("mutate")
    assert call.parent is not None
    assert call.parent.span_id == span_id(phase)
    run.run_until_idle()
