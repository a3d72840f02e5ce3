"""What telemetry costs a run: `python benchmarks/telemetry.py`. Exits with 1 when it costs more than it may.

Variants of the same path, in one process, in turns, on one database:

- *cut*: every call into the code of spans and metrics is replaced by nothing, as if it had never been written;
- *off*: the code as it is, with nobody listening, which is the default;
- *traces*: spans are made, batched, encoded as OTLP and posted to a collector in a process of its own;
- *metrics*: everything is counted, handed over as a child of a worker does it, and added up;
- *on*: both.

A run is published, scheduled, prepared, mutated and committed with its whole SQL, without broker and worker
(`pipeline.testing.Inline`), by handlers and a connector that do nothing: what a run costs at least. It is measured
one run at a time, and in a backlog, where runs travel together, are cheapest, and telemetry weighs most.

What telemetry adds is work of this process, which holds the runs and the thread that exports: the CPU time a round
needs more than its neighbour without, as a share of the time by the clock that the neighbour took, waiting for
Postgres included; the median over all pairs of neighbours. The clocks themselves are shown beside it. They decide
nothing, because other programs on the machine move them more than telemetry does.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipeline import Call, Connector, PrepareResult, Workflow, mutation
from pipeline.embedded import servers
from pipeline.store.database import Database, Transaction
from pipeline.store.migrate import upgrade
from pipeline.telemetry import metrics, phase_observer, spans, spans_export
from pipeline.telemetry import metrics_collector as metrics_export_collector
from pipeline.telemetry.metrics_collector import MetricChannel, MetricTotals
from pipeline.testing import Inline
from pipeline.worker import calls

MOST_OFF, MOST_ON = 2.0, 15.0  #: percent of a run
COLLECTOR = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


class World(Connector):
    """An outside system that answers at once."""

    name = "world"

    @mutation(timeout=timedelta(seconds=5), settle=timedelta(0))
    def apply(self, call: Call, *, n: int) -> dict[str, Any]:
        """Do it."""
        del call
        return {"n": n}


bench = Workflow("bench", concurrency=200)
orders, done = bench.topic("orders"), bench.topic("done")


@bench.consumer(subscribes=[orders], publishes=[done])
class Fulfil:
    """One order, one effect, one event."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take an order."""
        del state
        pending = ctx.peek(orders, limit=1)
        return PrepareResult(reserve=pending, data=pending[0].payload) if pending else PrepareResult.nothing()

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Ask for the effect."""
        return ctx.world.apply(n=prepared.data["n"])

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Say that it is done."""
        del result
        ctx.publish(done, message_id=str(prepared.data["n"]), payload={})


class Round(NamedTuple):
    """What a run of one round took, in microseconds."""

    wall: float
    cpu: float


class Bench:
    """Rounds of runs, and what one of each variant costs."""

    def __init__(self, inline: Inline, provider: Any) -> None:
        self.inline, self.provider, self.size, self.count = inline, provider, 1, 0
        self.handing, self.totals = MetricChannel(), MetricTotals()
        self.handing.receiver.setblocking(False)
        self.meters = metrics_export_collector.meter_provider([metrics_export_collector.handover_reader(self.handing)])
        self.variants: dict[str, Callable[[], Any]] = {
            "cut": cut,
            "off": ExitStack,
            "traces": self.listening,
            "metrics": self.counting,
            "on": self.both,
        }

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Spans go to the collector."""
        spans.use_provider(self.provider)
        try:
            yield
            self.provider.force_flush()
        finally:
            spans.use_provider(None)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Numbers go through a channel to whoever adds them up, here in the same process."""
        metrics.use_provider(self.meters)
        try:
            yield
            self.meters.force_flush()
            self.handing.receive(self.totals)
        finally:
            metrics.use_provider(None)

    @contextmanager
    def both(self) -> Iterator[None]:
        """Everything there is."""
        with self.listening(), self.counting():
            yield

    def round(self, variant: str) -> Round:
        """Microseconds per run, by the clock and of CPU; what is still to be exported is exported within them."""
        payloads = [{"n": self.count + n} for n in range(self.size)]
        self.count += self.size
        with ExitStack() as stack:
            stack.enter_context(self.variants[variant]())
            begun, cpu = time.perf_counter(), time.process_time()
            self.inline.publish(orders, *payloads)
            self.inline.run()
            stack.close()
            wall, spent = time.perf_counter() - begun, time.process_time() - cpu
        return Round(wall / self.size * 1e6, spent / self.size * 1e6)


