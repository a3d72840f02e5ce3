"""The order of a run names files and folders that exist."""

from tests.support.run_order import LONGEST, SLOW, TESTS


def test_every_file_and_folder_that_begins_first_exists() -> None:
    assert [name for name in (*LONGEST, *SLOW) if not (TESTS / name).exists()] == []
