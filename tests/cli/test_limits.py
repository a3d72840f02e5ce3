"""A command says when its limit cut off items."""

import json

import pytest

from pipeline.cli import mutations
from pipeline.domain.workflows import OnUncertain
from pipeline.store.database import Database
from tests.cli import scenarios
from tests.cli.conftest import Pipeline
from tests.factories import a_workflow, some_events


def three_quarantined_events(db: Database) -> None:
    a_workflow(db)
    for n in range(3):
        scenarios.a_quarantined_event(db, f"order-{n}")


@pytest.mark.parametrize("verb", ["release", "skip"])
def test_an_act_on_the_first_of_many_says_that_there_are_more_and_ends_with_1(
    db: Database, pipeline: Pipeline, verb: str
) -> None:
    three_quarantined_events(db)
    act = ("quarantine", verb, "--workflow", "billing", "--limit", "2", "-m", "mended", "--yes")
    first = pipeline(*act)
    assert first.code == 1
    assert "the oldest 2 events to be" in first.out
    assert "These were the first 2. There are more: repeat the command." in first.out
    last = pipeline(*act)
    assert (last.code, "there are more" in last.out) == (0, False)
    assert pipeline("quarantine", "list").out == "No event is quarantined.\n"


def test_a_list_of_the_first_of_many_says_so_and_exits_with_0(db: Database, pipeline: Pipeline) -> None:
    three_quarantined_events(db)
    seen = pipeline("quarantine", "release", "--workflow", "billing", "--limit", "2")
    assert (seen.code, "the oldest 2 events to be released; there are more" in seen.out) == (0, True)


def test_json_says_that_there_are_more(db: Database, pipeline: Pipeline) -> None:
    three_quarantined_events(db)
    act = ("quarantine", "release", "--workflow", "billing", "-m", "mended", "--yes", "--json", "--limit")
    first = pipeline(*act, "2")
    result = json.loads(first.out)
    assert (first.code, result["is_more"], len(result["updated"])) == (1, True, 2)
    assert pipeline(*act, "2").json["is_more"] is False


def test_events_that_are_named_are_all_acted_on_whatever_the_limit(db: Database, pipeline: Pipeline) -> None:
    three_quarantined_events(db)
    ids = [str(each["event_id"]) for each in pipeline("quarantine", "list", "--json").json]
    done = pipeline("quarantine", "release", *ids, "--limit", "1", "-m", "mended", "--yes")
    assert (done.code, "3 released, 0 refused" in done.out) == (0, True)


def test_the_title_of_a_list_says_when_it_is_not_all(db: Database, pipeline: Pipeline) -> None:
    three_quarantined_events(db)
    some_events(db, "order-4")

    def title(*arguments: str) -> str:
        return pipeline(*arguments).out.partition("\n")[0]

    assert title("quarantine", "list", "--limit", "2") == "the oldest 2 events; there are more"
    assert title("quarantine", "list", "--limit", "3") == "3 events"
    assert title("events", "--limit", "1") == "the newest 1 event; there are more"
    assert title("events", "--limit", "4") == "4 events"
    assert len(pipeline("events", "--limit", "2", "--json").json) == 2


def test_lists_of_runs_and_mutations_say_when_they_are_not_complete(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db, concurrency=9)
    for n in range(3):
        scenarios.a_done_order(db, f"order-{n}")
    assert pipeline("runs", "--limit", "2").out.startswith("the newest 2 runs; there are more\n")
    assert pipeline("runs", "--limit", "3").out.startswith("3 runs\n")
    applied = ("mutations", "--status", "applied", "--limit")
    assert pipeline(*applied, "2").out.startswith("the newest 2 applied; there are more\n")
    assert pipeline(*applied, "3").out.startswith("3 applied\n")


def test_many_mutations_are_resolved_in_parts_that_say_that_there_are_more(
    db: Database, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutations, "_MAX_AT_ONCE", 2)
    a_workflow(db, concurrency=9, on_uncertain=OnUncertain.CONTAIN)
    for n in range(3):
        scenarios.an_indeterminate_mutation(db, f"order-{n}")
    assert pipeline("mutations", "--limit", "2").out.startswith("the oldest 2 indeterminate; there are more\n")
    act = ("resolve", "happened", "--workflow", "billing", "-m", "seen", "--no-result", "--yes")
    first = pipeline(*act)
    assert (first.code, "These were the first 2. There are more: repeat the command." in first.out) == (1, True)
    last = pipeline(*act)
    assert (last.code, "1 resolved, 0 refused" in last.out) == (0, True)


def test_attention_names_the_kinds_of_which_there_are_more(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db, concurrency=9)
    for n in range(3):
        scenarios.a_pending_approval(db, f"order-{n}")
    seen = pipeline("attention", "--limit", "2").out
    assert seen.startswith("2 items wait for an operator, oldest first; there are more of: approval.\n")
    assert len(pipeline("attention", "--limit", "2", "--json").json) == 2
    assert pipeline("attention").out.startswith("3 items wait for an operator, oldest first.\n")
