"""The page of every command, option, exit code and JSON shape, written from the command line itself."""

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, is_dataclass
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


#: A line that is typed for each command. A test reads each by the command's own parser.
EXAMPLES: dict[str, str] = {
    "attention": "--check",
    "top": "--once",
    "workflows": "billing",
    "events": "--workflow billing --status quarantined",
    "runs": "--waiting",
    "mutations": "01a1f1f2-fd94",
    "trace": "order-4711",
    "audit": "--workflow billing --since '2030-12-31 14:00'",
    "connectors": "",
    "breakers": "",
    "plan": "billing",
    "open": "order-4711",
    "resolve": "happened 01a1f1f2-fd94 --external-id ch_1 -m 'seen in the dashboard'",
    "resolve-from": "charges.csv --column reference --external-id id",
    "approve": "01a1f1f2-fd94 -m 'within budget'",
    "reject": "01a1f1f2-fd94 -m 'too expensive'",
    "acknowledge": "01a1f1f2-fd94 -m 'refunded one of them'",
    "pause": "billing -m stock-taking",
    "resume": "billing -m 'new credentials'",
    "maintenance": "enter billing -m 'wrong tax rate'",
    "breaker": "open mail.send -m 'provider outage'",
    "publish": 'shop orders.paid \'{"order": "4711"}\' --message-id order:4711',
    "init": "shop",
    "dev": "receipts",
    "api": "--port 8080",
    "consume": "inbox:ImportOrders --policy policy.toml",
    "metrics": "--once",
    "doctor": "--recent 100000",
    "workers": "",
    "settings": "",
    "chaos": "--mutations 150 --seed 7",
    "bench": "--cases light,backlog --repeats 5",
    "quarantine list": "--workflow billing",
    "quarantine release": "--workflow billing --handler send -m 'fixed in 2.4' --yes",
    "quarantine skip": "5 -m 'test data' --yes",
    "quarantine add": "5 --workflow billing --handler send -m 'times out' --yes",
    "ingest": "--stream orders --workflow shop --topic orders.paid --message-id-field id",
    "ingest recover": "--stream orders --workflow shop --topic orders.paid --message-id-field id",
    "ingest backlog": "--stream orders",
    "ingest park": "1700000000000-0 --stream orders -m 'no email'",
    "db upgrade": "",
    "db current": "",
    "db sql": "--since 0100",
    "db roles": "--prefix shop",
    "db keys": "",
    "tokens list": "",
    "tokens create": "ci --role publisher --workflow shop --days 30",
    "tokens revoke": "01a1f1f2",
    "dead-letters list": "--check",
    "dead-letters send-back": "--all --yes",
    "dead-letters drop": "3f0e6c0a-9d57-4c1c-8a53-0b5a0c4f6f5e --yes",
}
#: An option that so many commands have, with one meaning, is explained once for all of them.
_SHARED_BY = 3


def cli_page() -> str:
    """Every command of ``pipeline``, with what it takes and a line that is typed."""
    found = {name: _Parameters.of(callback) for name, callback in commands_of(build_app())}
    shared = _shared(found.values())
    codes = table(["exit code", "meaning"], ((str(number), meaning) for number, meaning in EXIT_CODES.items()))
    return page(
        "Command line",
        "`pipeline COMMAND --help` says the same in a terminal, `pipeline --install-completion` completes commands. "
        "The database is that of `PIPELINE_DATABASE_URL` or `--database-url`, else the one of `pipeline dev` in this "
        "folder. An id may be cut short. In a pipe, output is plain; `COLUMNS` sets the width.",
        section("Exit codes", codes),
        section("Options of several commands", "\n".join(f"- {name}: {meaning}" for name, meaning in sorted(shared))),
        *(section(f"pipeline {name}", *_parts(name, given, shared)) for name, given in found.items()),
        section(
            "JSON",
            "What `--json` prints. Fields may be added in a later version, none changes its meaning or goes away. "
            "A field without a type is text, `?` may be null. Instants are ISO 8601 with their zone. `is_notified`: "
            "workers were told of due work; `false`: the broker could not be reached; `null`: nothing became due.",
            table(["`pipeline`", "prints"], _json_rows()),
            table(["value", "fields"], ((kind.__name__, _field_list(kind)) for kind in _JSON_TYPES)),
        ),
    )


def _json_rows() -> Iterator[tuple[str, str]]:
    """The commands with their output; those that print the same are one row."""
    for words in dict.fromkeys(_JSON_OUTPUT.values()):
        yield ", ".join(code(name) for name, prints in _JSON_OUTPUT.items() if prints == words), words


def commands_of(group: typer.Typer, path: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command with its function, in the order of the page."""
    for info in group.registered_commands:
        if info.callback is not None:
            yield f"{path}{info.name or info.callback.__name__.replace('_', '-')}", info.callback
    for sub in group.registered_groups:
        if sub.typer_instance is not None:
            own = sub.typer_instance.registered_callback
            if own is not None and own.callback is not None and sub.typer_instance.info.invoke_without_command is True:
                yield f"{path}{sub.name}", own.callback
            yield from commands_of(sub.typer_instance, f"{path}{sub.name} ")


@dataclass(frozen=True)
class _Parameters:
    """What a command says about itself and takes: for each parameter its text, its meaning and its default."""

    words: str
    rows: list[tuple[str, str, str]]

    @classmethod
    def of(cls, callback: Callable[..., Any]) -> "_Parameters":
        """Read the parameters of a command, arguments first."""
        arguments: list[tuple[str, str, str]] = []
        options: list[tuple[str, str, str]] = []
        hints = get_type_hints(callback, include_extras=True)
        for parameter in inspect.signature(callback).parameters.values():
            hint = hints[parameter.name]
            if get_origin(hint) is not Annotated or parameter.name == "as_json":  # --json is explained once
                continue
            kind, info = get_args(hint)[:2]
            row = (_option_text(parameter.name, kind, info), _help(kind, info), _default(parameter.default))
            (arguments if isinstance(info, ArgumentInfo) else options).append(row)
        return cls(inspect.cleandoc(callback.__doc__ or ""), [*arguments, *options])


def _shared(found: Iterable[_Parameters]) -> set[tuple[str, str]]:
    counted = Counter((name, meaning) for each in found for name, meaning, _ in each.rows)
    return {row for row, times in counted.items() if times >= _SHARED_BY}


def _parts(name: str, given: _Parameters, shared: Set[tuple[str, str]]) -> Iterator[str]:
    """The words of a command, the options that it alone has, those that others have too, and an example."""
    own = [_parameter_line(*row) for row in given.rows if row[:2] not in shared]
    also = [
        f"{text}{f' ({default})' if default else ''}" for text, words, default in given.rows if (text, words) in shared
    ]
    yield given.words
    if own:
        yield "\n".join(own)
    if also:
        yield f"Also {', '.join(also)}."
    if EXAMPLES.get(name):
        yield f"```sh\npipeline {name} {EXAMPLES[name]}\n```"


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


def _field_list(kind: type) -> str:
    bases = [base for base in reversed(kind.__mro__) if is_dataclass(base)]
    fields = [field for base in bases for field in _fields(base)]
    return ", ".join(code(_spell(name, kind)) + (f" ({text})" if text else "") for name, kind, text in fields)


def _spell(name: str, kind: str) -> str:
    """A field with its type, briefly: text has none, and `?` may be null."""
    short = re.sub(r"tuple\[(\w+), \.\.\.\]", r"list[\1]", kind).replace(" | None", "?")
    return name + ("" if short == "str" else short.removeprefix("str") if short == "str?" else f":{short}")


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
