"""Secrets in parameters, errors and titles are in no output, notice, log or span."""

import json
from dataclasses import asdict
from datetime import timedelta

import pytest

from pipeline.background.notifier import Notice, deliver_notices
from pipeline.store.database import Database
from pipeline.testing import Inline
from tests.cli.conftest import Pipeline
from tests.support import secret_charges_workflow as shop
from tests.support.recorded_spans import seeing


class Recorded:
    """A receiver that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Notice] = []

    def notify(self, notice: Notice) -> None:
        self.got.append(notice)


@pytest.mark.parametrize("as_json", [(), ("--json",)], ids=["text", "json"])
def test_planted_secrets_are_in_no_output_notice_log_or_span(
    db: Database,
    pipeline: Pipeline,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    as_json: tuple[str, ...],
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("PIPELINE_WORKFLOWS", "")
    with seeing() as seen:
        run = Inline(Database(db.engine, clock_offset=timedelta(minutes=-5)), [shop.shop], [shop.pay])
        run.publish(shop.orders, {"cents": 100, "pin": "PLANTED-PIN"}, {"cents": 101})
        run.publish(shop.refunds, {"cents": 2}, prefix="r")
        run.run()
        receiver = Recorded()
        deliver_notices(db, receiver)
    first = next(row for row in run.ledger() if row.operation == "charge")
    event = next(row for row in run.deliveries(shop.orders)).event_id
    ids = {"mutations": first.id, "runs": first.run_id, "trace": "m1", "events": event}
    pipeline("resolve", "happened", str(first.id), "--no-result", "-m", "seen", *as_json)
    commands: list[tuple[object, ...]] = [
        *((name,) for name in ("attention", "mutations", "runs", "events", "workflows", "connectors", "breakers")),
        ("top", "--once"),
        ("doctor",),
        *((name, id_) for name, id_ in ids.items()),
        ("mutations", first.id, "--result"),
        ("events", event, "--payload"),
        ("resolve", "skip", "--workflow", "shop", "-m", "old"),
    ]
    shown = [pipeline(*map(str, command), *as_json) for command in commands]
    assert [command for command, answer in zip(commands, shown, strict=True) if answer.code > 1] == []
    texts = [*(answer.out + answer.err for answer in shown), json.dumps([asdict(each) for each in receiver.got])]
    texts += [caplog.text, seen.text()]
    assert [text for text in texts if any(secret in text for secret in shop.SECRETS)] == []
    assert "cents for order m" in shown[1].out
    assert {notice.headline for notice in receiver.got} >= {"Charge 101 cents for order m2, card •••"}
