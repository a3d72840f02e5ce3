"""The code of the guide, as it stands there: type-checked like the rest, and run by ``test_guide.py``."""

import asyncio
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pipeline.consumer_engine import (
    AsyncConsumerMixin,
    ConsumerMixin,
    ExceptionType,
    LoopReport,
    Transaction,
    TransactionException,
    load_policy,
    stopped_by_signals,
)


class Folder:
    def __init__(self, home: Path) -> None:
        self.home, self.given = home, set[str]()
        for name in ("done", "rejected"):
            (home / name).mkdir(exist_ok=True)

    def fetch_transactions(self, batch_size: int) -> Sequence[Transaction]:
        new = [path for path in sorted(self.home.glob("*.txt")) if path.name not in self.given][:batch_size]
        self.given |= {path.name for path in new}
        return [self._item(path) for path in new]

    def ack_transaction(self, transaction: Transaction) -> None:  # optional: the item is done
        (self.home / transaction.transaction_id).rename(self.home / "done" / transaction.transaction_id)

    def nack_transaction(self, transaction: Transaction, requeue: bool = True) -> None:  # optional: the item failed
        if not requeue:
            (self.home / transaction.transaction_id).rename(self.home / "rejected" / transaction.transaction_id)

    def _item(self, path: Path) -> Transaction:
        at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        return Transaction(transaction_id=path.name, payload=path.read_text(), created_at=at)


class CountLines(ConsumerMixin):
    source: Folder

    def __init__(self, home: Path) -> None:
        self.source = Folder(home)

    def process_transaction(self, transaction: Transaction) -> int:
        if not transaction.payload:
            raise TransactionException("it is empty", ExceptionType.BUSINESS)
        return len(transaction.payload.splitlines())

    def handle_transaction_exception(self, transaction: Transaction, error: TransactionException) -> None:
        self.source.nack_transaction(transaction, requeue=error.category is not ExceptionType.BUSINESS)


class AsyncFolder(Folder):
    async def fetch_transactions_async(self, batch_size: int) -> Sequence[Transaction]:
        return await asyncio.to_thread(self.fetch_transactions, batch_size)


class CountLinesAsync(AsyncConsumerMixin):
    source: AsyncFolder

    def __init__(self, home: Path) -> None:
        self.source = AsyncFolder(home)

    async def process_transaction(self, transaction: Transaction) -> int:
        if not transaction.payload:
            raise TransactionException("it is empty", ExceptionType.BUSINESS)
        return len(transaction.payload.splitlines())

    async def handle_transaction_exception(self, transaction: Transaction, error: TransactionException) -> None:
        is_wrong = error.category is ExceptionType.BUSINESS
        await asyncio.to_thread(self.source.nack_transaction, transaction, requeue=not is_wrong)


def run(home: Path) -> LoopReport:
    task = CountLines(home)
    with stopped_by_signals(task):
        return task.consume_transactions(policy=load_policy(Path("policy.toml"), os.environ))


def test_an_empty_file_is_a_business_failure(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    at = datetime(2030, 1, 1, tzinfo=UTC)
    outcome = CountLines(tmp_path).start_processing(Transaction(transaction_id="a.txt", payload="", created_at=at))
    assert outcome.status == "exception"
    assert outcome.error is not None
    assert outcome.error.category == "business"
