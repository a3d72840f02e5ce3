"""Processes of web applications, beside a Redis of their own."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode

import pytest

from tests.support.installation import PROJECT, own_broker
from tests.support.wait import wait_for


@pytest.fixture(scope="session")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis that belongs to these tests."""
    with own_broker(tmp_path_factory.mktemp("broker") / "home") as url:
        yield url


@contextmanager
def process(
    command: Sequence[str], environ: Mapping[str, str], log: Path, *, sign: str, folder: Path = PROJECT
) -> Iterator[Path]:
    """A Python process that runs until the end, from when its log shows a sign."""
    with log.open("wb") as output:
        found = subprocess.Popen(
            [sys.executable, *command], env=dict(environ), cwd=folder, stdout=output, stderr=output
        )

    def is_ready() -> bool:
        if found.poll() is not None:
            raise RuntimeError(f"{command} ended with {found.returncode}:\n{log.read_text()[-3000:]}")
        return sign in log.read_text()

    try:
        wait_for(is_ready, within=90, every=0.1, why=f"{command} ready")
        yield log
    finally:
        found.terminate()
        try:
            found.wait(timeout=60)
        except subprocess.TimeoutExpired:
            found.kill()
            found.wait()


def answer(url: str, form: Mapping[str, str] | None = None) -> tuple[int, Any]:
    """The status and the JSON, or text, of an answer. Waits until a server listens."""
    data = None if form is None else urlencode(form).encode()

    def ask() -> Any:
        try:
            with urllib.request.urlopen(url, data, timeout=60) as found:
                return found.status, found.read()
        except HTTPError as error:
            with error:
                return error.code, error.read()
        except URLError as error:
            raise AssertionError(str(error)) from error

    status, body = wait_for(ask, within=60, every=0.1, why=f"an answer of {url}")
    try:
        return status, json.loads(body)
    except ValueError:
        return status, body.decode()
