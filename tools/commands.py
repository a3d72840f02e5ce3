"""The page of every command, option, exit code and JSON shape, written from the command line itself."""

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from pipeline.admin import (
    access,
    attention,
    audit,
    controls,
    events,
    mutations,
    quarantine,
    resolutions,
    runs,
    system,
    throughput,
    trace,
    workflows,
)
from pipeline.admin import timeline as moments
from pipeline.admin.advice import Advice
from pipeline.admin.dead_letters import DeadLetter
from pipeline.cli.main import EXIT_CODES, build_app
from pipeline.store.reads.invariants import Finding
from tools.comments import line_comments
from tools.markdown import code, page, section, table

#: What `--json` prints: "list of" these, or one of them.
_JSON_OUTPUT: dict[str, str] = {
    "workflows": "a list of WorkflowSummary; with a name, a WorkflowDetail",
    "events": "a list of EventSummary; with an id, an EventDetail",
    "runs": "a list of RunSummary; with an id, a RunDetail",
    "mutations": "a list of MutationSummary; with an id, a MutationDetail",
    "attention": "a list of AttentionItem",
    "trace": "a Trace",
    "top": "a Snapshot",
    "audit": "`items`, a list of AuditRecord, and `next`, the cursor for `--after` or null",
    "doctor": "a list of Finding",
    "workers": "a list of WorkerStatus",
    "settings": "a list of SettingStatus",
    "pause": "a ControlResult, with `is_notified`",
    "resume": "a ControlResult, with `is_notified`",
    "maintenance": "a ControlResult, with `is_notified`",
    "approve": "`mutation`, `act`, `consequence`, `is_notified`",
    "reject": "`mutation`, `act`, `consequence`, `is_notified`",
    "acknowledge": "`mutation`, `act`, `consequence`, `is_notified`",
    "resolve": "with an id `mutation`, `act`, `consequence`, `is_notified`; else `resolutions`, `preview`, "
    "`is_done`, `updated`, `refused`, `is_more`",
    "resolve-from": "`resolutions`, `preview`, `is_done`, `updated`, `refused`, `is_more`",
    "quarantine list": "a list of QuarantineEntry",
    "quarantine release": "`selected`, `is_done`, `updated`, `refused`, `is_more`, `is_notified`",
    "quarantine skip": "`selected`, `is_done`, `updated`, `refused`, `is_more`, `is_notified`",
    "quarantine add": "`selected`, `is_done`, `updated`, `refused`, `is_more`, `is_notified`",
    "dead-letters list": "a list of DeadLetter",
    "dead-letters send-back": "`is_done`, `moved`, `kept`, `missing`",
    "dead-letters drop": "`is_done`, `moved`, `kept`, `missing`",
    "tokens list": "a list of TokenSummary",
    "tokens create": "`secret` and `token`, a TokenSummary",
    "tokens revoke": "`id`, `is_changed`",
    "publish": "`new`, `repeated`, `replaced`, `is_notified`",
    "breaker": "`operation`, `act`, `is_changed`, `is_notified`",
    "breakers": "a list of `connector`, `operation`, `reason`, `opened_by`, `opened_at`, `probe_at`",
    "connectors": "a list of `connector`, `operation`, `grade`, `timeout`, `settle`",
    "plan": "`renames`, `requests` and `counts`",
    "db upgrade": "`version`",
    "db current": "`version`",
}
_JSON_TYPES: tuple[type, ...] = (
    workflows.WorkflowSummary,
    workflows.WorkflowDetail,
    workflows.HandlerSummary,
    workflows.TopicSummary,
    workflows.Block,
    workflows.AuditEntry,
    events.EventSummary,
    events.EventDetail,
    events.Delivery,
    runs.RunSummary,
    runs.RunDetail,
    runs.SessionLine,
    runs.EventLine,
    runs.MutationLine,
    resolutions.MutationSummary,
    mutations.MutationDetail,
    moments.TimelineEntry,
    Advice,
    attention.AttentionItem,
    trace.Trace,
    trace.Match,
    trace.TraceNode,
    throughput.Snapshot,
    throughput.Throughput,
    quarantine.QuarantineEntry,
    controls.ControlResult,
    audit.AuditRecord,
    system.WorkerStatus,
    system.SettingStatus,
    access.TokenSummary,
    DeadLetter,
    Finding,
)


