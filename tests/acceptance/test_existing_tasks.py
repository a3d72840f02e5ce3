"""The example of a Celery app that exists: its tasks are mutations now, and each happens once whatever is killed."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from pipeline.domain.values import NewEvent
from pipeline.embedded import servers
from pipeline.transitions import events
from tests.support.installation import Installation, alone
from tests.support.wait import wait_for

APP = "examples.celery_shop"


@pytest.fixture
def shop(embedded: servers.Servers, tmp_path: Path) -> Iterator[Installation]:
    with alone(embedded.database_url, tmp_path, APP) as found:
        yield found


def a_worker(shop: Installation) -> None:
    shop.worker("--concurrency=3", PIPELINE_WORKFLOWS="", SHOP_CHARGES=str(shop.home / "charges"))


def publish(shop: Installation, topic: str, payloads: list[dict[str, object]]) -> None:
    new = [NewEvent(topic=topic, message_id=f"{topic}:{each['order']}", payload=each) for each in payloads]
    with shop.db.transaction() as tx:
        events.publish(tx, "shop", new)
    shop.published += [each.message_id for each in new]


def test_existing_tasks_happen_once_although_their_worker_is_killed_and_redis_emptied(shop: Installation) -> None:
    charges = shop.home / "charges"
    shop.beat(PIPELINE_WORKFLOWS="")
    a_worker(shop)
    publish(shop, "charge_card", [{"order": str(number), "cents": number} for number in range(60)])
    wait_for(lambda: len([*charges.glob("*.charge")]) >= 5, within=60, why="some cards are charged")
    shop.nodes.pop().kill()
    with redis.Redis.from_url(shop.broker_url) as client:
        client.flushall()
    a_worker(shop)
    publish(shop, "book_parcel", [{"order": str(number)} for number in range(3)])
    wait_for(shop.is_consumed, within=90, every=0.1, why=f"all consumed; runs: {shop.shown()}")
    charged = Counter(file.read_text() for file in charges.glob("*.charge"))
    assert charged == {f"{number} {number}": 1 for number in range(60)}
    ledger = shop.ledger()
    assert {row.status for row in ledger if row.operation == "charge_card"} <= {"applied", "failed"}
    applied = [row for row in ledger if row.status == "applied"]
    assert Counter(row.operation for row in applied) == {"charge_card": 60, "book_parcel": 3}
    parcels = {row.result for row in applied if row.operation == "book_parcel"}
    assert parcels == {f"parcel of {number}" for number in range(3)}
    assert "sent" in (charges / "newsletters").read_text(), "the beat entry of the shop"
    assert shop.nodes.pop().stop() == 0
