"""Check the orders of a Redis stream, and publish each good one into the workflow of `examples/receipts.py`.

The engine checks: attempts, a timeout and four orders at once. The workflow has the effect that must happen once. The
success handler joins the two: it publishes, then acknowledges. If the process dies in between, the order is published
again under the same message id, which changes nothing. An order that is wrong is parked.

    export PIPELINE_DATABASE_URL=postgresql://... ORDERS_REDIS_URL=redis://localhost:6379/0
    pipeline consume examples.paid_orders:check_order
"""

import functools
import os

from pydantic import BaseModel, Field, ValidationError

from pipeline.client import DatabaseClient, EventInput
from pipeline.consumer_engine import ExceptionType, Transaction, TransactionException, consume, error_message
from pipeline.ingest import StreamSource


class Order(BaseModel):
    """The data of an entry."""

    order: str = Field(min_length=1)
    email: str = Field(pattern="@")
    cents: int = Field(gt=0)


def orders() -> StreamSource:
    """Connect to the stream, at the first fetch."""
    url, stream = os.environ["ORDERS_REDIS_URL"], os.environ.get("ORDERS_STREAM", "orders")
    return StreamSource.connect(url, stream=stream, group="checks", claim_idle_ms=130_000)


@functools.cache
def workflows() -> DatabaseClient:
    """Connect to the database of the workflows."""
    return DatabaseClient(os.environ["PIPELINE_DATABASE_URL"])


@consume(orders, batch=10, concurrency=4, attempts=3, timeout=20, streaming=True)
def check_order(transaction: Transaction) -> Order:
    """Return the order of an entry. Another attempt would not make a wrong one right."""
    try:
        return Order.model_validate(transaction.payload)
    except ValidationError as error:
        raise TransactionException(error_message(error), ExceptionType.BUSINESS) from error


@check_order.on_success
def publish_order(transaction: Transaction, order: Order) -> None:
    """Publish the order, then acknowledge its entry."""
    paid = EventInput(
        topic="orders.paid",
        message_id=f"order:{order.order}",
        payload={"order": order.order, "email": order.email},
    )
    workflows().publish("receipts", [paid])
    check_order.acknowledge(transaction)


@check_order.on_exception
def park_order(transaction: Transaction, error: TransactionException) -> None:
    """Park a wrong order; leave the others to a recovery."""
    check_order.source.nack_transaction(transaction, requeue=error.category is not ExceptionType.BUSINESS)
