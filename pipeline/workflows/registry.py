"""The workflows and connectors of this process, found by module name and by entry point.

The fingerprint of a workflow's code is the code version of the settings, or is computed from its source files. Only
files are read, not loaded modules. So all workers of one deployment compute the same fingerprint, whatever else they
have imported and in whatever order.
"""

import hashlib
import importlib
import inspect
import json
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from cronsim import CronSim

from pipeline.connectors.sdk import Connector, Operation
from pipeline.domain.codec import Codec
from pipeline.domain.errors import InvalidInputError, NotFoundError, PipelineError
from pipeline.domain.operations import OperationSpec
from pipeline.domain.values import HandlerSpec, TopicSpec, WorkflowSpec, options_of
from pipeline.domain.workflows import HandlerKind
from pipeline.store.codecs import Codecs
from pipeline.transitions import payload_schemas
from pipeline.workflows.authoring import Consumer, DeclarationError, Producer, Workflow, workflows_of
from pipeline.workflows.contexts import RESERVED_NAMES

ENTRY_POINT_GROUP = "pipeline.workflows"


@dataclass
class Registry:
    """The workflows and connectors of a worker. Other workflows are left to workers that know them."""

    workflows: dict[str, Workflow] = field(default_factory=dict)
    connectors: dict[str, Connector] = field(default_factory=dict)

    @classmethod
    def load(cls, modules: Iterable[str], connectors: Iterable[Connector] = ()) -> "Registry":
        """Import modules, named or offered by entry points, and collect their workflows and connectors."""
        registry = cls()
        add_current_folder_to_path()
        for connector in connectors:
            registry.add_connector(connector)
        named = [("PIPELINE_WORKFLOWS", name) for name in modules]
        offered = [(f"The package {entry.name!r}", entry.module) for entry in entry_points(group=ENTRY_POINT_GROUP)]
        for source, name in [*named, *offered]:
            module = _import_module(source, name)
            for workflow in workflows_of(module.__name__):
                registry.add(workflow)
            for value in vars(module).values():
                if isinstance(value, Connector):
                    registry.add_connector(value)
        return registry

    def add(self, workflow: Workflow) -> None:
        """Add a workflow. Adding it again changes nothing; another one of the same name is an error."""
        known = self.workflows.get(workflow.name)
        if known is not None and known is not workflow:
            raise DeclarationError(f"workflow {workflow.name!r} is declared at {known.where} as well", workflow.where)
        _refuse_unused(workflow)
        self.workflows[workflow.name] = workflow

    def add_connector(self, connector: Connector) -> None:
        """Add a connector by its name."""
        shown = type(connector).__qualname__
        if not connector.name:
            raise InvalidInputError(f"{shown} has no name; set name = '...' on the class.")
        if not connector.name.isidentifier() or connector.name.startswith("_") or connector.name in RESERVED_NAMES:
            raise InvalidInputError(
                f"{shown} is named {connector.name!r}, which cannot be reached as ctx.{connector.name}; expected a "
                f"Python name other than {', '.join(sorted(RESERVED_NAMES))}."
            )
        known = self.connectors.get(connector.name)
        if known is not None and known is not connector:
            raise InvalidInputError(
                f"{shown} and {type(known).__qualname__} are both named {connector.name!r}; expected a name of its own "
                "for each connector."
            )
        self.connectors[connector.name] = connector

    def operation(self, connector: str, operation: str) -> Operation[Any] | None:
        """Return an operation by its names in the ledger; None when the code no longer has it."""
        known = self.connectors.get(connector)
        return type(known).operations().get(operation) if known is not None else None

    def codecs(self, default: Codec | None = None) -> Codecs | None:
        """Return the codecs of these workflows, with one for all others; None if there is none at all."""
        declared = {name: workflow.codec for name, workflow in self.workflows.items()}
        return Codecs(declared, default) if default is not None or any(declared.values()) else None

    @property
    def handlers(self) -> set[tuple[str, str]]:
        """Every handler whose code this process has, as (workflow, name)."""
        return {
            (workflow.name, handler)
            for workflow in self.workflows.values()
            for handler in (*workflow.consumers, *workflow.producers)
        }

    @property
    def topics(self) -> set[tuple[str, str]]:
        """Every topic that the code of this process declares, as (workflow, name)."""
        return {(workflow.name, topic) for workflow in self.workflows.values() for topic in workflow.topics}

    def consumer(self, workflow: str, handler: str) -> Consumer:
        """Return a consumer of a workflow of this process."""
        found = self.workflow(workflow).consumers.get(handler)
        if found is None:
            known = self.workflow(workflow).consumers
            raise NotFoundError(f"consumer of workflow {workflow!r} named", handler, known)
        return found

    def producer(self, workflow: str, handler: str) -> Producer:
        """Return a producer of a workflow of this process."""
        found = self.workflow(workflow).producers.get(handler)
        if found is None:
            known = self.workflow(workflow).producers
            raise NotFoundError(f"producer of workflow {workflow!r} named", handler, known)
        return found

    def workflow(self, name: str) -> Workflow:
        """Return a workflow of this process."""
        found = self.workflows.get(name)
        if found is None:
            raise NotFoundError("workflow", name, self.workflows)
        return found


