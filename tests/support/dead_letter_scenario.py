"""What a person can do about messages that a worker refused: one scene, played on every kind of broker."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from celery import Celery

from pipeline.domain.values import TopicSpec, WorkflowSpec
from pipeline.transitions import registration
from tests.support.installation import PROJECT, Installation
from tests.support.wait import wait_for

SECRET = "4111 1111"
_DRIVER = """
import contextlib, io, json, sys
from pipeline.cli.main import main
for line in sys.stdin:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main(json.loads(line))
        code = 0
    except SystemExit as ended:
        code = ended.code
    print(json.dumps([code, said.getvalue()]), flush=True)
"""


class Shell:
    """`pipeline dead-letters …` against one installation, always in one process: starting one takes longest."""

    def __init__(self, environ: Mapping[str, str], log: IO[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER],
            env={**os.environ, **environ, "COLUMNS": "200"},
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """Its exit code and its words."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(["dead-letters", *arguments]) + "\n")
        self._process.stdin.flush()
        code, said = json.loads(self._process.stdout.readline())
        return int(code), str(said)

    def listed(self) -> list[dict[str, Any]]:
        code, said = self("list", "--json")
        assert code == 0, said
        found: list[dict[str, Any]] = json.loads(said)
        return found

    def close(self) -> None:
        self._process.communicate(timeout=60)


@contextmanager
def shell(nodes: Installation, **environ: str) -> Iterator[Shell]:
    """A shell that is gone at the end."""
    with (nodes.home / "refused.log").open("w") as log:
        found = Shell({**nodes.environ, **environ}, log)
        try:
            yield found
        finally:
            found.close()


def play(nodes: Installation) -> None:
    """Three are refused; one is dropped, one sent back in vain, and one once its workflow is there."""
    _send(nodes)
    with shell(nodes) as refused:
        wait_for(lambda: len(refused.listed()) == 3, within=60, every=0.2)
        before = refused.listed()
        assert refused.listed() == before, "a look changes nothing"
        annex, nonsense, orderz = sorted(before, key=lambda each: (each["workflow"], each["events"]))
        assert ("'annex'" in annex["reason"], annex["message_ids"]) == (True, ["annex 1"])
        assert ("orderz" in orderz["reason"], orderz["events"]) == (True, 5)
        _look(refused, orderz["id"])
        _drop(refused, nonsense["id"])
        code, said = refused("send-back", orderz["id"], "nobody", "--yes")
        assert (code, "nobody: there is no such message" in said) == (1, True), said
        wait_for(lambda: len(refused.listed()) == 2, within=60, every=0.2, why="refused again")
        spec = WorkflowSpec(name="annex", topics=(TopicSpec(name="orders"),), handlers=(), version=1)
        with nodes.db.transaction() as tx:
            registration.register(tx, spec)
        assert refused("send-back", annex["id"], "--yes") == (0, f"{annex['id']}: sent back, 1 event for 'annex'\n")
        wait_for(lambda: len(nodes.ask("SELECT FROM pipeline.events WHERE message_id = 'annex 1'")) == 1, within=60)
        assert [each["workflow"] for each in refused.listed()] == ["shop"]
        code, said = refused("send-back", "nobody", "--yes", "--json")
        assert (code, json.loads(said)) == (1, {"is_done": True, "moved": [], "kept": [], "missing": ["nobody"]})
        left = [each["id"] for each in refused.listed()]
        code, said = refused("drop", "--all", "--yes", "--json")
        assert (code, json.loads(said)) == (0, {"is_done": True, "moved": left, "kept": [], "missing": []})
        assert refused("list", "--check") == (0, "Nothing was refused.\n")


def _send(nodes: Installation) -> None:
    theirs = Celery("theirs", broker=nodes.broker_url)
    theirs.conf.task_create_missing_queue_type = "quorum"
    event = {"topic": "orders", "message_id": "annex 1", "payload": {"card": SECRET}}
    for given in (["annex", [event]], ["shop", "nonsense"], ["shop", [{**event, "topic": "orderz"}] * 5]):
        theirs.send_task("pipeline.publish", args=given, queue="pipeline.schedule")
    theirs.close()


def _look(refused: Shell, id_: str) -> None:
    code, said = refused("list", "--check")
    assert (code, id_ in said, "and 2 more" in said, SECRET in said) == (4, True, True, False), said
    assert refused("drop")[0] == 2


def _drop(refused: Shell, id_: str) -> None:
    code, said = refused("drop", id_)
    assert (code, "would be dropped" in said, len(refused.listed())) == (0, True, 3), said
    assert refused("drop", id_, "--yes")[0] == 0
    assert id_ not in {each["id"] for each in refused.listed()}
