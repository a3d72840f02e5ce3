"""How long a run takes is remembered as a moving average, and the slowest phase counts."""

from datetime import timedelta

from pipeline.worker.settings import HandlerDurations


def test_a_handler_that_never_ran_takes_no_time() -> None:
    assert HandlerDurations().per_run(1) == timedelta(0)


def test_the_slowest_phase_counts_and_recent_runs_count_most() -> None:
    speeds = HandlerDurations()
    speeds.record(1, "prepare", 0.1)
    speeds.record(1, "next", 2.0)
    speeds.record(2, "next", 9.0)
    assert speeds.per_run(1) == timedelta(seconds=2)
    speeds.record(1, "next", 1.0)
    assert speeds.per_run(1) == timedelta(seconds=1.7)
