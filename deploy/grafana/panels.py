"""Write panels, rows and pages of Grafana as JSON."""

from collections.abc import Sequence
from typing import Any, NamedTuple

PROMETHEUS = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT = 8, 8  # a third of a row


class Line(NamedTuple):
    """One expression and the legend of its lines."""

    expr: str
    legend: str


class Panel(NamedTuple):
    """A graph: its title, its purpose and its lines."""

    title: str
    why: str
    lines: Sequence[Line]
    unit: str = "short"
    kind: str = "timeseries"
    red_from: float | None = None


class Row(NamedTuple):
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


def panel(made: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    """Return a panel as Grafana reads it."""
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if made.red_from is not None:
        steps.append({"color": "red", "value": made.red_from})
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    if made.kind == "stat":
        options = {"colorMode": "value", "graphMode": "none", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return {
        "id": number,
        "type": made.kind,
        "title": made.title,
        "description": made.why,
        "datasource": PROMETHEUS,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": made.unit, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {"refId": chr(65 + at), "datasource": PROMETHEUS, "expr": line.expr, "legendFormat": line.legend}
            for at, line in enumerate(made.lines)
        ],
    }


def panels(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Place rows from the top, three panels side by side."""
    made: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        heading = {"id": len(made) + 1, "type": "row", "title": row.title, "collapsed": False, "panels": []}
        made.append({**heading, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}})
        for at, each in enumerate(row.panels):
            place = {"x": at % 3 * WIDTH, "y": top + 1 + at // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT}
            made.append(panel(each, len(made) + 1, place))
        top += 1 + -(-len(row.panels) // 3) * HEIGHT
    return made


def variable(name: str, metric: str) -> dict[str, Any]:
    """Return a variable of the page, filled from a label."""
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": PROMETHEUS,
        "query": {"query": f"label_values({metric}, {name})", "refId": name},
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def dashboard(uid: str, title: str, rows: Sequence[Row], variables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a page as Grafana reads it."""
    link = {"type": "dashboards", "tags": ["pipeline"], "title": "Pipeline", "asDropdown": True, "includeVars": True}
    return {
        "uid": uid,
        "title": title,
        "tags": ["pipeline"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "editable": False,
        "links": [link],
        "templating": {"list": list(variables)},
        "annotations": {"list": []},
        "panels": panels(rows),
    }
