"""What a Prometheus would see of a process, and the questions a test asks about it."""

import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.ports import free_port
from tests.support.wait import wait_for

__all__ = ["Scraped", "answering", "free_port", "scrape"]


@dataclass
class Scraped:
    """One answer of an endpoint."""

    text: str
    samples: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for family in text_string_to_metric_families(self.text):
            self.kinds[family.name] = family.type
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def sum(self, name: str, **labels: str) -> float:
        """All series of a name with these labels, added up."""
        return sum(value for found, value in self.samples.get(name, ()) if labels.items() <= found.items())

    def by(self, name: str, *labels: str) -> dict[Any, float]:
        """Values by labels; with one label by its value alone."""
        found: dict[Any, float] = {}
        for given, value in self.samples.get(name, ()):
            key = tuple(given[label] for label in labels)
            found[key[0] if len(key) == 1 else key] = found.get(key[0] if len(key) == 1 else key, 0.0) + value
        return found

    def growing(self) -> Iterator[tuple[tuple[str, tuple[tuple[str, str], ...]], float]]:
        """Every series that must never go back."""
        for name, series in self.samples.items():
            if name.endswith(("_total", "_bucket", "_count")):
                for labels, value in series:
                    yield (name, tuple(sorted(labels.items()))), value


def scrape(port: int, path: str = "/metrics") -> Scraped:
    """Ask an endpoint of this machine."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return Scraped(answer.read().decode())


def answering(port: int, within: float = 60.0) -> Scraped:
    """The first answer of an endpoint that is being started."""

    def ask() -> Scraped:
        try:
            return scrape(port)
        except OSError as error:
            raise AssertionError(str(error)) from None

    return wait_for(ask, within=within, every=0.1, why=f"an answer on port {port}")
