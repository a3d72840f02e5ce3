"""The generated parts of docs/performance.md: `python -m benchmarks.compare.page docs/performance.md bench.json`.

The file is what `pipeline bench --json bench.json` wrote. `python -m benchmarks.compare --write` fills the other part.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.bench.figures import FIGURES, Range, ratio_text

END = "<!-- end -->"
_GROUPS = {
    "rate or time": ("runs_per_second", "events_per_second", "seconds", "statements_per_second", "tick_seconds"),
    "p50, p95, p99 ms": ("p50_ms", "p95_ms", "p99_ms"),
    "statements, commits, planned": ("statements", "commits", "plans"),
    "CPU ms: worker, Postgres": ("worker_cpu_ms", "postgres_cpu_ms"),
    "WAL bytes": ("wal_bytes",),
}


def write_part(page: Path, name: str, text: str) -> None:
    """Replace the part of a page that a command generates."""
    begin = f"<!-- begin: {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    if not found:
        raise SystemExit(f"{page} has no line {begin!r}, which the generated part follows")
    after = rest.partition(END)[2]
    page.write_text(f"{before}{begin}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def bench_table(found: Mapping[str, Any]) -> str:
    """Return the result of ``pipeline bench`` as a table."""
    heads = ["case", *_GROUPS, "against"]
    lines = [f"{found['machine']}.", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for case in found["cases"]:
        ratio = "" if case["ratio"] is None else f"{ratio_text(case['ratio'], found['spread'])} of {case['against']}"
        if (least := case.get("least_ratio")) is not None:
            ratio += f"; {least:.2f} in the worst repeat"
        cells = [_cell(case["figures"], names) for names in _GROUPS.values()]
        lines.append(f"| {' | '.join([case['title'], *cells, ratio])} |")
    noise = found["spread"]
    return "\n".join([*lines, "", f"Spread of the A/A pair: {'unknown' if noise is None else f'{noise:.2f}'}."])


def _cell(figures: Mapping[str, Any], names: tuple[str, ...]) -> str:
    shown = [f"{Range(**figures[name]).text(FIGURES[name].digits)}{_unit(name)}" for name in names if name in figures]
    is_once = "runs_per_second" in figures and "events_per_second" in figures and "runs_per_second" in names
    if is_once and figures["runs_per_second"] == figures["events_per_second"]:
        del shown[1]
    return "; ".join(shown)


def _unit(name: str) -> str:
    units = {"runs_per_second": "/s", "events_per_second": " events/s", "seconds": " s", "tick_seconds": " s a tick"}
    return units.get(name, " statements/s" if name == "statements_per_second" else "")


if __name__ == "__main__":
    write_part(Path(sys.argv[1]), "pipeline bench", bench_table(json.loads(Path(sys.argv[2]).read_text())))
