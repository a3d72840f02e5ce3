"""The pace of the sweeps follows the tick."""

from datetime import timedelta

from pipeline.background.sweeps import PERIODS, periods


def test_at_the_usual_tick_every_sweep_has_its_usual_period() -> None:
    assert periods(PERIODS["tick"]) == PERIODS


def test_a_tick_ten_times_as_often_makes_every_sweep_ten_times_as_often() -> None:
    faster = periods(PERIODS["tick"] / 10)
    assert faster == {name: every / 10 for name, every in PERIODS.items()}
    assert faster["rescue"] == timedelta(milliseconds=200)
