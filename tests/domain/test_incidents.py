"""Which questions are alike."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from pipeline.domain.incidents import INCIDENT_GAP, INCIDENT_SPAN, Question, QuestionGroup, grouped_questions

START = datetime(2000, 1, 1, tzinfo=UTC)


def question(number: int, at: timedelta, operation: str = "pay.charge", error: str = "TimeoutError") -> Question:
    return Question(mutation_id=UUID(int=number), operation=operation, error_class=error, since=START + at)


def numbers(*questions: Question) -> list[list[int]]:
    return [[each.mutation_id.int for each in group.questions] for group in grouped_questions(questions)]


def test_questions_of_one_operation_and_error_close_in_time_are_one_incident_oldest_first() -> None:
    second = timedelta(seconds=1)
    assert numbers(question(3, 2 * second), question(1, 0 * second), question(2, second)) == [[1, 2, 3]]


def test_another_operation_or_error_is_another_incident_and_a_single_question_is_none() -> None:
    found = numbers(
        question(1, timedelta(seconds=1)),
        question(2, timedelta(seconds=2), operation="mail.send"),
        question(3, timedelta(seconds=3)),
        question(4, timedelta(seconds=4), error="WorkerLost"),
        question(5, timedelta(0), operation="mail.send"),
    )
    assert found == [[5, 2], [1, 3]], "the oldest incident comes first"


def test_a_pause_longer_than_the_gap_begins_another_incident() -> None:
    later = INCIDENT_GAP + timedelta(seconds=1)
    near = (question(1, timedelta(0)), question(2, INCIDENT_GAP))
    assert numbers(*near, question(3, INCIDENT_GAP + later), question(4, INCIDENT_GAP + later)) == [[1, 2], [3, 4]]


def test_a_long_stream_of_questions_is_several_incidents() -> None:
    stream = [question(n, n * INCIDENT_GAP) for n in range(1, 15)]
    first, second = numbers(*stream)
    assert stream[len(first) - 1].since - stream[0].since <= INCIDENT_SPAN
    assert first + second == list(range(1, 15))


def group_at(*minutes: int, error: str = "TimeoutError") -> QuestionGroup:
    (group,) = grouped_questions([question(n, n * timedelta(minutes=1), error=error) for n in minutes])
    return group


def test_an_incident_keeps_its_name_while_its_oldest_questions_are_resolved() -> None:
    whole = group_at(0, 5, 9, 12)
    assert whole.is_named(whole.id)
    assert group_at(5, 9, 12).is_named(whole.id)
    assert group_at(9, 12, 20).is_named(whole.id), "late ones join it"


def test_the_name_of_an_incident_is_not_that_of_another_one() -> None:
    name = group_at(0, 5).id
    assert not group_at(0, 5, error="WorkerLost").is_named(name)
    assert not group_at(16, 17).is_named(name), "it began too late to be the same"
    assert not group_at(0, 5).is_named(group_at(5, 9).id), "it began earlier"
    assert not group_at(0, 5).is_named("inc-1")
