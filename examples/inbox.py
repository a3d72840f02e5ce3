"""A consumer that does real work: order files from a folder become rows of a database, each once.

Every file is an item. It is claimed by moving it, so several processes can share a folder; what is
claimed by a process that died is put back when the next one starts. A good order is inserted and its
file goes to `done`; one that makes no sense goes to `rejected` with a word about why; when the
database is busy the order is tried again, and if that does not help its file goes back.

    INBOX=orders pipeline consume examples.inbox:ImportOrders
"""

import json
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from pipeline.engine.consumer import ConsumerMixin
from pipeline.engine.errors import ExceptionType, TransactionException
from pipeline.engine.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    ProcessPolicy,
    RetryPolicy,
)
from pipeline.engine.transactions import Transaction


class Order(BaseModel):
    """What a file must hold."""

    order: str = Field(min_length=1)
    cents: int = Field(gt=0)


class Folder:
    """A source: files that appear in a folder. One that is claimed is moved aside, and settled by moving it again."""

    def __init__(self, home: Path) -> None:
        self.home = home
        for name in ("claimed", "done", "rejected"):
            (home / name).mkdir(parents=True, exist_ok=True)
        for path in (home / "claimed").glob("*.json"):
            path.rename(home / path.name)

    def fetch_transactions(self, batch_size: int, /, **_extra: Any) -> Sequence[Transaction]:
        """Claim the oldest files. Renaming decides between two processes that want the same one."""
        claimed = []
        for path in sorted(self.home.glob("*.json"))[:batch_size]:
            try:
                mine = path.rename(self.home / "claimed" / path.name)
            except FileNotFoundError:
                continue
            at = datetime.fromtimestamp(mine.stat().st_mtime, UTC)
            claimed.append(Transaction(transaction_id=path.name, payload=mine.read_text(), created_at=at))
        return claimed

    def ack_transaction(self, transaction: Transaction, /) -> None:
        """The file is done."""
        self._move(transaction, "done")

    def nack_transaction(self, transaction: Transaction, /, requeue: bool = True) -> None:
        """The file goes back, or to the rejected ones."""
        self._move(transaction, "" if requeue else "rejected")

    def _move(self, transaction: Transaction, where: str) -> None:
        name = transaction.transaction_id
        (self.home / "claimed" / name).rename(self.home / where / name)


class ImportOrders(ConsumerMixin):
    """Inserts orders; the primary key makes a file that comes twice harmless."""

    policy = ConsumerPolicy(
        loop=ConsumerLoopPolicy(
            batch=BatchPolicy(size=50), concurrency=ConcurrencyPolicy(value=4), transaction_timeout=30
        ),
        steps=ConsumerSteps(process=ProcessPolicy(retry=RetryPolicy(max_attempts=5, timeout=10, backoff=0.05))),
    )

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or Path(os.environ.get("INBOX", "inbox"))
        self.source: Folder = Folder(self.home)
        with closing(self._database()) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, cents INTEGER NOT NULL)")

    def process_transaction(self, transaction: Transaction) -> int:
        """Insert one order; how many rows that made."""
        try:
            order = Order.model_validate(json.loads(transaction.payload))
        except (ValueError, ValidationError) as error:
            raise TransactionException("this is not an order", ExceptionType.BUSINESS, cause=error) from error
        with closing(self._database()) as database, database:
            made = database.execute("INSERT OR IGNORE INTO orders VALUES (?, ?)", (order.order, order.cents))
            return made.rowcount

    def handle_transaction_exception(self, transaction: Transaction, error: TransactionException) -> None:
        """Set aside what makes no sense; put back what may work another time."""
        is_wrong = error.category is ExceptionType.BUSINESS
        self.source.nack_transaction(transaction, requeue=not is_wrong)
        if is_wrong:
            (self.home / "rejected" / f"{transaction.transaction_id}.why").write_text(f"{error}: {error.__cause__}\n")

    def _database(self) -> sqlite3.Connection:
        return sqlite3.connect(self.home / "orders.db", timeout=0.2)
