"""However a worker ends, its exit code is one of those that the guides list."""

import signal
from typing import Any

import pytest
from celery.apps.worker import Worker
from celery.platforms import EX_FAILURE

from pipeline.config import EXIT_RESTART, EXIT_UNSAFE
from pipeline.tasks.supervised import EXIT_OK, SupervisedWorker, exit_code

ASKED_BY_CTRL_C, ASKED_BY_SIGTERM = EX_FAILURE, 0


@pytest.mark.parametrize("found", [None, EX_FAILURE, 2, 130])
def test_a_worker_that_was_not_asked_to_stop_is_to_be_started_again(found: int | None) -> None:
    assert exit_code(found, None, None) == EXIT_RESTART


@pytest.mark.parametrize("found", [None, EX_FAILURE])
@pytest.mark.parametrize("asked", [(ASKED_BY_CTRL_C, None), (ASKED_BY_SIGTERM, None), (None, EX_FAILURE), (0, 1)])
def test_a_worker_that_was_asked_to_stop_ends_with_0(found: int | None, asked: tuple[int | None, int | None]) -> None:
    assert exit_code(found, *asked) == EXIT_OK


@pytest.mark.parametrize("found", [None, EX_FAILURE])
def test_a_worker_that_the_watchdog_stopped_is_to_be_started_again(found: int | None) -> None:
    assert exit_code(found, EXIT_RESTART, None) == EXIT_RESTART


@pytest.mark.parametrize("found", [EXIT_OK, EXIT_RESTART, EXIT_UNSAFE])
def test_a_documented_code_stays(found: int) -> None:
    assert exit_code(found, None, None) == found


@pytest.mark.parametrize("error", [None, OSError("too many open files"), SystemExit(1)])
def test_a_worker_that_ended_leaves_each_further_signal_to_one_handler(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    def end(worker: Any) -> None:
        worker.exitcode = EXIT_OK
        if error is not None:
            raise error

    handled: list[int] = []
    monkeypatch.setattr(Worker, "start", end)
    monkeypatch.setattr(signal, "signal", lambda number, handler: handled.append(number))
    worker = SupervisedWorker.__new__(SupervisedWorker)
    worker.start()
    assert handled == [signal.SIGINT, signal.SIGQUIT]
    assert worker.exitcode == (EXIT_OK if error is None else EXIT_RESTART)
