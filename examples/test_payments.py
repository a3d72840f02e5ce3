"""Charges whose answer was lost are settled by the provider's file, each once."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples import payments
from pipeline.testing import Inline

PROJECT = Path(__file__).parents[1]
PIPELINE = str(Path(sys.executable).parent / "pipeline")


def command(run: Inline, *arguments: str) -> str:
    """Run a program as an operator does."""
    environ = {
        "PIPELINE_DATABASE_URL": run.db.engine.url.set(drivername="postgresql").render_as_string(hide_password=False),
        "PIPELINE_WORKFLOWS": "examples.payments",
        "PAYMENTS_PROVIDER": str(payments.PROVIDER),
    }
    done = subprocess.run(
        arguments, env={**os.environ, **environ}, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run(pipeline_run: Callable[..., Inline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inline:
    """The workflow with its stand-in, in an empty folder."""
    monkeypatch.setattr(payments, "PROVIDER", tmp_path / "provider.jsonl")
    return pipeline_run(payments.billing, connectors=[payments.payments])


def test_lost_answers_are_settled_by_the_file_of_the_provider(run: Inline, tmp_path: Path) -> None:
    for order, card in {"1": "good", "2": "lost after", "3": "lost before"}.items():
        run.publish(payments.placed, payments.Order(order=order, cents=990, card=card))
    run.run_until_idle()
    assert sorted(row.status for row in run.ledger()) == ["applied", "indeterminate", "indeterminate"]
    settlement = tmp_path / "settlement.csv"
    settlement.write_text(command(run, sys.executable, "-m", "examples.payments"))
    options = ("--column", "reference", "--external-id", "charge", "-m", "settlement", "--yes")
    command(run, PIPELINE, "resolve-from", str(settlement), *options)
    run.run_until_idle()
    (open_,) = [row for row in run.ledger() if row.status != "applied"]
    assert (open_.status, open_.params["order"]) == ("indeterminate", "3"), "it is not in the file"
    assert sorted(event.payload["charge"] for event in run.events(payments.paid)) == ["ch_1", "ch_2"]
    assert sorted(charge["charge"] for charge in payments.charges()) == ["ch_1", "ch_2"]


def test_a_declined_card_is_set_aside_and_charged_nowhere(run: Inline) -> None:
    run.publish(payments.placed, payments.Order(order="1", cents=990, card="declined"))
    run.run_until_idle()
    assert [row.status for row in run.deliveries(payments.placed)] == ["quarantined"]
    assert payments.charges() == []
