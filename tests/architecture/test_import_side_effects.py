"""Importing the package does nothing: no network, no process, no file, no thread, no read of the environment."""

import ast
import json
import subprocess
import sys

import pytest

from tests.support.source_code import PACKAGE, ROOT, label, modules

#: Imports everything with the doors closed, and tells what it imported.
CHILD = """
import importlib, json, logging, os, pkgutil, socket, sys, threading

class Closed(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("a socket was opened while importing")
socket.socket = Closed

FORBIDDEN = ("socket.connect", "socket.bind", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec",
             "os.fork", "os.posix_spawn", "os.mkdir", "os.remove", "os.rename", "os.kill", "os.putenv")
def guard(event, args):
    if event in FORBIDDEN:
        raise AssertionError(f"{event} {args} while importing")
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        raise AssertionError(f"{args[0]} was opened for writing while importing")

extra, before = json.loads(sys.argv[1]), dict(os.environ)
for name in extra["first"]:
    importlib.import_module(name)
sys.addaudithook(guard)
import pipeline
seen = ["pipeline"]
for module in pkgutil.walk_packages(pipeline.__path__, "pipeline."):
    if extra["instead"]:
        exec(extra["instead"])
        break
    importlib.import_module(module.name)
    seen.append(module.name)
assert dict(os.environ) == before, "the environment was changed"
assert threading.active_count() == 1, "a thread was started"
assert not logging.getLogger("pipeline").handlers, "a log handler was installed"
sys.stdout.write(json.dumps(seen))
"""
#: Other people's packages are not on trial: they may do what they like when they are first imported.
FIRST = ["alembic.command", "celery.app.defaults", "pydantic_settings", "psycopg2", "sqlalchemy.dialects.postgresql"]


def imported(instead: str = "") -> subprocess.CompletedProcess[str]:
    """Import every module, or do something else in the place of the first."""
    command = [sys.executable, "-B", "-c", CHILD, json.dumps({"first": FIRST, "instead": instead})]
    return subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True, check=False, timeout=110)


def test_importing_every_module_has_no_side_effect() -> None:
    answer = imported()
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""
    paths = [path.relative_to(PACKAGE.parent).with_suffix("") for path in modules("pipeline")]
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    assert {name for name in names if not name.endswith("__main__")} == set(json.loads(answer.stdout))


@pytest.mark.parametrize(
    ("instead", "complaint"),
    [
        ("socket.socket()", "a socket was opened"),
        ("import subprocess; subprocess.Popen(['true'])", "subprocess.Popen"),
        ("open('/dev/null', 'w')", "opened for writing"),
        ("os.environ['SPOILED'] = '1'", "os.putenv"),
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", "a thread was started"),
        ("logging.getLogger('pipeline').addHandler(logging.NullHandler())", "a log handler"),
    ],
)
def test_an_import_side_effect_is_found(instead: str, complaint: str) -> None:
    answer = imported(instead)
    assert answer.returncode != 0
    assert complaint in answer.stderr


#: What takes long to import and only some commands need. An author's code is imported by those that run it.
_NOT_FOR_READING = {
    "alembic",
    "celery",
    "httpx",
    "jsonschema",
    "kombu",
    "pipeline.cli.ingest",
    "pipeline.client.publishing",
    "pipeline.connectors.sdk",
    "pipeline.worker.calls",
    "pipeline.workflows.authoring",
    "redis",
    "sqlalchemy.orm",
}


@pytest.mark.parametrize("command", ["attention", "doctor", "workflows"])
def test_a_command_waits_for_nothing_that_only_others_need(command: str) -> None:
    program = (
        f"import pipeline.cli.setup, sys; from pipeline.cli.main import build_app; build_app([{command!r}]); "
        "print(*sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(answer.stdout.split())
    assert f"pipeline.cli.{'database' if command == 'doctor' else command}" in loaded
    assert _NOT_FOR_READING & loaded == set()


#: Modules that the help of the command needs as little as a misspelt command does.
_NOT_FOR_HELP = {
    "alembic",
    "celery",
    "httpx",
    "jsonschema",
    "opentelemetry",
    "pipeline.cli.common",
    "pipeline.cli.setup",
    "pipeline.connectors.sdk",
    "pipeline.store.database",
    "pipeline.workflows.authoring",
    "psycopg2",
    "redis",
    "sqlalchemy",
}


@pytest.mark.parametrize("arguments", [["--help"], [], ["pubish"]])
def test_help_waits_for_no_command(arguments: list[str]) -> None:
    program = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules)); from pipeline.cli.main import main; main()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110
    )
    assert "pipeline.cli.main" in answer.stdout, answer.stderr
    assert _NOT_FOR_HELP & set(answer.stdout.splitlines()[-1].split()) == set()


def test_import_pipeline_loads_nothing_that_is_not_used() -> None:
    program = "import pipeline, sys; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (_NOT_FOR_HELP | {"pydantic"}) & set(answer.stdout.split()) == set()


def test_a_worker_waits_for_nothing_that_only_some_workflows_need() -> None:
    program = "import pipeline.tasks.publish, pipeline.tasks.phases, sys; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"alembic", "httpx", "jsonschema", "sqlalchemy.orm"} & set(answer.stdout.split()) == set()


def test_an_init_re_exports_and_nothing_more() -> None:
    inits = [path for path in modules("pipeline") if path.name == "__init__.py"]
    trees = {label(path): ast.parse(path.read_text()) for path in inits}
    assert [name for name, tree in trees.items() if not all(_is_re_export(node) for node in tree.body)] == []


def _is_re_export(node: ast.stmt) -> bool:
    """Allow a docstring, imports, assignments, and imports for type checkers beside the names that load lazily."""
    if isinstance(node, ast.If):
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return is_for_types and all(
            isinstance(part, ast.ImportFrom | ast.Assign) for part in [*node.body, *node.orelse]
        )
    return isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign)


def test_the_domain_needs_nothing_but_the_standard_library_and_pydantic() -> None:
    found = {label(path): foreign(path.read_text()) for path in modules("pipeline/domain")}
    assert {name: names for name, names in found.items() if names} == {}


def test_a_package_that_is_not_on_the_list_is_found() -> None:
    assert foreign("import json, attrs\nfrom pipeline.store import views\nfrom datetime import time") == [
        "attrs",
        "pipeline.store",
    ]


def foreign(source: str) -> list[str]:
    """What a module of the domain imports and may not."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    allowed = {*sys.stdlib_module_names, "pydantic"}
    ours = ("pipeline.domain", "pipeline.text")  # the second is as pure, and telemetry needs it too
    return [name for name in names if name.split(".")[0] not in allowed and not name.startswith(ours)]
