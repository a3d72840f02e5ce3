"""Answer every error as a problem of RFC 9457, by the one table of problem types."""

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException as StarletteHTTPException

from pipeline.admin.problem_types import BY_SLUG, ProblemType, problem_type
from pipeline.domain.errors import PipelineError

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:pipeline:problem:"
_SLUG_OF_STATUS = {
    400: "bad-request",
    401: "unauthenticated",
    403: "forbidden",
    404: "no-such-page",
    405: "method-not-allowed",
    413: "too-large",
    415: "unsupported-media-type",
}


class ProblemError(HTTPException):
    """A problem that an endpoint answers with, by the slug of its type."""

    def __init__(
        self, slug: str, detail: str, *, headers: Mapping[str, str] | None = None, members: Mapping[str, Any] = {}
    ) -> None:
        self.kind, self.members = BY_SLUG[slug], members
        super().__init__(self.kind.status, detail, dict(headers or {}))


def problem_response(
    kind: ProblemType, detail: str, *, headers: Mapping[str, str] | None = None, members: Mapping[str, Any] = {}
) -> JSONResponse:
    """Return a problem as an HTTP answer."""
    body = {"type": f"{TYPE_PREFIX}{kind.slug}", "title": kind.title, "status": kind.status, "detail": detail}
    return JSONResponse(
        {**body, **members}, status_code=kind.status, headers=dict(headers or {}), media_type=MEDIA_TYPE
    )


def internal_problem(error: BaseException) -> JSONResponse:
    """Log an unexpected error under a reference; answer with the reference and nothing else."""
    reference = secrets.token_hex(8)
    log.error("request failed, reference %s", reference, exc_info=error)
    return problem_response(
        BY_SLUG["internal"],
        f"The server failed. The log of the server has the cause under the reference {reference}.",
        members={"reference": reference},
    )


def install_handlers(app: FastAPI) -> None:
    """Answer the errors of an app as problems."""
    app.add_exception_handler(PipelineError, _expected)
    app.add_exception_handler(DBAPIError, _database)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(StarletteHTTPException, _http)


def _expected(_: Request, error: Exception) -> Response:
    kind = problem_type(error)
    assert kind is not None
    return problem_response(kind, str(error))


def _database(_: Request, error: Exception) -> Response:
    reference = secrets.token_hex(8)
    log.error("the database failed, reference %s", reference, exc_info=error)
    return problem_response(
        BY_SLUG["database-unavailable"],
        f"The database did not do it. The log of the server has the cause under the reference {reference}.",
        members={"reference": reference},
    )


def _invalid_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [
        {"at": "/".join(map(str, each["loc"])), "problem": str(each["msg"]), "kind": str(each["type"])}
        for each in error.errors()
    ]
    detail = "; ".join(f"{each['at']}: {each['problem']}" for each in errors)
    return problem_response(BY_SLUG["invalid-request"], f"{detail}. Nothing was changed.", members={"errors": errors})


def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    if isinstance(error, ProblemError):
        return problem_response(error.kind, error.detail, headers=error.headers, members=error.members)
    slug = _SLUG_OF_STATUS.get(error.status_code, "bad-request" if error.status_code < 500 else "internal")
    return problem_response(BY_SLUG[slug], str(error.detail), headers=error.headers)
