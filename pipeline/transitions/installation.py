"""Record which workers run, and sample how the workflows stand. Operators read both; no decision does."""

import json
from datetime import timedelta

from pipeline.domain.installation import WORKER_KEPT, WorkerInfo
from pipeline.store.database import Transaction
from pipeline.store.writes import installation as installation_store

SAMPLES_KEPT = timedelta(days=14)
#: Events, and runs, that one sample counts at most.
_MAX_COUNTED = 200_000
#: Waiting events of one consumer that a sample counts at most.
_MAX_BACKLOG = 100_000


def record_worker(tx: Transaction, worker: WorkerInfo) -> None:
    """Record that a worker runs; forget workers that were not seen for a day."""
    tx.execute(
        installation_store.RECORD_WORKER,
        name=worker.name,
        host=worker.host,
        pid=worker.pid,
        pool=worker.pool,
        concurrency=worker.concurrency,
        queues=list(worker.queues),
        workflows=json.dumps(dict(worker.workflows)),
        code_version=worker.code_version,
        package_version=worker.package_version,
        kept=WORKER_KEPT,
    )


def remove_worker(tx: Transaction, name: str) -> None:
    """Forget a worker that stops in order."""
    tx.execute(installation_store.REMOVE_WORKER, name=name)


def take_sample(tx: Transaction) -> int:
    """Sample every workflow in which something happened or waits. Return their number."""
    return tx.one(installation_store.TAKE_SAMPLE, limit=_MAX_COUNTED, counted=_MAX_BACKLOG).number


def delete_old_samples(tx: Transaction) -> int:
    """Delete samples that are older than two weeks. Return their number."""
    return tx.execute(installation_store.DELETE_SAMPLES, kept=SAMPLES_KEPT)
