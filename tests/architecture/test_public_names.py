"""The public Python names: listed here, documented, light to import, and the only ones that users are shown."""

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source_code import ROOT, label, modules
from tools import api

#: Every public name. A change of this list is a change of what we promise.
PUBLIC = {
    "pipeline": """
        AesGcm Applied AuthError Backoff BreakerPolicy BrokerClient Call Codec Connector DatabaseClient DeclarationError
        ErrorMeaning ErrorReading Event EventError EventInput FailurePolicy Grade HandlerError InvalidInputError
        LogicError MissingKeyError MutateContext MutationResult MutationRetryPolicy NextContext NotFound NotFoundError
        PayloadError PhaseViolationError PipelineError PrepareContext PrepareResult Prepared ProducerContext Receipt
        ReconcilePolicy RefusedError Retention Retry TamperedError Topic TransientError UnavailableError Verdict
        WakePolicy Workflow mutation publish read
    """,
    "pipeline.client": """
        AsyncClient BrokerClient DatabaseClient EventInput HttpClient Limits Receipt RefusedError UnavailableError
        database_url_of publish publish_async
    """,
    "pipeline.celery": "install",
    "pipeline.django": "autodiscover publish register_workflows",
    "pipeline.fastapi": "Publish lifespan publisher",
    "pipeline.flask": "Pipeline",
    "pipeline.connectors": """
        Applied Call Connector ErrorMeaning ErrorReading Grade NotFound Retry Verdict mutation read
    """,
    "pipeline.connectors.http": "Http UnclearResponseError delete get patch post put",
    "pipeline.connectors.sql": "Sql UnknownCommitError create_effects_table effects_table query transaction",
    "pipeline.connectors.email": "Email EmailWithSent Imap Smtp Tls",
    "pipeline.connectors.gmail": "Gmail",
    "pipeline.connectors.celery": "Tasks",
    "pipeline.testing": """
        CASES Case CaseResult ConformanceReport CrashPoint Does Fault FaultyProxy Inline ProxiedRequest RecordedEffect
        Scripted Subject WorkerCrash WorkerPolicy assert_consumed assert_deliveries assert_runs check_case conformance
        is_complete_http_request is_complete_lines is_complete_postgres_messages scripted
    """,
    "pipeline.api": "Person Role create",
    "pipeline.ingest": """
        AsyncStreamSource ContextManagerTxFactory DbFactory DbTx NoStreamError PoisonEntry PoisonError QueueConfig
        QueueConsumer QueueError QueueMessage RecoveryRunner RedisStreamsQueue StreamSource connect_redis
    """,
    "pipeline.consumer_engine": """
        AbandonedCallsException AcknowledgingSource AsyncConsumerMixin AsyncSource Attempt
        BatchAcknowledgingSource BatchPolicy BoundedRunner ConcurrencyPolicy ConsumerLoopPolicy
        ConsumerLoopTimeoutException ConsumerMixin ConsumerPolicy ConsumerSteps EmptyQueuePolicy
        ExceptionPolicy ExceptionType FetchException FetchPolicy FetchTimeoutException ItemOutcome ItemStatus
        LoopReport PolicyCheckingSource PolicyError ProcessPolicy RetryPolicy Source SuccessPolicy Transaction
        TransactionException consume current_attempt error_message load_policy stopped_by_signals
    """,
}
NAMES = {package: names.split() for package, names in PUBLIC.items()}
SHOWN_TO_USERS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "deploy").rglob("*.md"),
    *(ROOT / "examples").rglob("*.py"),
]
_IMPORT = re.compile(
    r"^[> ]*from (pipeline[\w.]*) import (\([^)]*\)|[^\n]+)$|^[> ]*import (pipeline[\w.]*)", re.MULTILINE
)
_CLASS_PATH = re.compile(r"\b(pipeline(?:\.[a-z_]\w*)*)\.([A-Z]\w+)")


@pytest.mark.parametrize("package", NAMES)
def test_a_package_exports_exactly_the_listed_names(package: str) -> None:
    assert sorted(importlib.import_module(package).__all__) == sorted(NAMES[package])


