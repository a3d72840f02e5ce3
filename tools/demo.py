"""``make demo``: from nothing to a running system, and a true summary.

Starts Postgres and Redis, migrates, walks two runs by the verbs to show the tables, then runs the
example workflow with a real worker and beat, kills a process of the worker on the way, and counts
outside what happened outside. Ends by itself: 0 when every effect happened once and every invariant
holds, 1 otherwise. ``KEEP=1`` leaves the system up.
"""

import os
import sys

from rich.console import Console

from pipeline.config import Settings
from pipeline.embedded import servers
from pipeline.store import migrate
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from tools import demo_system, walkthrough
from tools.demo_system import Summary

_NEXT_COMMANDS = """
Try next, in this folder:

    export PATH="$PWD/.venv/bin:$PATH"
{again}    pipeline workflows                 how each workflow stands
    pipeline runs --workflow receipts  its runs, newest first; with an id, everything about one
    pipeline trace {example}
                                       everything that order caused
    pipeline attention                 what waits for a person, and what to type
    pipeline top                       all of it, live
"""
_RESTART_HINT = """\
    RECEIPTS_OUTBOX=.pipeline/outbox pipeline dev examples.receipts
                                       all of it again, in one terminal; the rest in another one
"""


def main() -> int:
    """Run the demo and say truthfully how it ended."""
    console = Console(highlight=False)
    home = Settings.load(os.environ).home
    with servers.running(home) as urls:
        db = Database.connect(urls.database_url)
        console.print(f"Postgres and Redis are up; schema version {migrate.upgrade(db)}.")
        walked = walkthrough.run_walkthrough(db)
        console.print(walked.table)
        once = set(walked.sent.values()) == {1}
        console.print("Now the same with a worker and beat, 200 orders, and a process killed on the way …")
        summary = demo_system.run(db, urls, home.resolve(), lambda found: _print_summary(console, db, found))
        with db.transaction() as tx:
            broken = invariants.findings(tx)
        db.dispose()
    return 0 if once and summary.is_successful and not broken else 1


def _print_summary(console: Console, db: Database, summary: Summary) -> None:
    """What came of it, counted where it arrived, and what to look at now."""
    with db.transaction() as tx:
        broken = invariants.findings(tx)
    console.print(f"Orders committed: {summary.committed} of {summary.orders}; processes killed: {summary.killed}.")
    console.print(f"Effects counted outside: {summary.effects}, of which twice: {summary.duplicates}.")
    console.print(f"Invariants broken: {len(broken)}.")
    again = "" if os.environ.get("KEEP") else _RESTART_HINT
    console.print(_NEXT_COMMANDS.format(again=again, example=summary.example), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
