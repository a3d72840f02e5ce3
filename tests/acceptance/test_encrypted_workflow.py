"""An encrypted workflow with a real worker, broker and shell: no table and no key of Redis has what was planted."""

import base64
import json
import subprocess

import redis
from celery import Celery

from pipeline import AesGcm, BrokerClient
from pipeline.store.codecs import Codecs
from tests.support import forked_python
from tests.support.databases import stored_text
from tests.support.environ import clean_environ
from tests.support.installation import RARE, Installation
from tests.support.wait import wait_for

KEYS = ",".join(f"{name}:{base64.b64encode(bytes([number]) * 32).decode()}" for name, number in (("k2", 2), ("k1", 1)))
OLD_KEY, WORKFLOW = KEYS.split(",")[1], "tests.support.encrypted_workflow"
PLANTED = "planted-4711"  #: as in the workflow


def shell(nodes: Installation, *arguments: str, keys: str = KEYS) -> "subprocess.CompletedProcess[str]":
    """Run a command in a shell without the workflow's code."""
    urls = {"PIPELINE_DATABASE_URL": nodes.database_url, "PIPELINE_BROKER_URL": nodes.broker_url}
    environ = {**clean_environ(), **urls, "COLUMNS": "200", "PIPELINE_CODEC_KEYS": keys}
    return forked_python.run(*arguments, environ=environ)


def redis_text(nodes: Installation) -> str:
    """Everything that the broker holds, with the bodies of messages decoded."""
    with redis.Redis.from_url(nodes.broker_url) as client:
        names: list[bytes] = client.keys()
        raw = [client.dump(key) or b"" for key in names]
        messages = [each for key in names if client.type(key) == b"list" for each in client.lrange(key, 0, -1)]
        held = [value for key in names if client.type(key) == b"hash" for value in client.hvals(key)]
    bodies = [base64.b64decode(json.loads(each)["body"]) for each in messages if each.startswith(b'{"body"')]
    return b"\n".join([*raw, *messages, *held, *bodies]).decode(errors="replace")


def test_an_encrypted_workflow_leaves_nothing_to_read_in_the_database_and_the_broker(  # noqa: PLR0915 - one story
    nodes: Installation,
) -> None:
    orders = [{"topic": "due", "message_id": f"o{n}", "payload": {"order": f"o{n}", "secret": PLANTED}} for n in (1, 2)]
    with Celery(broker=nodes.broker_url) as service:
        BrokerClient(service, codec=AesGcm.from_text(OLD_KEY)).publish("safe", orders)
        assert "$encrypted" in redis_text(nodes)
        assert PLANTED not in redis_text(nodes)
        nodes.sweep_nothing()
        worker = nodes.worker("--pool=solo", PIPELINE_WORKFLOWS=WORKFLOW, PIPELINE_CODEC_KEYS=KEYS, **RARE)
        clear = {"topic": "due", "message_id": "clear", "payload": {"order": "clear"}}
        BrokerClient(service).publish("safe", [clear])

    refused = shell(nodes, "publish", "safe", "due", '{"order": "o3"}', "--message-id", "o3", keys="")
    assert (refused.returncode, "is encrypted, and this process has no codec" in refused.stderr) == (6, True)
    payload = json.dumps({"order": "o3", "secret": PLANTED})
    published = shell(nodes, "publish", "safe", "due", payload, "--message-id", "o3")
    assert published.returncode == 0, published.stderr
    doubted = "SELECT id, headline FROM pipeline.mutations WHERE status = 'indeterminate' ORDER BY headline"
    wait_for(lambda: len(nodes.ask(doubted)) == 3, within=60, why="three charges in doubt")
    assert [row.headline for row in nodes.ask(doubted)] == ["Charge of o1", "Charge of o2", "Charge of o3"]
    assert "came over the broker in the clear" in shell(nodes, "dead-letters", "list").stdout

    assert "'order': 'clear'" in redis_text(nodes) or '"order": "clear"' in redis_text(nodes)  # the search finds text

    (first, second, third) = (str(row.id) for row in nodes.ask(doubted))
    assert "with key k2; this process has no such key" in shell(nodes, "mutations", first, keys="").stdout
    assert '"order": "o1"' in shell(nodes, "mutations", first, "--json").stdout
    for each in (first, second, third):
        result = json.dumps({"receipt": PLANTED})
        resolved = shell(nodes, "resolve", "happened", each, "--result", result, "-m", "seen", "--by", "erin")
        assert resolved.returncode == 0, resolved.stderr
    nodes.db.codecs = Codecs(default=AesGcm.from_text(KEYS))
    receipts = (
        "SELECT workflow, topic, message_id, payload FROM pipeline.events WHERE topic = 'done' ORDER BY message_id"
    )
    wait_for(lambda: len(nodes.ask(receipts)) == 3, within=60, why="three receipts")
    assert [row.payload for row in nodes.ask(receipts)] == [{"receipt": {"receipt": PLANTED}}] * 3
    nodes.db.codecs = None

    assert worker.stop() == 0
    assert PLANTED not in stored_text(nodes.db)
    assert stored_text(nodes.db).count('"$encrypted"') >= 3 * 6
    assert PLANTED not in redis_text(nodes)


def test_a_worker_with_the_wrong_keys_does_not_start(nodes: Installation) -> None:
    nodes.worker("--pool=solo", PIPELINE_WORKFLOWS=WORKFLOW, PIPELINE_CODEC_KEYS=OLD_KEY, **RARE).stop()
    wrong = f"k2:{base64.b64encode(bytes(32)).decode()}"
    environ = nodes.environ | {"PIPELINE_WORKFLOWS": WORKFLOW, "PIPELINE_CODEC_KEYS": wrong}
    command = ("-A", "pipeline", "worker", "--pool=solo")
    ended = forked_python.run(*command, module="celery", environ=environ, timeout=90)
    assert (ended.returncode, "encrypted with the key 'k1'" in ended.stderr) == (78, True), ended.stderr
