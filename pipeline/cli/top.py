"""Command ``pipeline top``: show workflows, their rates and what waits for an operator, live."""

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.admin import throughput
from pipeline.admin.resolutions import Resolutions
from pipeline.admin.throughput import Snapshot
from pipeline.admin.workflows import WorkflowSummary
from pipeline.background.sweeps import periods
from pipeline.cli import common, tables
from pipeline.cli.workflows import capped_count
from pipeline.config import Settings
from pipeline.domain.errors import quantity

_STYLES = {"active": "green", "paused": "yellow", "error": "bold red"}
_NARROW = 100
_MOST_ITEMS = 8


def top(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two frames.")] = 2.0,
    as_json: common.AsJson = False,
) -> None:
    """Show workflows, backlog, rates and what waits for an operator, live. q or Ctrl-C ends it."""
    resolutions = Resolutions(context.obj)
    sweeps = periods(Settings.load(os.environ).tick)
    if as_json:
        common.print_json(throughput.snapshot(resolutions, sweeps))
    elif once or not sys.stdout.isatty():
        console = Console(highlight=False, width=tables.line_width(Console()))
        console.print(render(throughput.snapshot(resolutions, sweeps), console.width))
    else:
        _run_live(resolutions, sweeps, every)


def render(snapshot: Snapshot, width: int) -> Group:
    """Render one frame; a narrow terminal gets fewer columns."""
    rates = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    is_narrow = width < _NARROW
    columns = ["workflow", "status", "to decide", "runs", "waiting", "oldest", "in/s", "done/s"]
    columns += [] if is_narrow else ["stopped/s", "quarantined", "reason"]
    for column in columns:
        rates.add_column(column, no_wrap=column != "reason", justify="left")
    for workflow in snapshot.workflows:
        rates.add_row(*_cells(snapshot, workflow)[: len(columns)])
    parts: list[Table | Text] = [_title(snapshot), Text(""), rates, Text(""), *_attention(snapshot)]
    return Group(*parts)


def _cells(frame: Snapshot, workflow: WorkflowSummary) -> list[Text]:
    pace = frame.throughput.get(workflow.name)
    status = f"{workflow.status}, maintenance" if workflow.is_in_maintenance else workflow.status
    rates = [f"{rate:.1f}" for rate in (pace.published, pace.committed, pace.stopped)] if pace else ["", "", ""]
    return [
        Text(workflow.name),
        Text(status, style="yellow" if workflow.is_in_maintenance else _STYLES.get(workflow.status, "")),
        Text(_count_text(frame.to_decide.get(workflow.name, 0)), style="bold red"),
        Text(f"{workflow.active_runs}/{workflow.concurrency}"),
        Text(capped_count(workflow.waiting)),
        Text(common.age(workflow.oldest_at, frame.at)),
        *(Text(rate) for rate in rates),
        Text(str(workflow.quarantined or "")),
        Text(common.printable(workflow.reason)),
    ]


def _count_text(count: int) -> str:
    """Format how many items of a workflow wait for an operator: nothing, or up to so many of each kind."""
    return f"{count}+" if count >= throughput.MAX_ITEMS else str(count or "")


def _title(frame: Snapshot) -> Text:
    title = Text(f"pipeline  {frame.at:%Y-%m-%d %H:%M:%S}  {quantity(len(frame.workflows), 'workflow')}", style="bold")
    if frame.late_sweeps:
        title.append(f"  late: {', '.join(frame.late_sweeps)}; is beat running?", style="bold red")
    return title


def _attention(frame: Snapshot) -> list[Text]:
    if not frame.attention:
        return [Text("Nothing waits for an operator.", style="dim")]
    count = len(frame.attention)
    wait = "item waits" if count == 1 else "items wait"
    lines = [Text(f"{count} {wait} for an operator; `pipeline attention` lists the commands", style="bold")]
    groups = [
        f"  {common.age(each.first_at, frame.at).rjust(4)}  {each.count} of {each.operation}  {each.error_class}  "
        f"{'; '.join(each.headlines)}"
        for each in frame.incidents
    ]
    singles = [
        f"  {common.age(item.since, frame.at).rjust(4)}  {item.kind}  {item.headline}  {item.workflow}  {item.reason}"
        for item in frame.attention
        if item.incident is None
    ]
    shown = [*groups, *singles]
    lines += [Text(common.printable(line), no_wrap=True, overflow="ellipsis") for line in shown[:_MOST_ITEMS]]
    if len(shown) > _MOST_ITEMS:
        lines.append(Text(f"  … and {len(shown) - _MOST_ITEMS} more", style="dim"))
    return lines


def _run_live(resolutions: Resolutions, sweeps: Mapping[str, timedelta], every: float) -> None:
    console = Console(highlight=False)
    live = Live(console=console, screen=True, auto_refresh=False)
    with suppress(KeyboardInterrupt), _quit_key() as is_asked_to_end, live:
        while True:
            live.update(render(throughput.snapshot(resolutions, sweeps), console.width), refresh=True)
            if is_asked_to_end(every):
                return


@contextmanager
def _quit_key() -> Iterator["_QuitKey"]:
    """Read keys without Enter; restore the terminal afterwards."""
    if not sys.stdin.isatty():
        yield _QuitKey(None)
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield _QuitKey(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _QuitKey:
    """Wait for a key that ends the view."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, within: float) -> bool:
        """Return whether q was pressed in time. Ctrl-C interrupts the command."""
        descriptors = [] if self._descriptor is None else [self._descriptor]
        ready, _, _ = select.select(descriptors, [], [], within)
        return bool(ready) and os.read(ready[0], 1) in (b"q", b"Q", b"")
