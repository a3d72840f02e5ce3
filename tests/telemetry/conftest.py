"""Spans in memory."""

from collections.abc import Iterator

import pytest

from tests.support.seen import Seen, seeing


@pytest.fixture
def seen() -> Iterator[Seen]:
    """Somebody listens, and what he hears can be asked for."""
    with seeing() as found:
        yield found
