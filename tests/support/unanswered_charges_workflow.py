"""A workflow for tests of answers: every request is carried out and never answered. ``next`` needs the result."""

from datetime import timedelta
from typing import Any, ClassVar

from typing_extensions import TypedDict

from pipeline import Call, Connector, NotFound, PrepareResult, Workflow, mutation


class BankCharge(TypedDict):
    """A charge, as the bank answers it."""

    id: str
    cents: int


class Bank(Connector):
    """A bank that loses its answers. What it did is found by its own id."""

    name = "bank"
    by_id: ClassVar[dict[str, Any]] = {}

    @mutation(timeout=timedelta(seconds=1), settle=timedelta(0), redact=["card"], shows="Charge {cents}")
    def charge(self, call: Call, *, cents: int, card: str = "4242") -> BankCharge:
        """Charge a card; the result can be fetched."""
        del call, card
        self.by_id[f"ch_{cents}"] = {"id": f"ch_{cents}", "cents": cents}
        raise TimeoutError("no answer")

    @charge.fetch
    def get_charge(self, call: Call, *, external_id: str) -> Any:
        """Fetch a charge by the bank's id."""
        del call
        if external_id == "down":
            raise ConnectionRefusedError("the bank is closed to card 4242")
        return self.by_id.get(external_id, NotFound("no such charge"))

    @mutation(timeout=timedelta(seconds=1), settle=timedelta(0), keyed=True)
    def refund(self, call: Call, *, cents: int) -> BankCharge:
        """Refund a charge; the result cannot be fetched."""
        del self, call, cents
        raise TimeoutError("no answer")

    @mutation(timeout=timedelta(seconds=1), settle=timedelta(0))
    def void(self, call: Call, *, cents: int) -> None:
        """Void a charge; there is no result."""
        del self, call, cents
        raise TimeoutError("no answer")

    @mutation(timeout=timedelta(seconds=1), settle=timedelta(0))
    def note(self, call, *, cents):  # type: ignore[no-untyped-def]
        """Note a charge; nothing is declared about the result."""
        del self, call, cents
        raise TimeoutError("no answer")


bank = Bank()
books = Workflow("books", on_uncertain="contain", concurrency=8)
due = books.topic("due")
done = books.topic("done")


@books.consumer(subscribes=[due], publishes=[done])
class Book:
    """One operation for one event, and an event with the id of its result."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take one event."""
        del state
        pending = ctx.peek(due, limit=1)
        return PrepareResult(reserve=pending, data=pending[0].payload) if pending else PrepareResult.nothing()

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Request the operation that the event names."""
        return getattr(ctx.bank, prepared.data["operation"])(cents=prepared.data["cents"])

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Publish the id of the result; an operation that declares none has none."""
        if result.applied:
            has_result = prepared.data["operation"] in ("charge", "refund")
            id_ = result.value["id"] if has_result else "none"
            ctx.publish(done, message_id=f"{prepared.data['operation']} {prepared.data['cents']}", payload={"id": id_})