def test_no_other_package_exports_names() -> None:
    inits = {path for path in modules("pipeline") if path.name == "__init__.py" and "\n__all__" in path.read_text()}
    packages = {ROOT / f"{name.replace('.', '/')}/__init__.py" for name in NAMES}
    assert inits - packages == set()
    assert set(api.PACKAGES) == set(NAMES)


@pytest.mark.parametrize("package", NAMES)
def test_type_checkers_and_the_interpreter_find_the_same_objects(package: str) -> None:
    module = importlib.import_module(package)
    homes = {name: home for name, home in _imports(Path(str(module.__file__))) if name in NAMES[package]}
    wrong = [
        name
        for name, home in homes.items()
        if getattr(module, name) is not getattr(importlib.import_module(home), name)
    ]
    assert wrong == []
    assert sorted(homes) == sorted(NAMES[package]) or not hasattr(module, "__path__"), "a module defines its own names"
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018 - the access is the test


def test_no_module_hides_a_public_name() -> None:
    """A submodule becomes an attribute of its package when it is imported, and would replace a lazy name."""
    hidden = [
        f"{package}.{module.name}"
        for package in NAMES
        for module in pkgutil.iter_modules(getattr(importlib.import_module(package), "__path__", []))
        if module.name in NAMES[package]
    ]
    assert hidden == []


def test_every_public_name_has_a_docstring_and_a_word_in_the_glossary() -> None:
    page = api.api_page()
    undescribed = [
        f"{package}.{name}"
        for package, names in NAMES.items()
        for name in names
        if not api.description(package, name) or f"`{name}" not in page
    ]
    _, _, section = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").partition("\n## Public names")
    in_glossary = set(re.findall(r"`(\w+)`", section))
    public = {name for names in NAMES.values() for name in names}
    assert undescribed == []
    assert (public - in_glossary, in_glossary - public) == (set(), set())


def test_documents_and_examples_import_public_names_only() -> None:
    wrong = {label(page): found for page in SHOWN_TO_USERS if (found := [*_private_imports(page.read_text())])}
    assert wrong == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from pipeline.ingest.queue import QueueConfig", ["pipeline.ingest.queue"]),
        ("    from pipeline.store import migrate", ["pipeline.store"]),
        ("from pipeline import Workflow, Registry", ["pipeline.Registry"]),
        ("from pipeline.ingest import (\n    QueueConfig,\n    Bridge,\n)", ["pipeline.ingest.Bridge"]),
        ("import pipeline.config", ["pipeline.config"]),
        ("Use `pipeline.client.publishing.DatabaseClient`.", ["pipeline.client.publishing.DatabaseClient"]),
        ("from pipeline import Workflow  # the author's", []),
        ("`pipeline.client.DatabaseClient` and the metric `pipeline.backlog.age`", []),
    ],
)
def test_a_private_import_is_found(text: str, found: list[str]) -> None:
    assert [*_private_imports(text)] == found


@pytest.mark.parametrize("package", ["pipeline", "pipeline.testing", "pipeline.ingest", "pipeline.consumer_engine"])
def test_importing_a_package_loads_no_database_driver_broker_or_http_client(package: str) -> None:
    program = f"import sys, json, {package}; print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"alembic", "celery", "httpx", "psycopg2", "pydantic_settings", "redis", "sqlalchemy", "typer"}
    assert heavy & set(json.loads(answer.stdout)) == set()


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """Every name that a module imports, with the module it comes from; those for type checkers included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node.module or "") for alias in node.names)


def _private_imports(text: str) -> Iterator[str]:
    for package, names, whole in _IMPORT.findall(text):
        if whole or package not in NAMES:
            yield whole or package
            continue
        given = [name.partition(" as ")[0].strip() for name in names.partition("#")[0].strip("() \n").split(",")]
        yield from (f"{package}.{name}" for name in given if name and name not in NAMES[package])
    for package, name in _CLASS_PATH.findall(text):
        if package not in NAMES or name not in NAMES[package]:
            yield f"{package}.{name}"
