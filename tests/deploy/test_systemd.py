"""The systemd units: understood by systemd, strict about rights, and gentle when they stop a worker."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from pipeline.cli.main import build_app
from pipeline.config import EXIT_RESTART, EXIT_UNSAFE, TIME_LIMIT_GRACE, Settings
from tests.deploy.known_names import DEPLOY

PLACE = DEPLOY / "systemd"
UNITS = sorted(PLACE.glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")
STANDARD = Path("/usr/lib/systemd/system")
needs_systemd = pytest.mark.skipif(
    ANALYZE is None or not STANDARD.is_dir(), reason="systemd-analyze and the units of systemd are not installed"
)
#: How exposed systemd calls a unit, from 0 to 10.
MOST_EXPOSED = 2.0


def values(path: Path, key: str) -> list[str]:
    """The values of a key in a unit, in order."""
    return re.findall(rf"^{key}=(.*)$", path.read_text(), re.MULTILINE)


def instance(path: Path) -> str:
    return path.name.replace("@.", "@orders.")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file system with our units, systemd's own, and programs where ours would be."""
    made = tmp_path_factory.mktemp("root")
    shutil.copytree(PLACE, made / "etc/systemd/system")
    shutil.copytree(STANDARD, made / "usr/lib/systemd/system", symlinks=True)
    programs = made / "opt/pipeline/bin"
    programs.mkdir(parents=True)
    for name in ("celery", "pipeline"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    return made


def analyzed(root: Path, *arguments: str) -> str:
    """The output of systemd-analyze."""
    command = [str(ANALYZE), *arguments[:1], f"--root={root}", *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@needs_systemd
def test_systemd_understands_every_line(root: Path) -> None:
    assert analyzed(root, "verify", "--man=no", *map(instance, UNITS)) == ""


@needs_systemd
def test_a_unit_is_hardly_exposed(root: Path, subtests: pytest.Subtests) -> None:
    for unit in UNITS:
        with subtests.test(unit=unit.stem):
            said = analyzed(root, "security", "--offline=yes", "--no-pager", instance(unit))
            level = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
            assert level, said
            assert float(level[1]) <= MOST_EXPOSED


def test_a_unit_starts_a_command_of_ours(subtests: pytest.Subtests) -> None:
    for unit in UNITS:
        with subtests.test(unit=unit.stem):
            (line,) = values(unit, "ExecStart")
            program, *arguments = shlex.split(re.sub(r"\$\w+", "", line))
            if program.endswith("/celery"):
                assert arguments[:2] == ["-A", "pipeline"]
                assert arguments[2] in ("worker", "beat", "flower")
                continue
            command: Any = get_command(build_app())
            while arguments and arguments[0] in getattr(command, "commands", {}):
                command = command.commands[arguments.pop(0)]
            command.make_context("it", arguments)


def test_a_worker_is_started_again_unless_an_operator_is_needed() -> None:
    worker = PLACE / "pipeline-worker@.service"
    assert values(worker, "Restart") == ["always"]
    assert values(worker, "RestartPreventExitStatus") == [str(EXIT_UNSAFE)]
    assert values(worker, "SuccessExitStatus") == [str(EXIT_RESTART)]
    assert values(PLACE / "pipeline-.service.d/10-common.conf", "StartLimitIntervalSec") == ["0"]


def test_a_worker_has_time_to_finish_the_longest_phase_and_only_its_main_process_gets_the_signal() -> None:
    worker = PLACE / "pipeline-worker@.service"
    settings = Settings()
    longest = max(settings.prepare_time_limit, settings.mutate_time_limit, settings.next_time_limit)
    (patience,) = values(worker, "TimeoutStopSec")
    assert int(patience.removesuffix("s")) >= (longest + TIME_LIMIT_GRACE).total_seconds()
    assert values(worker, "KillMode") == ["mixed"]
    assert values(PLACE / "pipeline-.service.d/10-common.conf", "KillSignal") == ["SIGTERM"]


def test_the_example_of_an_environment_is_accepted() -> None:
    lines = (PLACE / "pipeline.env.example").read_text().splitlines()
    settings = Settings.load(dict(line.split("=", 1) for line in lines if line and not line.startswith("#")))
    assert settings.workflows
