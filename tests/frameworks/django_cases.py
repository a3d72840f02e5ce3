"""Cases for Django's own test runner, which `test_django.py` starts with each driver of Postgres."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import redis
from django.conf import settings
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import TestCase, TransactionTestCase, override_settings
from django.urls import include, path
from orders.models import Order  # type: ignore[import-not-found]

from pipeline.client import Receipt
from pipeline.django import autodiscover, publish, register_workflows
from pipeline.domain.errors import InvalidInputError, PayloadError

QUEUE = f"{os.environ['PIPELINE_QUEUE_PREFIX']}.publish"


def paid(number: str, **fields: Any) -> dict[str, Any]:
    """Return the event of a payment."""
    return {
        "topic": "orders.paid",
        "message_id": f"order:{number}",
        "payload": {"order": number, "email": "ada@example.org"},
    } | fields


def published(using: str = "default") -> list[str]:
    """Return the message ids in a database."""
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT message_id FROM pipeline.events ORDER BY id")
        return [row[0].removeprefix("order:") for row in cursor.fetchall()]


def woken() -> list[str]:
    """Take the wake-up messages from the broker, and return which workflows they name."""
    with redis.Redis.from_url(settings.CELERY_BROKER_URL) as client:
        messages = client.lrange(QUEUE, 0, -1)
        client.delete(QUEUE)
    tasks = [json.loads(message)["headers"] for message in messages]
    assert {task["task"] for task in tasks} <= {"pipeline.schedule"}
    return [task["argsrepr"] for task in tasks]


def pay(request: HttpRequest, number: str) -> HttpResponse:
    """Record and publish without a transaction of its own, and fail if the request says so."""
    Order.objects.create(number=number, email="ada@example.org")
    publish("shop", [paid(number)])
    return HttpResponse(status=int(request.GET["status"]) // int(request.GET.get("divisor", "1")))


urlpatterns = [path("", include("orders.urls")), path("cases/<str:number>", pay)]


@contextmanager
def atomic_requests() -> Iterator[None]:
    """Run each request in a transaction."""
    with mock.patch.dict(connections["default"].settings_dict, ATOMIC_REQUESTS=True):
        yield


class Committed(TransactionTestCase):
    """Publish in transactions that really end."""

    databases = {"default", "other", "strict", "binding", "lite"}  # noqa: RUF012 - as Django declares it

    def setUp(self) -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute("TRUNCATE pipeline.events, pipeline.deliveries")
        with transaction.atomic():
            register_workflows()
        woken()

    def test_an_event_is_there_if_and_only_if_the_transaction_commits(self) -> None:
        with transaction.atomic():
            assert publish("shop", [paid("1")]) == Receipt(new=("order:1",))
            transaction.set_rollback(True)
        assert (published(), woken()) == ([], [])
        with transaction.atomic():
            assert publish("shop", [paid("1")]).new
            assert woken() == []
        assert (published(), woken()) == (["1"], ["['shop']"])
        with transaction.atomic():
            assert publish("shop", [paid("1")]) == Receipt(repeated=("order:1",))
        assert woken() == []

    def test_a_savepoint_takes_its_event_and_its_wake_up_back(self) -> None:
        with transaction.atomic():
            with transaction.atomic():
                publish("shop", [paid("1")])
                transaction.set_rollback(True)
            with transaction.atomic():
                publish("shop", [paid("2")])
        assert (published(), woken()) == (["2"], ["['shop']"])

    def test_autocommit_is_refused_with_what_to_do(self) -> None:
        with pytest.raises(InvalidInputError, match=r"Expected `with transaction\.atomic\(\):`"):
            publish("shop", [paid("1")])
        assert published() == []

    def test_a_transaction_that_the_caller_manages_is_used_without_a_wake_up(self) -> None:
        transaction.set_autocommit(False)
        try:
            publish("shop", [paid("1")])
            transaction.rollback()
            publish("shop", [paid("2")])
            transaction.commit()
        finally:
            transaction.set_autocommit(True)
        assert (published(), woken()) == (["2"], [])

    def test_atomic_requests_are_one_transaction(self) -> None:
        with atomic_requests():
            assert self.client.get("/cases/1?status=201").status_code == 201
            with pytest.raises(ZeroDivisionError):
                self.client.get("/cases/2?status=201&divisor=0")
        assert (published(), woken()) == (["1"], ["['shop']"])
        assert [order.number for order in Order.objects.all()] == ["1"]
        with pytest.raises(InvalidInputError):
            self.client.get("/cases/3?status=201")

    def test_the_schema_of_a_topic_is_checked_with_each_way_to_bind(self) -> None:
        for using in ("default", "binding"):
            with transaction.atomic(using=using):
                with pytest.raises(PayloadError, match=r"\$\.email is missing"):
                    publish("shop", [paid("1", payload={"order": "1"})], using=using)
                assert publish("shop", [paid(using, title="100 %")], using=using).new
                assert publish("shop", [paid(using)], using=using, replace=True).replaced
        assert published() == ["default", "binding"]

    def test_another_database_has_its_own_schema_and_events(self) -> None:
        upgraded = StringIO()
        call_command("pipeline", "db", "upgrade", using="other", stdout=upgraded)
        assert "schema version" in upgraded.getvalue()
        with transaction.atomic(using="other"):
            register_workflows("other")
            publish("shop", [paid("1")], using="other")
        assert (published("other"), published()) == (["1"], [])
        with pytest.raises(InvalidInputError), transaction.atomic():
            publish("shop", [paid("1")], using="other")

    def test_databases_that_cannot_take_events_are_refused(self) -> None:
        with transaction.atomic(using="strict"), pytest.raises(InvalidInputError, match="REPEATABLE READ"):
            publish("shop", [paid("1")], using="strict")
        with transaction.atomic(using="lite"), pytest.raises(InvalidInputError, match="of kind sqlite"):
            publish("shop", [paid("1")], using="lite")
        assert published() == []


class Rolled(TestCase):
    """Publish in a TestCase, whose transaction never commits."""

    @classmethod
    def setUpTestData(cls) -> None:
        register_workflows()

    def test_the_wake_up_is_a_callback_of_the_commit(self) -> None:
        woken()
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            publish("shop", [paid("1")])
        assert len(callbacks) == 1
        assert (published(), woken()) == (["1"], ["['shop']"])

    def test_commands_use_the_test_database(self) -> None:
        before = os.environ["PIPELINE_DATABASE_URL"]
        output = StringIO()
        call_command("pipeline", "workflows", "--json", stdout=output)
        assert json.loads(output.getvalue()) == [], "what this transaction registered cannot be seen from outside"
        assert connections["default"].settings_dict["NAME"] not in before
        assert os.environ["PIPELINE_DATABASE_URL"] == before
        with pytest.raises(CommandError) as caught:
            call_command("pipeline", "workflows", "nothing", stdout=StringIO())
        assert caught.value.returncode == 5
        with pytest.raises(CommandError, match="no Postgres"):
            call_command("pipeline", "workflows", using="lite")


class Checks(TestCase):
    """Each check names what is wrong and what to do."""

    databases = {"default", "other"}  # noqa: RUF012 - as Django declares it

    def found(self, **environ: str) -> dict[str, str]:
        """Return the messages of our checks by id."""
        with mock.patch.dict(os.environ, environ):
            messages = run_checks(tags=["pipeline", "database"], databases=["default", "other", "lite"])
        assert all(message.hint for message in messages)
        return {message.id: message.msg for message in messages}

    def test_nothing_is_wrong_with_the_example(self) -> None:
        assert self.found() == {}
        assert autodiscover() == ("orders.workflows",)

    def test_an_alias_that_cannot_be_used(self) -> None:
        for alias, number in {"nope": "E001", "lite": "E002", "strict": "E003", "other": "W002"}.items():
            with override_settings(PIPELINE_DATABASE_ALIAS=alias):
                assert [*self.found()] == [f"pipeline.{number}"], alias

    def test_settings_that_workers_would_refuse(self) -> None:
        assert "PIPELINE_LEASE" in self.found(PIPELINE_LEASE="soon")["pipeline.E004"]
        assert "is not the broker" in self.found(PIPELINE_BROKER_URL="redis://127.0.0.1:1/0")["pipeline.E005"]
        assert "no.such" in self.found(PIPELINE_WORKFLOWS="no.such")["pipeline.E006"]

    def test_another_database_of_the_workers(self) -> None:
        elsewhere = os.environ["PIPELINE_DATABASE_URL"].rpartition("/")[0] + "/elsewhere"
        assert "'default'" in self.found(PIPELINE_DATABASE_URL=elsewhere)["pipeline.W001"]
