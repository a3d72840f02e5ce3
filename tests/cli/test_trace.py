"""``pipeline trace``: from any id up to the roots and down to all effects."""

from typing import Any

from pipeline.domain.states import EventId, Phase, PhaseTask
from pipeline.domain.values import HandlerSpec, NewEvent, PreparedRun, Reservation, TopicSpec, WorkflowSpec
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.transitions import registration, runs, starts
from tests.cli import scenarios
from tests.cli.conftest import Pipeline
from tests.factories import (
    IN,
    LEASE,
    OUT,
    a_run,
    a_workflow,
    committed,
    held,
    some_events,
    stopped,
    the_mutation,
    the_run,
)
from tests.support.table_reads import rows


def two_steps(db: Database) -> tuple[Any, Any]:
    """Create an order, the run that sent its receipt, and the run that filed it."""
    spec = WorkflowSpec(
        name="billing",
        topics=(TopicSpec(name=IN), TopicSpec(name=OUT), TopicSpec(name="filed")),
        handlers=(HandlerSpec(name="send", subscribes=(IN,)), HandlerSpec(name="file", subscribes=(OUT,))),
    )
    with db.transaction() as tx:
        registration.register(tx, spec)
    first = scenarios.a_done_order(db, "order-1")
    second = a_filed_receipt(db)
    return first, second


def a_filed_receipt(db: Database) -> Any:
    with db.transaction() as tx:
        (run,) = starts.start(tx, "billing", "file").runs
        (run,) = runs.claim(tx, PhaseTask.PREPARE, [run.id], lease_duration=LEASE, worker="w").claimed
        (event,) = work.reservable_events(tx, run, OUT, limit=1)
        reserved = Reservation(topic=OUT, ids=(EventId(event.id),))
        runs.finish_prepare(tx, [PreparedRun(lease=held(run), reservations=(reserved,))]).only()
        (run,) = runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed
        runs.no_mutation(tx, [held(run)]).only()
    return committed(db, the_run(db, run.id), published=[NewEvent(topic="filed", message_id="filed-1", payload={})])


def shape(node: dict[str, Any]) -> Any:
    """Reduce a tree to the kinds of its nodes."""
    return {node["kind"]: [shape(child) for child in node["children"]]}


WHOLE = {"event": [{"run": [{"mutation": []}, {"event": [{"run": [{"event": []}]}]}]}]}


def test_the_whole_tree_is_shown_from_every_starting_point(db: Database, pipeline: Pipeline) -> None:
    first, second = two_steps(db)
    (event,) = first.event_ids
    key = the_mutation(db, first.mutation_id).idempotency_key
    for asked, noun in (
        (f"event:{event}", "event"),
        ("order-1", "event"),
        ("filed-1", "event"),
        (str(second.id), "run"),
        (str(first.id)[:30], "run"),
        (str(first.mutation_id), "mutation"),
        (key, "mutation"),
    ):
        output = pipeline("trace", asked, "--json").json
        (root,) = output["roots"]
        assert shape(root) == WHOLE, asked
        assert output["match"]["noun"] == noun, asked
        assert marks(root) == 1, asked
    drawn = pipeline("trace", "order-1", columns=80).out
    assert drawn.splitlines()[0].endswith("[send: consumed]  <- this")
    assert f"└── run {first.id}  send  [committed]" in drawn
    assert f"mutation {first.mutation_id}  Mail to someone@example.org; mail.send, key {key}  [applied]" in drawn


def marks(node: dict[str, Any]) -> int:
    return int(node["is_match"]) + sum(marks(child) for child in node["children"])


def test_a_mutation_is_found_by_the_outside_systems_id(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    row = scenarios.an_indeterminate_mutation(db)
    given = '{"charge": {"id": "ch_123", "number": 77001}}'
    assert pipeline("resolve", "happened", str(row.id), "-m", "seen", "--result", given, "--unchecked").code == 0
    for asked in ("ch_123", "external:77001", f"key:{row.idempotency_key}"):
        assert pipeline("trace", asked, "--json").json["match"]["id"] == str(row.id), asked


def test_runs_that_released_an_event_are_in_its_tree(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    some_events(db, "order-1")
    failed = stopped(db, a_run(db, Phase.PREPARED))
    pipeline("maintenance", "exit", "billing", "-m", "mended")
    done = committed(db, a_run(db, Phase.EMITTING))
    (root,) = pipeline("trace", "order-1", "--json").json["roots"]
    assert [child["id"] for child in root["children"]] == [str(failed.id), str(done.id)]


def test_a_run_whose_inputs_were_deleted_is_a_root(db: Database, pipeline: Pipeline) -> None:
    first, second = two_steps(db)
    for table, column in (("deliveries", "event_id"), ("events", "id")):
        rows(db, f"DELETE FROM pipeline.{table} WHERE {column} = :id RETURNING {column}", id=first.event_ids[0])
    (root,) = pipeline("trace", str(second.id), "--json").json["roots"]
    assert (root["kind"], root["id"]) == ("run", str(first.id))
    assert root["description"] == "send, 1 input no longer kept"
    assert shape(root) == WHOLE["event"][0]
    assert "1 input no longer kept" in pipeline("runs", str(first.id)).out


def test_ambiguous_and_unknown_ids_are_refused(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    a_workflow(db, "mails")
    (event,) = some_events(db, "order-1")
    some_events(db, str(event), workflow="mails")
    several = pipeline("trace", str(event))
    assert several.code == 2
    assert f"`pipeline trace event:{event}`" in several.err
    assert f"`pipeline trace message:{event}`" in several.err
    assert pipeline("trace", f"event:{event}").code == 0
    nothing = pipeline("trace", "nowhere")
    assert (nothing.code, "There is no event, message, run" in nothing.err) == (5, True)


def test_a_large_tree_is_cut_at_the_limit(db: Database, pipeline: Pipeline) -> None:
    two_steps(db)
    short = pipeline("trace", "order-1", "--limit", "2")
    assert "There is more; --limit shows it." in short.out
    assert pipeline("trace", "order-1", "--limit", "2", "--json").json["is_partial"] is True
