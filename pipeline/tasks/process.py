"""The objects of a worker process, made once per process and never carried across a fork."""

import functools
import math
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from sqlalchemy import event

from pipeline.background.notifier import LogNotifier, Notifier, WebhookNotifier
from pipeline.background.scheduler import Scheduler
from pipeline.background.sweeps import Sweeps, periods
from pipeline.celery import installed
from pipeline.config import Settings
from pipeline.domain.values import Limits
from pipeline.store.codecs import settings_codec
from pipeline.store.database import LOCK_TIMEOUT, Database
from pipeline.tasks import messages
from pipeline.worker.leases import Leases
from pipeline.worker.runner import Runner
from pipeline.worker.settings import WorkerPolicy
from pipeline.workflows.registry import Registry

_random = secrets.SystemRandom()

#: A cohort is made so large that it takes a quarter of this. How soon a death is noticed has no say in that.
_COHORT_TIME = timedelta(minutes=1)


@dataclass
class WorkerProcess:
    """Settings, pool, registry, runner and scheduler of one process."""

    settings: Settings
    pid: int

    @cached_property
    def db(self) -> Database:
        settings = self.settings
        # heartbeats skip a row that a write has locked while it waits for another: it must not wait for a whole lease
        lock_timeout = min(LOCK_TIMEOUT, settings.lease / 2)
        db = Database.connect(settings.database_url, pool_size=settings.pool_size, lock_timeout=lock_timeout)
        db.codecs = self.registry.codecs(settings_codec(settings))
        return db

    @cached_property
    def registry(self) -> Registry:
        return Registry.load(self.settings.workflows)

    @cached_property
    def leases(self) -> Leases:
        settings = self.settings
        db = Database.connect(settings.database_url, pool_size=1, lock_timeout=settings.lease / 4)
        event.listen(db.engine, "do_connect", functools.partial(_hurry, settings.lease))
        return Leases(db, lease=settings.lease, every=settings.heartbeat)

    @cached_property
    def policy(self) -> WorkerPolicy:
        settings = self.settings
        return WorkerPolicy(
            lease=settings.lease,
            step_limit=settings.step_time_limit,
            cohort_budget=min(settings.prepare_time_limit, settings.next_time_limit) / 2,
            mutation_budget=settings.mutate_time_limit / 2,
            mutation_concurrency=settings.mutation_concurrency,
            limits=Limits(
                payload=settings.max_payload_bytes,
                prepare_result=settings.max_prepare_result_bytes,
                state=settings.max_state_bytes,
            ),
        )

    @cached_property
    def runner(self) -> Runner:
        return Runner(self.db, self.registry, self.leases, self.policy, _random.random)

    def drain(self, must_end: Callable[[], bool]) -> None:
        """Wait for the outcomes of calls that outlived their tasks, unless this process must end before."""
        if "runner" in self.__dict__:
            self.runner.stragglers.wait(must_end)

    @cached_property
    def scheduler(self) -> Scheduler:
        settings, speeds = self.settings, self.runner.durations
        return Scheduler(
            self.db,
            messages.dispatch,
            cohort_time=_COHORT_TIME,
            max_cohort_size=settings.max_cohort_size,
            per_run=speeds.per_run,
        )

    @cached_property
    def notifier(self) -> Notifier:
        settings = self.settings
        if not settings.notify_url:
            return LogNotifier()
        return WebhookNotifier(settings.notify_url, settings.notify_secret.get_secret_value())

    @cached_property
    def sweeps(self) -> Sweeps:
        return Sweeps(
            db=self.db,
            registry=self.registry,
            scheduler=self.scheduler,
            jitter=_random.random,
            redispatch_after=self.settings.redispatch_after,
            dispatch_reconcile=messages.dispatch_reconcile,
            redispatch_reconcile=messages.redispatch_reconcile,
            notifier=self.notifier,
            allowed_unsafe_settings=self.settings.allowed_unsafe_settings,
            outage=self.settings.lease * 7 / 8 - self.settings.heartbeat,
            periods=periods(self.settings.tick),
        )


def _hurry(lease: timedelta, _dialect: Any, _record: Any, _args: Any, parameters: dict[str, Any]) -> None:
    """Let a connection for heartbeats notice sooner than a lease lasts that its server has vanished."""
    parameters["connect_timeout"] = max(2, math.ceil(lease.total_seconds() / 4))
    parameters["tcp_user_timeout"] = lease // timedelta(milliseconds=2)


_processes: dict[int, WorkerProcess] = {}


def current_process() -> WorkerProcess:
    """Return the objects of this process; a forked child gets its own."""
    pid = os.getpid()
    if pid not in _processes:
        _processes.clear()
        _processes[pid] = WorkerProcess(settings=installed().load_settings(), pid=pid)
    return _processes[pid]
