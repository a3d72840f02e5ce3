"""What must be true of the tables and of the settings of Postgres, as queries that return what is not.

The tests run them after every step, ``pipeline doctor`` runs them in production. They only read: a
broken invariant means a verb is wrong, and repairing the row would hide it. Overdue findings are
work that a sweep should have done by now: the sweep is not running.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from pipeline.domain.errors import InvalidInputError
from pipeline.domain.states import DeliveryStatus, MutationOutcome, MutationStatus, Phase, RunStatus
from pipeline.domain.workflows import BlockKind, DesiredStatus, HandlerKind
from pipeline.store.database import Statement, Transaction
from pipeline.store.functions import AUDIT_PRUNED
from pipeline.store.predicates import (
    BEFORE_PREPARED,
    DONE_DELIVERY,
    HELD_INPUT,
    IS_MISSING_WORKER,
    KEEPS_SESSION_OPEN,
    MUTATION_IN_DOUBT,
    MUTATION_MAY_HAVE_HAPPENED,
    OPEN_MUTATION,
    RESOLVED_MUTATION,
)
from pipeline.store.rows import FindingRow, UnsafeSettingRow
from pipeline.text import parse_id, printable_text

#: The invariant of late effects. Attention and gauges report each of them as what it is, not as a broken promise.
LATE_EFFECTS = "failed-mutations-have-no-late-effect"


class Severity(StrEnum):
    """How to read a finding."""

    BROKEN = "broken"  #: a promise does not hold: page someone
    OVERDUE = "overdue"  #: a sweep should have mended it by now: is beat running?


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariant:
    """A sentence that must be true, and a query for the rows of which it is not."""

    name: str
    sentence: str
    advice: str
    severity: Severity
    query: Statement[FindingRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row that breaks one invariant."""

    invariant: str
    severity: Severity
    subject: str
    detail: str
    sentence: str
    advice: str


_REPORT_ADVICE = "Report it with the output of this command; do not edit the rows by hand."
#: History is looked at this far back: ids are ordered by time, so the newest rows are a short index scan.
_RECENT = "(SELECT * FROM pipeline.runs ORDER BY id DESC LIMIT :recent)"


_BEAT_ADVICE = "Start beat: its sweeps repair this."
#: Of a run's workflow: no operator paused it, and no block or maintenance holds it back.
_CAN_WORKFLOW_START = f"""EXISTS (
  SELECT FROM pipeline.workflows w WHERE w.name = r.workflow AND w.desired = '{DesiredStatus.ACTIVE}'
    AND NOT w.maintenance
    AND NOT EXISTS (SELECT FROM pipeline.blocks b WHERE b.workflow = w.name AND b.closed_at IS NULL))"""


#: Of a run: the code still has its handler; what is left of one that is gone has a finding of its own.
_IS_HANDLER_CURRENT = "EXISTS (SELECT FROM pipeline.handlers k WHERE k.id = r.handler_id AND NOT k.retired)"
#: Of a run: its workflow has a free place.
_HAS_CAPACITY = f"""(
  SELECT count(*) FROM pipeline.runs o JOIN pipeline.handlers k ON k.id = o.handler_id AND NOT k.retired
  WHERE o.workflow = r.workflow AND o.finished_at IS NULL AND o.status = '{RunStatus.ACTIVE}')
  < (SELECT w.concurrency FROM pipeline.workflows w WHERE w.name = r.workflow)"""
#: Of a run: it came back from its mutate phase while a breaker is open, and may wait for that.
_WAITS_FOR_BREAKER = f"""(r.phase IN ('{Phase.PREPARED}', '{Phase.MUTATING}')
  AND (r.fence > 1 OR r.retry_of IS NOT NULL) AND EXISTS (SELECT FROM pipeline.breakers b WHERE b.closed_at IS NULL))"""


def _bounded(query: str) -> Statement[FindingRow]:
    return Statement[FindingRow](f"SELECT subject, detail FROM ({query}) AS found LIMIT :limit")


def _broken(name: str, sentence: str, query: str, advice: str = _REPORT_ADVICE) -> Invariant:
    return Invariant(name=name, sentence=sentence, advice=advice, severity=Severity.BROKEN, query=_bounded(query))


