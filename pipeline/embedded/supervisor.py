"""The process that owns the embedded servers: `python -m pipeline.embedded.supervisor HOME`; and the two servers.

At most one lives per home: it holds `supervisor.lock` for life. `servers.json` is locked by it as well, so a
reader knows whether the writer still lives. It stops when it can take `users.lock` alone, which means that
no user is left; users that were killed have lost their share of the lock, so nothing waits for the dead.

Both servers are durable like production, and reachable over TCP with a password. Postgres never runs as root; its data
directory is named by the major version, so two versions never open the same files. Redis syncs its append-only file
each second.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psycopg2  # type: ignore[import-untyped]

from pipeline.embedded import binaries, data_directory, processes
from pipeline.embedded.locks import Lock, publish_locked, read_or_create, write_private
from pipeline.embedded.processes import EmbeddedServer, ServersError

USER = "pipeline"
DATABASE = "pipeline"
ZOMBIE_TIMEOUT = 5.0
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
}


class EmbeddedPostgres(EmbeddedServer):
    """One Postgres cluster with the database `pipeline` in it."""

    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": ends the sessions, writes a checkpoint and leaves in order

    def __init__(self, home: Path, found: binaries.PostgresPrograms) -> None:
        super().__init__(home)
        self.account = processes.server_account()
        self._home = home
        self._postgres_programs = found
        self._programs = found.directory
        self._data = home
        self._password = ""

    @property
    def url(self) -> str:
        return f"postgresql+psycopg2://{USER}:{self._password}@127.0.0.1:{self.port}/{DATABASE}"

    def prepare(self) -> None:
        place = data_directory.prepare_data_directory(self._home, self.account)
        self._programs = data_directory.reachable_programs(self._postgres_programs, place, self.account)
        self._password = read_or_create(place / "password", lambda: secrets.token_urlsafe(24))
        self._data = place / str(self._postgres_programs.major)
        if self._data.exists():
            self._clear_orphan()
        else:
            self._initialise(place)

    def command(self) -> list[str | Path]:
        settings = SETTINGS | {"port": str(self.port)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [self._programs / "postgres", "-D", self._data, *options]

    def is_ready(self) -> bool:
        """Whether a session can be opened; the first one that can makes sure the database exists."""
        try:
            connection = psycopg2.connect(
                host="127.0.0.1",
                port=self.port,
                user=USER,
                password=self._password,
                dbname="postgres",
                connect_timeout=2,
            )
        except psycopg2.OperationalError:
            return False
        connection.autocommit = True
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT FROM pg_database WHERE datname = %s", (DATABASE,))
                if cursor.rowcount == 0:
                    cursor.execute(f"CREATE DATABASE {DATABASE}")
        finally:
            connection.close()
        return True

    def _initialise(self, place: Path) -> None:
        """Make the cluster beside its final name, so that one made halfway is never taken for a whole one."""
        draft = place / f".{self._data.name}.new"
        shutil.rmtree(draft, ignore_errors=True)
        password_file = place / "password"
        data_directory.change_owner(password_file, self.account)
        command: list[str | Path] = [self._programs / "initdb", "-D", draft, "-U", USER]
        command += [f"--pwfile={password_file}", "--auth=scram-sha-256"]
        command += ["--encoding=UTF8", "--locale=C", "--data-checksums"]
        made = processes.run_as(self.account, command)
        if made.returncode != 0:
            raise ServersError(f"initdb of {self._programs} failed:\n{made.stdout[-500:]}\n{made.stderr}".strip())
        draft.rename(self._data)

    def _clear_orphan(self) -> None:
        """End what a dead supervisor left, and the claim on the directory that outlived it.

        A server that ended but was not collected yet still counts as running for Postgres, which then
        refuses to start. Some containers never collect; after a while the claim of the dead is removed.
        """
        claim = self._data / "postmaster.pid"
        pid = processes.read_pid(claim)
        if pid is None:
            return
        processes.stop_orphan(pid, self._data, self.stop_signal, within=30)
        processes.wait_until(lambda: not claim.exists() or not processes.pid_exists(pid), within=ZOMBIE_TIMEOUT)
        if claim.exists() and not processes.is_running(pid):
            claim.unlink()


CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir {directory}
pidfile {pid_file}
daemonize no
appendonly yes
appendfsync everysec
save ""
"""


