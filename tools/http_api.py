"""The page of the HTTP API, written from its OpenAPI document and its routes."""

import inspect
from collections.abc import Iterator
from typing import Any

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from pipeline.api import create
from pipeline.api.v1 import ROUTERS
from pipeline.config import Settings
from tools.markdown import code, page, section

_COMMON = {"400", "401", "403", "413", "415", "422", "500", "503"}
_CONVENTIONS = """\
`pipeline api` serves it, and `/openapi.json` describes it in full: parameters, bodies, answers, examples. Below, the
role that an endpoint needs stands behind it, and in parentheses its answers besides 200. Every endpoint may also
answer 400, 401, 403, 422, 500 or 503, and with a body 413 or 415.

- A caller presents an API token: `Authorization: Bearer pl_...`. The audit names its caller; no body can name
  another.
- A problem is `application/problem+json` (RFC 9457). Its `type` is `urn:pipeline:problem:` and a name of
  [errors](errors.md).
- Ids of events are texts. Instants are RFC 3339 in UTC.
- A list has `items` and `next`. `?after=` takes `next`, `?limit=` the size of a page. A cursor belongs to one list
  with one filter.
- Payloads, parameters, results and evidence are null unless `?fields=payload,...` asks for them, with the right to
  see payloads.
- What is out of the caller's scope reads as not found.
- `GET` of a mutation has an `ETag`. An act on it needs `If-Match`: 428 without, 412 with the mutation as it is now if
  it has changed.
- A `POST` may carry an `Idempotency-Key`. Within 24 hours a repeat gets the same answer, marked
  `Idempotency-Replayed: true`; another body gets 422, a repeat while the first one runs 409. A refused request frees
  its key.
- `/v1/attention/stream` sends server-sent events. `Last-Event-ID` resumes; the event `reset` means: read again."""


def http_api_page() -> str:
    """The page of every endpoint: method, path, role, what it does, answers."""
    app = create(Settings(database_url="postgresql://localhost/none"))
    by_tag: dict[str, list[str]] = {}
    for route in _routes():
        for method in sorted(route.methods or ()):
            operation = app.openapi()["paths"][f"/v1{route.path}"][method.lower()]
            tag = str((operation.get("tags") or ["other"])[0])
            by_tag.setdefault(tag, []).append(_line(method, route, operation))
    sections = [section(tag.capitalize(), "\n".join(lines)) for tag, lines in sorted(by_tag.items())]
    return page("HTTP API", _CONVENTIONS, *sections)


def _routes() -> Iterator[APIRoute]:
    for part in ROUTERS:
        yield from (route for route in part.routes if isinstance(route, APIRoute))


def _line(method: str, route: APIRoute, operation: dict[str, Any]) -> str:
    """An endpoint with its role, what it does, and its answers besides 200 and those of every endpoint."""
    answers = sorted(set(operation["responses"]) - _COMMON - {"200"})
    summary = str(operation.get("description", "")).partition("\n\n")[0]
    role = _role(route.dependant)
    also = f" ({', '.join(answers)})" if answers else ""
    return f"- {code(f'{method} /v1{route.path}')}{f' {role}' if role else ''}: {' '.join(summary.split())}{also}"


def _role(dependant: Dependant) -> str:
    """The role that an endpoint requires; empty: any authenticated caller."""
    for each in dependant.dependencies:
        call = each.call
        if call is not None and getattr(call, "__qualname__", "").startswith("require."):
            return str(inspect.getclosurevars(call).nonlocals["role"])
        if found := _role(each):
            return found
    return ""
