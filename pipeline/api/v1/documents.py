"""Complete the OpenAPI document: every answer that an endpoint can give, and no other.

Which problems an endpoint can answer follows from its parts: a path parameter can name nothing, a body can be refused,
an act can be stale. So the rules are here once, and not at each endpoint. 500 is in no rule: it is always a fault.
"""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from pipeline.api.preconditions import KEY_HEADER
from pipeline.api.problems import MEDIA_TYPE
from pipeline.api.v1.models import ProblemView

_SCHEMA = "#/components/schemas/"
_NAMES = frozenset({"workflow", "handler", "topic"})  #: parameters that can name what does not exist
_ASKS_OUTSIDE = ("/resolve", "/fetch")  #: ends of paths whose endpoints may ask an outside system
_NEEDS_PROCESS = ("/fetch", "/plan", "/refused")  #: ends of paths that not every process can serve
#: Acts that create what they name, or need not find it.
_NEVER_MISSING = (("put", "/v1/views/{name}"), ("post", "/v1/breakers/{operation}/close"))
_SELECTING = ("/v1/bulk/previews", "/v1/imports")  #: their bodies name workflows and incidents
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
            if method in _METHODS and path != "/healthz":
                yield path, method, operation


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    parameters = operation.setdefault("parameters", [])
    for status in sorted(_statuses(path, method, operation)):
        operation["responses"][str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": f"{_SCHEMA}Problem"}}},
        }
    if method == "post":
        parameters.append(_KEY_PARAMETER)


def _statuses(path: str, method: str, operation: dict[str, Any]) -> set[int]:
    """Return the statuses of the problems that an endpoint can answer."""
    if path == "/readyz":
        return {503}
    operation["responses"].pop("422", None)
    names = {each["name"].lower() for each in operation["parameters"]}
    is_post, has_body = method == "post", "requestBody" in operation
    can_miss = "{" in path and (method, path) not in _NEVER_MISSING
    rules = {
        (400, 401, 403, 503): True,  # every caller is looked up in the database
        (404,): can_miss or bool(_NAMES & names) or path in _SELECTING,
        (409,): is_post or path.endswith(_NEEDS_PROCESS),
        (412, 428): "if-match" in names,
        (413,): is_post or has_body,
        (422,): is_post or has_body or bool(names),
        (502,): path.endswith(_ASKS_OUTSIDE),
    }
    return {status for statuses, is_possible in rules.items() if is_possible for status in statuses}
