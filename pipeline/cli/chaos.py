"""Command ``pipeline chaos``: run orders under faults and compare the effects with the ledger."""

import secrets
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.chaos import run as runs
from pipeline.chaos.faults import KEYED, OPERATIONS
from pipeline.chaos.run import ChaosResult
from pipeline.cli import common, tables
from pipeline.domain.errors import InvalidInputError

if TYPE_CHECKING:
    from pipeline.chaos.compare import SideFigures
    from pipeline.chaos.soak import SoakResult

_MAX_PRINTED = 5
_WORKERS = 2
_COMPARED = {
    "orders": "published",
    "done": "done",
    "effects": "effects",
    "doubled": "with more than one effect",
    "lost": "without an effect, unreported",
    "stuck": "with an effect, never done, unreported",
    "wrong_verdicts": "recorded otherwise than it was",
    "for_a_person": "that wait for an operator",
    "unfinished": "messages left at the end of the time",
}


class Peer(StrEnum):
    """What a run is compared with."""

    CELERY = "celery"


def chaos(  # noqa: PLR0913 - options of a command
    *,
    mutations: Annotated[int, typer.Option(min=1, help="How many orders; each requests one effect.")] = 1000,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Repeats faults and kills; random by default.", show_default=False)
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers, each with several processes; 2 by default.", show_default=False)
    ] = None,
    faults: Annotated[
        int | None,
        typer.Option(
            min=0, max=90, help="Percent of its calls in which the provider misbehaves; about half by default."
        ),
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="Keep servers' data, logs and the provider's records here.", show_default=False)
    ] = None,
    compare: Annotated[
        Peer | None,
        typer.Option(
            help="Run the same orders as a plain Celery chain, too, under the same faults.", show_default=False
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="With --compare: draw the result into this SVG file.", show_default=False)
    ] = None,
    soak: Annotated[
        int | None,
        typer.Option(min=1, help="So many orders in segments under every fault, resumable.", show_default=False),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="With --soak: the folder from which it goes on.", show_default=False)
    ] = None,
    segment: Annotated[
        int | None, typer.Option(min=1, help="With --soak: orders per segment; 2000 by default.", show_default=False)
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Send mutations to a faulty provider while workers and servers are killed; compare its records with the ledger.

    Uses servers of its own, never your database. Exit code 1 when records and ledger disagree. A soak that was stopped
    goes on when it is called again with the same state.
    """
    if (soak is None) != (state is None) or (segment is not None and soak is None):
        raise InvalidInputError("A soak needs --soak ORDERS and --state FOLDER; --segment is for a soak only.")
    if soak is not None and compare is not None:
        raise InvalidInputError("A soak and a comparison were asked for at once; expected one of --soak and --compare.")
    if soak is not None and state is not None:
        _soak(soak, state, {"seed": seed, "segment": segment, "workers": workers, "faults": faults}, as_json=as_json)
        return
    workers = workers or _WORKERS
    if plot is not None and compare is None:
        raise InvalidInputError("--plot was given without --compare; expected `--compare celery --plot FILE`.")
    drawn = secrets.randbelow(10**6) if seed is None else seed
    options = runs.ChaosOptions(
        mutations=mutations, seed=drawn, workers=workers, faults=faults, home=home, report_progress=_print_progress
    )
    _print_progress(f"seed {drawn}")
    if compare is not None:
        _compare(options, plot, as_json=as_json)
        return
    result = runs.run(options)
    if as_json:
        common.print_json(runs.as_dict(result))
    else:
        _print_result(result)
    if not result.is_successful:
        raise typer.Exit(1)


def _soak(orders: int, state: Path, given: dict[str, int | None], *, as_json: bool) -> None:
    """Begin a soak or go on with one. What is not given is as it began, or as by default."""
    from pipeline.chaos import soak as soaking

    chosen = {name: value for name, value in given.items() if value is not None}
    fixed = {"seed": secrets.randbelow(10**6), **soaking.saved_options(state), **chosen}
    result = soaking.soak(soaking.SoakOptions(orders=orders, state=state, report_progress=_print_progress, **fixed))
    if as_json:
        common.print_json(soaking.as_dict(result))
    else:
        _print_soak(result)
    if not result.is_successful:
        raise typer.Exit(1)


def _print_soak(result: "SoakResult") -> None:
    from pipeline.chaos import soak as soaking

    found, options = result.total, result.options
    tables.print_table(
        f"seed {options.seed}: {found.orders} of {options.orders} orders in {result.segments} segments, "
        f"{found.seconds / 3600:.2f} h",
        ("counted", "number"),
        [
            ("runs", found.runs),
            ("ledger rows", found.mutations),
            ("effects", found.effects),
            ("doubled effects", found.doubled),
            ("lost effects", found.lost),
            ("wrong verdicts", found.wrong_verdicts),
            ("runs that lost their worker", found.lost_runs),
            ("unknown outcomes", found.unknown),
            ("settled without a person", _percent(found.share_without_a_person)),
            ("the same, of operations with a search", _percent(found.reconcilable_share_without_a_person)),
            ("time to certainty without a person, p50", _seconds(soaking.percentile(found.certainty, 50))),
            ("time to certainty without a person, p95", _seconds(soaking.percentile(found.certainty, 95))),
            ("wrong not found, repeated under an honoured key", found.wrong_absences),
            ("late effects that a person acknowledged", found.late_effects),
            ("times that the soak itself was stopped in a segment", found.interruptions),
            ("largest database, MB", found.database_mb),
        ],
    )
    tables.print_table(
        "Faults of processes, servers and messages",
        ("fault", "number", "repaired p50", "p95"),
        [
            (
                fault,
                count,
                *(_seconds(soaking.percentile(found.recoveries.get(fault, {}), percent)) for percent in (50, 95)),
            )
            for fault, count in sorted(found.faults.items())
        ],
    )
    tables.print_table("What the provider did", ("request", "number"), sorted(found.requests.items()))
    tables.print_table("What its search did", ("reconcile request", "number"), sorted(found.reconciles.items()))
    typer.echo(f"Machine: {result.machine}.")
    _print_first("PROBLEM", list(result.problems))
    typer.echo(
        f"The gate of the next segment is closed, with {len(result.problems)} problems. Its records: {options.state}."
        if result.problems
        else "Every segment's gate is open: each order has one effect, the ledger equals the provider's file, and the "
        "doctor finds nothing."
    )


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.2f} %"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


def _compare(options: runs.ChaosOptions, plot: Path | None, *, as_json: bool) -> None:
    runs.check_options(options)
    from pipeline.chaos import compare as comparing  # Celery is slow to import

    found = comparing.compare(options)
    if plot is not None:
        comparing.write_plot(plot, found)
    if as_json:
        common.print_json(comparing.as_dict(found))
    else:
        _print_result(found.ours)
        _print_sides(found.sides)
    if not found.is_successful:
        raise typer.Exit(1)


def _print_sides(sides: "Sequence[SideFigures]") -> None:
    names = [side.side for side in sides]
    rows = [(title, *(getattr(side, name) for side in sides)) for name, title in _COMPARED.items()]
    for operation in OPERATIONS:
        honours = "keys honoured" if operation in KEYED else "keys not honoured"
        rows.append((f"doubled: {operation} ({honours})", *(side.doubled_by_operation[operation] for side in sides)))
    tables.print_table("Both sides under the same faults, counted by the provider", ("orders", *names), rows)
    for side in sides:
        typer.echo(
            f"{side.side}: {side.seconds:.0f} s; {', '.join(f'{count} x {act}' for act, count in side.faults.items())}."
        )


def _print_progress(text: str) -> None:
    typer.echo(text, err=True)


def _print_result(result: ChaosResult) -> None:
    found, options = result.records, result.options
    tables.print_table(
        f"seed {options.seed}: {options.mutations} orders, {result.seconds:.0f} s",
        ("what the provider did", "requests", "effects", "ledger: applied", "failed", "unresolved"),
        [(row.fault, row.requests, row.effects, row.applied, row.failed, row.unresolved) for row in result.comparison],
    )
    tables.print_table(
        "Effects by operation",
        (
            "operation",
            "honours keys",
            "search lags beyond its window",
            "orders",
            "effects",
            "doubled",
            "wrong not found",
        ),
        [
            (
                row.operation,
                "yes" if row.is_keyed else "no",
                "yes" if row.is_lagging else "no",
                row.orders,
                row.effects,
                row.doubled,
                row.wrong_absences,
            )
            for row in result.figures
        ],
    )
    consumed = sum(delivery.status == "consumed" for delivery in found.deliveries)
    lines = [
        f"Effects at the provider: {len(found.effects)}, of {len({effect.order for effect in found.effects})} orders.",
        f"Orders done: {consumed}; mutations for an operator: {len(result.unresolved)}; "
        f"ledger rows: {len(found.ledger)}.",
        f"Reconcile attempts: {sum(result.reconcile_counts.values())} "
        f"({', '.join(f'{count} {kind}' for kind, count in sorted(result.reconcile_counts.items()))}).",
        f"Disruptions: {', '.join(f'{count} x {act}' for act, count in result.disruptions.items()) or 'none'}.",
        f"Runs that lost their worker: {result.lost_runs[0]}, {result.lost_runs[1]} of them with a mutation "
        f"in the ledger.",
    ]
    typer.echo("\n".join(lines))
    _print_first("unresolved", [_describe_unresolved(result, n) for n in range(len(result.unresolved))])
    _print_first("unfinished", list(result.unfinished))
    _print_first("PROBLEM", [str(problem) for problem in result.problems])
    typer.echo(_conclusion(result))


def _describe_unresolved(result: ChaosResult, n: int) -> str:
    entry = result.unresolved[n]
    count = len(result.records.by_key.get(entry.key, ()))
    late = ", found late" if entry.is_found_late else ""
    return f"{entry.operation} of {entry.order}: {entry.status}{late}; in truth it happened {count} times ({entry.key})"


def _print_first(what: str, lines: list[str]) -> None:
    for line in lines[:_MAX_PRINTED]:
        typer.echo(f"{what}: {line}")
    if len(lines) > _MAX_PRINTED:
        typer.echo(f"… and {len(lines) - _MAX_PRINTED} more; --json shows all")


def _conclusion(result: ChaosResult) -> str:
    if result.is_successful:
        return "The ledger agrees with the provider for every row; no effect happened twice, no order was lost."
    repeat = f"pipeline chaos --mutations {result.options.mutations} --seed {result.options.seed}"
    repeat += "" if result.options.faults is None else f" --faults {result.options.faults}"
    return (
        f"{len(result.problems)} problems, {len(result.unfinished)} orders unfinished. "
        f"Logs and records: {result.home}. Repeat: {repeat} --workers {result.options.workers}"
    )
