"""``pipeline chaos``: whether the promise holds here, with faults, judged from outside."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

from pipeline.chaos import run as runs
from pipeline.chaos.run import Result
from pipeline.cli import common, tables

_MOST_SHOWN = 5


def chaos(
    mutations: Annotated[int, typer.Option(min=1, help="How many orders, each of which asks for one effect.")] = 1000,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Repeats faults and kills; drawn if not given.", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes, each with a pool of two.")] = 2,
    home: Annotated[
        Path | None, typer.Option(help="Keep servers' data, logs and the world's book here.", show_default=False)
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Send mutations through a world full of faults while workers are killed, and compare it with the ledger.

    Uses servers of its own, never your database. Exit code 1 when the two disagree.
    """
    drawn = secrets.randbelow(10**6) if seed is None else seed
    options = runs.Options(mutations=mutations, seed=drawn, workers=workers, home=home, tell=_tell)
    _tell(f"seed {drawn}")
    result = runs.run(options)
    if as_json:
        common.as_json(runs.as_dict(result))
    else:
        _show(result)
    if not result.is_good:
        raise typer.Exit(1)


def _tell(words: str) -> None:
    typer.echo(words, err=True)


def _show(result: Result) -> None:
    found, options = result.facts, result.options
    tables.listed(
        f"seed {options.seed}: {options.mutations} orders, {result.seconds:.0f} s",
        ("what the world did", "requests", "effects", "ledger: applied", "failed", "question"),
        [(seen.world, seen.requests, seen.done, seen.applied, seen.failed, seen.asked) for seen in result.compared],
    )
    consumed = sum(delivery.status == "consumed" for delivery in found.deliveries)
    lines = [
        f"Effects in the world: {len(found.effects)}, of {len({effect.order for effect in found.effects})} orders.",
        f"Orders done: {consumed}; questions for a person: {len(result.questions)}; ledger rows: {len(found.ledger)}.",
        f"The world was asked {sum(result.looks.values())} times what became of a request "
        f"({', '.join(f'{count} {kind}' for kind, count in sorted(result.looks.items()))}).",
        f"Harm done: {', '.join(f'{count} x {act}' for act, count in result.acts.items()) or 'none'}.",
        f"Runs that lost their worker: {result.lost[0]}, {result.lost[1]} of them with a mutation in the ledger.",
    ]
    typer.echo("\n".join(lines))
    _show_some("question", [_question(result, n) for n in range(len(result.questions))])
    _show_some("unfinished", list(result.unfinished))
    _show_some("PROBLEM", [str(problem) for problem in result.problems])
    typer.echo(_verdict(result))


def _question(result: Result, n: int) -> str:
    entry = result.questions[n]
    count = len(result.facts.by_key.get(entry.key, ()))
    late = ", surfaced late" if entry.has_surfaced else ""
    return f"{entry.operation} of {entry.order}: {entry.status}{late}; in truth it happened {count} times ({entry.key})"


def _show_some(what: str, lines: list[str]) -> None:
    for line in lines[:_MOST_SHOWN]:
        typer.echo(f"{what}: {line}")
    if len(lines) > _MOST_SHOWN:
        typer.echo(f"… and {len(lines) - _MOST_SHOWN} more; --json shows all")


def _verdict(result: Result) -> str:
    if result.is_good:
        return "The ledger agrees with the world for every row; no effect happened twice, no order was lost."
    repeat = f"pipeline chaos --mutations {result.options.mutations} --seed {result.options.seed}"
    return (
        f"{len(result.problems)} problems, {len(result.unfinished)} orders unfinished. Logs and books: {result.home}. "
        f"Repeat: {repeat} --workers {result.options.workers}"
    )
