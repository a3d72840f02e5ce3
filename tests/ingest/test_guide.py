"""The guide and the deployment page say what the program does, and every check of the notes has a test."""

import re
import shlex
from configparser import ConfigParser, SectionProxy
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import create_engine, text
from typer.main import get_command

from pipeline import InvalidInputError
from pipeline.cli.ingest import app
from pipeline.ingest import QueueConsumer
from tests.ingest.redis_streams import Place, in_thread
from tests.support.wait import wait_for

BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks(path: Path, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(path.read_text(encoding="utf-8")) if kind == language]


def commands(project: Path) -> list[list[str]]:
    """Every `pipeline ingest …` of the guide and of the deployment files, without its first two arguments."""
    guide = project / "docs/guides/ingest-a-stream.md"
    lines = [line for block in blocks(guide, "sh") for line in block.splitlines() if line.startswith("pipeline ingest")]
    lines += [unit["ExecStart"].replace("$INGEST_OPTIONS", "--message-id-field id") for unit in units(project)]
    found = [shlex.split(line, comments=True)[2:] for line in lines]
    return found + [service["command"][2:] for service in services(project)]


def units(project: Path) -> list[SectionProxy]:
    """Return the systemd units of ingest and recovery."""
    found = []
    for path in sorted((project / "deploy/systemd").glob("pipeline-ingest*.service")):
        unit = ConfigParser(interpolation=None)
        unit.read(path)
        found.append(unit["Service"])
    return found


def services(project: Path) -> list[dict[str, Any]]:
    """Return the compose services of ingest and recovery."""
    every = yaml.safe_load((project / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    return [service for name, service in every.items() if name.startswith("ingest")]


def test_every_command_of_the_guide_and_the_deployment_files_is_understood(project: Path) -> None:
    group: Any = get_command(app)
    found = commands(project)
    assert len(found) >= 7
    for arguments in found:
        if arguments[0] in group.commands:
            group.commands[arguments[0]].make_context("it", arguments[1:])
        else:
            group.make_context("it", arguments)


def test_ingest_and_recovery_are_started_again_after_every_exit_code(project: Path) -> None:
    assert [unit["Restart"] for unit in units(project)] == ["always", "always"]
    assert [service["restart"] for service in services(project)] == ["unless-stopped", "unless-stopped"]


def test_every_check_of_the_notes_has_a_test_of_its_number(project: Path) -> None:
    names = " ".join(
        name
        for path in (project / "tests/ingest").glob("test_*.py")
        for name in re.findall(r"def test_((?:q\d+_)+)", path.read_text(encoding="utf-8"))
    )
    assert set(re.findall(r"q\d+", names)) == {f"q{number}" for number in range(1, 19)}


def test_the_program_of_the_guide_runs_as_it_is_printed(
    project: Path, place: Place, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, _ = blocks(project / "docs/guides/ingest-a-stream.md", "python")
    program = program.replace('stream="orders"', f'stream="{place.stream}"')
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE seen_orders (id text PRIMARY KEY)"))
    place.add({"order": "1"}, {"order": "2"}, {"order": "1"})
    made: list[QueueConsumer] = []
    first = QueueConsumer.__init__

    def remembered(self: QueueConsumer, queue: Any) -> None:
        first(self, queue)
        made.append(self)

    monkeypatch.setattr(QueueConsumer, "__init__", remembered)

    def stop_when_done() -> None:
        wait_for(lambda: place.raw.exists(place.stream) and made and place.is_done("ledger"))
        made[0].stop()
        place.add({"order": "1"})  # ends the read that waits for one

    helper = in_thread(stop_when_done)
    try:
        plain = database_url.replace("postgresql+psycopg2://", "postgresql://")
        exec(program, {"DATABASE_URL": plain, "REDIS_URL": place.url})
        helper.outcome()
        with engine.begin() as connection:
            assert connection.execute(text("SELECT id FROM seen_orders ORDER BY id")).scalars().all() == ["1", "2"]
    finally:
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE seen_orders"))
        engine.dispose()


def test_the_consumer_of_the_engine_in_the_guide_has_just_the_idle_time_it_needs(project: Path, place: Place) -> None:
    _, program = blocks(project / "docs/guides/ingest-a-stream.md", "python")
    program = program.replace('stream="orders"', f'stream="{place.stream}"')
    exec(program, {"REDIS_URL": place.url})
    with pytest.raises(InvalidInputError, match="expected at least 205000"):
        exec(program.replace("300_000", "60_000"), {"REDIS_URL": place.url})


def test_every_page_and_example_names_the_same_fact_in_the_same_way(project: Path) -> None:
    """A team that adds the stream as a second way in must not get two events of one order."""
    pages = ["docs/guides/publish-events.md", "docs/guides/ingest-a-stream.md", "examples/xadd.sh"]
    pages += ["deploy/systemd/ingest-orders.env.example"]
    texts = {page: (project / page).read_text(encoding="utf-8") for page in pages}
    fields = {name for text in texts.values() for name in re.findall(r"--message-id-field,? (\w+)", text)}
    assert fields == {"id"}
    component = (project / "deploy/kubernetes/components/ingest/kustomization.yaml").read_text(encoding="utf-8")
    assert "INGEST_MESSAGE_ID_FIELD=id" in component
    assert '"message_id": "order:4711"' in texts["docs/guides/publish-events.md"]
    assert '"id": "order:4711"' in texts["docs/guides/ingest-a-stream.md"]
    assert '\\"id\\": \\"order:$order\\"' in texts["examples/xadd.sh"]
