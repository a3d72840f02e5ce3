"""Workflows for tests of the runtime: a consumer put together from functions, each with a sensible default."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from pipeline import PrepareResult, Topic, Workflow
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.testing import Inline, Scripted, scripted

Handler = Callable[..., Any]
#: For calls that are to begin and end in time, though the machine stands still meanwhile.
UNHURRIED = timedelta(seconds=25)


def take_one(ctx: Any, topic: Topic) -> PrepareResult:
    """Reserve the oldest event and pass its payload on."""
    pending = ctx.peek(topic, limit=1)
    return PrepareResult(reserve=pending, data=pending[0].payload) if pending else PrepareResult.nothing()


class Shop:
    """One workflow ``shop`` with a consumer ``Send`` of ``orders`` that may publish to ``receipts``."""

    def __init__(
        self,
        *,
        prepare: Handler | None = None,
        mutate: Handler | None = None,
        next: Handler | None = None,
        merge: Handler | None = None,
        **options: Any,
    ) -> None:
        known = ("version", "concurrency", "on_uncertain", "on_logic_error", "on_exhausted", "retention")
        switches = {name: options.pop(name) for name in known if name in options}
        self.workflow = Workflow("shop", **switches)
        self.orders = self.workflow.topic("orders")
        self.receipts = self.workflow.topic("receipts")
        self.elsewhere = self.workflow.topic("elsewhere")
        self.mail: Scripted = scripted(
            "mail", mutations=("send", "cancel"), reads={"find": lambda n: {"n": n}}, timeout=UNHURRIED
        )
        members = {
            "prepare": _method(prepare or (lambda ctx, _: take_one(ctx, self.orders))),
            "mutate": _method(mutate or (lambda ctx, prepared: ctx.mail.send(n=prepared.data["n"]))),
            "next": _method(next or self._receipt),
        }
        if merge is not None:
            members["merge"] = _method(merge)
        declare = self.workflow.consumer(subscribes=[self.orders], publishes=[self.receipts], **options)
        declare(type("Send", (), members))
        leap_day = self.workflow.producer(cron="0 0 29 2 *", publishes=[self.elsewhere])
        leap_day(lambda ctx, state: None)

    def _receipt(self, ctx: Any, prepared: Any, result: Any) -> None:
        if result.applied:
            ctx.publish(self.receipts, message_id=f"receipt:{prepared.data['n']}", payload={"n": prepared.data["n"]})

    def inline(self, db: Database, **options: Any) -> Inline:
        """The workflow, ready to run."""
        return Inline(db, [self.workflow], [self.mail, *options.pop("connectors", ())], **options)

    def started(self, db: Database, orders: int = 1, **options: Any) -> Inline:
        """The workflow with so many orders, numbered from 0."""
        run = self.inline(db, **options)
        run.publish(self.orders, *({"n": n} for n in range(orders)))
        return run


def _method(function: Handler) -> Handler:
    """A function as a method that forgets ``self``."""

    def method(_: Any, *args: Any) -> Any:
        return function(*args)

    return method


def at_once(**options: Any) -> FailurePolicy:
    """A policy whose retries do not wait."""
    return FailurePolicy(backoff=Backoff(base=Backoff().base * 0, cap=Backoff().base * 0), **options)


def statuses(run: Inline, topic: Topic) -> list[str]:
    """Where each event of a topic stands."""
    return [row.status for row in run.deliveries(topic)]


def each_once(shop: Shop, numbers: Sequence[int]) -> bool:
    """Whether the outside world saw exactly one mail for each order."""
    return sorted(effect.params["n"] for effect in shop.mail.effects) == sorted(numbers)


def the_workflow(run: Inline, name: str = "shop") -> Any:
    """The workflow's row."""
    with run.db.transaction() as tx:
        return work.workflow(tx, name)


def blocks(run: Inline, name: str = "shop") -> list[str]:
    """The kinds of the workflow's open blocks."""
    with run.db.transaction() as tx:
        return [row.kind for row in work.open_blocks(tx, name)]
