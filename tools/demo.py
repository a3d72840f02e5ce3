"""``make demo``: from nothing to a running system, and a true summary.

Starts Postgres and Redis, migrates, walks two runs by the verbs to show the tables, then runs the workflow in
``examples/receipts.py`` with a real worker and beat, kills a process of the worker on the way, and counts
outside what happened outside. Three refunds of ``examples/refunds.py`` get no answer on purpose: they are questions in
the inbox of the console, which runs too. Ends by itself: 0 when every effect happened once and every invariant
holds, 1 otherwise. ``KEEP=1`` leaves the system up.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from rich.console import Console

from pipeline.chaos.nodes import Disruption, NodeProcess, celery_command
from pipeline.config import Settings
from pipeline.domain.values import NewEvent
from pipeline.embedded import development, servers
from pipeline.embedded.servers import Servers
from pipeline.store import migrate
from pipeline.store.database import Database, Statement
from pipeline.store.reads import invariants
from pipeline.transitions import events
from tools import walkthrough

ROOT = Path(__file__).parents[1]
WORKFLOW, TOPIC = "receipts", "orders.paid"
QUESTIONS = 3
TIME_LIMIT = 180.0
_API = (sys.executable, "-c", "from pipeline.cli.main import main; main()", "api")
#: Everything heals sooner than by default, so that a killed process costs the onlooker seconds and not a minute.
FAST_SETTINGS = {
    "PIPELINE_LEASE": "15s",
    "PIPELINE_HEARTBEAT": "3s",
    "PIPELINE_REDISPATCH_AFTER": "5s",
    "PIPELINE_TICK": "1s",
}

_DONE = Statement[Any]("""
SELECT count(*) FROM pipeline.events e JOIN pipeline.deliveries d ON d.event_id = e.id
WHERE e.workflow = 'receipts' AND e.message_id LIKE :prefix AND d.status = 'consumed'
""")


_QUESTIONS = Statement[Any]("""
SELECT count(*) FROM pipeline.mutations
WHERE workflow = 'refunds' AND status = 'indeterminate' AND message_ids[1] LIKE :prefix
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What came of the demo's orders."""

    orders: int
    committed: int
    effects: int
    duplicates: int
    killed: int
    questions: int  #: left in the inbox on purpose
    example: str  #: the message id of one of the orders

    @property
    def is_successful(self) -> bool:
        is_exact = self.committed == self.orders == self.effects and not self.duplicates
        return is_exact and self.questions == QUESTIONS


