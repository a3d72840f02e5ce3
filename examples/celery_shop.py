"""A Celery app that exists: its plain tasks go on as before, and two of them are durable effects now.

    celery -A examples.celery_shop worker -B

The payment provider is a directory: a charge is a file that is named by the id of the task, which is the idempotency
key where the task runs as a mutation.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from celery import Celery

from pipeline import Applied, Call, NotFound, Verdict, Workflow
from pipeline.celery import install
from pipeline.connectors.celery import Tasks

CHARGES = Path(os.environ.get("SHOP_CHARGES", "charges"))

app = Celery("shop")
app.conf.broker_url = os.environ.get("PIPELINE_BROKER_URL", "redis://localhost:6379/0")
app.conf.result_backend = os.environ.get("SHOP_RESULTS", app.conf.broker_url)
app.conf.beat_schedule = {"newsletter": {"task": "shop.newsletter", "schedule": timedelta(seconds=2)}}

shop = Workflow("shop", concurrency=8, on_uncertain="contain")
tasks = Tasks()


@app.task(name="shop.newsletter", ignore_result=True)
def newsletter() -> None:
    """Go on as before: a plain task of the shop, sent by beat."""
    CHARGES.mkdir(parents=True, exist_ok=True)
    with (CHARGES / "newsletters").open("a") as file:
        file.write("sent\n")


def find_charge(call: Call, *, order: str, cents: int) -> Verdict:
    """Find out whether the provider has a charge."""
    del order, cents
    file = CHARGES / f"{call.idempotency_key}.charge"
    return Applied(file.name) if file.exists() else NotFound()


@tasks.durable(shop, keyed=True, settle=timedelta(0), reconcile=find_charge)
@app.task(name="shop.charge_card", bind=True)
def charge_card(self: Any, order: str, cents: int) -> str:
    """Charge a card. The provider takes a key once."""
    CHARGES.mkdir(parents=True, exist_ok=True)
    file = CHARGES / f"{self.request.id}.charge"
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(f"{order} {cents}")
    part.replace(file)
    return file.name


@tasks.durable(shop, remote=True)
@app.task(name="shop.book_parcel")
def book_parcel(order: str) -> str:
    """Book a parcel in a worker that reads the shop's own queue."""
    return f"parcel of {order}"


install(app, workflows=[__name__])