def cli_page() -> str:
    """Every command of ``pipeline``."""
    codes = table(["exit code", "meaning"], ((str(number), meaning) for number, meaning in EXIT_CODES.items()))
    return page(
        "Command line",
        "`pipeline COMMAND --help` says the same in a terminal; `pipeline --install-completion` completes commands "
        "and options in your shell. The database is that of `PIPELINE_DATABASE_URL` or `--database-url`; without "
        "either, the one that `pipeline dev` runs in the same folder. An id may be cut short wherever what is left is "
        "unambiguous, and `show` before it changes nothing. In a pipe, output is plain and lines are as long as they "
        "need to be; `COLUMNS` sets another width. With `--json`, the commands of [JSON](#json) print JSON instead of "
        "a table.",
        section("Exit codes", codes),
        *(_command_section(name, callback) for name, callback in _commands(build_app())),
        section(
            "JSON",
            "What `--json` prints. Fields may be added in a later version, none changes its meaning or goes away. "
            "Instants are ISO 8601 with their zone. `is_notified` says whether a worker was notified of work that "
            "became due: `false` means that the broker could not be reached and the next tick goes on, `null` that "
            "nothing became due.",
            table(["command", "prints"], ((code(f"pipeline {name}"), words) for name, words in _JSON_OUTPUT.items())),
            *(_type_section(kind) for kind in _JSON_TYPES),
        ),
    )


def _commands(group: typer.Typer, path: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    for info in group.registered_commands:
        if info.callback is not None:
            yield f"{path}{info.name or info.callback.__name__.replace('_', '-')}", info.callback
    for sub in group.registered_groups:
        if sub.typer_instance is not None:
            yield from _commands(sub.typer_instance, f"{path}{sub.name} ")


def _command_section(name: str, callback: Callable[..., Any]) -> str:
    arguments: list[tuple[str, str, str]] = []
    options: list[tuple[str, str, str]] = []
    hints = get_type_hints(callback, include_extras=True)
    for parameter in inspect.signature(callback).parameters.values():
        hint = hints[parameter.name]
        if get_origin(hint) is not Annotated:
            continue
        kind, info = get_args(hint)[:2]
        if parameter.name == "as_json":  # said once for all commands
            continue
        row = (_option_text(parameter.name, kind, info), _help(kind, info), _default(parameter.default))
        (arguments if isinstance(info, ArgumentInfo) else options).append(row)
    parts = [inspect.cleandoc(callback.__doc__ or "")]
    parts += ["\n".join(_parameter_line(*row) for row in (*arguments, *options))] if arguments or options else []
    return section(f"pipeline {name}", *parts)


def _parameter_line(name: str, meaning: str, default: str) -> str:
    if default == "required":
        return f"- {name} (required): {meaning}"
    return f"- {name}: {meaning} Default {default}." if default else f"- {name}: {meaning}"


def _option_text(name: str, kind: Any, info: ArgumentInfo | OptionInfo) -> str:
    if isinstance(info, ArgumentInfo):
        return code(info.metavar or name.upper())
    plain = "--" + name.replace("_", "-")
    first = [info.default] if isinstance(info.default, str) else []  # inside Annotated it is a spelling too
    given = [text for text in [*first, *(info.param_decls or ())] if text.startswith("-")]
    if given:
        return ", ".join(code(text) for text in given)
    return f"{code(plain)}, {code('--no-' + plain[2:])}" if kind is bool else code(plain)


def _help(kind: Any, info: ArgumentInfo | OptionInfo) -> str:
    members = [each for each in _member_types(kind) if isinstance(each, type) and issubclass(each, Enum)]
    choices = ", ".join(code(str(member.value)) for each in members for member in each)
    return " ".join(part for part in (info.help or "", f"One of {choices}." if choices else "") if part)


def _member_types(kind: Any) -> Iterator[Any]:
    if get_origin(kind) in (Union, UnionType):
        yield from (each for each in get_args(kind) if each is not NoneType)
    else:
        yield kind


def _default(value: Any) -> str:
    if value in (None, "", False) or value is inspect.Parameter.empty:
        return "required" if value is inspect.Parameter.empty else ""
    return code(str(value.value) if isinstance(value, Enum) else "yes" if value is True else str(value))


def _type_section(kind: type) -> str:
    meaning = (kind.__doc__ or "").strip().partition("\n")[0]
    bases = [base for base in reversed(kind.__mro__) if is_dataclass(base)]
    fields = [field for base in bases for field in _fields(base)]
    lines = (f"- `{name}: {spelled}`" + (f": {text}" if text else "") for name, spelled, text in fields)
    return f"### {kind.__name__}\n\n{meaning}\n\n" + "\n".join(lines)


def _fields(kind: type) -> Iterator[tuple[str, str, str]]:
    """Name, type and comment of each field of its own, as the source has them."""
    source = Path(inspect.getfile(kind)).read_text(encoding="utf-8")
    said = line_comments(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    spelled = ast.unparse(field.annotation).replace("'", "")
                    yield field.target.id, spelled, said.get(field.end_lineno or field.lineno, "")