def run_system(
    db: Database,
    urls: Servers,
    home: Path,
    say: Callable[[str], None],
    report: Callable[[Summary], None],
    *,
    orders: int = 200,
) -> Summary:
    """Publish orders, kill a process of the worker half-way, wait for the rest, count outside, and tell.

    With ``KEEP`` in the environment all of it stays up afterwards, until Ctrl-C.
    """
    prefix = f"demo-{time.monotonic_ns()}-"
    outbox = home / "outbox" / prefix
    with ExitStack() as stack:
        worker = stack.enter_context(_node("worker", urls, home, outbox, "--concurrency=2"))
        stack.enter_context(_node("beat", urls, home, outbox, "--schedule", str(home / "beat-schedule")))
        console = stack.enter_context(_node("console", urls, home, outbox, "--port=0"))
        _wait(lambda: _is_registered(db), "the worker to start", worker)
        _wait(lambda: "\n" in console.log.read_text(), "the console to start", console)
        link = console.log.read_text().splitlines()[0]
        say(f"The console, with a link that logs in once: {link}")
        stack.enter_context(development.published_console(home, link.partition("/login")[0]))
        _publish(db, prefix, orders)
        _wait(lambda: _count(db, _DONE, prefix) >= orders // 10, "the first orders", worker)
        killed = len(worker.disrupt(Disruption.CHILD, fraction=0.5, freeze_for=0.0))
        _wait(lambda: _count(db, _DONE, prefix) >= orders, "every order", worker)
        _wait(lambda: _count(db, _QUESTIONS, prefix) >= QUESTIONS, "the unanswered refunds", worker)
        sent = _sent_mails(outbox, prefix)
        summary = Summary(
            orders=orders,
            committed=_count(db, _DONE, prefix),
            effects=len(sent),
            duplicates=sum(count > 1 for count in sent.values()),
            killed=killed,
            questions=_count(db, _QUESTIONS, prefix),
            example=f"{prefix}0",
        )
        report(summary)
        if os.environ.get("KEEP"):
            _wait_for_interrupt(home)
    return summary


@contextmanager
def _node(name: str, urls: Servers, home: Path, outbox: Path, *arguments: str) -> Iterator[NodeProcess]:
    """Run ``celery -A pipeline NAME`` or the console until the block is left, its output in a file of the home."""
    environ = {
        **os.environ,
        **FAST_SETTINGS,
        "PIPELINE_DATABASE_URL": urls.database_url,
        "PIPELINE_BROKER_URL": urls.broker_url,
        "PIPELINE_WORKFLOWS": "examples.receipts,examples.refunds",
        "PYTHONPATH": str(ROOT),
        "RECEIPTS_OUTBOX": str(outbox),
    }
    log = home / f"demo-{name}.log"
    log.unlink(missing_ok=True)
    command = [*_API, *arguments] if name == "console" else celery_command(name, *arguments)
    node = NodeProcess(name, command, environ, log)
    try:
        yield node
    finally:
        node.ask_to_stop()
        node.wait_and_end()


def _wait(condition: Callable[[], bool], what: str, node: NodeProcess) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    pause = Event()
    while not condition():
        if node.has_ended:
            raise RuntimeError(f"the {node.name} ended while waiting for {what}:\n{node.log_tail()}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {TIME_LIMIT:g} s in vain for {what}; see the logs in the home")
        pause.wait(0.1)


def _is_registered(db: Database) -> bool:
    with db.transaction() as tx:
        query = Statement[Any]("SELECT true FROM pipeline.workflows WHERE name IN ('receipts', 'refunds')")
        return len(tx.all(query)) == len(("receipts", "refunds"))


def _publish(db: Database, prefix: str, orders: int) -> None:
    """As a service would, in its own transaction. Nobody is told: the next tick finds them."""
    new = [
        NewEvent(topic=TOPIC, message_id=f"{prefix}{n}", payload={"order": f"{prefix}{n}", "email": "you@example.org"})
        for n in range(orders)
    ]
    unanswered = [
        NewEvent(
            topic="refunds.wanted",
            message_id=f"{prefix}refund-{n}",
            payload={"order": f"{prefix}{n}", "amount": f"{19 + n}.90", "is_answered": False},
        )
        for n in range(QUESTIONS)
    ]
    with db.transaction() as tx:
        events.publish(tx, WORKFLOW, new)
        events.publish(tx, "refunds", unanswered)


def _count(db: Database, query: Statement[Any], prefix: str) -> int:
    with db.transaction() as tx:
        row = tx.first(query, prefix=f"{prefix}%")
    assert row is not None
    return int(row[0])


def _sent_mails(outbox: Path, prefix: str) -> Counter[str]:
    """Mails per order, counted where they arrived."""
    lines = [line for file in outbox.glob("*") for line in file.read_text().splitlines() if prefix in line]
    return Counter(line.rsplit(" ", 1)[-1] for line in lines)


def _wait_for_interrupt(home: Path) -> None:
    sys.stdout.write(f"Still running, logs in {home}; press Ctrl-C to stop.\n")
    try:
        Event().wait()
    except KeyboardInterrupt:
        sys.stdout.write("Stopping.\n")


_NEXT_COMMANDS = """
Try next, in this folder:

    export PATH="$PWD/.venv/bin:$PATH"
{again}    pipeline workflows                 how each workflow stands
    pipeline runs --workflow receipts  its runs, newest first; with an id, everything about one
    pipeline trace {example}
                                       everything that order caused
    pipeline attention                 what waits for a person, and what to type: three refunds
    pipeline open                      the inbox of the console, while it runs
    pipeline top                       all of it, live
"""
_RESTART_HINT = """\
    RECEIPTS_OUTBOX=.pipeline/outbox pipeline dev examples.receipts examples.refunds
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
        summary = run_system(
            db,
            urls,
            home.resolve(),
            lambda line: console.print(line, soft_wrap=True, markup=False),
            lambda found: _print_summary(console, db, found),
        )
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
    console.print(
        f"Questions left in the inbox on purpose: {summary.questions}, refunds that the bank never answered. "
        "`pipeline attention` and the console list them."
    )
    console.print(f"Invariants broken: {len(broken)}.")
    again = "" if os.environ.get("KEEP") else _RESTART_HINT
    console.print(_NEXT_COMMANDS.format(again=again, example=summary.example), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
