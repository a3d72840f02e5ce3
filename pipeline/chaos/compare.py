"""``pipeline chaos --compare celery``: an ordinary Celery chain beside ours, under the same faults.

Both get the same orders, the same provider with the same faults per request, and the same planned kills and outages.
The provider's file of effects judges both: it is compared with what each side says about its orders.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import redis

from pipeline.bench.figures import Range, svg
from pipeline.chaos import celery_chain, run
from pipeline.chaos.faults import OPERATIONS, PROVIDER_VARIABLE, operation_of
from pipeline.chaos.judge import ChaosRecords
from pipeline.chaos.nodes import UNACKNOWLEDGED, NodeProcess, celery_command
from pipeline.chaos.provider import EFFECTS, records_of
from pipeline.chaos.run import ChaosOptions, ChaosResult, Drive
from pipeline.embedded import servers

OURS, PEER = "this package", "Celery chain"
#: The peer is over when its broker has been empty for so long. A message that waits for its retry in a worker alone,
#: because Redis was emptied meanwhile, is published again within this time.
_QUIET = celery_chain.MAX_BACKOFF + 4.0


class Claim(StrEnum):
    """What a side says about an order at the end."""

    DONE = "done"
    FAILED = "failed"
    OPEN = "open"  #: it waits for an operator, and attention shows it
    NONE = "none"  #: nothing moves, and no status reports it


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFigures:
    """What became of the orders of one side. The provider counted the effects."""

    side: str
    orders: int
    done: int
    effects: int
    doubled: int  #: orders with more than one effect
    lost: int  #: orders without an effect that no status reports
    stuck: int  #: orders with an effect that never became done and that no status reports
    wrong_verdicts: int  #: done without an effect, or failed with one
    for_a_person: int  #: orders that wait for an operator, as open or as failed
    seconds: float
    doubled_by_operation: Mapping[str, int]
    faults: Mapping[str, int]
    unfinished: int = 0  #: messages that were still in the broker when the time was over


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both sides of a comparison."""

    ours: ChaosResult
    sides: Sequence[SideFigures]

    @property
    def is_successful(self) -> bool:
        """Whether we kept our promise. What the peer did is no part of it."""
        return self.ours.is_successful


def compare(options: ChaosOptions) -> Comparison:
    """Make a run of ours, then one of the peer."""
    ours = run.run(options)
    return Comparison(ours=ours, sides=[figures_of_ours(ours), _run_peer(options)])


def figures_of_ours(result: ChaosResult) -> SideFigures:
    """Count our side."""
    found = result.records
    return tally(
        OURS,
        found.orders,
        Counter(effect.order for effect in found.effects),
        claims(found),
        seed=result.options.seed,
        seconds=result.seconds,
        faults=result.disruptions,
    )


def claims(found: ChaosRecords) -> dict[str, Claim]:
    """Return what our ledger says about each order."""
    waiting = {entry.order for entry in found.unresolved}
    return {
        each.order: Claim.DONE if each.status == "consumed" else Claim.OPEN if each.order in waiting else Claim.NONE
        for each in found.deliveries
    }


def tally(  # noqa: PLR0913 - both records of one side
    side: str,
    orders: Sequence[str],
    effects: Mapping[str, int],
    said: Mapping[str, Claim],
    *,
    seed: int,
    seconds: float,
    faults: Mapping[str, int],
    unfinished: int = 0,
) -> SideFigures:
    """Compare what a side says with the effects of each order."""
    pairs = [(said.get(order, Claim.NONE), effects.get(order, 0)) for order in orders]
    doubled = [order for order in orders if effects.get(order, 0) > 1]
    by_operation = Counter(operation_of(seed, order) for order in doubled)
    return SideFigures(
        side=side,
        orders=len(orders),
        done=_count(claim is Claim.DONE for claim, _ in pairs),
        effects=sum(effects.values()),
        doubled=len(doubled),
        lost=_count(claim is Claim.NONE and not count for claim, count in pairs),
        stuck=_count(claim is Claim.NONE and count > 0 for claim, count in pairs),
        wrong_verdicts=_count(
            (claim is Claim.DONE and not count) or (claim is Claim.FAILED and count > 0) for claim, count in pairs
        ),
        for_a_person=_count(claim in (Claim.OPEN, Claim.FAILED) for claim, _ in pairs),
        seconds=seconds,
        doubled_by_operation={operation: by_operation[operation] for operation in OPERATIONS},
        faults=faults,
        unfinished=unfinished,
    )


def _count(those: Iterable[bool]) -> int:
    return sum(those)