def _overdue(name: str, sentence: str, query: str, advice: str) -> Invariant:
    return Invariant(name=name, sentence=sentence, advice=advice, severity=Severity.OVERDUE, query=_bounded(query))


#: A worker checks it at its start, after the crashed runs were recovered.
NO_ORPHANED_RESERVATION = _broken(
    "no-orphaned-reservation",
    "A reserved event belongs to a run that is moving or waits for a retry.",
    f"""
    SELECT 'event ' || d.event_id AS subject,
      'reserved by run ' || d.run_id || ' which is ' || coalesce(r.phase || ', ' || r.status, 'missing') AS detail
    FROM pipeline.deliveries d LEFT JOIN pipeline.runs r ON r.id = d.run_id
    WHERE d.status = '{DeliveryStatus.RESERVED}' AND (r.id IS NULL OR NOT (r.finished_at IS NULL OR r.retry_pending))
    """,
)

AUDIT_CHAIN = "the-audit-is-as-it-was-chained"
#: The newest links, each with the one before it. Of the oldest that is read, only the first of all has no such one.
#: An act that says it is more than an hour older than the links before it was not late: it was written afterwards.
#: A link has a number in the chain that no other has, so the first finding is the first act that does not fit.
_UNCHAINED_ACTS = f"""
SELECT 'act ' || x.audit_id AS subject, x.problem AS detail FROM (
  SELECT s.audit_id, s.position, CASE
    WHEN s.position > 1 AND s.before_position IS NULL AND s.number < :recent
      THEN 'the links before its own, ' || s.position || ', are gone'
    WHEN s.position <> s.before_position + 1
      THEN 'the links between ' || s.before_position || ' and ' || s.position || ' are gone'
    WHEN (s.position = 1 OR s.before_position IS NOT NULL)
        AND s.hash <> pipeline.link_hash(coalesce(s.before_hash, ''), s.row_hash, s.position, s.chained_at)
      THEN 'its link ' || s.position || ' does not follow from the one before'
    WHEN a.id IS NULL AND s.audit_id NOT IN (
        SELECT CAST(jsonb_array_elements_text(p.evidence -> 'ids') AS bigint) FROM pipeline.audit p
        WHERE p.act = '{AUDIT_PRUNED}')
      THEN 'it was deleted, and not by retention'
    WHEN a.id IS NOT NULL AND s.row_hash <> pipeline.audit_row_hash(a.id) THEN 'it was changed after it was chained'
    WHEN a.at < s.earlier - interval '1 hour'
      THEN 'it says ' || a.at || ', and was not there when others were chained at ' || s.earlier
    END AS problem
  FROM (
    SELECT n.*, lag(n.position) OVER chain AS before_position, lag(n.hash) OVER chain AS before_hash,
      count(*) OVER () AS number,
      max(n.chained_at) OVER (ORDER BY n.chained_at GROUPS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS earlier
    FROM (SELECT * FROM pipeline.audit_links WHERE position IS NOT NULL ORDER BY position DESC LIMIT :recent) n
    WINDOW chain AS (ORDER BY n.position)
  ) s LEFT JOIN pipeline.audit a ON a.id = s.audit_id
  UNION ALL
  SELECT a.id, NULL, 'it was written around the links'
  FROM (SELECT id FROM pipeline.audit ORDER BY id DESC LIMIT :recent) a
  WHERE NOT EXISTS (SELECT FROM pipeline.audit_links s WHERE s.audit_id = a.id)
) x WHERE x.problem IS NOT NULL ORDER BY x.position NULLS LAST
"""

