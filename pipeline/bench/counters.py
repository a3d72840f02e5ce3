"""Count what runs cost: processor time, WAL, and the statements, commits and plans in the log of Postgres.

Statements are counted in Postgres's own log, because not every Postgres has ``pg_stat_statements``. While it counts,
Postgres logs each statement (``log_statement``) and each planning (``log_planner_stats``). Logging costs time, so no
figure of time is measured meanwhile. Only sessions of workers count: the benchmark's own have another name.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from os import sysconf
from pathlib import Path
from typing import Any

import psycopg2  # type: ignore[import-untyped]

from pipeline.embedded.processes import wait_until

WORKERS = "pipeline"  #: the application name of our workers' sessions
OWN = "pipeline-bench"  #: of the sessions of the benchmark itself
_MARK = "bench"
_LOGGED = {"log_line_prefix": f"{_MARK}|%p|%a|", "log_statement": "all", "log_planner_stats": "on"}
_LINE = re.compile(
    rf"^{_MARK}\|(?P<pid>\d+)\|(?P<name>[^|]*)\|LOG:  "
    r"(?:(?:statement|execute [^:]*): *(?P<verb>\w*)(?P<joined>[^;]*; *\w)?|PLANNER STATISTICS)"
)
_BEGIN, _COMMIT, _ROLLBACK = {"BEGIN", "START"}, {"COMMIT", "END"}, {"ROLLBACK", "ABORT"}


@dataclass(slots=True)
class LogCounts:
    """What the sessions of one application did. BEGIN and COMMIT are statements too."""

    statements: int = 0
    commits: int = 0  #: transactions that ended with COMMIT, and statements outside of one
    plans: int = 0
    _open: dict[str, int] = field(default_factory=lambda: defaultdict(lambda: -1))  #: statements, by session

    def add(self, pid: str, verb: str | None, *, has_second: bool = False) -> None:
        """Count a line of the log: None is about planning. The verb is empty if the text begins on the next line.

        A BEGIN travels with the first statement of its transaction: ``has_second``.
        """
        if verb is None:
            self.plans += 1
            return
        self.statements += 1
        if verb in _BEGIN:
            self.statements += has_second
            self._open[pid] = int(has_second)
        elif verb in _COMMIT:
            self.commits += self._open[pid] != 0
            self._open[pid] = -1
        elif verb in _ROLLBACK:
            self._open[pid] = -1
        elif self._open[pid] >= 0:
            self._open[pid] += 1
        else:
            self.commits += 1


def count_log(lines: Iterable[str], name: str = WORKERS) -> LogCounts:
    """Count the statements, commits and plans of the sessions with an application name."""
    counts = LogCounts()
    for line in lines:
        found = _LINE.match(line)
        if found and found["name"] == name:
            verb = None if found["verb"] is None else found["verb"].upper()
            counts.add(found["pid"], verb, has_second=found["joined"] is not None)
    return counts


class StatementLog:
    """The log of an embedded Postgres, which counts statements while it is asked to."""

    def __init__(self, url: str, file: Path) -> None:
        self._url, self._file = url, file

    @contextmanager
    def counted(self) -> Iterator[LogCounts]:
        """Count from here to the end of the block. The counts are there after it."""
        counts = LogCounts()
        begun = self._file.stat().st_size
        self._switch(is_on=True)
        try:
            yield counts
        finally:
            self._switch(is_on=False)
        with self._file.open(errors="replace") as log:
            log.seek(begun)
            found = count_log(log)
        counts.statements, counts.commits, counts.plans = found.statements, found.commits, found.plans

    def _switch(self, *, is_on: bool) -> None:
        """Change the settings of the server, and wait until new sessions have them."""
        with closing(connect(self._url)) as connection, connection.cursor() as cursor:
            for name, value in _LOGGED.items():
                cursor.execute(f"ALTER SYSTEM SET {name} = '{value}'" if is_on else f"ALTER SYSTEM RESET {name}")
            cursor.execute("SELECT pg_reload_conf()")
        if not wait_until(lambda: (self._setting() == "all") is is_on, within=30):
            raise TimeoutError("Postgres did not read its changed settings within 30 s")

    def _setting(self) -> Any:
        with closing(connect(self._url)) as connection, connection.cursor() as cursor:
            cursor.execute("SHOW log_statement")
            return cursor.fetchone()[0]


def connect(url: str) -> Any:
    """Open a session of the benchmark's own, in autocommit."""
    connection = psycopg2.connect(url.replace("+psycopg2", "", 1), application_name=OWN)
    connection.autocommit = True
    return connection


def postmaster_pid(backend: int) -> int | None:
    """Return the server process of a backend; None if it does not run on this machine."""
    with suppress(OSError):
        name, _, rest = Path(f"/proc/{backend}/stat").read_text().partition("(")[2].rpartition(")")
        if name.startswith("postgres"):
            return int(rest.split()[1])
    return None


def cpu_seconds(*roots: int) -> float:
    """Return the processor time of these processes and all their children, ended ones included."""
    return sum(_process_trees(roots).values()) / float(sysconf("SC_CLK_TCK"))


def memory_mb(*roots: int) -> float:
    """Return the memory of these processes and their children in megabytes; a shared page counts once."""
    kilobytes = 0
    for pid in _process_trees(roots):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kilobytes / 1024


def _process_trees(roots: Iterable[int]) -> dict[int, int]:
    """Return the processes below these, with their processor time and that of their ended children, in ticks."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile, and its parent has its time
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            ticks[pid] = sum(int(value) for value in fields[11:15])
            children[int(fields[1])].append(pid)
    waiting, found = [*roots], {}
    while waiting:
        pid = waiting.pop()
        if pid in ticks:
            found[pid] = ticks[pid]
        waiting += children[pid]
    return found
