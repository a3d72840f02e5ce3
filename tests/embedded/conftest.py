"""Homes that leave nothing behind, and users of the servers that are processes of their own."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.embedded import locks, servers
from tests.support.environ import clean_environ
from tests.support.wait import wait_for

USER = """
import sys
from pathlib import Path
from pipeline.embedded import servers
with servers.running(Path(sys.argv[1])) as found:
    print(found.database_url, found.broker_url, flush=True)
    sys.stdin.read()
"""


class User:
    """Another process that uses the servers of a home until it is told to leave or is killed."""

    def __init__(
        self, home: Path, environ: Mapping[str, str], *, python: str = sys.executable, user: str | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [python, "-c", USER, str(home)],
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            user=user,
            cwd="/",
        )

    def urls(self) -> Sequence[str]:
        """Database and broker, as soon as the user has them."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def leave(self) -> None:
        self.process.communicate()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def environ() -> dict[str, str]:
    """Our environment without the URL of a server."""
    return clean_environ()


@pytest.fixture
def new_home(tmp_path: Path) -> Iterator[Path]:
    """Where no home is yet: the first start there has everything to make."""
    yield tmp_path / "home"
    servers.remove(tmp_path / "home")


@pytest.fixture(scope="session")
def _used_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("used") / "home"
    home.mkdir(mode=0o711)
    yield home
    servers.remove(home)


@pytest.fixture
def home(_used_home: Path) -> Iterator[Path]:
    """A home that may have been used before, for whatever is not about the first start in one: that takes seconds.

    Nothing runs there at the beginning, whatever the test before has left.
    """
    _come_to_rest(_used_home)
    yield _used_home
    _come_to_rest(_used_home)


def _come_to_rest(home: Path) -> None:
    servers.stop(home)
    wait_for(lambda: not locks.is_held(home / "supervisor.lock"), within=100)


@pytest.fixture
def a_user(home: Path, environ: dict[str, str]) -> Iterator[Callable[[], User]]:
    with ExitStack() as leave:

        def start() -> User:
            user = User(home, environ)
            leave.callback(user.kill)
            return user

        yield start
