"""An encrypted workflow of a bank that carries every charge out and answers none."""

from datetime import timedelta
from typing import Any

from pipeline import AesGcm, Connector, PrepareResult, Workflow, mutation

PLANTED = "planted-4711"  #: in every payload, plan, request, result and error


class Vault(Connector):
    """A bank that loses its answers, and says what it was asked."""

    name = "vault"

    @mutation(timeout=timedelta(seconds=5), settle=timedelta(0), shows="Charge of {order}")
    def charge(self, call: Any, *, order: str, secret: str) -> dict[str, str]:
        """Charge, and lose the answer."""
        del self, call
        raise TimeoutError(f"no answer about {order} with {secret}")


vault = Vault()
safe = Workflow("safe", concurrency=8, on_uncertain="contain", codec=AesGcm.from_environment())
due, done = safe.topic("due"), safe.topic("done")


@safe.consumer(subscribes=[due], publishes=[done])
class Charge:
    """Charge one order, and publish its receipt."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take one order."""
        del state
        pending = ctx.peek(due, limit=1)
        if not pending:
            return PrepareResult.nothing()
        return PrepareResult(reserve=pending, data=pending[0].payload, ui={"title": PLANTED})

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Request the charge."""
        return ctx.vault.charge(order=prepared.data["order"], secret=prepared.data["secret"])

    def next(self, ctx: Any, prepared: Any, result: Any) -> Any:
        """Publish the receipt."""
        ctx.publish(done, message_id=f"done {prepared.data['order']}", payload={"receipt": result.value})
        return {"last": prepared.data}

    def merge(self, current: Any, returned: Any) -> Any:
        """Keep the last one."""
        return (current or {}) | returned
