"""Pages that are written from the code, so that they cannot say anything else: ``python -m tools.docs``.

With ``--check`` nothing is written; the exit code says whether a page is stale, stderr which one.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from sqlalchemy import CheckConstraint, Column, ForeignKeyConstraint, Index, Table, UniqueConstraint
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import Constraint

from pipeline.admin import problem_types
from pipeline.config import Settings
from pipeline.domain import errors
from pipeline.domain.states import (
    DELIVERY_TRANSITIONS,
    INITIAL_PHASES,
    MUTATION_TRANSITIONS,
    PHASE_TRANSITIONS,
    RUN_STATUS_TRANSITIONS,
    DeliveryStatus,
    Evidence,
    MutationOutcome,
    MutationStatus,
    Phase,
    Resolver,
    RunStatus,
    Sequel,
)
from pipeline.domain.workflows import BlockKind, OnLogicError, OnUncertain
from pipeline.store import functions
from pipeline.store.reads import invariants as reads_invariants
from pipeline.store.reads.invariants import INVARIANTS, Severity
from pipeline.store.schema import metadata
from pipeline.telemetry import metrics, spans, transition_log
from tools import api, commands, http_api, rules, state_tables
from tools.comments import meanings
from tools.markdown import State, code, fold, page, section, table

ADRS = Path("docs/design/adr")
_POSTGRES = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy leaves it untyped


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Write every generated page, or with ``--check`` say which ones would change."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description="write the generated pages")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is stale")
    options = parser.parse_args(arguments)
    root = root or Path.cwd()
    outdated = stale_pages(root)
    for path, text in outdated.items():
        if options.check:
            sys.stderr.write(f"{path} is stale; run `make docs`\n")
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
    return 1 if options.check and outdated else 0


def stale_pages(root: Path) -> dict[Path, str]:
    """The pages of this checkout that are not what the code says, with what they should be."""
    return {path: text for path, text in pages(root).items() if _read(root / path) != text}


def pages(root: Path) -> dict[Path, str]:
    """Every generated page."""
    made: dict[str, Callable[[], str]] = {
        "states": states,
        "settings": settings,
        "telemetry": transitions,
        "metrics": metrics_page,
        "errors": error_tree,
        "invariants": invariants,
        "tables": tables,
        "cli": commands.cli_page,
        "http-api": http_api.http_api_page,
        "api": api.api_page,
    }
    written = {Path(f"docs/reference/{name}.md"): make() for name, make in made.items()}
    written[ADRS / "README.md"] = decisions(root / ADRS)
    written[rules.PAGE] = rules.fill_in_tests(_read(root / rules.PAGE), rules.tests_by_rule(root / "tests"))
    return written


def states() -> str:
    """Phases, statuses and moves, as the tables of moves have them."""
    return page(
        "States",
        "Every state there is and every move between them. A move that is not listed here is refused. A run begins at "
        f"{_join_members(Phase, INITIAL_PHASES)}, a mutation at `pending` or `in_flight`, a delivery at `pending`.",
        *_run_sections(),
        *_mutation_sections(),
        section(
            "Delivery of an event to one consumer",
            _transition_table(DeliveryStatus, DELIVERY_TRANSITIONS, "may become"),
        ),
        _workflow_section(),
        section(
            "The mutation boundary",
            "Which side a stopped run stands on, and what becomes of its inputs.",
            table(["phase", "outcome", "ledger", "side", "inputs"], fold(state_tables.boundary_rows(), 0)),
        ),
        section(
            "What follows a failure",
            "With the default policies, for a first failure.",
            table(["failure", "side", "status", "inputs", "then"], fold(state_tables.failure_rows(), 0)),
        ),
    )


def settings() -> str:
    """Every variable, from the settings themselves."""
    lines = (
        f"- {code(row.variable)}{f' = {code(row.default)}' if row.default else ''}: {row.meaning}"
        for row in Settings().describe()
    )
    return page(
        "Settings",
        "Read once, when a process starts, from the environment. A wrong value, a contradiction between two values or "
        "an unknown `PIPELINE_` variable stops the start, and every problem is named at once. Durations are written "
        "`30s`, `5m`, `1h`, `1m30s`, `PT30S` or as a number of seconds; one that makes no sense is refused with the "
        "range that does. An empty variable counts as unset.",
        "\n".join(lines),
    )


def transitions() -> str:
    """Every line that the system says about itself."""
    lines = (f"- {code(name)}: {meaning}" for name, meaning in transition_log.TRANSITIONS.items())
    return page(
        "Telemetry",
        "One log line per transition, on the logger `pipeline`, said after the transaction has committed: a line is "
        "never about something that did not happen. Ids are fields of the record, payloads never are.",
        "\n".join(lines),
        section(
            "Spans",
            "Made when somebody listens, in the trace of the run they are about. The tasks that carry runs have spans "
            "in traces of their own, linked to the runs and from them.",
            table(["span", "parent", "what it is", "attributes"], _spans()),
        ),
    )


def _spans() -> Iterable[tuple[str, str, str, str]]:
    for name, (parent, what, attributes) in spans.SPANS.items():
        yield code(name), parent, what, ", ".join(code(attribute) for attribute in attributes)


def metrics_page() -> str:
    """Every metric, from the one table of them."""
    parts = {
        "Counted as it happens": lambda each: each.kind != metrics.GAUGE and not each.name.startswith(_OTHER_PREFIXES),
        "Read from Postgres when somebody asks": lambda each: (
            each.kind == metrics.GAUGE and not each.name.startswith(_OTHER_PREFIXES)
        ),
        "Streams, from `pipeline ingest`": lambda each: each.name.startswith(_OTHER_PREFIXES[1]),
        "The consumer engine, from `pipeline consume`": lambda each: each.name.startswith(_OTHER_PREFIXES[0]),
    }
    return page(
        "Metrics",
        "What is served at `/metrics` and sent over OTLP ([how](../guides/monitor.md)). Labels are names that stand "
        "in code, and statuses; never ids, keys or payloads. The OpenTelemetry name has dots and no suffix: "
        "`pipeline.backlog.age` is `pipeline_backlog_age_seconds`.",
        *(section(title, _metrics(filter(chosen, metrics.METRICS.values()))) for title, chosen in parts.items()),
        section(
            "Buckets",
            table(
                ["histogram", "upper bounds"],
                (
                    (code(each.prometheus), ", ".join(f"{bound:g}" for bound in each.bounds))
                    for each in metrics.METRICS.values()
                    if each.bounds
                ),
            ),
        ),
    )


_OTHER_PREFIXES = ("pipeline.consumer_engine.", "pipeline.queue.")


def _metrics(chosen: Iterable[metrics.Metric]) -> str:
    return "\n".join(
        f"- {code(each.prometheus)} ({', '.join([each.kind, *map(code, each.labels)])}): {each.description}"
        for each in chosen
    )


def error_tree() -> str:
    """Every error raised on purpose, indented by kinship."""
    return page(
        "Errors",
        "Everything this package raises on purpose. An error names what was asked, what was found and what would "
        "have been accepted; the rows are unchanged.",
        "\n".join(_error_lines(errors.PipelineError, 0)),
        section(
            "Problems",
            "How people meet an error: the HTTP API answers with a problem (RFC 9457) whose `type` is "
            f"`{problem_types.TYPE_PREFIX}` and the slug, the command `pipeline` ends with the exit code. An error "
            "that is not in the table is reported as its nearest base that is.",
            table(
                ["slug", "HTTP status", "exit code", "title", "errors"],
                (
                    (
                        code(each.slug),
                        str(each.status),
                        "" if each.exit_code is None else str(each.exit_code),
                        each.title,
                        ", ".join(code(kind.__name__) for kind in each.errors),
                    )
                    for each in problem_types.PROBLEM_TYPES
                ),
            ),
        ),
    )


def invariants() -> str:
    """What must be true of the tables at every instant."""
    advised: dict[str, list[str]] = {}
    for each in INVARIANTS:
        advised.setdefault(f"*{each.severity}*. {each.advice}", []).append(f"- {code(each.name)}: {each.sentence}")
    parts = [f"{advice}\n\n" + "\n".join(lines) for advice, lines in advised.items()]
    return page(
        "Invariants",
        f"{len(INVARIANTS)} sentences that must be true of the tables at every instant. The tests ask for them after "
        "every test that used the database, and the command line's doctor asks in production. They only look; "
        "nothing is repaired. *broken* means that a promise does not hold, *overdue* that a sweep is not running.",
        *parts,
        section(
            "Settings of Postgres",
            "The doctor also reads what makes these sentences last. A worker does not start where it is broken.",
            table(
                ["name", "severity", "sentence", "advice"],
                [(code(reads_invariants.NAME), Severity.BROKEN, reads_invariants.SENTENCE, reads_invariants.ADVICE)],
            ),
        ),
    )


def tables() -> str:
    """Tables, and everything the database refuses by itself."""
    found = [_table(each) for each in metadata.tables.values()]
    triggers = [match for made in functions.AFTER_TABLES if (match := _TRIGGER.search(made))]
    return page(
        "Tables",
        f"All of it lives in the schema `{metadata.schema}`. A type with `?` may be null. Each row satisfies every "
        "listed condition; `(A) <= (B)` reads “A only if B”.",
        *found,
        section(
            "Triggers",
            "Each refuses a move.",
            "\n".join(
                f"- {code(made['name'])} on {code(made['table'])}: {code(' '.join(made['when'].split()))}"
                for made in triggers
            ),
        ),
    )


def decisions(folder: Path) -> str:
    """The index of decision records; a status is named where it is not the usual one."""
    lines = []
    for path in sorted(folder.glob("[0-9]*.md")):
        text = _read(path)
        title = text.partition("\n")[0].removeprefix("# ").partition(" ")[2]
        found = re.search(r"^Status: (.+)$", text, re.MULTILINE)
        status = found[1] if found else "no status"
        lines.append(f"- [{path.name[:4]}]({path.name}) {title}{'' if status == _USUAL else f': {status}'}")
    return page(
        "Decisions",
        f"One page per decision: the question, the answer, what follows, what was rejected. All are {_USUAL} unless "
        "something else is said. A record is not rewritten when minds change; a later one supersedes it.",
        "\n".join(lines),
    )


_USUAL = "accepted, built"
_TRIGGER = re.compile(
    r"CREATE TRIGGER (?P<name>\w+) .*? ON (?P<table>[\w.]+) .*?WHEN \((?P<when>.*)\)\s*EXECUTE", re.DOTALL
)


def _run_sections() -> tuple[str, ...]:
    return (
        section(
            "Phase of a run",
            "How far it got. The phase only grows; a failure never changes it.",
            _transition_table(Phase, PHASE_TRANSITIONS, "goes on to"),
        ),
        section(
            "Status of a run",
            "Whether it is moving, and why not. A status leaves `active` once; the only way back is a granted "
            "approval. Work that stopped otherwise goes on in a new run.",
            _transition_table(RunStatus, RUN_STATUS_TRANSITIONS, "may become"),
        ),
        section("Outcome of its mutation, as the run remembers it", _member_table(MutationOutcome, "outcome")),
        section(
            "Sequel of a run",
            "What became of it after it stopped. It is derived and not stored.",
            _member_table(Sequel, "sequel"),
        ),
    )


def _mutation_sections() -> tuple[str, ...]:
    return (
        section(
            "Mutation",
            "One row of the ledger.",
            _transition_table(MutationStatus, MUTATION_TRANSITIONS, "may become"),
        ),
        section("Who resolved a mutation", _member_table(Resolver, "resolver")),
        section("What “it did not happen” rests on", _member_table(Evidence, "evidence")),
    )


def _workflow_section() -> str:
    return section(
        "Workflow",
        "Why the system holds one back:",
        _member_table(BlockKind, "block"),
        "What people are shown:",
        table(["a person wants", "blocks", "shown"], fold(state_tables.status_rows(), 1)),
        "How far trouble reaches, by the workflow's choice:",
        _member_table(OnUncertain, "on an unknown outcome"),
        _member_table(OnLogicError, "on wrong code"),
    )


def _transition_table(members: type[State], moves: Mapping[State, Iterable[State]], verb: str) -> str:
    said = meanings(members)
    rows = ((code(state), said[state], _join_members(members, moves[state])) for state in members)
    return table([members.__name__.removesuffix("Status").lower() or "state", "meaning", verb], rows)


def _member_table(members: type[StrEnum], head: str) -> str:
    said = meanings(members)
    return table([head, "meaning"], ((code(state) or "(empty)", said[state]) for state in members))


def _join_members(order: type[StrEnum], chosen: Iterable[StrEnum]) -> str:
    wanted = set(chosen)
    return ", ".join(code(state) for state in order if state in wanted) or "nothing"


def _error_lines(kind: type[BaseException], depth: int) -> list[str]:
    first = (kind.__doc__ or "").strip().partition("\n")[0]
    transition_log = [f"{'  ' * depth}- `{kind.__name__}`: {first}"]
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            transition_log += _error_lines(child, depth + 1)
    return transition_log


def _table(each: Table) -> str:
    """A table as four lists: columns, keys, what a row must satisfy, and indexes."""
    constraints = sorted(each.constraints, key=lambda found: (type(found).__name__, str(found.name)))
    checks = [
        f"- {code(str(found.name))}: {code(str(found.sqltext))}"
        for found in constraints
        if isinstance(found, CheckConstraint)
    ]
    parts = [", ".join(_column(column) for column in each.columns) + "."]
    parts += [" ".join(_key(found) for found in constraints if not isinstance(found, CheckConstraint))]
    parts += ["\n".join(checks)] if checks else []
    indexes = sorted(each.indexes, key=lambda index: str(index.name))
    parts += [f"Indexes: {', '.join(_index(index) for index in indexes)}."] if indexes else []
    return section(each.name, *parts)


def _column(column: Column[object]) -> str:
    kind = column.type.compile(dialect=_POSTGRES).lower().replace("timestamp with time zone", "timestamptz")
    default = _default(column)
    return code(f"{column.name} {kind}{'?' if column.nullable else ''}{f' = {default}' if default else ''}")


def _default(column: Column[object]) -> str:
    if column.identity is not None:
        return "identity"
    return str(getattr(column.server_default, "arg", ""))


def _key(constraint: Constraint) -> str:
    if isinstance(constraint, ForeignKeyConstraint):
        (key,) = constraint.elements
        return f"{code(key.parent.name)} is in {code(f'{key.column.table.name}.{key.column.name}')}."
    kind = "Unique:" if isinstance(constraint, UniqueConstraint) else "Primary key:"
    return f"{kind} {code(', '.join(column.name for column in constraint.columns))}."  # type: ignore[attr-defined]


def _index(index: Index) -> str:
    where = index.dialect_options["postgresql"]["where"]
    columns = code(", ".join(column.name for column in index.columns))
    unique = "unique " if index.unique else ""
    return f"{code(str(index.name))} ({unique}{columns}{'' if where is None else f' where {code(str(where))}'})"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