def _run_peer(options: ChaosOptions) -> SideFigures:
    """Run the chain on servers of its own."""
    home, begun = run.make_home(options.home), time.monotonic()
    with ExitStack() as stack:
        urls = stack.enter_context(servers.running(home, run.environ_without_urls()))
        provider = stack.enter_context(run.provider_process(home, options.seed, options.faults))
        database = urls.database_url.replace("+psycopg2", "")
        celery_chain.app.conf.update(broker_url=urls.broker_url, chaos_database=database)
        celery_chain.execute(celery_chain.TABLE)
        environ = {
            **os.environ,
            PROVIDER_VARIABLE: provider,
            celery_chain.BROKER_VARIABLE: urls.broker_url,
            celery_chain.DATABASE_VARIABLE: database,
        }
        nodes = _peer_workers(home, environ, options.workers, stack)
        client = stack.enter_context(redis.Redis.from_url(urls.broker_url))
        run.wait_for_nodes(nodes, lambda: all(node.children() for node in nodes), "the Celery workers to start")
        drive = run.planned_drive(options, home, nodes, None, urls.broker_url, provider, queues=[celery_chain.QUEUE])
        drive.unavailable = celery_chain.UNAVAILABLE
        end = _PeerEnd(client, provider, options.mutations)
        drive.run(lambda orders: celery_chain.publish(options.seed, orders), end.is_reached)
        run.stop_nodes(nodes)
        run.wait_until_idle(provider)
        said = {order: _CLAIMS[status] for order, status in celery_chain.statuses().items()}
        effects = Counter(str(line["order"]) for line in records_of(home / EFFECTS))
    figures = tally(
        PEER,
        [f"order {n}" for n in range(options.mutations)],
        effects,
        said,
        seed=options.seed,
        seconds=time.monotonic() - begun,
        faults=drive.fault_counts(),
        unfinished=end.messages,
    )
    if options.home is None:
        servers.remove(home)
    return figures


#: An order that is open at the end waits for nothing, and no record says that it is in trouble.
_CLAIMS = {"done": Claim.DONE, "failed": Claim.FAILED, "open": Claim.NONE}


def _peer_workers(home: Path, environ: Mapping[str, str], workers: int, stack: ExitStack) -> list[NodeProcess]:
    nodes = []
    for n in range(workers):
        options = (f"--hostname=celery{n}@chaos", "--pool=prefork", "--concurrency=2")
        command = celery_command("worker", *options, app="pipeline.chaos.celery_chain")
        nodes.append(NodeProcess(f"celery{n}", command, environ, home / f"celery{n}.log"))
        stack.callback(nodes[-1].end)
    return nodes


class _PeerEnd:
    """Decides when nothing more can come from the peer."""

    def __init__(self, client: redis.Redis, provider: str, orders: int) -> None:
        self.client, self.provider, self.orders = client, provider, orders
        self.messages = 0
        self._quiet_since = time.monotonic()

    def is_reached(self, drive: Drive) -> bool:
        """Return whether every order has ended, or nothing that could go on is left anywhere for long enough."""
        counts = Counter(celery_chain.statuses().values())
        self.messages = int(self.client.llen(celery_chain.QUEUE)) + int(self.client.hlen(UNACKNOWLEDGED))
        drive.report(f"{counts['done']} done, {counts['failed']} failed, {self.messages} messages in the broker")
        if self.messages or run.requests_in_progress(self.provider) or not drive.is_done:
            self._quiet_since = time.monotonic()
        is_ended = not counts["open"] and counts.total() == self.orders
        return drive.is_done and (is_ended or time.monotonic() - self._quiet_since > _QUIET)


_CHARTS = {
    "doubled": "orders with more than one effect",
    "lost": "orders without an effect, unreported",
    "stuck": "orders with an effect that stay open, unreported",
    "wrong_verdicts": "orders recorded otherwise than it was",
    "for_a_person": "orders that wait for an operator",
}


def write_plot(file: Path, found: Comparison) -> None:
    """Write a chart for each kind of damage, with a bar for each side."""
    charts = [
        (title, [(side.side, Range.of(float(getattr(side, name)))) for side in found.sides])
        for name, title in _CHARTS.items()
    ]
    options = found.ours.options
    share = "about half" if options.faults is None else f"{options.faults} %"
    note = f"{options.mutations} orders each, seed {options.seed}, the provider misbehaves in {share} of its calls"
    file.write_text(svg(charts, note), encoding="utf-8")


def as_dict(found: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON."""
    return {
        "is_successful": found.is_successful,
        "seed": found.ours.options.seed,
        "faults": found.ours.options.faults,
        "sides": [asdict(side) for side in found.sides],
        "ours": run.as_dict(found.ours),
    }
