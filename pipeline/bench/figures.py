"""Figures of measurements: medians, the spread of the A/A pair, ratios, what they resolve, and their charts.

The A/A pair is one case that is measured twice in each repeat. Its spread is the largest ratio between the two in one
repeat. A ratio that is no larger than this spread is noise of the machine: it is not resolved.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Self
from xml.sax.saxutils import escape

from pipeline.domain.errors import PipelineError

Figures = Mapping[str, float]

NOT_RESOLVED = "not resolved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A kind of figure: how it is shown."""

    title: str
    digits: int = 1


#: Every figure that a case may have, in the order of the table.
FIGURES: Mapping[str, Figure] = {
    "runs_per_second": Figure(title="runs/s", digits=0),
    "events_per_second": Figure(title="events/s", digits=0),
    "p50_ms": Figure(title="p50 ms"),
    "p95_ms": Figure(title="p95 ms"),
    "p99_ms": Figure(title="p99 ms"),
    "statements": Figure(title="statements", digits=2),
    "commits": Figure(title="commits", digits=2),
    "plans": Figure(title="planned", digits=2),
    "worker_cpu_ms": Figure(title="worker CPU ms", digits=2),
    "postgres_cpu_ms": Figure(title="Postgres CPU ms", digits=2),
    "wal_bytes": Figure(title="WAL bytes", digits=0),
    "row_bytes": Figure(title="bytes of rows and indexes", digits=0),
    "worker_mb": Figure(title="memory of the workers, MB", digits=0),
    "answered_p90_s": Figure(title="answered to next, p90 s", digits=2),
    "seconds": Figure(title="seconds", digits=2),
    "statements_per_second": Figure(title="statements/s"),
    "tick_seconds": Figure(title="tick s", digits=3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One case, measured once. With a problem it has no figures."""

    case: str
    repeat: int
    figures: Figures = field(default_factory=dict)
    problems: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Drop the figures of a sample with a problem, so that no reader of samples can use them."""
        if self.problems:
            object.__setattr__(self, "figures", {})


def sample_of(case: str, repeat: int, measure: Callable[[], tuple[Figures, Sequence[str]]]) -> Sample:
    """Measure once. An error is the problem of this sample, and the other samples stay."""
    try:
        found, problems = measure()
    except Exception as error:  # noqa: BLE001 - whatever one sample meets must not lose the others
        found, problems = {}, [str(error) if isinstance(error, PipelineError) else repr(error)]
    return Sample(case=case, repeat=repeat, figures=found, problems=problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The median of some samples, between the least and the largest."""

    median: float
    least: float
    largest: float

    @classmethod
    def of(cls, value: float) -> Self:
        """Return the range of a single value."""
        return cls(median=value, least=value, largest=value)

    def text(self, digits: int) -> str:
        """Return the median, and the range where it is one."""
        shown = [f"{value:,.{digits}f}" for value in (self.median, self.least, self.largest)]
        return shown[0] if shown[1] == shown[2] else f"{shown[0]} ({shown[1]} to {shown[2]})"


def ranges(samples: Sequence[Sample]) -> dict[str, Range]:
    """Return the range of each figure over the repeats of one case; nothing if a sample has a problem."""
    if any(sample.problems for sample in samples):
        return {}
    names = [name for name in FIGURES if any(name in sample.figures for sample in samples)]
    found = {name: [sample.figures[name] for sample in samples if name in sample.figures] for name in names}
    return {
        name: Range(median=median(values), least=min(values), largest=max(values)) for name, values in found.items()
    }


def spread(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the largest ratio of an A/A pair within one repeat, at least 1; None without a whole pair."""
    pairs = [(a, b) for a, b in zip(first, second, strict=False) if a > 0 and b > 0]
    return max((max(a / b, b / a) for a, b in pairs), default=None)


def least_ratio(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Return the least ratio of two figures over the repeats; None if no repeat has both."""
    return min((own / other for own, other in pairs if own is not None and other), default=None)


def is_resolved(ratio: float, noise: float | None) -> bool:
    """Say whether a ratio is larger than the noise, in either direction."""
    return noise is not None and ratio > 0 and max(ratio, 1 / ratio) > noise


def ratio_text(ratio: float, noise: float | None) -> str:
    """Return a ratio, marked where it is not resolved."""
    return f"{ratio:.2f}" if is_resolved(ratio, noise) else f"{ratio:.2f}, {NOT_RESOLVED}"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that this percentage of the values does not exceed, by the nearest rank."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


_WIDTH, _LABELS, _ROW, _MARGIN = 760, 300, 26, 16
_SCALE = _WIDTH - _LABELS - 130


def svg(charts: Sequence[tuple[str, Sequence[tuple[str, Range]]]], note: str) -> str:
    """Return charts, one below the other."""
    parts, y = [], _MARGIN
    for title, bars in charts:
        parts.append(f'<text x="0" y="{y + 12}" font-weight="bold">{escape(title)}</text>')
        y += _ROW
        largest = max(found.largest for _, found in bars) or 1.0
        for label, found in bars:
            parts += _bar(y, label, found, _SCALE / largest)
            y += _ROW
        y += _MARGIN
    parts.append(f'<text x="0" y="{y + 4}" font-size="10" fill="#666">{escape(note)}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + _MARGIN}" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{y + _MARGIN}" fill="white"/>', *parts, "</svg>", ""])


def _bar(y: int, label: str, found: Range, scale: float) -> list[str]:
    width, middle = found.median * scale, y + 9
    digits = 0 if found.median >= 100 or float(found.median).is_integer() else 1
    return [
        f'<text x="0" y="{y + 13}">{escape(label)}</text>',
        f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="18" fill="#4878a8"/>',
        f'<line x1="{_LABELS + found.least * scale:.1f}" x2="{_LABELS + found.largest * scale:.1f}" '
        f'y1="{middle}" y2="{middle}" stroke="#222" stroke-width="1.5"/>',
        f'<text x="{_LABELS + found.largest * scale + 6:.1f}" y="{y + 13}">{escape(found.text(digits))}</text>',
    ]
