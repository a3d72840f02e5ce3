"""Lists are read page by page: newest first, complete, and unmoved by rows that are added."""

import base64
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from pipeline.admin import pages
from pipeline.admin.audit import AuditFilter
from pipeline.admin.events import EventFilter
from pipeline.admin.mutations import LedgerFilter
from pipeline.admin.pages import Page
from pipeline.admin.quarantine import QuarantineFilter
from pipeline.admin.runs import RunFilter, SessionFilter, session_detail
from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import DeliveryStatus, MutationStatus, Phase, Resolver, RunStatus
from pipeline.domain.workflows import OnUncertain, SessionResult
from pipeline.store.database import Database
from pipeline.transitions import events, workflows
from tests.factories import IN, OUT, SOMEBODY, a_run, a_workflow, applied, committed, some_events, stopped

Read = Callable[..., Page[Any]]


@pytest.fixture
def site(db: Database) -> Database:
    """Two workflows whose runs disturb each other by nothing."""
    for name in ("billing", "letters"):
        a_workflow(db, name, concurrency=50, on_uncertain=OnUncertain.CONTAIN)
    return db


def walked(read: Read, db: Database, only: Any, **options: Any) -> list[Any]:
    """Return the items of all pages."""
    found: list[Any] = []
    after, pages_read = None, 0
    while True:
        page = read(db, only, after=after, **options)
        found += page.items
        pages_read += 1
        assert pages_read < 100, "a walk that does not end"
        if page.next is None:
            return found
        after = page.next


def indeterminate(db: Database, name: str, workflow: str = "billing") -> Any:
    some_events(db, name, workflow=workflow)
    run = a_run(db, Phase.MUTATING, workflow=workflow, reconcilable=False)
    return stopped(db, run, FailureKind.TRANSIENT)


def ids(items: list[Any]) -> list[Any]:
    return [item.id for item in items]


def test_pages_of_events_are_complete_and_newest_first_while_events_are_added(site: Database) -> None:
    made = some_events(site, *(f"m{n}" for n in range(7)))
    first = pages.event_page(site, EventFilter(), limit=3)
    some_events(site, "later")
    second = pages.event_page(site, EventFilter(), after=first.next, limit=3)
    third = pages.event_page(site, EventFilter(), after=second.next, limit=3)
    assert ids([*first.items, *second.items, *third.items]) == made[::-1]
    assert third.next is None


def test_a_full_last_page_has_no_cursor(site: Database) -> None:
    some_events(site, "a", "b")
    assert pages.event_page(site, EventFilter(), limit=2).next is None


def test_a_rare_event_is_found_behind_the_window(site: Database) -> None:
    (rare,) = some_events(site, "rare", key="gold")
    some_events(site, *(f"m{n}" for n in range(9)))
    first = pages.event_page(site, EventFilter(key="gold"), limit=5, window=4)
    assert (first.items, first.is_partial(5)) == ((), True)
    assert ids(walked(pages.event_page, site, EventFilter(key="gold"), limit=5, window=4)) == [rare]


@pytest.mark.parametrize("window", [2, 100])
def test_open_events_of_several_consumers_are_listed_once_each(db: Database, window: int) -> None:
    a_workflow(db, consumers=("send", "note"))
    made = some_events(db, *(f"m{n}" for n in range(5)))
    with db.transaction() as tx:
        events.quarantine(tx, "billing", "note", made[1], SOMEBODY)
    options = {"limit": 2, "window": window}
    assert ids(walked(pages.event_page, db, EventFilter(status=DeliveryStatus.PENDING), **options)) == made[::-1]
    quarantined = EventFilter(status=DeliveryStatus.QUARANTINED)
    assert ids(walked(pages.event_page, db, quarantined, **options)) == [made[1]]


def test_events_are_filtered(site: Database) -> None:
    one, two = some_events(site, "one", "two", key="gold")
    (other,) = some_events(site, "one", workflow="letters")

    def found(**only: Any) -> list[int]:
        return ids(list(pages.event_page(site, EventFilter(**only)).items))

    assert found(workflow="letters") == [other]
    assert found(within=frozenset({"letters"})) == [other]
    with pytest.raises(NotFoundError, match="no workflow 'billing'"):
        found(workflow="billing", within=frozenset({"letters"}))
    assert found(message_id="one") == [other, one]
    assert found(message_id="one", workflow="billing") == [one]
    assert found(key="gold") == [two, one]
    assert found(workflow="billing", topic=OUT) == []
    assert found(workflow="billing", topic=IN, status=DeliveryStatus.PENDING, key="gold") == [two, one]
    assert found(status=DeliveryStatus.CONSUMED) == []


