"""Redis with TLS of an own authority and an ACL user with the rights that the documentation names."""

import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from pipeline.embedded import binaries, servers
from tests.support import certificates, databases
from tests.support.environ import clean_environ
from tests.support.installation import PROJECT, Installation, installed
from tests.support.ports import free_port
from tests.support.relays import relayed
from tests.support.wait import wait_for

PAGE = PROJECT / "docs/guides/deploy-servers.md"
PIPELINE = Path(sys.executable).parent / "pipeline"
PASSWORD = "pass@word/1"
QUOTED = "pass%40word%2F1"


@contextmanager
def secured(home: Path) -> Iterator[tuple[int, Path]]:
    """A server that knows only the documented user. TLS ends in front of it: the one of our wheel has none."""
    (line,) = re.findall(r"^user shop on >password .*$", PAGE.read_text(), re.M)
    port, chain = free_port(), certificates.certificate_file(home)
    conf = home / "valkey.conf"
    user = line.replace(">password", f">{PASSWORD}")
    conf.write_text(f"port {port}\nbind 127.0.0.1\ndir {home}\nuser default off\n{user}\n")
    with (home / "valkey.log").open("wb") as log:
        process = subprocess.Popen([str(binaries.find_redis(os.environ)), str(conf)], stdout=log, stderr=log)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)

    def listens() -> bool:
        with redis.Redis(port=port, username="shop", password=PASSWORD) as client:
            return bool(client.ping())

    try:
        wait_for(listens, within=60, why="the server listening")
        with relayed(port, tls=context) as through:
            yield through, chain
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def shop(embedded: servers.Servers, tmp_path: Path) -> Iterator[Installation]:
    """An installation whose broker needs a certificate, a user and a password."""
    with ExitStack() as stack:
        port, chain = stack.enter_context(secured(tmp_path))
        database_url = stack.enter_context(databases.clone_database(embedded.database_url, f"secured_{os.getpid()}"))
        url = f"rediss://shop:{QUOTED}@127.0.0.1:{port}/0?ssl_ca_certs={chain}"
        yield stack.enter_context(installed(tmp_path, database_url, url))


def test_worker_and_beat_work_with_tls_and_the_documented_user(shop: Installation) -> None:
    worker = shop.worker("--pool=threads", "--concurrency=4")
    beat = shop.beat()
    shop.publish(10)
    shop.all_done_once()
    assert not [
        node.name for node in (worker, beat) if QUOTED in node.log.read_text() or PASSWORD in node.log.read_text()
    ]
    for wrong, words in (
        (shop.broker_url.partition("?")[0], "certificate"),  # the authority is not trusted
        (shop.broker_url.replace(QUOTED, "secret-guess"), "password"),
        (shop.broker_url.replace("rediss:", "redis:").partition("?")[0], "broker"),
    ):
        done = subprocess.run(
            [PIPELINE, "dead-letters", "list"],
            env={**clean_environ(), "PIPELINE_DATABASE_URL": shop.database_url, "PIPELINE_BROKER_URL": wrong},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 75, done
        assert words in done.stderr.lower(), done.stderr
        assert not [each for each in (QUOTED, PASSWORD, "secret-guess") if each in done.stdout + done.stderr]
