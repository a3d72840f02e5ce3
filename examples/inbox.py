"""Import order files from a folder into a database, each order once.

Every file is an item. A process claims it by moving it into its own folder, so several processes can share an inbox. A
process that starts puts back the files of a process that died.

- A good order is inserted, and its file goes to `done`.
- A file that is no order goes to `rejected`, with the reason.
- If the database is busy, the order is tried again. If that does not help, its file waits in `later` until the next
  start.

    INBOX=orders pipeline consume examples.inbox:ImportOrders
"""

import fcntl
import json
import os
import sqlite3
import uuid
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from pipeline.consumer_engine import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerMixin,
    ConsumerPolicy,
    ConsumerSteps,
    ExceptionType,
    ProcessPolicy,
    RetryPolicy,
    Transaction,
    TransactionException,
    error_message,
)


class Order(BaseModel):
    """The content of a file."""

    order: str = Field(min_length=1)
    cents: int = Field(gt=0)


class Folder:
    """A source of files in a folder. Claiming a file moves it, and finishing it moves it again."""

    def __init__(self, home: Path) -> None:
        self.home = home
        for name in ("claimed", "done", "later", "rejected"):
            (home / name).mkdir(parents=True, exist_ok=True)
        self.mine = self._own_folder()
        for path in (home / "claimed").glob("[!.]*"):
            self._put_back_if_dead(path)
        for path in (home / "later").glob("*.json"):
            self._put_back(path)

    def fetch_transactions(self, batch_size: int, /, **_extra: Any) -> Sequence[Transaction]:
        """Claim the first files. If two processes want the same file, the rename lets one of them have it."""
        claimed = []
        for path in sorted(self.home.glob("*.json"))[:batch_size]:
            with suppress(FileNotFoundError):
                mine = path.rename(self.mine / path.name)
                at = datetime.fromtimestamp(mine.stat().st_mtime, UTC)
                claimed.append(Transaction(transaction_id=path.name, created_at=at))
        return claimed

    def read(self, transaction: Transaction) -> bytes:
        """Return the bytes of a file. The task decides whether they are an order."""
        return (self.mine / transaction.transaction_id).read_bytes()

    def ack_transaction(self, transaction: Transaction, /) -> None:
        """Move the file to `done`."""
        self._move(transaction, "done")

    def nack_transaction(self, transaction: Transaction, /, requeue: bool = True) -> None:
        """Move the file to `later`, or to `rejected`."""
        self._move(transaction, "later" if requeue else "rejected")

    def _own_folder(self) -> Path:
        """Make a folder with a lock that the system releases when this process ends.

        It is renamed to its final name after it is locked. Another process never takes it for the folder of a dead one.
        """
        name = uuid.uuid4().hex
        made = self.home / "claimed" / f".{name}"
        made.mkdir()
        fcntl.flock(os.open(made / "lock", os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
        return made.rename(self.home / "claimed" / name)

    def _move(self, transaction: Transaction, where: str) -> None:
        name = transaction.transaction_id
        (self.mine / name).rename(self.home / where / name)

    def _put_back_if_dead(self, folder: Path) -> None:
        if folder == self.mine:
            return
        with suppress(OSError), (folder / "lock").open() as lock:  # its process is alive, or another process was faster
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in folder.glob("*.json"):
                self._put_back(path)
            (folder / "lock").unlink()
            folder.rmdir()

    def _put_back(self, path: Path) -> None:
        with suppress(FileExistsError, FileNotFoundError):  # a newer file of that name goes first
            os.link(path, self.home / path.name)
            path.unlink()


class ImportOrders(ConsumerMixin):
    """Insert orders. The primary key makes a file that comes twice harmless."""

    policy = ConsumerPolicy(
        loop=ConsumerLoopPolicy(
            batch=BatchPolicy(size=50), concurrency=ConcurrencyPolicy(value=4), transaction_timeout=30
        ),
        steps=ConsumerSteps(process=ProcessPolicy(retry=RetryPolicy(max_attempts=5, timeout=10, backoff=0.05))),
    )
    source: Folder

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or Path(os.environ.get("INBOX", "inbox"))
        self.source = Folder(self.home)
        with closing(self._database()) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, cents INTEGER NOT NULL)")

    def process_transaction(self, transaction: Transaction) -> int:
        """Insert one order, and return the number of new rows."""
        try:
            order = Order.model_validate(json.loads(self.source.read(transaction)))
        except ValueError as error:
            raise TransactionException("this is not an order", ExceptionType.BUSINESS, cause=error) from error
        with closing(self._database()) as database, database:
            insert = "INSERT INTO orders VALUES (?, ?) ON CONFLICT (id) DO NOTHING"
            made = database.execute(insert, (order.order, order.cents)).rowcount
            (cents,) = database.execute("SELECT cents FROM orders WHERE id = ?", (order.order,)).fetchone()
        if cents != order.cents:
            raise TransactionException("this order is there with another amount", ExceptionType.BUSINESS)
        return made

    def handle_transaction_exception(self, transaction: Transaction, error: TransactionException) -> None:
        """Reject a file that is no order. Keep a file whose order may work later."""
        is_wrong = error.category is ExceptionType.BUSINESS
        self.source.nack_transaction(transaction, requeue=not is_wrong)
        if is_wrong:
            why = str(error) if error.__cause__ is None else f"{error}: {error_message(error.__cause__)}"
            (self.home / "rejected" / f"{transaction.transaction_id}.why").write_text(f"{why}\n", encoding="utf-8")

    def _database(self) -> sqlite3.Connection:
        return sqlite3.connect(self.home / "orders.db", timeout=0.2)
