"""Complete the OpenAPI document: every answer that an endpoint can give, problems included.

Which problems an endpoint can answer follows from its parts: a path parameter can name nothing, a body can be refused,
an act can be stale. So the rules are here once, and not at each endpoint.
"""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from pipeline.api.idempotency import KEY_HEADER
from pipeline.api.problems import MEDIA_TYPE
from pipeline.api.v1.models import ProblemView

_SCHEMA = "#/components/schemas/"
_METHODS = ("get", "post", "put", "delete", "patch")
_KEY_PARAMETER = {
    "name": KEY_HEADER,
    "in": "header",
    "required": False,
    "description": "Executes the request once: a repeat within 24 hours gets the same answer.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}


def document_answers(app: FastAPI) -> None:
    """Let an app describe the problems that its endpoints under /v1 answer."""
    describe = app.openapi

    def complete() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = describe()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas["Problem"] = ProblemView.model_json_schema(ref_template=_SCHEMA + "{model}")
            for path, method, operation in _operations(document):
                _complete(path, method, operation)
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
        found: dict[str, Any] = app.openapi_schema or {}
        return found

    app.openapi = complete  # type: ignore[method-assign]


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if path.startswith("/v1/") and method in _METHODS:
                yield path, method, operation


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    parameters = operation.setdefault("parameters", [])
    names = {each["name"].lower() for each in parameters}
    statuses = {400, 401, 403, 422, 500, 503}
    if "{" in path:
        statuses.add(404)
    if method != "get":
        statuses |= {404, 409, 413, 415}
    if "after" in names or {"workflow", "handler", "topic"} & names:
        statuses.add(404)
    if "if-match" in names:
        statuses |= {412, 428, 502}
    if "/fetch" in path or "/refused" in path or "/plan" in path:
        statuses |= {409, 502}
    if method == "post":
        parameters.append(_KEY_PARAMETER)
    for status in sorted(statuses | {int(code) for code in operation["responses"] if int(code) >= 400}):
        operation["responses"][str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": f"{_SCHEMA}Problem"}}},
        }
