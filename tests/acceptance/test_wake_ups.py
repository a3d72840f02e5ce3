"""Wake-up messages are enough: every sweep is an hour away, and no run waits for one."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

from celery import Celery, chain
from fastapi import FastAPI
from starlette.testclient import TestClient

from pipeline.api import Person, Role, create
from pipeline.config import Settings
from tests.support.installation import RARE, Installation
from tests.support.wait import wait_for

_WAITED = """
SELECT r.started_at - e.created_at AS span FROM pipeline.runs r JOIN pipeline.deliveries d ON d.run_id = r.id
JOIN pipeline.events e ON e.id = d.event_id WHERE e.topic = 'orders' ORDER BY e.id DESC LIMIT 5
"""


def begin(shop: Installation) -> None:
    """A worker that stays from test to test, and no beat."""
    shop.sweep_nothing()
    shop.worker(**RARE)


def test_from_publish_to_prepare_a_wake_up_message_is_enough_however_rare_the_tick(shop: Installation) -> None:
    for _ in range(5):
        shop.publish(1)
        shop.ring()
        shop.all_done_once()
    waited = shop.ask(_WAITED)
    assert len(waited) == 5
    assert max(row.span for row in waited) < timedelta(hours=1) / 100


def test_a_run_that_waits_for_free_concurrency_is_started_by_the_end_of_another_however_rare_the_tick(
    shop: Installation,
) -> None:
    shop.publish(150)  # more than the workflow has places
    shop.ring()
    shop.all_done_once()


def test_a_chain_ends_with_the_last_run_that_had_something_to_do(shop: Installation) -> None:
    log, nobody = shop.nodes[0].log, [str(uuid4())]
    said = len(log.read_text())
    app = Celery(broker=shop.broker_url)
    first, *rest = (
        app.signature(name, args=(nobody,), immutable=True, queue=name)
        for name in ("pipeline.prepare", "pipeline.mutate", "pipeline.next")
    )
    id_ = first.freeze().id
    chain(first, *rest).apply_async()
    wait_for(lambda: f"Task pipeline.prepare[{id_}] succeeded" in log.read_text()[said:], within=60)
    shop.publish(1)
    shop.ring()
    shop.all_done_once()
    mutates = [line for line in log.read_text()[said:].splitlines() if "Task pipeline.mutate" in line]
    assert len([line for line in mutates if "received" in line]) == 1


def test_an_api_inside_another_app_wakes_workers_through_the_celery_app_of_its_host(shop: Installation) -> None:
    settings = Settings(database_url=shop.database_url)
    ada = Person(name="ada", role=Role.ADMIN, is_ambient=False)
    host = FastAPI()
    with Celery("host", broker=shop.broker_url) as celery:
        host.mount("/ops", create(settings, database=shop.db, identify=lambda _: ada, celery_app=celery))
        with TestClient(host) as client:
            message_id = f"order {len(shop.published)}"
            shop.published.append(message_id)
            order = {"message_id": message_id, "payload": {"needs_approval": True}}
            events = f"/ops/v1/workflows/{shop.workflow}/topics/orders/events"
            assert client.post(events, json=order).status_code == 201
            asked = wait_for(lambda: approvals(client), within=60, why="the wake-up message started a run")
            found = client.get(f"/ops/v1/mutations/{asked[0]['mutation_id']}")
            body = {"request_hash": found.json()["mutation"]["request_hash"]}
            path = f"/ops/v1/mutations/{asked[0]['mutation_id']}/approve"
            approved = client.post(path, json=body, headers={"If-Match": found.headers["ETag"]})
            assert approved.status_code == 200, approved.text
            shop.all_done_once()


def approvals(client: TestClient) -> list[Any]:
    """What waits for an approval."""
    return [each for each in client.get("/ops/v1/attention").json()["items"] if each["kind"] == "approval"]
