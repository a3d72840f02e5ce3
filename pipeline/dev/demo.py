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
from pipeline.dev import servers, system, walk
from pipeline.store import invariants, migrate
from pipeline.store.database import Database


def main() -> int:
    """Run the demo and say truthfully how it ended."""
    console = Console(highlight=False)
    home = Settings.load(os.environ).home
    with servers.running(home) as urls:
        db = Database.connect(urls.database_url)
        console.print(f"Postgres and Redis are up; schema version {migrate.upgrade(db)}.")
        walked = walk.walked(db)
        console.print(walked.table)
        once = set(walked.sent.values()) == {1}
        console.print("Now the same with a worker and beat, 200 orders, and a process killed on the way …")
        summary = system.run(db, urls, home.resolve())
        with db.transaction() as tx:
            broken = invariants.findings(tx)
        db.dispose()
    console.print(f"Orders committed: {summary.committed} of {summary.orders}; processes killed: {summary.killed}.")
    console.print(f"Effects counted outside: {summary.effects}, of which twice: {summary.twice}.")
    console.print(f"Invariants broken: {len(broken)}.")
    return 0 if once and summary.is_good and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