INVARIANTS: Sequence[Invariant] = (
    NO_ORPHANED_RESERVATION,
    _broken(
        "reservations-are-pinned",
        "A reserved event is among the inputs that its run reserved.",
        f"""
        SELECT 'event ' || d.event_id AS subject, 'not an input of run ' || r.id AS detail
        FROM pipeline.deliveries d JOIN pipeline.runs r ON r.id = d.run_id
        WHERE d.status = '{DeliveryStatus.RESERVED}' AND NOT (d.event_id = ANY(r.event_ids)
          AND d.handler_id = r.handler_id)
        """,
    ),
    _broken(
        "inputs-are-owned",
        "A run that goes on, or waits for a retry, owns every input that it reserved.",
        f"""
        SELECT 'run ' || r.id AS subject, 'event ' || i.event_id || ' is ' || coalesce(d.status, 'missing') AS detail
        FROM pipeline.runs r CROSS JOIN unnest(r.event_ids) AS i(event_id)
        LEFT JOIN pipeline.deliveries d ON d.event_id = i.event_id AND d.handler_id = r.handler_id
        WHERE (r.finished_at IS NULL OR r.retry_pending)
          AND (d.run_id IS DISTINCT FROM r.id OR d.status NOT IN {HELD_INPUT})
        """,
    ),
    _broken(
        "committed-inputs-are-done",
        "Every input of a committed run is consumed, or was skipped by a person.",
        f"""
        SELECT 'run ' || r.id AS subject, 'event ' || i.event_id || ' is ' || coalesce(d.status, 'missing') AS detail
        FROM {_RECENT} r CROSS JOIN unnest(r.event_ids) AS i(event_id)
        LEFT JOIN pipeline.deliveries d ON d.event_id = i.event_id AND d.handler_id = r.handler_id
        WHERE r.status = '{RunStatus.COMMITTED}' AND d.event_id IS NOT NULL
          AND NOT (d.run_id = r.id AND d.status IN {DONE_DELIVERY})
        """,
    ),
    _broken(
        "one-mutation-per-input",
        "An event is bound to at most one applied or unresolved mutation per consumer.",
        f"""
        SELECT 'event ' || i.event_id AS subject, count(DISTINCT m.id) || ' mutations' AS detail
        FROM {_RECENT} r CROSS JOIN unnest(r.event_ids) AS i(event_id) JOIN pipeline.mutations m ON m.id = r.mutation_id
        WHERE m.status IN {MUTATION_MAY_HAVE_HAPPENED}
        GROUP BY i.event_id, r.handler_id HAVING count(DISTINCT m.id) > 1
        """,
    ),
    _broken(
        "ledger-and-run-agree",
        "A mutation that is not resolved belongs to a run in its mutate phase, stopped or moving as the ledger says.",
        f"""
        SELECT 'mutation ' || m.id AS subject, m.status || ' while its run is ' || r.phase || ', ' || r.status AS detail
        FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id
        WHERE m.status IN {OPEN_MUTATION}
          AND NOT (r.phase = '{Phase.MUTATING}' AND CASE m.status
            WHEN '{MutationStatus.PENDING}' THEN r.status = '{RunStatus.PAUSED_APPROVAL}'
              OR (r.status = '{RunStatus.ACTIVE}' AND m.approved_at IS NOT NULL)
            WHEN '{MutationStatus.IN_FLIGHT}' THEN r.status = '{RunStatus.ACTIVE}'
            ELSE r.status = '{RunStatus.PAUSED_RECONCILIATION}' AND r.retry_pending END)
        """,
    ),
    _broken(
        "mutating-has-a-ledger-row",
        "A run in its mutate phase has an unresolved mutation in the ledger.",
        f"""
        SELECT 'run ' || r.id AS subject, 'mutating, ledger says ' || coalesce(m.status, 'nothing') AS detail
        FROM pipeline.runs r LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id
        WHERE r.phase = '{Phase.MUTATING}' AND (r.finished_at IS NULL OR r.retry_pending)
          AND (m.id IS NULL OR m.status IN {RESOLVED_MUTATION})
        """,
    ),
    _broken(
        "outcome-matches-ledger",
        "What a run remembers of its mutation is what the ledger says.",
        f"""
        SELECT 'run ' || r.id AS subject,
          'remembers ' || quote_literal(r.mutation_outcome) || ', ledger says ' || m.status AS detail
        FROM {_RECENT} r JOIN pipeline.mutations m ON m.id = r.mutation_id
        WHERE (r.mutation_outcome = '{MutationOutcome.SUCCESS}') <> (m.status = '{MutationStatus.APPLIED}')
          OR (r.mutation_outcome IN ('{MutationOutcome.FAILURE}',
            '{MutationOutcome.SKIPPED}')) <> (m.status = '{MutationStatus.FAILED}')
        """,
    ),
    _broken(
        "offers-are-live",
        "An event is offered only to a run that is still selecting its inputs.",
        f"""
        SELECT 'event ' || d.event_id AS subject,
          'offered to run ' || d.offered_to || ' which is ' || coalesce(r.phase || ', ' || r.status, 'missing')
            AS detail
        FROM pipeline.deliveries d LEFT JOIN pipeline.runs r ON r.id = d.offered_to
        WHERE d.status = '{DeliveryStatus.PENDING}' AND d.offered_to IS NOT NULL
          AND (r.id IS NULL OR r.finished_at IS NOT NULL OR r.phase NOT IN {BEFORE_PREPARED})
        """,
    ),
    _broken(
        "nothing-below-the-watermark",
        "No open event is hidden below its consumer's low watermark.",
        f"""
        SELECT 'event ' || d.event_id AS subject, 'below watermark ' || h.low_watermark || ' of ' || h.name AS detail
        FROM pipeline.handlers h CROSS JOIN LATERAL (
          (SELECT event_id FROM pipeline.deliveries
           WHERE handler_id = h.id AND status = '{DeliveryStatus.PENDING}' AND event_id <= h.low_watermark
           ORDER BY event_id LIMIT :limit)
          UNION ALL
          (SELECT event_id FROM pipeline.deliveries
           WHERE handler_id = h.id AND status = '{DeliveryStatus.RESERVED}' AND event_id <= h.low_watermark
           ORDER BY event_id LIMIT :limit)
        ) d
        """,
    ),
    _broken(
        "blocks-have-a-cause",
        "A workflow waits for a reconciliation only while the outcome is unknown.",
        f"""
        SELECT 'workflow ' || b.workflow AS subject,
          'blocked by run ' || r.id || ' whose mutation is ' || coalesce(m.status, 'missing') AS detail
        FROM pipeline.blocks b JOIN pipeline.runs r ON r.id = b.run_id
        LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id
        WHERE b.closed_at IS NULL AND b.kind = '{BlockKind.RECONCILIATION}'
          AND (m.id IS NULL OR m.status NOT IN {MUTATION_IN_DOUBT})
        """,
    ),
    _overdue(
        "leases-are-recovered",
        "A run whose lease has lapsed is recovered within ten minutes; no lease ends later than it can.",
        """
        SELECT 'run ' || id AS subject, CASE WHEN lease_expires_at < pipeline.clock()
          THEN 'lease lapsed at ' || lease_expires_at
          ELSE 'its lease of ' || lease_duration || ' ends at ' || lease_expires_at ||
            ': it is from before the clock of Postgres was set back' END AS detail
        FROM pipeline.runs
        WHERE finished_at IS NULL AND (lease_expires_at < pipeline.clock() - interval '10 minutes'
          OR lease_expires_at > pipeline.clock() + 2 * lease_duration + interval '10 minutes')
        """,
        _BEAT_ADVICE,
    ),
    _overdue(
        "in-flight-is-held",
        "A mutation in flight belongs to a run that a worker holds.",
        f"""
        SELECT 'mutation ' || m.id AS subject, 'sent at ' || m.sent_at || ', no worker holds its run' AS detail
        FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id
        WHERE m.status = '{MutationStatus.IN_FLIGHT}'
          AND (r.lease_expires_at IS NULL OR r.lease_expires_at < pipeline.clock() - interval '10 minutes')
        """,
        _BEAT_ADVICE,
    ),
    _overdue(
        "reconciles-are-on-time",
        "The next reconcile attempt of a mutation in doubt begins within ten minutes of its time.",
        f"""
        SELECT 'mutation ' || id AS subject, 'next reconcile attempt was due at ' || next_reconcile_at AS detail
        FROM pipeline.mutations
        WHERE status = '{MutationStatus.NEEDS_RECONCILE}'
          AND next_reconcile_at < pipeline.clock() - interval '10 minutes'
        """,
        _BEAT_ADVICE,
    ),
    _overdue(
        "stopped-runs-are-carried-forward",
        "A run that can be retried is, within ten minutes, unless its workflow is held back or full.",
        f"""
        SELECT 'run ' || r.id AS subject,
          'could be retried since ' || coalesce(r.retry_at, r.finished_at) AS detail
        FROM pipeline.runs r LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id
        WHERE r.retry_pending AND (m.id IS NULL OR m.status IN {RESOLVED_MUTATION})
          AND coalesce(r.retry_at, r.finished_at) < pipeline.clock() - interval '10 minutes' AND {_CAN_WORKFLOW_START}
          AND {_IS_HANDLER_CURRENT} AND {_HAS_CAPACITY}
          AND NOT EXISTS (SELECT FROM pipeline.handlers h WHERE h.id = r.handler_id AND {IS_MISSING_WORKER})
        """,
        _BEAT_ADVICE,
    ),
    _overdue(
        "active-runs-are-held",
        "A worker claims an active run within ten minutes, unless its workflow is held back or its breaker is open.",
        f"""
        SELECT 'run ' || r.id AS subject, r.phase || ' for ' || h.name || ' of ' || h.workflow || ', begun at ' ||
          coalesce(m.approved_at, r.started_at, r.created_at) || ', last dispatched at ' ||
          coalesce(r.dispatched_at, r.created_at) AS detail
        FROM pipeline.runs r JOIN pipeline.handlers h ON h.id = r.handler_id AND NOT h.retired
        LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id
        WHERE r.finished_at IS NULL AND r.status = '{RunStatus.ACTIVE}' AND r.lease_expires_at IS NULL
          AND coalesce(m.approved_at, r.started_at, r.created_at) < pipeline.clock() - interval '10 minutes'
          AND {_CAN_WORKFLOW_START} AND NOT {_WAITS_FOR_BREAKER}
          AND NOT EXISTS (
            SELECT FROM pipeline.runs o WHERE o.workflow = r.workflow AND o.handler_id = r.handler_id
              AND o.finished_at IS NULL AND o.lease_expires_at > pipeline.clock())
        """,
        "Start beat, a worker that knows this workflow, and one for the queue of this phase.",
    ),
    _overdue(
        "handlers-are-claimed",
        "A worker knows every handler that has something to do.",
        f"""
        SELECT 'handler ' || h.name || ' of ' || h.workflow AS subject,
          'no worker takes its runs since ' || h.unclaimed_since || '; the next is tried at ' || h.retry_at AS detail
        FROM pipeline.handlers h WHERE {IS_MISSING_WORKER} AND (h.kind = '{HandlerKind.PRODUCER}' OR EXISTS (
          SELECT FROM pipeline.deliveries d WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.PENDING}')
          OR EXISTS (SELECT FROM pipeline.deliveries d WHERE d.handler_id = h.id
            AND d.status = '{DeliveryStatus.RESERVED}'))
        """,
        "Start a worker that has the handler, deploy code without it under a higher version, or pause the workflow.",
    ),
    _broken(
        LATE_EFFECTS,
        "A mutation that was resolved as failed has not happened.",
        """
        SELECT 'mutation ' || m.id AS subject, m.connector || '.' || m.operation || ' of run ' || m.run_id ||
          ' found late at ' || m.found_late_at || ', resolved as failed by ' || m.resolved_by || ' at ' || m.resolved_at
          AS detail
        FROM pipeline.mutations m WHERE m.found_late_at IS NOT NULL AND m.acknowledged_by IS NULL
        """,
        "Count the effects outside, and undo one only if there are two; the audit (mutation.found_late) names both "
        "sides. Then acknowledge it.",
    ),
    _overdue(
        "retired-handlers-hold-nothing",
        "A handler that is gone from the code has no event waiting, none reserved, and no run that waits for a retry.",
        f"""
        SELECT 'event ' || d.event_id AS subject, d.status || ' for ' || h.name || ' of ' || h.workflow ||
          ', which is gone from the code' AS detail
        FROM pipeline.handlers h CROSS JOIN LATERAL (
          SELECT event_id, status FROM pipeline.deliveries WHERE handler_id = h.id
            AND status = '{DeliveryStatus.RESERVED}'
          UNION ALL
          SELECT event_id, status FROM pipeline.deliveries WHERE handler_id = h.id
            AND status = '{DeliveryStatus.PENDING}'
        ) d
        WHERE h.retired
        UNION ALL
        SELECT 'run ' || r.id, r.phase || ', waits for a retry of ' || h.name || ' of ' || h.workflow ||
          ', which is gone from the code'
        FROM pipeline.runs r JOIN pipeline.handlers h ON h.id = r.handler_id AND h.retired
        WHERE r.retry_pending AND NOT EXISTS (
          SELECT FROM pipeline.deliveries d
          WHERE d.event_id = ANY(r.event_ids) AND d.handler_id = r.handler_id
            AND d.status = '{DeliveryStatus.RESERVED}')
        """,
        "Bring the handler back under its old name until its events are done, or skip them.",
    ),
    _overdue(
        "waiting-events-have-a-subscription",
        "The oldest events that wait for a consumer are of topics it is subscribed to.",
        f"""
        SELECT 'event ' || e.id AS subject, 'waits for ' || h.name || ' of ' || h.workflow ||
          ', which is no longer subscribed to ' || e.topic AS detail
        FROM pipeline.handlers h CROSS JOIN LATERAL (
          SELECT event_id FROM pipeline.deliveries WHERE handler_id = h.id AND status = '{DeliveryStatus.PENDING}'
          ORDER BY event_id LIMIT 100
        ) d JOIN pipeline.events e ON e.id = d.event_id
        WHERE NOT h.retired AND NOT EXISTS (
          SELECT FROM pipeline.subscriptions s WHERE s.handler_id = h.id AND s.topic = e.topic)
        """,
        "Subscribe the consumer to the topic again until its events are done, or skip them.",
    ),
    _broken(
        AUDIT_CHAIN,
        "Every act in the audit is as it was when it was chained, in its place, and was deleted by retention only.",
        _UNCHAINED_ACTS,
        "Who can act as the owner of the schema has changed the audit. Compare it with a backup, and the head of the "
        "chain with the one that you keep elsewhere. Do not mend it: what is found now is evidence.",
    ),
    _overdue(
        "sessions-are-finished",
        "A session whose runs have all committed is finished within ten minutes.",
        f"""
        SELECT 'session ' || s.id AS subject, 'every run committed' AS detail FROM pipeline.sessions s
        WHERE s.finished_at IS NULL
          AND NOT EXISTS (SELECT FROM pipeline.runs r WHERE r.workflow = s.workflow AND {KEEPS_SESSION_OPEN})
          AND (SELECT max(r.finished_at) FROM pipeline.runs r WHERE r.session_id = s.id)
            < pipeline.clock() - interval '10 minutes'
        """,
        _BEAT_ADVICE,
    ),
    _overdue(
        "maintenance-has-a-task",
        "Every workflow in maintenance has a maintenance task within ten minutes.",
        """
        SELECT 'workflow ' || w.name AS subject, 'in maintenance since ' || w.maintenance_since AS detail
        FROM pipeline.workflows w
        WHERE w.maintenance AND w.maintenance_since < pipeline.clock() - interval '10 minutes' AND NOT EXISTS (
          SELECT FROM pipeline.maintenance_tasks t WHERE t.workflow = w.name AND t.closed_at IS NULL)
        """,
        _BEAT_ADVICE,
    ),
    _overdue(
        "sweeps-ran-in-the-past",
        "The last run of a sweep lies in the past; one that does not is from before Postgres's clock was set back.",
        """
        SELECT 'sweep ' || name AS subject, 'last ran at ' || last_run_at || ', which is yet to come' AS detail
        FROM pipeline.sweeps WHERE last_run_at > pipeline.clock() + interval '1 minute'
        """,
        "Check the clock of Postgres's host, and that beat runs: its next run of the sweep mends this.",
    ),
)


