"""Publish in a transaction of Django, and wake the workflow after its commit."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from django.db import connections, transaction

from pipeline.celery import installed
from pipeline.client.publishing import (
    WAKE_UP_TIMEOUT,
    EventInputs,
    Receipt,
    WakeUpSender,
    publish_in_transaction,
    require_postgres,
)
from pipeline.django.project import autodiscover, database_alias
from pipeline.domain.codec import Codec
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.values import DEFAULT_LIMITS, Limits
from pipeline.store.codecs import Codecs
from pipeline.store.connections import CallerCursors
from pipeline.store.database import Database, Transaction
from pipeline.workflows import registration
from pipeline.workflows.registry import Registry


def publish(
    workflow: str,
    events: EventInputs,
    *,
    using: str | None = None,
    replace: bool = False,
    limits: Limits = DEFAULT_LIMITS,
    codec: Codec | None = None,
) -> Receipt:
    """Publish in the open transaction of a database alias. After its commit, wake the workflow.

    ``using`` is the alias; by default the one of PIPELINE_DATABASE_ALIAS. Outside ``transaction.atomic`` it is refused.
    """
    alias = database_alias() if using is None else using
    connection = connections[alias]
    require_postgres(connection.vendor)
    _require_atomic(connection)
    tx = Transaction(CallerCursors(connection.cursor), codecs=None if codec is None else Codecs(default=codec))
    receipt = publish_in_transaction(tx, workflow, events, replace=replace, limits=limits)
    if connection.in_atomic_block and (receipt.new or receipt.replaced):
        transaction.on_commit(partial(_wake_workflow, workflow), using=alias, robust=True)
    return receipt


def register_workflows(using: str | None = None) -> None:
    """Register the workflows of the installed apps in the open transaction, for a ``TestCase`` that publishes.

    In production the first worker registers them.
    """
    registration.register_workflows(_LentDatabase(using), Registry.load(autodiscover()))


class _LentDatabase(Database):
    """A database of Django, each of whose transactions is a savepoint of the one that is open."""

    def __init__(self, using: str | None) -> None:
        self._alias = database_alias() if using is None else using

    @contextmanager
    def transaction(self, *, is_autocommit: bool = False) -> Iterator[Transaction]:  # noqa: ARG002 - as declared
        with transaction.atomic(using=self._alias):
            yield Transaction(CallerCursors(connections[self._alias].cursor), codecs=self.codecs)


def _require_atomic(connection: Any) -> None:
    """Refuse autocommit: the event would stay although the rows beside it are rolled back or never written."""
    if connection.get_autocommit():
        raise InvalidInputError(
            f"Events cannot be published through the database {connection.alias!r} outside of a transaction: they "
            "would be committed apart from the rows they belong to. Expected `with transaction.atomic():` around both, "
            "or ATOMIC_REQUESTS; nothing was published."
        )


def _wake_workflow(workflow: str) -> None:
    found = installed()
    _sender(found.app, found.prefix).wake_workflow(workflow)


@cache
def _sender(app: Any, prefix: str) -> WakeUpSender:
    return WakeUpSender(app, timeout=WAKE_UP_TIMEOUT, queue_prefix=prefix)
