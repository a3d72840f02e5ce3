"""Settings of Postgres without which a crash may forget a commit, and with it an effect that happened."""

from collections.abc import Collection

from pipeline.store.database import Statement, Transaction
from pipeline.store.reads.invariants import Finding, Severity
from pipeline.store.rows import UnsafeSettingRow

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
