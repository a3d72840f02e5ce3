"""Workers of several deployments start in any order, and no handler loses its events."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeline import Topic, Workflow
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import invariants, work
from pipeline.testing import Inline
from pipeline.transitions import registration, workflows
from pipeline.workflows.registry import fingerprint, spec_of
from tests.factories import SOMEBODY
from tests.support.concurrent_transactions import raced
from tests.support.scripted_consumers import take_one, the_workflow


class Release:
    """One release of the workflow ``shop``: consumers, each with the topics it listens to."""

    def __init__(self, listens: Mapping[str, Sequence[str]], version: int = 1, **options: Any) -> None:
        start_at = options.pop("start_at", "latest")
        self.workflow = Workflow("shop", version=version, **options)
        self.topics: dict[str, Topic] = {name: self.workflow.topic(name) for name in ("a", "b")}
        for name, topics in listens.items():
            self._consumer(name, [self.topics[topic] for topic in topics], start_at)
        quiet = self.workflow.producer(cron="0 0 29 2 *", publishes=list(self.topics.values()), name="leap")
        quiet(lambda ctx, state: None)

    def _consumer(self, name: str, topics: Sequence[Topic], start_at: str) -> None:
        def prepare(ctx: Any, _: Any) -> Any:
            plans = [take_one(ctx, topic) for topic in topics]
            return next((plan for plan in plans if plan.reserve), plans[0])

        silent = staticmethod(lambda *_: None)
        handler = type(name, (), {"prepare": staticmethod(prepare), "mutate": silent, "next": silent})
        self.workflow.consumer(subscribes=topics, start_at=start_at)(handler)

    def started(self, db: Database, code_version: str = "") -> Inline:
        """A worker of this release starts."""
        return Inline(db, [self.workflow], code_version=code_version)

    def register(self, tx: Transaction) -> Any:
        """What a worker of this release does when it starts."""
        return registration.register(tx, spec_of(self.workflow, tx.clock()))


def got(run: Inline, topic: Topic) -> list[tuple[str, str, str]]:
    """Who got which event, and where it stands."""
    return [(row.message_id, row.handler, row.status) for row in run.deliveries(topic)]


def listening(db: Database) -> set[tuple[str, str]]:
    """Who listens to what."""
    with db.transaction() as tx:
        return work.subscriptions_by_name(tx, "shop")


def retired(db: Database) -> set[str]:
    """Handlers that no code has any more."""
    with db.transaction() as tx:
        return {row.name for row in work.handlers(tx, "shop") if row.retired}


def test_after_a_rollback_a_handler_that_the_newer_version_had_removed_gets_new_events(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    good = Release({"send": "a", "audit": "a"})
    good.started(db)
    Release({"send": "a"}, version=2).started(db)
    assert retired(db) == {"audit"}
    back = good.started(db)
    assert "restored were the handler 'audit'" in caplog.text
    back.publish(good.topics["a"], {"n": 1}, {"n": 2})
    back.run()
    assert got(back, good.topics["a"]) == [
        (event, handler, "consumed") for event in ("m1", "m2") for handler in ("audit", "send")
    ]
    assert the_workflow(back).version == 2
    with db.transaction() as tx:
        assert invariants.findings(tx) == []


def test_after_a_rollback_a_consumer_listens_again_to_a_topic_that_the_newer_version_had_dropped(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    good = Release({"send": ["a", "b"]})
    good.started(db)
    Release({"send": "a"}, version=2).started(db)
    back = good.started(db)
    assert "restored were topic 'b' of 'send'" in caplog.text
    back.publish(good.topics["b"], {"n": 1})
    back.run()
    assert got(back, good.topics["b"]) == [("m1", "send", "consumed")]


def test_events_published_during_a_handlers_absence_reach_it_with_start_at_earliest(db: Database) -> None:
    good = Release({"send": "a", "audit": "a"}, start_at="earliest")
    good.started(db)
    bad = Release({"send": "a"}, version=2).started(db)
    bad.publish(good.topics["a"], {"n": 1})
    back = good.started(db)
    back.run()
    assert got(back, good.topics["a"]) == [("m1", "audit", "consumed"), ("m1", "send", "consumed")]


def test_an_older_version_changes_nothing_of_what_both_have(db: Database) -> None:
    old = Release({"send": "a"}, concurrency=1)
    old.started(db)
    Release({"send": ["a", "b"], "extra": "a"}, version=2, concurrency=4).started(db)
    before = listening(db), retired(db), tuple(the_workflow(old.started(db)))
    assert (listening(db), retired(db)) == before[:2] == ({("a", "send"), ("b", "send"), ("a", "extra")}, set())
    assert tuple(the_workflow(old.started(db))) == before[2]


def test_an_old_worker_that_starts_again_takes_no_topic_from_the_release_of_the_same_version(db: Database) -> None:
    old, new = Release({"send": "a"}), Release({"send": ["a", "b"]})
    old.started(db)
    run = new.started(db)
    old.started(db)
    run.publish(new.topics["b"], {"n": 1})
    run = new.started(db)
    run.publish(new.topics["b"], {"n": 2})
    run.run()
    assert got(run, new.topics["b"]) == [("m1", "send", "consumed"), ("m2", "send", "consumed")]


def test_old_and_new_starting_in_turns_lose_nothing_that_either_needs(db: Database) -> None:
    old = Release({"send": "a", "audit": "a"}, concurrency=4)
    new = Release({"send": ["a", "b"], "extra": "a"}, concurrency=4)
    old.started(db)
    news = new.started(db)
    for _ in range(10):
        old.started(db)
        news.publish(new.topics["a"], {})
        news.publish(new.topics["b"], {})
        assert retired(db) == set()
        news = new.started(db)
        assert retired(db) == {"audit"}
        assert listening(db) == {("a", "send"), ("b", "send"), ("a", "extra")}
    news.run()
    old.started(db).run()
    names = {"a": ["audit", "extra", "send"], "b": ["send"]}
    for topic, handlers in names.items():
        assert [row[1:] for row in got(news, new.topics[topic])] == [(name, "consumed") for name in handlers] * 10


def test_a_new_deployment_of_the_same_version_removes_what_it_no_longer_has(db: Database) -> None:
    Release({"send": "a", "audit": "a"}).started(db)
    Release({"send": "a"}).started(db)
    assert retired(db) == {"audit"}
    assert listening(db) == {("a", "send")}
    Release({"send": "b"}).started(db)
    assert listening(db) == {("b", "send")}


def test_going_back_to_a_release_of_the_same_version_brings_its_settings_back_and_ends_maintenance(
    db: Database,
) -> None:
    good = Release({"send": "a"}, concurrency=2)
    good.started(db)
    bad = Release({"send": ["a", "b"]}, concurrency=50).started(db)
    with db.transaction() as tx:
        workflows.enter_maintenance(tx, "shop", "it is wrong", SOMEBODY)
    assert the_workflow(bad).concurrency == 50
    back = good.started(db)
    assert the_workflow(back).concurrency == 2
    assert not the_workflow(back).maintenance
    with db.transaction() as tx:
        workflows.enter_maintenance(tx, "shop", "this is wrong as well", SOMEBODY)
    assert the_workflow(good.started(db)).maintenance, "the same code again mends nothing"


def test_another_code_version_ends_maintenance_and_an_older_one_takes_nothing_away(db: Database) -> None:
    old, new = Release({"send": "a"}), Release({"send": "a", "extra": "b"})
    starts = [(old, "2.3", False), (new, "2.4", False), (new, "2.4", True), (new, "2.5", False)]
    for release, code_version, is_in_maintenance in starts:
        assert the_workflow(release.started(db, code_version)).maintenance is is_in_maintenance
        with db.transaction() as tx:
            workflows.enter_maintenance(tx, "shop", "it is wrong", SOMEBODY)
    old.started(db, "2.3")
    assert listening(db) == {("a", "send"), ("b", "extra")}
    assert retired(db) == set()


def test_a_change_of_subscriptions_alone_is_a_new_deployment() -> None:
    prints = [
        fingerprint(Release(listens).workflow)
        for listens in ({"send": "a"}, {"send": "b"}, {"send": ["a", "b"]}, {"mail": "a"})
    ]
    assert len(set(prints)) == 4


def test_the_last_twenty_releases_of_a_version_are_remembered(db: Database) -> None:
    for number in range(25):
        with db.transaction() as tx:
            registration.register(tx, _spec(tx, str(number)))
    with db.transaction() as tx:
        row = work.workflow(tx, "shop")
        assert row is not None
        assert row.known_fingerprints == [str(number) for number in range(5, 25)]
        assert registration.register(tx, _spec(tx, "7")).is_older
        assert not registration.register(tx, _spec(tx, "24")).is_older
        assert not registration.register(tx, _spec(tx, "new")).is_older
        assert registration.register(tx, _spec(tx, "24")).is_older


def _spec(tx: Transaction, mark: str) -> Any:
    return replace(spec_of(Release({"send": "a"}).workflow, tx.clock()), fingerprint=mark)


@pytest.mark.parametrize("versions", [(1, 2), (1, 1)], ids=["version-raised", "same-version"])
@pytest.mark.parametrize("new_first", [True, False])
def test_two_releases_that_start_at_once_leave_the_newer_whole(
    db: Database, versions: tuple[int, int], new_first: bool
) -> None:
    old = Release({"send": "a"}, version=versions[0])
    new = Release({"send": ["a", "b"], "extra": "b"}, version=versions[1])
    old.started(db)
    if versions[0] == versions[1]:
        new.started(db)
    order: list[Callable[[Transaction], Any]] = (
        [new.register, old.register] if new_first else [old.register, new.register]
    )
    raced(db, order[0], order[1]).result()
    assert listening(db) == {("a", "send"), ("b", "send"), ("b", "extra")}
    assert retired(db) == set()
    with db.transaction() as tx:
        row = work.workflow(tx, "shop")
        assert row is not None
        assert row.version == versions[1]
