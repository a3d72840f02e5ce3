"""Group questions that are alike: one operation, one class of error, one span of time. Pure: no I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

#: Two questions that are further apart belong to two incidents.
INCIDENT_GAP = timedelta(minutes=10)
#: A longer stream of alike questions is several incidents.
INCIDENT_SPAN = timedelta(hours=1)
MIN_INCIDENT_SIZE = 2
_PREFIX = "inc-"
_DIGITS = 12  #: of the id of the oldest mutation; the last ones are random


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """An unknown outcome, by what makes it alike to others."""

    mutation_id: UUID
    operation: str  #: as connector.operation
    error_class: str
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionGroup:
    """Questions that are alike, oldest first."""

    questions: tuple[Question, ...]

    @property
    def id(self) -> str:
        """Return the name of the group: of its oldest mutation."""
        return incident_id(self.questions[0].mutation_id)

    def is_named(self, id_: str) -> bool:
        """Return whether an id names this group: the id that begins with any of its questions."""
        return any(incident_id(question.mutation_id) == id_ for question in self.questions)


def incident_id(mutation_id: UUID) -> str:
    """Return the id of an incident that begins with this mutation."""
    return f"{_PREFIX}{mutation_id.hex[-_DIGITS:]}"


def grouped_questions(questions: Iterable[Question]) -> list[QuestionGroup]:
    """Group questions that are alike, oldest group first. A question without its like is in no group."""
    alike: dict[tuple[str, str], list[list[Question]]] = {}
    for question in sorted(questions, key=lambda each: (each.since, each.mutation_id)):
        groups = alike.setdefault((question.operation, question.error_class), [])
        if not groups or not _joins(question, groups[-1]):
            groups.append([])
        groups[-1].append(question)
    found = [group for groups in alike.values() for group in groups if len(group) >= MIN_INCIDENT_SIZE]
    return [QuestionGroup(questions=tuple(group)) for group in sorted(found, key=_order)]


def _joins(question: Question, group: Sequence[Question]) -> bool:
    is_near = question.since - group[-1].since <= INCIDENT_GAP
    return is_near and question.since - group[0].since <= INCIDENT_SPAN


def _order(group: Sequence[Question]) -> tuple[datetime, UUID]:
    return group[0].since, group[0].mutation_id
