"""What a worker finds out when it starts: which workflows it is offered, and whether their code has changed."""

import importlib
from pathlib import Path
from types import ModuleType

from pipeline.workflows.registry import Registry, fingerprint

FEED = """
from datetime import timedelta
from pipeline import Workflow

feed = Workflow("feed")
news = feed.topic("news")

@feed.producer(every=timedelta(hours=1), publishes=[news])
def poll(ctx, state):
    {body}
"""


def imported(place: Path, name: str, body: str) -> ModuleType:
    """A workflow that has nothing but a producer, in a module of its own."""
    (place / f"{name}.py").write_text(FEED.format(body=body))
    importlib.invalidate_caches()
    return importlib.import_module(name)


def test_workflows_that_an_installed_package_offers_are_found(place: Path) -> None:
    (place / "offering.py").write_text(FEED.format(body="return None"))
    info = place / "offering-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pipeline.workflows]\nmine = offering\n")
    assert set(Registry.load([]).workflows) == {"feed"}


def test_changed_code_of_a_producer_is_new_code(place: Path) -> None:
    """A maintenance ends when the code changes; a producer is code as much as a consumer."""
    wrong = imported(place, "feed_wrong", "raise ValueError")
    unchanged = imported(place, "feed_unchanged", "raise ValueError")
    mended = imported(place, "feed_mended", "return None")
    assert fingerprint(wrong.feed) == fingerprint(unchanged.feed)
    assert fingerprint(wrong.feed) != fingerprint(mended.feed)
