"""Answer every error as a problem of RFC 9457, by the one table of problem types."""

import logging
import secrets
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException as StarletteHTTPException

from pipeline.admin.problem_types import BY_SLUG, TYPE_PREFIX, ProblemType, database_sentence, problem_type
from pipeline.domain.errors import PipelineError

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_SLUG_OF_STATUS = {
    400: "bad-request",
    401: "unauthenticated",
    403: "forbidden",
    404: "no-such-page",
    405: "method-not-allowed",
    413: "too-large",
}


_AWAY = ("42P01", "42501", "3F000")  #: no such table, no right, no such schema: the database is not set up yet


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


#: Answers a browser with a page instead of JSON; None: JSON is right.
ProblemPage = Callable[[Request, ProblemType, str], Response | None]


def install_handlers(app: FastAPI, page: ProblemPage) -> None:
    """Answer the errors of an app as problems: as a page where ``page`` makes one, else as JSON."""
    app.state.problem_page = page
    app.add_exception_handler(PipelineError, _expected)
    app.add_exception_handler(DBAPIError, _database)
    app.add_exception_handler(PoolTimeoutError, _database)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(StarletteHTTPException, _http)


def _answer(
    request: Request,
    kind: ProblemType,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    members: Mapping[str, Any] = {},
) -> Response:
    page: ProblemPage = request.app.state.problem_page
    return page(request, kind, detail) or problem_response(kind, detail, headers=headers, members=members)


def internal_problem(request: Request, error: BaseException) -> Response:
    """Log an unexpected error under a reference; answer with the reference and nothing else."""
    return _failed(request, BY_SLUG["internal"], "The server failed.", error)


def _failed(request: Request, kind: ProblemType, sentence: str, error: BaseException) -> Response:
    reference = secrets.token_hex(8)
    where = "".join(traceback.format_tb(error.__traceback__))  # its message may quote a payload or a secret
    log.error("request failed with %s, reference %s\n%s", _kind_of(error), reference, where)
    detail = f"{sentence} The log of the server has the cause under the reference {reference}."
    return _answer(request, kind, detail, members={"reference": reference})


def _is_fault(error: Exception) -> bool:
    """Whether a statement was wrong, so that repeating it later cannot help."""
    state = getattr(getattr(error, "orig", None), "pgcode", None)
    return isinstance(error, DataError | IntegrityError | ProgrammingError) and state not in _AWAY


def _kind_of(error: BaseException) -> str:
    """Name an error for the log: its type, and what Postgres calls it."""
    state = getattr(getattr(error, "orig", None), "pgcode", None)
    return type(error).__qualname__ + (f" (SQLSTATE {state})" if state else "")


def _expected(request: Request, error: Exception) -> Response:
    kind = problem_type(error)
    assert kind is not None
    return _answer(request, kind, str(error))


def _database(request: Request, error: Exception) -> Response:
    if _is_fault(error):
        return internal_problem(request, error)
    return _failed(request, BY_SLUG["database-unavailable"], database_sentence(error), error)


def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [
        {"at": "/".join(map(str, each["loc"])), "problem": str(each["msg"]), "kind": str(each["type"])}
        for each in error.errors()
    ]
    detail = "; ".join(f"{each['at']}: {each['problem']}" for each in errors)
    return _answer(request, BY_SLUG["invalid-request"], f"{detail}. Nothing was changed.", members={"errors": errors})


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    if isinstance(error, ProblemError):
        return _answer(request, error.kind, error.detail, headers=error.headers, members=error.members)
    slug = _SLUG_OF_STATUS.get(error.status_code, "bad-request" if error.status_code < 500 else "internal")
    return _answer(request, BY_SLUG[slug], str(error.detail), headers=error.headers)
