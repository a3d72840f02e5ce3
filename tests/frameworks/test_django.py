"""Django: our app in its own test runner with both drivers, and the example as real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from pipeline.embedded import servers
from tests.frameworks.conftest import answer, process
from tests.support import databases
from tests.support.environ import clean_environ
from tests.support.installation import PROJECT
from tests.support.ports import free_port
from tests.support.wait import wait_for

SHOP = PROJECT / "examples/django_shop"


def environ_of(found: servers.Servers, database: str) -> dict[str, str]:
    """The environment of a process of the shop."""
    url = make_url(found.database_url).set(drivername="postgresql", database=database)
    return clean_environ() | {
        "SHOP_DATABASE_URL": url.render_as_string(hide_password=False),
        "SHOP_BROKER_URL": found.broker_url,
        "PYTHONPATH": os.pathsep.join([str(SHOP), str(PROJECT)]),
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_the_cases_of_djangos_test_runner_pass_with_each_driver(embedded: servers.Servers, driver: str) -> None:
    name = f"django_{driver}_{os.getpid()}"
    environ = environ_of(embedded, name) | {
        "DJANGO_SETTINGS_MODULE": "tests.frameworks.django_settings",
        "SHOP_DRIVER": driver,
        "PIPELINE_QUEUE_PREFIX": name,
    }
    tests = ["tests.frameworks.django_cases", "orders"]
    command = [sys.executable, "-W", "error", "-m", "django", "test", "--noinput", *tests]
    ended = subprocess.run(command, env=environ, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Ran 15 tests" in ended.stderr


@pytest.mark.timeout(300)
def test_the_example_serves_pays_and_sends_one_receipt(
    embedded: servers.Servers, broker_url: str, tmp_path: Path
) -> None:
    mails, port = tmp_path / "mails", free_port()
    with databases.empty(embedded.database_url, f"django_shop_{os.getpid()}") as url:
        environ = environ_of(servers.Servers(database_url=url, broker_url=broker_url), make_url(url).database or "")
        environ |= {"SHOP_MAILS": str(mails), "PIPELINE_TICK": "1s", "PIPELINE_ALLOWED_UNSAFE_SETTINGS": "fsync"}

        def manage(*arguments: str) -> str:
            command = [sys.executable, "manage.py", *arguments]
            return subprocess.run(command, env=environ, cwd=SHOP, capture_output=True, text=True, check=True).stdout

        assert "at schema version" in manage("migrate", "--settings=shop.settings")
        assert "no issues" in manage("check", "--database", "default", "--fail-level", "WARNING")
        worker = ["-m", "celery", "-A", "shop", "worker", "-B", "--pool=solo", "--without-mingle", "--loglevel=INFO"]
        worker.append(f"--schedule={tmp_path / 'schedule'}")
        with (
            process(worker, environ, tmp_path / "worker.log", sign=" ready.", folder=SHOP),
            process(
                ["-u", "manage.py", "runserver", "--noreload", f"127.0.0.1:{port}"],
                environ,
                tmp_path / "web.log",
                sign="Quit the server",
                folder=SHOP,
            ),
        ):
            for number in ("1", "2", "1"):
                status, body = answer(f"http://127.0.0.1:{port}/orders/{number}/paid", {"email": "ada@example.org"})
                assert status == 200, body
            wait_for(lambda: len([*mails.glob("*")]) == 2, within=60, every=0.2, why="two receipts")
            counted = "from orders.models import Order; print(Order.objects.filter(is_counted=True).count())"

            def is_done() -> bool:
                runs = json.loads(manage("pipeline", "--settings", "shop.settings", "runs", "--json"))
                assert [run["status"] for run in runs] == ["committed", "committed"], runs
                return manage("shell", "--no-imports", "-v0", "-c", counted).strip() == "2"

            wait_for(is_done, within=60, every=0.5, why="two runs, and two calls of the plain task")
        texts = [file.read_text() for file in mails.glob("*")]
        assert sorted(text.count("Message-ID: <") for text in texts) == [1, 1]
        assert "Subject: Your receipt for 2" in "".join(texts)
