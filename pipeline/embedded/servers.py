"""Embedded Postgres and Redis for development and tests: no Docker, no root, nothing to configure.

`running(home)` starts a pair or joins the one that runs; several processes at once share it, and it stops
when the last of them has left, however they left. The data stays in the home. A server whose URL is in the
environment (`PIPELINE_DATABASE_URL`, `PIPELINE_BROKER_URL`) is used as it is, and none is started for it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config import Settings
from pipeline.embedded import data_directory, locks
from pipeline.embedded.locks import Lock, read_locked
from pipeline.embedded.processes import ServersError, wait_until

__all__ = ["ServerStatus", "Servers", "ServersError", "remove", "running", "status", "stop"]

URL_VARIABLES = {"PIPELINE_DATABASE_URL": "postgres", "PIPELINE_BROKER_URL": "redis"}
START_WITHIN = 120.0
STOP_WITHIN = 90.0
POLL_INTERVAL = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Where the two servers are; passwords are inside, so the representation keeps quiet about them."""

    database_url: str
    broker_url: str

    def __repr__(self) -> str:
        return "Servers(...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What a living supervisor says about its servers: which processes they are and how to reach them."""

    supervisor_pid: int
    pids: Mapping[str, int]
    urls: Mapping[str, str] = field(repr=False)


@contextmanager
def running(home: Path, environ: Mapping[str, str] = os.environ) -> Iterator[Servers]:
    """Start the servers of this home or join them; they stay up at least until the block is left."""
    given = _urls_from_environment(environ)
    if len(given) == len(URL_VARIABLES):
        yield _servers(given)
        return
    home = _make_home(home)
    with Lock(home / "users.lock") as membership:
        if not wait_until(membership.try_shared, within=STOP_WITHIN):
            raise ServersError(f"the servers of {home} are stopping and do not come to an end; see its logs")
        found = _join_or_start(home, environ)
        yield _servers({**found.urls, **given})


def status(home: Path) -> ServerStatus | None:
    """The servers of this home, or None when they are not running."""
    text = read_locked(home / "servers.json")
    if text is None:
        return None
    posted = json.loads(text)
    return ServerStatus(supervisor_pid=posted["supervisor"], pids=posted["pids"], urls=posted["urls"])


def stop(home: Path) -> bool:
    """Stop the servers, whoever uses them; False when none were running. They are down on return."""
    found = status(home)
    if found is None:
        return False
    with suppress(ProcessLookupError):  # it was about to end by itself
        os.kill(found.supervisor_pid, signal.SIGTERM)
    if not wait_until(lambda: not locks.is_held(home / "supervisor.lock"), within=STOP_WITHIN):
        raise ServersError(f"the supervisor of {home} (process {found.supervisor_pid}) does not stop")
    return True


def remove(home: Path) -> None:
    """Stop the servers and delete the home with all data."""
    stop(home)
    data_directory.remove_data(home)


def _urls_from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The servers that need not be started, with their URLs as our settings read them."""
    named = {name: environ[name] for name in URL_VARIABLES if environ.get(name, "").strip()}
    settings = Settings.load(named)
    urls = {"PIPELINE_DATABASE_URL": settings.database_url, "PIPELINE_BROKER_URL": settings.broker_url}
    return {URL_VARIABLES[name]: urls[name] for name in named}


def _make_home(home: Path) -> Path:
    """Create the home; root lets other accounts pass through, since Postgres runs under one."""
    try:
        home.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ServersError(f"{home} cannot be made: {error.strerror}; set PIPELINE_HOME to another place") from error
    return home.resolve()


def _join_or_start(home: Path, environ: Mapping[str, str]) -> ServerStatus:
    """The running servers; whoever gets the supervisor's lock starts them, all others wait for the notice."""
    deadline = time.monotonic() + START_WITHIN
    pause = threading.Event()
    while time.monotonic() < deadline:
        found = status(home)
        if found is not None:
            return found
        with Lock(home / "supervisor.lock") as lock:
            if lock.try_exclusive():
                _start(home, lock, environ)
        pause.wait(POLL_INTERVAL)
    raise ServersError(f"the servers of {home} did not come up in time; see {home / 'supervisor.log'}")


def _start(home: Path, lock: Lock, environ: Mapping[str, str]) -> None:
    """Start the supervisor and hand it the lock, so that there is no moment when another could start too."""
    command = [sys.executable, "-m", "pipeline.embedded.supervisor", str(home), "--lock-fd", str(lock.fd)]
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            pass_fds=(lock.fd,),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=START_WITHIN,
        )
    except subprocess.TimeoutExpired as error:
        raise ServersError(f"the servers of {home} did not start in time; see its logs") from error
    if done.returncode != 0:
        raise ServersError(f"cannot start the servers of {home}:\n{done.stderr.strip()}")


def _servers(urls: Mapping[str, str]) -> Servers:
    missing = [name for name in URL_VARIABLES.values() if name not in urls]
    if missing:
        raise ServersError(
            f"the running servers were started without {' and '.join(missing)}, by a process that had a URL "
            "for it: stop them, or use another PIPELINE_HOME"
        )
    return Servers(database_url=urls["postgres"], broker_url=urls["redis"])
