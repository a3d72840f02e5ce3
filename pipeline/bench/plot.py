"""Draw the medians of a result as an SVG file: one bar for each case, with its range."""

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from pipeline.bench.figures import FIGURES, Range
from pipeline.bench.run import BenchResult

_WIDTH, _LABELS, _ROW, _MARGIN = 760, 300, 26, 16
_SCALE = _WIDTH - _LABELS - 130


def write_plot(file: Path, result: BenchResult) -> None:
    """Write a chart for each figure by which cases are compared."""
    charts = []
    for figure in dict.fromkeys(case.figure for case in result.cases):
        bars = [
            (case.title, found)
            for case in result.cases
            if case.figure == figure and (found := result.ranges(case.name).get(figure))
        ]
        charts.append((FIGURES[figure].title, bars))
    file.write_text(svg([chart for chart in charts if chart[1]], result.machine), encoding="utf-8")


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
    digits = 0 if found.median >= 100 else 1
    return [
        f'<text x="0" y="{y + 13}">{escape(label)}</text>',
        f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="18" fill="#4878a8"/>',
        f'<line x1="{_LABELS + found.least * scale:.1f}" x2="{_LABELS + found.largest * scale:.1f}" '
        f'y1="{middle}" y2="{middle}" stroke="#222" stroke-width="1.5"/>',
        f'<text x="{_LABELS + found.largest * scale + 6:.1f}" y="{y + 13}">{escape(found.text(digits))}</text>',
    ]
