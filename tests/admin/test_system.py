"""The report on the installation: workers, sweeps, versions, settings, and whether all is well."""

from datetime import timedelta

from pipeline.admin import attention, system
from pipeline.admin.resolutions import Resolutions
from pipeline.background.sweeps import PERIODS
from pipeline.config import Settings
from pipeline.domain.workflows import WorkerInfo
from pipeline.store.database import Database
from pipeline.testing import Inline
from pipeline.transitions import housekeeping, workflows
from tests.factories import SOMEBODY, a_workflow
from tests.support.scripted_consumers import Shop

SECRET = "hunter2"


def a_worker(name: str = "celery@here:7") -> WorkerInfo:
    return WorkerInfo(
        name=name,
        host="here",
        pid=7,
        pool="prefork",
        concurrency=4,
        queues=("pipeline.schedule", "pipeline.mutate"),
        workflows={"billing": 2},
        code_version="abc",
        package_version="1.0",
    )


def record(db: Database, *names: str) -> None:
    with db.transaction() as tx:
        for name in names:
            housekeeping.record_worker(tx, a_worker(name))


def test_a_worker_is_listed_until_it_stops_and_gone_after_three_missed_heartbeats(db: Database) -> None:
    record(db, "one", "two")
    db.advance_clock(timedelta(seconds=50))
    record(db, "one")
    db.advance_clock(timedelta(seconds=15))
    one, two = system.list_workers(db)
    assert (one.name, one.is_gone, two.name, two.is_gone) == ("one", False, "two", True)
    assert one.seen_at - one.started_at >= timedelta(seconds=50)
    assert (one.workflows, one.queues) == ({"billing": 2}, ("pipeline.schedule", "pipeline.mutate"))
    with db.transaction() as tx:
        housekeeping.remove_worker(tx, "one")
    assert [worker.name for worker in system.list_workers(db)] == ["two"]
    db.advance_clock(timedelta(days=1))
    record(db, "three")
    assert [worker.name for worker in system.list_workers(db)] == ["three"]


def run_sweeps(run: Inline) -> None:
    for name in PERIODS:
        assert run.sweeps.run(name) is not None


def test_an_installation_is_well_while_workers_beat_and_doctor_are(db: Database) -> None:
    run = Shop().started(db)
    fresh = system.health(db, PERIODS)
    assert (fresh.is_well, fresh.are_workers_well, fresh.is_beat_well, fresh.is_doctor_well) == (False,) * 4
    assert (set(fresh.late_sweeps), fresh.doctor_at, fresh.last_act_at) == (set(PERIODS), None, None)
    run_sweeps(run)
    record(db, "one")
    well = system.health(db, PERIODS)
    assert (well.is_well, well.workers, well.gone_workers, well.broken) == (True, 1, 0, 0)
    db.advance_clock(timedelta(minutes=2))
    late = system.health(db, PERIODS)
    assert (late.is_well, late.workers, late.gone_workers, late.is_doctor_well) == (False, 0, 1, True)
    assert {"tick", "rescue"} <= set(late.late_sweeps) < set(PERIODS)


def test_the_last_act_says_since_when_nothing_waits(db: Database) -> None:
    a_workflow(db)
    with db.transaction() as tx:
        workflows.pause(tx, "billing", SOMEBODY)
        now = tx.clock()
    db.advance_clock(timedelta(hours=1))
    assert system.health(db, PERIODS).last_act_at == now


def test_broken_promises_of_the_doctors_last_run_are_counted(db: Database) -> None:
    run = Shop().started(db)
    run_sweeps(run)
    with db.engine.begin() as connection:
        connection.exec_driver_sql(
            """UPDATE pipeline.sweeps SET report =
            '{"broken: x": 2, "broken: failed-mutations-have-no-late-effect": 1, "overdue: y": 1, "findings": 4}'
            WHERE name = 'doctor'"""
        )
    found = system.health(db, PERIODS)
    assert (found.broken, found.is_doctor_well) == (2, False)


def test_the_report_names_versions_sweeps_and_queues_and_masks_secrets(db: Database) -> None:
    run_sweeps(Shop().started(db))
    record(db, "one")
    settings = Settings(
        database_url=f"postgresql://ada:{SECRET}@db/pipeline",
        broker_url=f"redis://:{SECRET}@redis:6379/0",
        notify_url=f"https://hooks.example.org/services/{SECRET}?token={SECRET}",
        notify_secret=SECRET,
    )
    asked: list[object] = []

    def queue_lengths(names: object) -> dict[str, int]:
        asked.append(names)
        return {"pipeline.mutate": 3}

    found = system.system_report(db, settings, PERIODS, queue_lengths)
    assert asked == [["pipeline.mutate", "pipeline.schedule"]]
    assert found.queues == {"pipeline.mutate": 3}
    assert found.schema_version == found.expected_schema_version
    assert {"pipeline", "celery", "kombu", "redis", "SQLAlchemy", "python", "postgres"} == set(found.versions)
    assert all(found.versions.values())
    assert SECRET not in repr(found)
    shown = {each.variable: each.value for each in found.settings}
    assert shown["PIPELINE_NOTIFY_URL"] == "https://hooks.example.org/***"
    assert shown["PIPELINE_DATABASE_URL"].endswith("ada:***@db/pipeline")
    tick = next(sweep for sweep in found.sweeps if sweep.name == "tick")
    assert tick.last_run_at is not None
    assert (tick.due_at, tick.is_late) == (tick.last_run_at + PERIODS["tick"], False)
    assert [each.subject for each in found.unsafe_settings] == _unsafe(db)
    assert system.system_report(db, settings, PERIODS).queues is None


def _unsafe(db: Database) -> list[str]:
    """The embedded server of the tests runs without some of them."""
    with db.engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT name FROM pg_settings WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit') "
            "AND reset_val <> 'on' ORDER BY name"
        )
        return [f"Postgres's {row.name}" for row in rows]


def test_the_inbox_shows_what_the_doctor_found_last_without_checking_again(db: Database) -> None:
    run_sweeps(Shop().started(db))
    assert [item.kind for item in attention.items(Resolutions(db), recent=None)] == []
    with db.engine.begin() as connection:
        connection.exec_driver_sql(
            """UPDATE pipeline.sweeps SET report = '{"broken: commits-are-durable": 2, "overdue: y": 1}'
            WHERE name = 'doctor'"""
        )
    (item,) = attention.items(Resolutions(db), recent=None)
    assert (item.kind, item.subject) == ("broken_invariant", "invariant commits-are-durable")
    assert item.reason.startswith("2 findings of the doctor; A commit survives")
