"""The objects of a worker process, made once per process and never carried across a fork."""

import os
import secrets
from dataclasses import dataclass
from functools import cached_property

from pipeline.background.notifier import LogNotifier, Notifier, WebhookNotifier
from pipeline.background.scheduler import Scheduler
from pipeline.background.sweeps import Sweeps, periods
from pipeline.config import Settings
from pipeline.domain.values import Limits
from pipeline.store.database import LOCK_TIMEOUT, Database
from pipeline.tasks import messages
from pipeline.worker.leases import Leases
from pipeline.worker.runner import Runner
from pipeline.worker.settings import WorkerPolicy
from pipeline.workflows.registry import Registry

_random = secrets.SystemRandom()


@dataclass
class WorkerProcess:
    """Settings, pool, registry, runner and scheduler of one process."""

    settings: Settings
    pid: int

    @cached_property
    def db(self) -> Database:
        settings = self.settings
        # a write that waits for a lock must not cost its runs their leases
        lock_timeout = min(LOCK_TIMEOUT, settings.lease / 4)
        return Database.connect(settings.database_url, pool_size=settings.pool_size, lock_timeout=lock_timeout)

    @cached_property
    def registry(self) -> Registry:
        return Registry.load(self.settings.workflows)

    @cached_property
    def leases(self) -> Leases:
        return Leases(self.db, lease=self.settings.lease, every=self.settings.heartbeat)

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

    @cached_property
    def scheduler(self) -> Scheduler:
        settings, speeds = self.settings, self.runner.durations
        return Scheduler(
            self.db,
            messages.dispatch,
            lease=settings.lease,
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
            periods=periods(self.settings.tick),
        )


_processes: dict[int, WorkerProcess] = {}


def current_process() -> WorkerProcess:
    """Return the objects of this process; a forked child gets its own."""
    pid = os.getpid()
    if pid not in _processes:
        _processes.clear()
        _processes[pid] = WorkerProcess(settings=Settings.load(os.environ), pid=pid)
    return _processes[pid]