class EmbeddedRedis(EmbeddedServer):
    """Redis or Valkey; the password is in a file only we can read, never on a command line."""

    name = "redis"
    stop_signal = signal.SIGTERM

    def __init__(self, home: Path, program: Path) -> None:
        super().__init__(home)
        self._program = program
        self._directory = home / "redis"
        self._pid_file = self._directory / "redis.pid"
        self._password = ""

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    def prepare(self) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._password = read_or_create(self._directory / "password", lambda: secrets.token_urlsafe(24))
        if (orphan := processes.read_pid(self._pid_file)) is not None:
            processes.stop_orphan(orphan, self._directory, self.stop_signal, within=30)

    def command(self) -> list[str | Path]:
        config = self._directory / "redis.conf"
        values = {"directory": _quote(self._directory), "pid_file": _quote(self._pid_file)}
        write_private(config, CONFIG.format(port=self.port, password=self._password, **values))
        return [self._program, config]

    def is_ready(self) -> bool:
        """Whether it takes the password and has read its data back; asked by hand, no client needed."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                with connection.makefile("rb") as replies:
                    return (replies.readline(), replies.readline()) == (b"+OK\r\n", b"+PONG\r\n")
        except OSError:
            return False


def _quote(path: Path) -> str:
    """A path as the configuration file wants it, whatever characters it has."""
    return json.dumps(str(path), ensure_ascii=False)


READY = "ready"
POLL_INTERVAL = 0.1
MAX_RESTARTS = 20
RESTART_WINDOW = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the servers in the background; exit 0 once they answer, else 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.embedded.supervisor")
    parser.add_argument("home", type=Path)
    parser.add_argument("--lock-fd", type=int, help="supervisor.lock, already taken by the caller")
    options = parser.parse_args(arguments)
    home: Path = options.home.resolve()
    lock = Lock.adopt(options.lock_fd) if options.lock_fd is not None else Lock(home / "supervisor.lock")
    if not lock.try_exclusive():
        sys.stderr.write(f"the servers of {home} have a supervisor already\n")
        return 1
    readable, writable = os.pipe()
    if os.fork() == 0:
        os.close(readable)
        return _serve_in_background(home, writable)
    os.close(writable)
    with os.fdopen(readable) as report:
        reason = report.read()
    if reason == READY:
        return 0
    log = home / "supervisor.log"
    sys.stderr.write(reason or f"the supervisor died. The end of {log}:\n{processes.tail(log)}")
    return 1


def _serve_in_background(home: Path, report: int) -> int:
    """Run as the detached process, which has nothing but its log to write to."""
    log = os.open(home / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, stream)
    os.chdir(home)  # the folder of the start may be removed
    try:
        Supervisor(home, os.environ).run(report)
    except ServersError as error:
        _report(report, str(error))
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _report(report: int, text: str) -> None:
    """Tell the process that waits for us; it may have gone away, which changes nothing for us."""
    try:
        os.write(report, text.encode())
        os.close(report)
    except OSError:
        return


class Supervisor:
    """Owns the servers from the first start to the last stop."""

    def __init__(self, home: Path, environ: Mapping[str, str]) -> None:
        self._home = home
        self._status_file = home / "servers.json"
        self._status_lock: Lock | None = None
        self._children: list[EmbeddedServer] = []
        self._restarts: list[float] = []
        if not environ.get("PIPELINE_DATABASE_URL", "").strip():
            self._children.append(EmbeddedPostgres(home, binaries.find_postgres(environ)))
        if not environ.get("PIPELINE_BROKER_URL", "").strip():
            self._children.append(EmbeddedRedis(home, binaries.find_redis(environ)))

    def run(self, report: int) -> None:
        """Serve until no user is left or a signal asks to stop. The servers are down when this returns."""
        for asked in (signal.SIGTERM, signal.SIGINT):
            signal.signal(asked, _exit)
        with ExitStack() as undo:
            undo.callback(self._stop_all)
            for child in self._children:
                child.start()
            self._publish_status()
            _report(report, READY)
            self._supervise(undo.enter_context(Lock(self._home / "users.lock")))

    def _supervise(self, users: Lock) -> None:
        pause = threading.Event()
        while not users.try_exclusive():
            for child in self._children:
                if not child.is_alive():
                    self._restart(child)
            pause.wait(POLL_INTERVAL)

    def _restart(self, child: EmbeddedServer) -> None:
        """Start a server that died again, under the same URL, unless it keeps dying."""
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW] + [now]
        if len(self._restarts) > MAX_RESTARTS:
            raise ServersError(f"{child.name} keeps dying; see {child.log}")
        child.restart()
        self._publish_status()

    def _publish_status(self) -> None:
        """Tell users where the servers are; the lock on the file says that we still live."""
        urls = {child.name: child.url for child in self._children}
        pids = {child.name: child.pid for child in self._children}
        text = json.dumps({"supervisor": os.getpid(), "urls": urls, "pids": pids}, indent=2)
        previous, self._status_lock = self._status_lock, publish_locked(self._status_file, text)
        if previous is not None:
            previous.close()

    def _stop_all(self) -> None:
        """Remove the notice first, so that no process joins servers that are about to stop."""
        for late in (signal.SIGTERM, signal.SIGINT):
            signal.signal(late, signal.SIG_IGN)
        self._status_file.unlink(missing_ok=True)
        for child in reversed(self._children):
            child.stop()


def _exit(_signal: int, _frame: object) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
