"""The image and the compose files, as far as they can be checked without a container engine."""

import fnmatch
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

from pipeline.cli.main import build_app
from pipeline.config import TIME_LIMIT_GRACE, Settings
from tests.acceptance.test_liveness import PROBE
from tests.deploy.known_names import document
from tests.support.source_code import ROOT

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


class ComposeFile(NamedTuple):
    """A compose file and what it declares."""

    name: str
    content: dict[str, Any]

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.content["services"]
        return found

    @property
    def ours(self) -> list[str]:
        return [name for name, service in self.services.items() if "build" in service]


LARGE, SMALL = (ComposeFile(name, document(ROOT / name)) for name in ("docker-compose.yml", "docker-compose.small.yml"))
ALL = [(file, name) for file in (LARGE, SMALL) for name in file.services]
OURS = [(file, name) for file in (LARGE, SMALL) for name in file.ours]
BIN = Path(sys.executable).parent
#: How a service that something waits for says that it is ready.
READINESS = {"service_healthy", "service_completed_successfully", "service_started"}
IMAGE = re.compile(r"[\w/.-]+:v?\d+\.\d+[\w.-]*")


def with_defaults(text: str) -> str:
    """What compose puts in for `${NAME:-default}` when NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def settings_of(file: ComposeFile, name: str) -> Settings:
    """The settings that a service of ours starts with, the image's own included."""
    image = dict(re.findall(r"(PIPELINE_\w+)=(\S+)", DOCKERFILE))
    given = {variable: with_defaults(value) for variable, value in file.services[name]["environment"].items()}
    return Settings.load(image | given)


def pins(lock: Path) -> dict[str, set[str]]:
    """Version and hashes by package."""
    found = re.findall(r"^(\S+==[^\s;]+)[^\\\n]*\\\n((?: +--hash=\S+(?: \\)?\n?)+)", lock.read_text(), re.MULTILINE)
    return {pin: set(re.findall(r"sha256:\w+", hashes)) for pin, hashes in found}