def test_events_are_found_by_time(site: Database) -> None:
    made = [some_events(site, f"m{n}")[0] for n in range(6)]
    at = [event.created_at for event in reversed(pages.event_page(site, EventFilter()).items)]
    only = EventFilter(since=at[1], until=at[4])
    assert ids(walked(pages.event_page, site, only, limit=2)) == made[1:4][::-1]
    waiting = EventFilter(since=at[1], until=at[4], status=DeliveryStatus.PENDING)
    assert ids(walked(pages.event_page, site, waiting, limit=2)) == made[1:4][::-1]
    assert pages.event_page(site, EventFilter(until=at[0] - timedelta(days=1))).items == ()


def test_an_empty_list_has_one_empty_page(site: Database) -> None:
    with site.transaction() as tx:
        now = tx.clock()
    for only in (EventFilter(), EventFilter(since=now, until=now)):
        assert pages.event_page(site, only) == Page(items=(), next=None)


def test_runs_are_filtered_and_paged(site: Database) -> None:
    some_events(site, "a")
    done = committed(site, a_run(site, Phase.MUTATED))
    active = [a_run(site) for _ in range(3) if some_events(site, f"b{uuid4()}")]
    doubted = indeterminate(site, "c", "letters")

    def found(**only: Any) -> list[UUID]:
        return ids(walked(pages.run_page, site, RunFilter(**only), limit=2, window=3))

    newest_first = sorted((done.id, doubted.id, *(run.id for run in active)), reverse=True)
    assert found() == newest_first
    assert found(status=RunStatus.COMMITTED) == [done.id]
    assert found(status=RunStatus.ACTIVE) == sorted((run.id for run in active), reverse=True)
    assert found(phase=Phase.PENDING) == sorted((run.id for run in active), reverse=True)
    assert found(is_waiting=True) == [doubted.id]
    assert found(workflow="letters", handler="send") == [doubted.id]
    assert found(session_id=doubted.session_id) == [doubted.id]
    assert found(session_id=uuid4()) == []
    assert found(since=active[0].created_at, until=active[2].created_at) == [run.id for run in active[1::-1]]


def test_mutations_are_filtered_and_paged(site: Database) -> None:
    doubted = [indeterminate(site, f"u{n}").mutation_id for n in range(4)]
    indeterminate(site, "other", "letters")
    some_events(site, "good")
    run = a_run(site, Phase.MUTATING)
    applied(site, run)
    good = run.mutation_id

    def found(window: int = 2, **only: Any) -> list[UUID]:
        return ids(walked(pages.mutation_page, site, LedgerFilter(**only), limit=3, window=window))

    newest_first = sorted(doubted, reverse=True)
    open_status = (MutationStatus.INDETERMINATE,)
    assert len(found()) == 6
    assert found(workflow="billing", statuses=open_status) == newest_first
    assert found(window=1, within=frozenset({"billing"}), statuses=open_status) == newest_first
    assert found(workflow="billing", error_type="ZeroDivisionError") == newest_first
    assert found(error_type="TimeoutError") == []
    assert found(statuses=(MutationStatus.APPLIED,)) == [good]
    assert found(resolved_by=Resolver.CALL) == [good]
    assert found(connector="mail", operation="charge") == []
    assert found(older_than=timedelta(hours=1)) == []
    with site.transaction() as tx:
        now = tx.clock()
    assert found(since=now) == []
    assert len(found(until=now)) == 6


def test_sessions_are_filtered_and_paged(site: Database) -> None:
    some_events(site, "a")
    done = committed(site, a_run(site, Phase.MUTATED))
    some_events(site, "b", workflow="letters")
    open_run = a_run(site, workflow="letters")
    with site.transaction() as tx:
        workflows.finish_sessions(tx, [done.session_id])

    def found(**only: Any) -> list[UUID]:
        return ids(walked(pages.session_page, site, SessionFilter(**only), limit=1))

    assert found() == sorted((done.session_id, open_run.session_id), reverse=True)
    assert found(is_open=True) == [open_run.session_id]
    assert found(result=SessionResult.COMPLETED) == [done.session_id]
    assert found(workflow="letters") == [open_run.session_id]
    assert session_detail(site, str(done.session_id)).run_count == 1
    with pytest.raises(NotFoundError):
        session_detail(site, str(uuid4()))
    with pytest.raises(InvalidInputError, match="not the id of a session"):
        session_detail(site, "7")


