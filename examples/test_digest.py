"""One mail a day, with all comments of the day, and none before its time."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from examples import digest
from pipeline.testing import CrashPoint, Inline, assert_consumed


@pytest.fixture
def run(pipeline_run: Callable[..., Inline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inline:
    """The workflow, one hour after a digest."""
    monkeypatch.setattr(digest, "OUTBOX", tmp_path / "outbox")
    run = pipeline_run(digest.digest, connectors=[digest.mail])
    run.advance(digest.next_mail(run.now()) - run.now() + timedelta(hours=1))
    return run


def mails() -> list[str]:
    """The mails that were sent."""
    return sorted(file.read_text() for file in digest.OUTBOX.glob("*"))


def test_comments_of_a_day_are_one_mail_at_six(run: Inline) -> None:
    run.publish(digest.written, digest.Comment(author="Ada", text="one"))
    run.run()
    run.advance(timedelta(hours=20))
    run.publish(digest.written, digest.Comment(author="Bob", text="two"))
    run.run()
    assert mails() == []
    run.advance(timedelta(hours=4))
    run.run()
    assert mails() == ["Ada: one\nBob: two\n"]
    assert_consumed(run, digest.written)


def test_a_worker_that_dies_sends_no_second_mail(run: Inline) -> None:
    run.publish(digest.written, digest.Comment(author="Ada", text="one"))
    run.run()
    run.advance(timedelta(hours=24))
    with run.crash_at(CrashPoint.CALLED):
        run.run()
    run.run_until_idle()
    assert mails() == ["Ada: one\n"]
    assert_consumed(run, digest.written)
