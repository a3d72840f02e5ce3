"""Run the ``pipeline`` command inside the test's process."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pipeline.cli.main import main
from pipeline.embedded import servers
from pipeline.store.database import Database
from pipeline.transitions.registration import register_operations
from pipeline.workflows.registry import Registry, operation_specs
from tests.support.unanswered_mail_workflow import mail

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?")
_EVENT = re.compile(r"^\d+(?=  )", re.MULTILINE)
_PARTS = re.compile(r"(?<=T)\.\d{3}")
_AGE = re.compile(r"\b\d+[smh]\b *")


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code in (0, 4), self.err
        return json.loads(self.out)

    def plain(self) -> str:
        """The output with what differs from run to run replaced by letters of the same length."""
        text = _UUID.sub(lambda found: "U" * len(found[0]), self.out)
        text = _MOMENT.sub(lambda found: "T" * len(found[0]), text)
        text = _PARTS.sub(".MMM", text)
        text = _EVENT.sub(lambda found: "N".ljust(len(found[0])), text)
        text = _AGE.sub(lambda found: "AA".ljust(len(found[0])), text)
        return "\n".join(line.rstrip() for line in text.splitlines())


Pipeline = Callable[..., Answer]


@pytest.fixture
def pipeline(
    db: Database,
    database_url: str,
    embedded: servers.Servers,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Pipeline:
    """Run a command on the database of this test, as wide as ``columns``."""
    monkeypatch.setenv("PIPELINE_DATABASE_URL", database_url)
    monkeypatch.setenv("PIPELINE_BROKER_URL", embedded.broker_url)
    monkeypatch.setenv("PIPELINE_WORKFLOWS", "tests.support.unanswered_mail_workflow")
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setenv("LOGNAME", "ada")
    with db.transaction() as tx:
        register_operations(tx, operation_specs(Registry(connectors={"mail": mail})), ())

    def run(*arguments: str, columns: int = 200) -> Answer:
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        output = capsys.readouterr()
        return Answer(int(ended.value.code or 0), output.out, output.err)

    return run