def test_acts_are_filtered_and_paged(site: Database) -> None:
    (event,) = some_events(site, "a")
    with site.transaction() as tx:
        for name in ("billing", "letters"):
            workflows.pause(tx, name, SOMEBODY)
            workflows.resume(tx, name, SOMEBODY)
        events.quarantine(tx, "billing", "send", event, SOMEBODY)

    def found(**only: Any) -> list[str]:
        return [each.act for each in walked(pages.audit_page, site, AuditFilter(**only), limit=1, window=2)]

    billing = ["event.quarantine", "workflow.resume", "workflow.pause"]
    assert found() == ["event.quarantine", *["workflow.resume", "workflow.pause"] * 2]
    assert found(workflow="billing") == billing
    assert found(within=frozenset({"billing"})) == billing
    assert found(act="workflow.pause") == ["workflow.pause"] * 2
    assert found(actor="ada", workflow="letters") == ["workflow.resume", "workflow.pause"]
    assert found(actor="bob") == []
    assert found(event_id=event) == ["event.quarantine"]
    assert found(event_id=event, workflow="letters") == []
    assert found(mutation_id=uuid4()) == found(run_id=uuid4()) == []
    with site.transaction() as tx:
        now = tx.clock()
    assert (found(since=now), len(found(until=now))) == ([], 5)


def test_the_quarantine_is_paged_by_event_and_consumer(db: Database) -> None:
    a_workflow(db, consumers=("send", "note"))
    made = some_events(db, "a", "b", "c")
    with db.transaction() as tx:
        for event in made:
            for handler in ("send", "note"):
                events.quarantine(tx, "billing", handler, event, SOMEBODY)
    found = walked(pages.quarantine_page, db, QuarantineFilter(), limit=4)
    assert [entry.event_id for entry in found] == [event for event in reversed(made) for _ in range(2)]
    assert len({(entry.event_id, entry.handler) for entry in found}) == 6
    assert len(walked(pages.quarantine_page, db, QuarantineFilter(workflow="billing", handler="note"), limit=2)) == 3
    assert walked(pages.quarantine_page, db, QuarantineFilter(within=frozenset())) == []


def forged(*content: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")


def test_a_cursor_of_another_list_or_filter_is_refused(site: Database) -> None:
    some_events(site, "a", "b")
    cursor = pages.event_page(site, EventFilter(), limit=1).next
    assert cursor is not None
    with pytest.raises(InvalidInputError, match="another filter"):
        pages.event_page(site, EventFilter(key="gold"), after=cursor)
    with pytest.raises(InvalidInputError, match="another list"):
        pages.run_page(site, RunFilter(), after=cursor)
    with pytest.raises(InvalidInputError, match="another version"):
        pages.event_page(site, EventFilter(), after=forged(2, "events", "x", "1"))


@pytest.mark.parametrize("text", ["", "!", "é", "AAAA", "e30", "bnVsbA", forged(1), forged(1, "events", "x", "1", 2)])
def test_a_text_that_is_no_cursor_is_refused(site: Database, text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"no cursor|another list"):
        pages.event_page(site, EventFilter(), after=text)


@pytest.mark.parametrize("position", ["-1", "x", str(2**63), None, [], "1:2:3"])
def test_a_cursor_with_an_impossible_position_is_refused(site: Database, position: object) -> None:
    digest = json.loads(base64.urlsafe_b64decode(_some_cursor(site) + "=="))[2]
    with pytest.raises(InvalidInputError, match="no cursor"):
        pages.event_page(site, EventFilter(), after=forged(1, "events", digest, position))


def _some_cursor(db: Database) -> str:
    some_events(db, "a", "b")
    cursor = pages.event_page(db, EventFilter(), limit=1).next
    assert cursor is not None
    return cursor


def test_a_page_of_an_impossible_size_and_unknown_names_are_refused(site: Database) -> None:
    for limit in (0, pages.MAX_LIMIT + 1):
        with pytest.raises(InvalidInputError, match="items was asked for"):
            pages.event_page(site, EventFilter(), limit=limit)
    with pytest.raises(NotFoundError):
        pages.mutation_page(site, LedgerFilter(workflow="bills"))
    with pytest.raises(NotFoundError):
        pages.event_page(site, EventFilter(workflow="billing", topic="nothing"))
    with pytest.raises(NotFoundError):
        pages.run_page(site, RunFilter(workflow="billing", handler="nothing"))
    with pytest.raises(NotFoundError):
        pages.quarantine_page(site, QuarantineFilter(workflow="billing", handler="nothing"))
