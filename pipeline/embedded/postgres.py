"""The embedded Postgres: durable like production, reachable over TCP with a password, never as root.

The data directory is named by the major version, so two versions never open the same files.
"""

import secrets
import shutil
import signal
from pathlib import Path

import psycopg2  # type: ignore[import-untyped]

from pipeline.embedded import binaries, data_directory, processes
from pipeline.embedded.locks import read_or_create
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
