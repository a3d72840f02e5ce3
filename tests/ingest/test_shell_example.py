"""The example service that needs nothing but a shell: what it adds is published once, however often it runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.receipts import receipts
from pipeline.client.publishing import publish
from pipeline.ingest.bridge import Bridge, Route
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.transitions import registration
from pipeline.workflows.registry import spec_of
from tests.ingest.redis_streams import Place

#: In the place of redis-cli, so that the answer does not depend on what is installed. Like redis-cli 7.0,
#: it refuses the password of a URL in which the user is empty.
STAND_IN = """#!{python}
import sys, urllib.parse, redis
assert sys.argv[1] == "-u"
url = urllib.parse.urlsplit(sys.argv[2])
if url.password and not url.username:
    sys.exit("NOAUTH Authentication required.")
print(redis.Redis.from_url(sys.argv[2]).execute_command(*sys.argv[3:]).decode())
"""


@pytest.fixture
def cli(tmp_path: Path) -> str:
    """The redis-cli beside the chosen server, else the program that stands in for it."""
    named = shutil.which(os.environ.get("PIPELINE_REDIS_BIN", ""))
    if named and (found := Path(named).with_name("redis-cli")).exists():
        return str(found)
    made = tmp_path / "redis-cli"
    made.write_text(STAND_IN.format(python=sys.executable))
    made.chmod(0o755)
    return str(made)


def xadd(project: Path, place: Place, cli: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "REDIS_CLI": cli, "REDIS_URL": place.url, "STREAM": place.stream}
    command = [str(project / "examples/xadd.sh"), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)


def test_an_order_added_from_a_shell_twice_is_one_event(place: Place, db: Database, project: Path, cli: str) -> None:
    with db.transaction() as tx:
        registration.register(tx, spec_of(receipts, tx.clock()))
    for _ in range(2):
        done = xadd(project, place, cli, "4711", "a@example.org")
        assert done.returncode == 0, done.stderr
        assert "-" in done.stdout
    route = Route(workflow="receipts", topic="orders.paid", message_id_field="id")
    bridge = Bridge(place.queue(max_read_count=10), db, route)
    bridge.read_once()
    assert (bridge.counts.published, bridge.counts.duplicates, place.pending()) == (1, 1, {})
    with db.transaction() as tx:
        again = {"topic": "orders.paid", "message_id": "order:4711", "payload": {"order": "4711", "email": "a"}}
        assert publish(tx, "receipts", [again]).repeated == ("order:4711",), "the order service calls it the same"
    with db.transaction() as tx:
        assert work.workflow_names(tx) == ["receipts"]


@pytest.mark.parametrize(
    "arguments",
    [(), ("4711",), ('47"11', "a@example.org"), ("4711", "a\\@example.org"), ("47\n11", "a"), ("4711", "a\tb")],
)
def test_a_value_that_would_not_be_json_is_not_added(
    place: Place, project: Path, cli: str, arguments: tuple[str, ...]
) -> None:
    assert xadd(project, place, cli, *arguments).returncode == 2
    assert not place.raw.exists(place.stream)
