"""Copy the changes of customers into a CRM: in batches, and in order for each customer.

The CRM is a stand-in: a folder with one file per customer. It has the version of the last change that it took, so a
reconcile can tell whether a change arrived.

    pipeline dev examples.crm_sync
    pipeline publish crm customers.changed '{"customer": "7", "city": "Rome"}' --key 7 --message-id change:1
"""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline import Applied, Call, Connector, NotFound, PrepareResult, TransientError, Verdict, Workflow, mutation

CRM = Path(os.environ.get("CRM_FOLDER", "crm"))


class Change(BaseModel):
    """The payload that the shop publishes, with the customer as the key of the event."""

    customer: str
    city: str


class Crm(Connector):
    """Stand in for a CRM."""

    name = "crm"
    is_busy_for: frozenset[str] = frozenset()  #: customers whose record another user edits

    @mutation(keyed=True, timeout=timedelta(seconds=10), settle=timedelta(0), shows="Update customer {customer}")
    def update(self, call: Call, *, customer: str, version: int, changes: list[dict[str, str]]) -> None:
        """Apply changes in their order, in one request."""
        if customer in self.is_busy_for:
            raise TransientError("the record is locked")
        CRM.mkdir(parents=True, exist_ok=True)
        record = self.record(customer)
        for change in changes:
            record = record | change | {"version": version, "requests": record.get("requests", 0)}
        (CRM / f"{customer}.json").write_text(json.dumps(record | {"requests": record.get("requests", 0) + 1}))

    @update.reconcile
    def find(self, call: Call, *, customer: str, version: int, changes: list[dict[str, str]]) -> Verdict:
        """Find out whether the CRM has this version, or a later one."""
        return Applied() if self.record(customer).get("version", 0) >= version else NotFound()

    def record(self, customer: str) -> dict[str, Any]:
        """Return what the CRM has of a customer."""
        file = CRM / f"{customer}.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found


crm = Crm()
sync = Workflow("crm", concurrency=8, on_uncertain="contain")
changed = sync.topic("customers.changed", schema=Change)


@sync.consumer(subscribes=[changed], ordered=True, batch=50)
class UpdateCustomer:
    """Send all waiting changes of one customer in one request."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take the changes of the customer whose change is the oldest. The others are for other runs."""
        pending = ctx.peek(changed, limit=50)
        mine = [event for event in pending if event.key == pending[0].key]
        if not mine:
            return PrepareResult.nothing()
        changes = [event.payload.model_dump(exclude={"customer"}) for event in mine]
        request = {"customer": mine[0].payload.customer, "version": mine[-1].id, "changes": changes}
        return PrepareResult(reserve=mine, data=request)

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Ask for one update."""
        return ctx.crm.update(**prepared.data)

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Publish nothing."""
