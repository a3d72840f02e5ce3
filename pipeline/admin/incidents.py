"""List unknown outcomes that are alike as incidents, which an operator resolves as one."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from pipeline.admin import advice
from pipeline.admin.operations import RegisteredOperation, operations_by_name
from pipeline.admin.resolutions import MutationSummary, Resolutions
from pipeline.domain.errors import NotFoundError
from pipeline.domain.incidents import Question, QuestionGroup, grouped_questions
from pipeline.store.reads import ledger
from pipeline.store.rows import OpenQuestionRow

MAX_QUESTIONS = 10_000
_SAMPLE = 3  #: headlines that an incident shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Unknown outcomes of one operation with one class of error, close to each other in time."""

    id: str
    operation: str  #: as connector.operation
    error_class: str
    count: int
    first_at: datetime
    last_at: datetime
    workflows: tuple[str, ...]
    headlines: tuple[str, ...]  #: of its oldest mutations
    mutation_ids: tuple[UUID, ...]  #: oldest first
    commands: tuple[str, ...]  #: that list it and resolve it


def open_incidents(
    resolutions: Resolutions, *, workflow: str | None = None, limit: int = MAX_QUESTIONS
) -> list[Incident]:
    """List incidents among the oldest ``limit`` unknown outcomes that wait for an operator, oldest first."""
    with resolutions.db.transaction() as tx:
        rows = ledger.open_questions(tx, workflow=workflow, limit=limit)
        operations = operations_by_name(tx, [(row.connector, row.operation) for row in rows])
    by_id: dict[UUID, OpenQuestionRow] = {row.id: row for row in rows}
    by_name = {operation.name: operation for operation in operations.values()}
    return [_incident(group, by_id, by_name.get(group.questions[0].operation)) for group in _groups(rows)]


def incident_mutations(resolutions: Resolutions, incident_id: str) -> list[MutationSummary]:
    """Return the unresolved mutations of an incident."""
    with resolutions.db.transaction() as tx:
        rows = ledger.open_questions(tx, limit=MAX_QUESTIONS)
    for group in _groups(rows):
        if group.is_named(incident_id):
            return resolutions.mutations_by_id([question.mutation_id for question in group.questions])
    raise NotFoundError(
        "open incident",
        incident_id,
        hint="It may have been resolved meanwhile. `pipeline attention` lists the open ones. Nothing was changed.",
    )


def _groups(rows: Sequence[OpenQuestionRow]) -> list[QuestionGroup]:
    return grouped_questions(
        Question(
            mutation_id=row.id,
            operation=f"{row.connector}.{row.operation}",
            error_class=row.error_type or "",
            since=row.since,
        )
        for row in rows
    )


def _incident(
    group: QuestionGroup, by_id: dict[UUID, OpenQuestionRow], operation: RegisteredOperation | None
) -> Incident:
    first, last = group.questions[0], group.questions[-1]
    rows = [by_id[question.mutation_id] for question in group.questions]
    return Incident(
        id=group.id,
        operation=first.operation,
        error_class=first.error_class,
        count=len(rows),
        first_at=first.since,
        last_at=last.since,
        workflows=tuple(sorted({row.workflow for row in rows})),
        headlines=tuple(row.headline for row in rows[:_SAMPLE] if row.headline),
        mutation_ids=tuple(row.id for row in rows),
        commands=advice.incident_commands(
            group.id,
            operation.declared_result if operation else None,
            can_try_again=operation is not None and operation.can_reconcile,
        ),
    )
