"""Command ``pipeline chaos``: run orders under faults and compare the effects with the ledger."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

from pipeline.chaos import run as runs
from pipeline.chaos.run import ChaosResult
from pipeline.cli import common, tables

_MAX_PRINTED = 5


def chaos(
    mutations: Annotated[int, typer.Option(min=1, help="How many orders; each requests one effect.")] = 1000,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Repeats faults and kills; random by default.", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes, each with a pool of two.")] = 2,
    faults: Annotated[
        int | None,
        typer.Option(
            min=0, max=90, help="Percent of its calls in which the provider misbehaves; about half by default."
        ),
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="Keep servers' data, logs and the provider's records here.", show_default=False)
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Send mutations to a faulty provider while workers and servers are killed; compare its records with the ledger.

    Uses servers of its own, never your database. Exit code 1 when records and ledger disagree.
    """
    drawn = secrets.randbelow(10**6) if seed is None else seed
    options = runs.ChaosOptions(
        mutations=mutations, seed=drawn, workers=workers, faults=faults, home=home, report_progress=_print_progress
    )
    _print_progress(f"seed {drawn}")
    result = runs.run(options)
    if as_json:
        common.print_json(runs.as_dict(result))
    else:
        _print_result(result)
    if not result.is_successful:
        raise typer.Exit(1)


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
