"""Show one mutation to an operator, with its timeline and advice."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipeline.admin import advice, lookup, workflows
from pipeline.admin import timeline as admin_timeline
from pipeline.admin.advice import Advice
from pipeline.admin.operations import operations_by_name
from pipeline.admin.resolutions import MutationSummary, Resolutions, resolve_commands
from pipeline.admin.timeline import TimelineEntry
from pipeline.domain.redaction import BY_NAME
from pipeline.store.reads import listings


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationDetail:
    """Everything about one mutation."""

    mutation: MutationSummary
    result: Any  #: null unless requested: it may hold personal data
    resolved_by: str | None  #: call, reconcile, operator …
    resolved_at: datetime | None
    timeline: tuple[TimelineEntry, ...]
    advice: Advice


def detail(resolutions: Resolutions, text: str, *, with_result: bool = False) -> MutationDetail:
    """Return a mutation by its id or its first digits; with its result if requested."""
    with resolutions.db.transaction() as tx:
        mutation_id = lookup.find_id(tx, text, "mutation")
        (row,) = listings.mutations(tx, [mutation_id])
        timeline = admin_timeline.of_mutation(row, acts=listings.audit(tx, mutation_id=mutation_id), now=tx.clock())
        holding = workflows.workflow_holds(tx, row.workflow)
        operations = operations_by_name(tx, [(row.connector, row.operation)])
    redaction = next((each.redaction for each in operations.values()), BY_NAME)
    mutation = resolutions.mutation(mutation_id)
    return MutationDetail(
        mutation=mutation,
        result=redaction.value(row.result) if with_result else None,
        resolved_by=row.resolved_by,
        resolved_at=row.resolved_at,
        timeline=timeline,
        advice=advice.for_mutation(row, holding, resolve_commands(mutation), declared=mutation.declared_result),
    )
