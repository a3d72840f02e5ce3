"""The deployment files, as far as they can be checked without a container engine."""

import fnmatch
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import Settings

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def with_defaults(text: str) -> str:
    """What compose puts in for `${NAME:-default}` when NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def pins(lock: Path) -> dict[str, set[str]]:
    """Version and hashes by package."""
    found = re.findall(r"^(\S+==[^\s;]+)[^\\\n]*\\\n((?: +--hash=\S+(?: \\)?\n?)+)", lock.read_text(), re.MULTILINE)
    return {pin: set(re.findall(r"sha256:\w+", hashes)) for pin, hashes in found}


def copied() -> list[str]:
    """What the image takes from the checkout."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_has_a_version_or_is_ours(name: str) -> None:
    image = SERVICES[name]["image"]
    assert "build" in SERVICES[name] or re.fullmatch(r"[\w/.-]+:\d[\w.-]*", image)


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "build" in service])
def test_what_is_built_here_has_its_files_and_settings_we_accept(name: str) -> None:
    service = SERVICES[name]
    assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    environ = {variable: with_defaults(value) for variable, value in service["environment"].items()}
    settings = Settings.load(environ)
    for url in (settings.database_url, settings.broker_url):
        assert re.search(r"@(\w+):", url)[1] in SERVICES  # type: ignore[index]
    assert all(variable.startswith("PIPELINE_") for variable in environ)


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "depends_on" in service])
def test_nothing_waits_for_health_that_nobody_checks(name: str) -> None:
    for needed, how in SERVICES[name]["depends_on"].items():
        assert how["condition"] == "service_healthy"
        assert SERVICES[needed]["healthcheck"]["test"]


def test_servers_keep_their_data_in_declared_volumes_and_listen_on_loopback_only() -> None:
    for name in ("postgres", "redis"):
        (volume,) = SERVICES[name]["volumes"]
        assert volume.partition(":")[0] in COMPOSE["volumes"]
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])


def test_the_schema_is_brought_up_to_date_once() -> None:
    assert SERVICES["migrate"]["command"] == ["pipeline", "db", "upgrade"]
    assert SERVICES["migrate"]["restart"] == "no"


def test_the_image_does_not_run_as_root_and_its_bases_have_a_version() -> None:
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert users
    assert all(user not in ("root", "0") for user in users)
    for base in re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE):
        assert re.fullmatch(r"python:3\.\d+\.\d+-[\w-]+", base)


def test_everything_the_image_copies_exists_and_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert copied()
    for source in copied():
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source


def test_the_image_installs_only_what_its_hashes_name() -> None:
    assert "--require-hashes -r deploy/requirements.lock" in DOCKERFILE
    ours, all_of_it = pins(ROOT / "deploy" / "requirements.lock"), pins(ROOT / "requirements.lock")
    assert len(ours) == len(re.findall(r"^[\w.-]+==", (ROOT / "deploy/requirements.lock").read_text(), re.MULTILINE))
    assert not {pin for pin, hashes in ours.items() if all_of_it.get(pin) != hashes}
    assert not [pin for pin in ours if pin.startswith(("pytest", "mypy", "ruff"))]