def findings(
    tx: Transaction, invariants: Sequence[Invariant] = INVARIANTS, *, recent: int = 10_000, limit: int = 100
) -> list[Finding]:
    """Every row that breaks an invariant, at most ``limit`` of each. An empty list is a clean bill."""
    found: list[Finding] = []
    for invariant in invariants:
        params = {"recent": recent} if ":recent" in invariant.query.text else {}
        found.extend(_finding(invariant, row) for row in tx.all(invariant.query, limit=limit, **params))
    return found


def broken_counts(report: Mapping[str, int]) -> dict[str, int]:
    """Promises that did not hold when the doctor wrote this report, by name. Late effects are no broken promise."""
    prefix = f"{Severity.BROKEN}: "
    found = {name.removeprefix(prefix): count for name, count in report.items() if name.startswith(prefix)}
    return {name: count for name, count in found.items() if name != LATE_EFFECTS}


INVARIANTS_BY_NAME = {invariant.name: invariant for invariant in INVARIANTS}


def _finding(invariant: Invariant, row: FindingRow) -> Finding:
    return Finding(
        invariant=invariant.name,
        severity=invariant.severity,
        subject=row.subject,
        detail=row.detail,
        sentence=invariant.sentence,
        advice=invariant.advice,
    )


NAME = "commits-are-durable"
SENTENCE = "A commit survives a crash of Postgres, of its host, and a failover to a synchronous standby."
ADVICE = (
    "Correct the setting of the server, database or role. If all data of this installation may be lost, or the file "
    "system makes it safe, name the setting in PIPELINE_ALLOWED_UNSAFE_SETTINGS."
)

