"""Spans in memory."""

from collections.abc import Iterator

import pytest

from tests.support.recorded_spans import Seen, seeing
from tests.telemetry.metrics.conftest import _patient, _servers, installation

__all__ = ["_patient", "_servers", "installation"]


@pytest.fixture
def seen() -> Iterator[Seen]:
    """Record spans in memory."""
    with seeing() as found:
        yield found