def cut() -> Any:
    """The path as if neither a span nor a number had ever been thought of."""
    nothing = lambda *_, **__: None  # noqa: E731 - eleven times the same
    stack = ExitStack()
    for module, name, instead in [
        (phase_observer, "observe", lambda *_, **__: _NOTHING),
        (phase_observer, "make_in_span", lambda make_call, run: make_call(run)),
        (phase_observer, "in_span", lambda *_: _NOTHING),
        (phase_observer, "is_timed", lambda: False),
        *(
            (phase_observer, name, nothing)
            for name in ("record_finished", "record_failed", "link_inputs", "publisher_traceparent")
        ),
        *((phase_observer, name, nothing) for name in ("start_call", "start_read")),
        (spans, "bind_started_runs", lambda _: _NOTHING),
        (spans, "activate", lambda _: _NOTHING),
        *((spans, name, nothing) for name in ("end_span", "record_rescued")),
        (spans, "current_traceparent", nothing),
        (spans, "bound_run", nothing),
        (Transaction, "count_on_commit", nothing),
        (calls, "record_metrics", nothing),
        (metrics, "is_on", lambda: False),
    ]:
        stack.enter_context(mock.patch.object(module, name, instead))
    return stack


class _Nothing:
    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


_NOTHING = _Nothing()


def measured(runner: Bench, rounds: int) -> dict[str, list[Round]]:
    """Rounds of the variants in turns, each time in another order, after two that do not count."""
    order = list(runner.variants)
    for variant in order * 2:
        runner.round(variant)
    found: dict[str, list[Round]] = {variant: [] for variant in order}
    for number in range(rounds):
        for variant in order[number % len(order) :] + order[: number % len(order)]:
            found[variant].append(runner.round(variant))
    return found


def over(found: dict[str, list[Round]], variant: str) -> float:
    """How many percent of a run a variant costs."""
    pairs = zip(found[variant], found["cut"], strict=True)
    return statistics.median((with_it.cpu - without.cpu) / without.wall for with_it, without in pairs) * 100


@contextmanager
def ready() -> Iterator[Bench]:
    """Servers, a collector, and the workflow on an empty database."""
    with TemporaryDirectory() as folder, servers.running(Path(folder)) as urls:
        db = Database.connect(urls.database_url)
        upgrade(db)
        collector = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True)
        assert collector.stdout is not None
        provider = spans_export._exporting_provider(f"http://127.0.0.1:{collector.stdout.readline().strip()}")
        inline = Inline(db, [bench], [World()])
        runner = Bench(inline, provider)
        try:
            yield runner
        finally:
            provider.shutdown()
            runner.meters.shutdown()
            runner.handing.close()
            inline.close()
            inline.db.dispose()
            collector.kill()
            collector.wait()


def shown(found: dict[str, list[Round]]) -> bool:
    """Print a table, and say whether what it says is within bounds."""
    say = sys.stdout.write
    say(f"{'variant':<8} {'µs per run':>11} {'least':>8} {'of CPU':>8} {'by clock':>9} {'costs':>9} {'allowed':>8}\n")
    usual = statistics.median(each.wall for each in found["cut"])
    good = True
    for variant in found:
        most = {"cut": None, "off": MOST_OFF}.get(variant, MOST_ON)
        walls, more = [each.wall for each in found[variant]], over(found, variant)
        wall, cpu = statistics.median(walls), statistics.median(each.cpu for each in found[variant])
        bound = "" if most is None else f"{most:.0f} %"
        say(f"{variant:<8} {wall:>11.0f} {min(walls):>8.0f} {cpu:>8.0f} {(wall / usual - 1) * 100:>7.1f} % ")
        say(f"{more:>7.1f} % {bound:>8}\n")
        good &= most is None or more <= most
    return good


def main() -> int:
    """Measure, print tables, and say whether telemetry is within its bounds."""
    parser = argparse.ArgumentParser(description="what telemetry costs a run")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each variant")
    parser.add_argument("--backlog", type=int, default=200, help="runs in a round of the backlog")
    options = parser.parse_args()
    good = True
    with ready() as runner:
        for size, what in ((1, "one run at a time"), (options.backlog, f"a backlog of {options.backlog} runs")):
            runner.size = size
            sys.stdout.write(f"\n{what}, {options.rounds} rounds of each variant in turns\n\n")
            good &= shown(measured(runner, options.rounds))
    sys.stdout.write(f"\n{'within bounds' if good else 'MORE THAN ALLOWED'}\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