#: What a new session gets: `SET` of the session that asks does not count. Without standbys ``local`` is the same as
#: ``on``; with them it lets a failover forget what was committed.
_UNSAFE_SETTINGS = Statement[UnsafeSettingRow]("""
SELECT name, reset_val AS found, CASE name WHEN 'synchronous_commit' THEN 'on, remote_write or remote_apply'
  ELSE 'on' END AS expected
FROM pg_settings
WHERE (name IN ('fsync', 'full_page_writes') AND reset_val <> 'on')
  OR (name = 'synchronous_commit' AND (reset_val = 'off'
    OR (reset_val = 'local' AND current_setting('synchronous_standby_names') <> '')))
ORDER BY name
""")


class _LinkRow(Protocol):
    position: int
    hash: str
    chained_at: datetime


_LINK = """
SELECT position, hash, chained_at FROM pipeline.audit_links WHERE position IS NOT NULL {only}
ORDER BY position DESC LIMIT 1
"""
_HEAD = Statement[_LinkRow](_LINK.format(only=""))
_LINK_AT = Statement[_LinkRow](_LINK.format(only="AND position = :position"))


def audit_head(tx: Transaction) -> str | None:
    """The newest link of the audit as ``position:hash``, to be kept elsewhere. None: nothing is chained yet."""
    row = tx.first(_HEAD)
    return None if row is None else f"{row.position}:{row.hash}"