def copied() -> list[str]:
    """What the image takes from the checkout."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def mounts(file: ComposeFile, name: str) -> list[tuple[str, str]]:
    """What a service sees of the checkout or of a volume, and where."""
    found = (str(volume).split(":") for volume in file.services[name].get("volumes", ()))
    return [(parts[0], parts[1]) for parts in found]


def test_the_compose_files_are_ones() -> None:
    command = [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", LARGE.name, SMALL.name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not (BIN / "hadolint").exists(), reason="there is no hadolint for this platform")
def test_the_linter_of_dockerfiles_finds_nothing() -> None:
    done = subprocess.run([str(BIN / "hadolint"), "deploy/Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_image_has_a_version_or_is_ours(subtests: pytest.Subtests) -> None:
    for file, name in ALL:
        with subtests.test(file=file.name, name=name):
            assert name in file.ours or IMAGE.fullmatch(file.services[name]["image"])


def test_services_built_here_have_their_files_and_accepted_settings(subtests: pytest.Subtests) -> None:
    for file, name in OURS:
        with subtests.test(file=file.name, name=name):
            build = file.services[name]["build"]
            assert (ROOT / build["context"] / build["dockerfile"]).is_file()
            settings = settings_of(file, name)
            for url in filter(None, (settings.database_url, settings.broker_url, settings.otlp_endpoint)):
                assert re.search(r"(?:@|//)([\w-]+):\d+", url)[1] in file.services  # type: ignore[index]


def test_our_containers_write_only_to_their_own_folders_and_gain_no_rights(subtests: pytest.Subtests) -> None:
    for file, name in OURS:
        with subtests.test(file=file.name, name=name):
            service = file.services[name]
            assert service["read_only"]
            assert service["cap_drop"] == ["ALL"]
            assert "no-new-privileges:true" in service["security_opt"]
            assert str(settings_of(file, name).liveness_file).startswith("/run/pipeline/")
            assert any(place.startswith("/run/pipeline:uid=10001") for place in service["tmpfs"])


def test_every_awaited_service_has_a_health_check(subtests: pytest.Subtests) -> None:
    for file, name in ALL:
        with subtests.test(file=file.name, name=name):
            for needed, how in file.services[name].get("depends_on", {}).items():
                condition, service = how["condition"], file.services[needed]
                assert condition in READINESS
                if condition == "service_healthy":
                    assert "HEALTHCHECK" in DOCKERFILE if needed in file.ours else service["healthcheck"]["test"]
                    assert not service.get("healthcheck", {}).get("disable")
                if condition == "service_completed_successfully":
                    assert service["restart"] == "no"


def test_nothing_waits_for_itself() -> None:
    def needs(file: ComposeFile, name: str) -> set[str]:
        direct = set(file.services[name].get("depends_on", {}))
        return direct.union(*(needs(file, each) for each in direct))

    assert [name for file, name in ALL if name in needs(file, name)] == []


def test_every_port_is_on_loopback(subtests: pytest.Subtests) -> None:
    for file, name in ALL:
        with subtests.test(file=file.name, name=name):
            assert [port for port in file.services[name].get("ports", ()) if not port.startswith("127.0.0.1:")] == []


def test_every_mount_is_a_declared_volume_or_a_folder_of_ours_that_is_only_read(subtests: pytest.Subtests) -> None:
    for file, name in ALL:
        with subtests.test(file=file.name, name=name):
            for volume in file.services[name].get("volumes", ()):
                source = volume.split(":")[0]
                if source.startswith("./"):
                    assert (ROOT / source).is_dir(), source
                    assert volume.endswith(":ro"), volume
                else:
                    assert source in file.content["volumes"], source


def test_no_secret_is_written_into_the_file_but_its_default(subtests: pytest.Subtests) -> None:
    secret = re.compile(r"PASSWORD|SECRET|AUTH|TOKEN")
    for file, name in ALL:
        with subtests.test(file=file.name, name=name):
            for variable, value in file.services[name].get("environment", {}).items():
                if secret.search(variable):
                    assert re.fullmatch(r"\$\{\w+:-[\w:]+\}", value), variable
                assert not re.search(r"://[^:$]*:[^$@]+@", value), variable


def test_files_that_commands_name_are_where_they_are_mounted() -> None:
    for file, name in ALL:
        places = dict((inside, source) for source, inside in mounts(file, name))
        command = json.dumps(file.services[name].get("command", ""))
        for path in re.findall(r"(?<!\w)(/(?:etc|demo)/[\w./-]+\.\w+)", command):
            inside = next(place for place in places if path.startswith(f"{place}/"))
            assert (ROOT / places[inside] / path.removeprefix(f"{inside}/")).is_file(), path


def test_a_worker_has_time_to_finish_the_longest_phase() -> None:
    for file in (LARGE, SMALL):
        settings = settings_of(file, "worker")
        longest = max(settings.prepare_time_limit, settings.mutate_time_limit, settings.next_time_limit)
        grace = int(file.services["worker"]["stop_grace_period"].removesuffix("s"))
        assert grace >= (longest + TIME_LIMIT_GRACE).total_seconds()


def test_the_schema_is_brought_up_to_date_once_and_before_any_process_starts() -> None:
    for file in (LARGE, SMALL):
        assert file.services["migrate"]["command"] == ["pipeline", "db", "upgrade"]
        assert file.services["migrate"]["restart"] == "no"
        for name in ("worker", "beat", "console"):
            assert file.services[name]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"


def test_the_small_file_has_what_is_needed_and_nothing_else() -> None:
    assert set(SMALL.services) == {"postgres", "redis", "migrate", "worker", "beat", "console"}
    for name, service in SMALL.services.items():
        assert service.get("image") == LARGE.services[name].get("image"), "both files run the same versions"


def test_the_console_is_called_with_options_it_has_and_is_healthy_while_it_answers() -> None:
    for file in (LARGE, SMALL):
        console = file.services["console"]
        command: Any = get_command(build_app(["api"]))
        program, name, *options = console["command"]
        assert (program, name) == ("pipeline", "api")
        given = command.commands["api"].make_context("api", options).params
        assert (given["host"], console["ports"]) == ("0.0.0.0", [f"127.0.0.1:{given['port']}:{given['port']}"])
        assert f"http://127.0.0.1:{given['port']}/healthz" in console["healthcheck"]["test"][-1]
        assert settings_of(file, "console").console_url == f"http://127.0.0.1:{given['port']}"


def test_the_image_does_not_run_as_root_and_its_bases_have_a_version() -> None:
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert users
    assert all(user not in ("root", "0") for user in users)
    for base in re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE):
        assert re.fullmatch(r"python:3\.\d+\.\d+-[\w-]+", base)


def test_the_image_is_healthy_while_the_file_that_its_process_touches_is_young() -> None:
    alive = dict(re.findall(r"(PIPELINE_\w+)=(\S+)", DOCKERFILE))["PIPELINE_LIVENESS_FILE"]
    (command,) = re.findall(r"^ +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert json.loads(command) == ["sh", "-c", PROBE.format(file=alive, seconds=60)]


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


def test_the_image_is_built_by_what_its_hashes_name() -> None:
    assert "--no-build-isolation" in DOCKERFILE
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    locked = {pin.partition("==")[0] for pin in pins(ROOT / "deploy" / "build.lock")}
    assert {re.match(r"[\w-]+", need)[0] for need in build} <= locked  # type: ignore[index]


def test_the_image_holds_what_telemetry_the_console_and_the_http_connectors_need() -> None:
    held = {pin.partition("==")[0] for pin in pins(ROOT / "deploy" / "requirements.lock")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {
        re.match(r"[\w.-]+", need)[0]  # type: ignore[index]
        for need in (*project["dependencies"], *extras["http"], *extras["otel"], *extras["console"], *extras["oidc"])
    }
    assert needed <= held


def test_flower_and_the_tracing_of_tasks_come_without_an_extra() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {re.match(r"[\w-]+", need)[0] for need in declared}  # type: ignore[index]
    assert {"flower", "opentelemetry-instrumentation-celery"} <= needed


def test_the_version_on_the_image_is_the_project_s() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"ARG VERSION={version}" in DOCKERFILE