def add_current_folder_to_path() -> None:
    """Add the current folder to the import path, for workers and commands alike, as `python -m` does.

    `celery -A pipeline` has it there only while it imports Pipeline.
    """
    try:
        here = str(Path.cwd())
    except FileNotFoundError:  # the folder was removed; installed modules can still be imported
        return
    if here not in sys.path:
        sys.path.insert(0, here)


def _import_module(source: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except DeclarationError:  # it names its place
        raise
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, PipelineError) else f"{type(error).__name__}: "
        missing = isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")
        hint = (
            "Expected a module on the worker's Python path or in its current folder."
            if missing
            else f"The fault is at {fault_site(error) or name}; correct it, and start again."
        )
        raise InvalidInputError(
            f"{source} names {name!r}, which cannot be imported: {kind}{str(error).rstrip('.')}. {hint}"
        ) from error


def fault_site(error: BaseException) -> str:
    """Return file and line of the user's code that raised an error; empty if no line of it is known.

    It is the last line outside the standard library, installed packages and Pipeline. If there is none, that of an
    installed package.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_path_on_import_path(error.filename)}:{error.lineno}"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_user_code(Path(each.filename))]
    own = [each for each in frames if not _INSTALLED & set(Path(each.filename).parts)] or frames
    return f"{_path_on_import_path(own[-1].filename)}:{own[-1].lineno}" if own else ""


def _is_user_code(file: Path) -> bool:
    is_standard = file.is_relative_to(_STANDARD_LIBRARY) and not _INSTALLED & set(file.parts)
    return not (is_standard or file.is_relative_to(_PACKAGE) or str(file).startswith("<"))


def _path_on_import_path(file: str) -> str:
    """Return the path of a file below its folder of the import path: `shop/mail.py` for the module `shop.mail`."""
    folders = [folder for folder in map(Path, sys.path) if folder.is_absolute() and Path(file).is_relative_to(folder)]
    return str(Path(file).relative_to(max(folders, key=lambda each: len(each.parts)))) if folders else file


def spec_of(workflow: Workflow, now: datetime, code_version: str = "") -> WorkflowSpec:
    """Return the description of a workflow for the database. A producer is first due at its next slot."""
    topics = tuple(
        TopicSpec(
            name=topic.name,
            schema=payload_schemas.json_schema(topic.schema) if topic.schema else None,
            renamed_from=topic.renamed_from,
        )
        for topic in workflow.topics.values()
    )
    consumers = tuple(
        HandlerSpec(
            **options_of(consumer),
            name=consumer.name,
            subscribes=tuple(topic.name for topic in consumer.subscribes),
            publishes=tuple(topic.name for topic in consumer.publishes),
        )
        for consumer in workflow.consumers.values()
    )
    producers = tuple(
        HandlerSpec(
            name=producer.name,
            kind=HandlerKind.PRODUCER,
            publishes=tuple(topic.name for topic in producer.publishes),
            renamed_from=producer.renamed_from,
            failures=producer.failures,
            schedule=producer.cron or f"every {producer.every}",
            first_run_at=now if producer.cron is None else first_slot(producer.cron, now),
        )
        for producer in workflow.producers.values()
    )
    return WorkflowSpec(
        name=workflow.name,
        version=workflow.version,
        fingerprint=fingerprint(workflow, code_version),
        topics=topics,
        handlers=(*consumers, *producers),
        concurrency=workflow.concurrency,
        on_uncertain=workflow.on_uncertain,
        on_logic_error=workflow.on_logic_error,
        on_exhausted=workflow.on_exhausted,
        retention=workflow.retention,
        renamed_from=workflow.renamed_from,
        codec=workflow.codec,
    )


def operation_specs(registry: Registry) -> list[OperationSpec]:
    """Return the description of every operation for the database."""
    return [
        OperationSpec(
            connector=connector.name,
            operation=name,
            is_mutation=operation.is_mutation,
            params_schema=payload_schemas.params_schema(operation.model),
            result_schema=payload_schemas.result_schema(operation.result_type),
            redact=tuple(sorted(operation.redact)),
            shown=tuple(sorted(operation.shown)),
            shows=operation.shows,
            look_up=operation.look_up,
            keyed=operation.keyed,
            key_lifetime=operation.key_lifetime,
            can_reconcile=operation.can_reconcile,
            can_fetch=operation.can_fetch,
            timeout=operation.timeout,
            settle=operation.settle,
            value=operation.value,
            four_eyes_above=None if operation.four_eyes_above is None else Decimal(operation.four_eyes_above),
        )
        for connector in registry.connectors.values()
        for name, operation in sorted(type(connector).operations().items())
    ]


def first_slot(cron: str, now: datetime) -> datetime:
    """Return the first slot of a cron expression after now, in UTC whatever the time zone of the database."""
    return next(CronSim(cron, now.astimezone(UTC)))


def _refuse_unused(workflow: Workflow) -> None:
    """Refuse a workflow without handlers, and a topic that no handler uses.

    A topic that is only subscribed to is valid: services publish to it from outside.
    """
    if not workflow.consumers and not workflow.producers:
        raise DeclarationError(
            f"workflow {workflow.name!r} has no handler; expected a consumer or a producer", workflow.where
        )
    used = {
        topic.name for consumer in workflow.consumers.values() for topic in (*consumer.subscribes, *consumer.publishes)
    }
    used |= {topic.name for producer in workflow.producers.values() for topic in producer.publishes}
    for name, topic in workflow.topics.items():
        if name not in used:
            raise DeclarationError(
                f"topic {name!r} of workflow {workflow.name!r} is neither subscribed to nor published to by any "
                "handler; remove it, or name it in subscribes= or publishes=",
                topic.where,
            )


_INSTALLED = frozenset({"site-packages", "dist-packages"})
_PACKAGE, _STANDARD_LIBRARY = Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))
_OURS = __name__.partition(".")[0]


def fingerprint(workflow: Workflow, code_version: str = "") -> str:
    """Return a value that changes with the code of a workflow or with its subscriptions.

    By it a deployment is recognised, and ends a maintenance. Without a ``code_version`` the code is that of the
    handlers and every source file of their packages.
    """
    subscriptions = [[name, *(topic.name for topic in given.subscribes)] for name, given in workflow.consumers.items()]
    parts = [workflow.name, str(workflow.version), json.dumps([sorted(subscriptions), sorted(workflow.producers)])]
    if code_version:
        parts.append(code_version)
    else:
        code = [*_code(workflow)]
        modules = {module for each in code if (module := inspect.getmodule(each))}
        parts += [*map(_source, code), *sorted(_digest(*_module_path(module)) for module in modules)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _code(workflow: Workflow) -> list[Any]:
    """Return the functions and classes of the handlers."""
    consumers = [consumer.instance for consumer in workflow.consumers.values()]
    functions = [producer.function for producer in workflow.producers.values()]
    return [*functions, *(getattr(each, "function", None) or type(each) for each in consumers)]


def _source(code: Any) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return str(getattr(code, "__qualname__", None) or getattr(code, "__name__", ""))


def _module_path(module: ModuleType) -> tuple[tuple[str, ...], str]:
    """Return the folders of a module's package and the pattern of its files. Pipeline's own code has none."""
    top = module.__name__.partition(".")[0]
    file = Path(getattr(module, "__file__", None) or "")
    if top == _OURS or not file.name:
        return (), ""
    if folders := getattr(sys.modules.get(top), "__path__", None):
        return tuple(folders), "**/*.py"
    alone = _INSTALLED & set(file.parts)  # else the files beside a single module belong to it
    return (str(file.parent),), file.name if alone else "*.py"


@cache
def _digest(folders: tuple[str, ...], pattern: str) -> str:
    """Return a digest of names and contents. Files are read once: the running code is the code of that time."""
    digest = hashlib.sha256()
    for folder in map(Path, folders):
        for file in sorted(folder.glob(pattern)):
            try:
                digest.update(f"{file.relative_to(folder)}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
            except OSError:
                continue  # an unreadable file was not imported from here
    return digest.hexdigest()
