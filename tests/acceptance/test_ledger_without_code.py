"""A real worker registers its operations; a shell without their code shows, approves and resolves."""

import json
from collections.abc import Callable

import pytest

from pipeline.domain.values import NewEvent
from pipeline.transitions import events
from tests.support import forked_python
from tests.support.environ import clean_environ
from tests.support.installation import RARE, Installation
from tests.support.secret_charges_workflow import SECRETS
from tests.support.wait import wait_for

Typed = Callable[..., str]


@pytest.fixture
def typed(nodes: Installation) -> Typed:
    """Run a command in a shell that has none of the workflow's code, and check that it shows no secret."""

    def run(*arguments: str, code: int = 0) -> str:
        urls = {"PIPELINE_DATABASE_URL": nodes.database_url, "PIPELINE_BROKER_URL": nodes.broker_url}
        done = forked_python.run(*arguments, environ={**clean_environ(), **urls, "COLUMNS": "200"})
        assert done.returncode == code, done.stderr
        assert not [secret for secret in SECRETS if secret in done.stdout + done.stderr]
        return done.stdout + done.stderr * bool(code)

    return run


def test_a_shell_without_code_shows_four_unknown_charges_apart_approves_and_resolves(  # noqa: PLR0915 - one story
    nodes: Installation, typed: Typed
) -> None:
    worker = nodes.worker("--pool=solo", PIPELINE_WORKFLOWS="tests.support.secret_charges_workflow", **RARE)
    nodes.sweep_nothing()
    new = [NewEvent(topic="orders", message_id=f"o{n}", payload={"cents": 100 + n}) for n in range(4)]
    refunds = [NewEvent(topic="refunds", message_id=f"r{n}", payload={"cents": n * 5_000}) for n in (0, 1)]
    with nodes.db.transaction() as tx:
        events.publish(tx, "shop", [*new, *refunds])
    nodes.ring()
    states = "SELECT status, count(*) AS number FROM pipeline.mutations GROUP BY status ORDER BY status"
    wait_for(
        lambda: [(row.status, row.number) for row in nodes.ask(states)] == [("indeterminate", 4), ("pending", 2)],
        within=60,
        why="four charges in doubt and two refunds that wait",
    )

    items = json.loads(typed("attention", "--json"))
    assert {(item["kind"], item["headline"]) for item in items} == {
        *(("indeterminate", f"Charge {100 + n} cents for order o{n}, card •••") for n in range(4)),
        ("approval", "Refund 0 cents of r0"),
        ("approval", "Refund 5000 cents of r1"),
    }
    (incident,) = {item["incident"] for item in items} - {None}
    listed = typed("attention")
    assert "4 of pay.charge" in listed
    assert "TimeoutError" in listed
    first, *_ = [item["mutation_id"] for item in items if item["kind"] == "indeterminate"]
    detail = json.loads(typed("mutations", first, "--json"))["mutation"]
    assert detail["params"]["card"] == detail["params"]["options"]["retry"]["api_token"] == "•••"
    assert detail["look_up"].startswith("https://pay.example/search?query=")

    approvals = {item["headline"]: item["mutation_id"] for item in items if item["kind"] == "approval"}
    dear, cheap = approvals["Refund 5000 cents of r1"], approvals["Refund 0 cents of r0"]
    assert json.loads(typed("mutations", dear, "--json"))["mutation"]["four_eyes_value"] == "5000"
    assert "two people" in typed("approve", dear, "-m", "within budget", "--by", "ada", code=6), (
        "a name is only claimed"
    )
    assert "Refund 0 cents of r0" in typed("approve", cheap, "-m", "within budget", "--by", "bob")
    sent = f"SELECT FROM pipeline.mutations WHERE id = '{cheap}' AND status = 'applied'"
    wait_for(lambda: len(nodes.ask(sent)) == 1, within=60, why="the refund is sent")

    typed("resolve", "happened", first, "--no-result", "-m", "the dashboard shows it")
    assert "3 resolutions" in typed("resolve", "skip", "--incident", incident, "-m", "outage"), "a preview"
    assert "3 resolved, 0 refused" in typed("resolve", "skip", "--incident", incident, "-m", "outage", "--yes")
    acts = nodes.ask("SELECT reason, evidence FROM pipeline.audit WHERE act = 'mutation.skip'")
    assert [(act.reason, act.evidence["incident"]) for act in acts] == [("outage", incident)] * 3
    assert not [secret for secret in SECRETS if secret in worker.log.read_text()]
