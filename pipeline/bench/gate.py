"""The gate after each measurement: every order was consumed once, had one effect, and nothing is left open.

The witness of the effects is a file that the calls append to. Without an open gate no figure is shown. Rows that a case
copied into the tables do not count: they were never published.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.bench.installation import NOT_COPIED, Fleet, Installation
from pipeline.bench.workflow import DONE, ORDERS
from pipeline.domain.states import DeliveryStatus, MutationStatus, RunStatus
from pipeline.store.reads import invariants
from pipeline.store.reads.invariants import durability_findings

_COUNTS = {
    "consumed": (
        "SELECT count(*) FROM pipeline.deliveries d JOIN pipeline.events e ON e.id = d.event_id "
        f"WHERE e.topic = %s AND d.status = %s AND {NOT_COPIED}",
        (ORDERS, DeliveryStatus.CONSUMED.value),
    ),
    "orders": (f"SELECT count(*) FROM pipeline.events e WHERE e.topic = %s AND {NOT_COPIED}", (ORDERS,)),
    "done": (f"SELECT count(*) FROM pipeline.events e WHERE e.topic = %s AND {NOT_COPIED}", (DONE,)),
    "open_runs": ("SELECT count(*) FROM pipeline.runs WHERE status = %s", (RunStatus.ACTIVE.value,)),
    "open_mutations": (
        "SELECT count(*) FROM pipeline.mutations WHERE status NOT IN (%s, %s)",
        (MutationStatus.APPLIED.value, MutationStatus.FAILED.value),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was found after a measurement."""

    published: int  #: orders
    expected: int  #: orders that must be done; the others must be as if they had never begun
    counts: Mapping[str, int]
    effects: Mapping[str, int]  #: how often the witness saw each order
    findings: Sequence[str] = ()


def problems(found: Evidence) -> list[str]:
    """Return what is wrong. An empty list opens the gate."""
    wanted = {"consumed": found.expected, "orders": found.published, "done": found.expected}
    wrong = [
        f"{name.replace('_', ' ')}: {found.counts[name]}; expected {wanted.get(name, 0)}"
        for name in found.counts
        if found.counts[name] != wanted.get(name, 0)
    ]
    repeated = [order for order, times in found.effects.items() if times > 1]
    if len(found.effects) != found.expected:
        wrong.append(f"orders with an effect: {len(found.effects)}; expected {found.expected}")
    if repeated:
        wrong.append(f"orders with more than one effect: {len(repeated)}, such as {repeated[0]}; expected none")
    return wrong + [f"doctor: {finding}" for finding in found.findings]


def check(fleet: Fleet) -> list[str]:
    """Return what is wrong after a measurement on these processes."""
    return problems(evidence(fleet))


def evidence(fleet: Fleet) -> Evidence:
    """Read what a measurement left behind."""
    site = fleet.site
    published = fleet.published.total()
    lines = fleet.witness.read_text().splitlines() if fleet.witness.exists() else []
    return Evidence(
        published=published,
        expected=published if fleet.expected is None else fleet.expected,
        counts={name: int(site.query(sql, *params)[0][0]) for name, (sql, params) in _COUNTS.items()},
        effects=Counter(lines),
        findings=_findings(site),
    )


def _findings(site: Installation) -> list[str]:
    with site.db.transaction() as tx:
        found = [*invariants.findings(tx), *durability_findings(tx)]
    return [f"{finding.subject}: {finding.detail} ({finding.invariant})" for finding in found]
