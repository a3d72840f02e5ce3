"""Draw charts over time and the graph of topics as SVG, without styles or scripts of their own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from pipeline.api.rendering import cleaned

_WIDTH, _HEIGHT = 300.0, 64.0
_NODE_WIDTH, _NODE_HEIGHT, _COLUMN_GAP, _ROW_GAP = 176, 40, 64, 16
_MAX_NAME = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnNode:
    """A topic or a handler in a picture."""

    key: str
    name: str
    note: str
    kind: str  #: topic, consumer, producer or operation
    path: str = ""
    is_retired: bool = False


def chart(values: Sequence[float | None], label: str, kind: str = "chart") -> Markup:
    """Draw one series as a line over an area. A value that is not known leaves a gap."""
    known = [each for each in values if each is not None]
    top = max(known, default=0.0) or 1.0
    step = _WIDTH / max(1, len(values) - 1)
    parts = [_run(run, step, top) for run in _runs(values)]
    return Markup(
        '<svg class="{}" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(kind, int(_WIDTH), int(_HEIGHT), label, Markup("").join(parts))


def _runs(values: Sequence[float | None]) -> Iterable[list[tuple[int, float]]]:
    """Yield the stretches without a gap, each value with its place."""
    run: list[tuple[int, float]] = []
    for place, value in enumerate(values):
        if value is None:
            if run:
                yield run
            run = []
        else:
            run.append((place, value))
    if run:
        yield run


def _run(run: Sequence[tuple[int, float]], step: float, top: float) -> Markup:
    points = [(place * step, _HEIGHT - 2 - value / top * (_HEIGHT - 6)) for place, value in run]
    if len(points) == 1:
        points.append((points[0][0] + 1, points[0][1]))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    area = f"{points[0][0]:.1f},{_HEIGHT:.0f} {line} {points[-1][0]:.1f},{_HEIGHT:.0f}"
    return Markup('<polygon class="area" points="{}"/><polyline class="line" points="{}"/>').format(area, line)


def graph(nodes: Sequence[DrawnNode], edges: Sequence[tuple[str, str]], label: str) -> Markup:
    """Draw nodes in layers from left to right. An edge that closes a circle is drawn backwards."""
    layers = _layers(nodes, edges)
    places: dict[str, tuple[int, int]] = {}
    for column, layer in enumerate(layers):
        for row, node in enumerate(layer):
            places[node.key] = (column * (_NODE_WIDTH + _COLUMN_GAP) + 2, row * (_NODE_HEIGHT + _ROW_GAP) + 2)
    width = len(layers) * (_NODE_WIDTH + _COLUMN_GAP) - _COLUMN_GAP + 4 if layers else 4
    height = max((len(layer) for layer in layers), default=0) * (_NODE_HEIGHT + _ROW_GAP) - _ROW_GAP + 4
    drawn = [_edge(places[start], places[end]) for start, end in edges if start in places and end in places]
    drawn += [_node(node, *places[node.key]) for node in nodes]
    return Markup(
        '<svg class="graph" width="{}" height="{}" viewBox="0 0 {} {}" role="group" aria-label="{}">{}</svg>'
    ).format(width, max(height, 4), width, max(height, 4), label, Markup("").join(drawn))


def _layers(nodes: Sequence[DrawnNode], edges: Sequence[tuple[str, str]]) -> list[list[DrawnNode]]:
    """Put each node behind the last of its sources; a node of a circle stands where the search met it."""
    sources: dict[str, list[str]] = {node.key: [] for node in nodes}
    for start, end in edges:
        if start in sources and end in sources and start != end:
            sources[end].append(start)
    depths: dict[str, int] = {}
    for node in nodes:
        _depth(node.key, sources, depths, frozenset())
    layers: list[list[DrawnNode]] = [[] for _ in range(max(depths.values(), default=-1) + 1)]
    for node in nodes:
        layers[depths[node.key]].append(node)
    return _ordered([layer for layer in layers if layer], sources)


def _ordered(layers: list[list[DrawnNode]], sources: Mapping[str, Sequence[str]]) -> list[list[DrawnNode]]:
    """Order each layer by the rows of its sources, so that fewer edges cross."""
    rows: dict[str, float] = {}
    for layer in layers:
        known = {node.key: [rows[each] for each in sources[node.key] if each in rows] for node in layer}
        layer.sort(key=lambda node: sum(known[node.key]) / len(known[node.key]) if known[node.key] else float("inf"))
        rows |= {node.key: float(row) for row, node in enumerate(layer)}
    return layers


def _depth(key: str, sources: Mapping[str, Sequence[str]], depths: dict[str, int], above: frozenset[str]) -> int:
    if key not in depths:
        before = [each for each in sources[key] if each not in above and each != key]
        depths[key] = max((_depth(each, sources, depths, above | {key}) + 1 for each in before), default=0)
    return depths[key]


def _edge(start: tuple[int, int], end: tuple[int, int]) -> Markup:
    x1, y1 = start[0] + _NODE_WIDTH, start[1] + _NODE_HEIGHT // 2
    x2, y2 = end[0], end[1] + _NODE_HEIGHT // 2
    bend = max(24, abs(x2 - x1) // 2)
    path = f"M{x1},{y1} C{x1 + bend},{y1} {x2 - bend},{y2} {x2 - 6},{y2}"
    head = f"{x2 - 7},{y2 - 4} {x2},{y2} {x2 - 7},{y2 + 4}"
    return Markup('<path d="{}"/><polygon class="head" points="{}"/>').format(path, head)


def _node(node: DrawnNode, x: int, y: int) -> Markup:
    name = node.name if len(node.name) <= _MAX_NAME else node.name[: _MAX_NAME - 1] + "…"
    body = Markup(
        '<g class="{}{}"><title>{}</title><rect x="{}" y="{}" width="{}" height="{}" rx="{}"/>'
        '<text x="{}" y="{}">{}</text><text class="sub" x="{}" y="{}">{}</text></g>'
    ).format(
        node.kind,
        " retired" if node.is_retired else "",
        cleaned(node.name),
        x,
        y,
        _NODE_WIDTH,
        _NODE_HEIGHT,
        18 if node.kind == "topic" else 6,
        x + 14,
        y + 17,
        cleaned(name),
        x + 14,
        y + 32,
        cleaned(node.note),
    )
    return Markup('<a href="{}">{}</a>').format(escape(node.path), body) if node.path else body
