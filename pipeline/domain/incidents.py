"""Group questions that are alike: one operation, one class of error, one span of time. Pure: no I/O."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

#: Two questions that are further apart belong to two incidents.
INCIDENT_GAP = timedelta(minutes=10)
#: A longer stream of alike questions is several incidents.
INCIDENT_SPAN = timedelta(hours=1)
MIN_INCIDENT_SIZE = 2
#: An incident is named by what is alike and by the second of its oldest question.
_ID = re.compile(r"inc-(?P<kind>[0-9a-f]{8})-(?P<second>[0-9a-f]{1,10})")


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
        """Return the name of the group: of what is alike, and of the second of its oldest question."""
        return f"inc-{self._kind}-{self._second:x}"

    def is_named(self, id_: str) -> bool:
        """Return whether an id names this group, also if its oldest questions were resolved since.

        A group that began at most ``INCIDENT_GAP`` later is the same one: a question so close would have joined it.
        """
        found = _ID.fullmatch(id_)
        if found is None or found["kind"] != self._kind:
            return False
        return 0 <= self._second - int(found["second"], 16) <= INCIDENT_GAP.total_seconds()

    @property
    def _kind(self) -> str:
        first = self.questions[0]
        return hashlib.sha256(f"{first.operation}\n{first.error_class}".encode()).hexdigest()[:8]

    @property
    def _second(self) -> int:
        return int(self.questions[0].since.timestamp())


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