def head_findings(tx: Transaction, noted: str) -> list[Finding]:
    """Return a finding unless the chain still contains a head that was noted elsewhere."""
    written, _, hash_ = noted.partition(":")
    position = parse_id(written)
    if position is None or not hash_:
        raise InvalidInputError(
            f"{printable_text(noted)!r} is no head of the audit; "
            "expected one as `pipeline audit --head` prints it: 42:9f86d08..."
        )
    row = tx.first(_LINK_AT, position=position)
    if row is not None and row.hash == hash_:
        return []
    chain = INVARIANTS_BY_NAME[AUDIT_CHAIN]
    found = "has no such link: newer acts are gone, or an older backup was restored" if row is None else "has another"
    return [
        Finding(
            invariant=chain.name,
            severity=chain.severity,
            subject=f"link {position}",
            detail=f"{found}; expected the hash {hash_}",
            sentence=chain.sentence,
            advice=chain.advice,
        )
    ]


def durability_findings(tx: Transaction, *, allowed: Collection[str] = ()) -> list[Finding]:
    """Return a finding for every unsafe setting that is not allowed."""
    return [
        Finding(
            invariant=NAME,
            severity=Severity.BROKEN,
            subject=f"Postgres's {row.name}",
            detail=f"is {row.found}; expected {row.expected}",
            sentence=SENTENCE,
            advice=ADVICE,
        )
        for row in tx.all(_UNSAFE_SETTINGS)
        if row.name not in allowed
    ]
