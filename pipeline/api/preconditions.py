"""Guard acts: by ``Idempotency-Key`` against a repeat, by ``If-Match`` against a state that has changed.

The key belongs to its caller. Only answers of success are kept: a request that was refused changed nothing, and its key
is free again. Of an answer that must not be stored, only ``request.state.kept_answer`` is kept, if it is set.
"""

import base64
import hashlib
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Header, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from pipeline.admin import access as admin_access
from pipeline.api import access
from pipeline.api.context import services
from pipeline.api.problems import ProblemError

KEY_HEADER = "Idempotency-Key"
REPLAY_HEADER = "Idempotency-Replayed"
_KEPT_HEADERS = ("content-type", "etag", "location")


class IdempotentRoute(APIRoute):
    """A route whose POST requests may carry an ``Idempotency-Key``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the endpoint: look the key up first, keep the answer afterwards."""
        execute = super().get_route_handler()

        async def handle(request: Request) -> Response:
            key = request.headers.get(KEY_HEADER)
            if key is None or request.method != "POST":
                return await execute(request)
            return await _execute_once(request, key, execute)

        return handle


async def _execute_once(
    request: Request, key: str, execute: Callable[[Request], Coroutine[Any, Any, Response]]
) -> Response:
    db, name = services(request).db, (await access.caller(request)).name
    earlier = await run_in_threadpool(admin_access.begin_request, db, name, key, await _request_hash(request))
    if earlier is not None:
        return _replayed(earlier, await _request_hash(request))
    try:
        response = await execute(request)
        may_be_kept = response.headers.get("cache-control") != "no-store"
        kept = getattr(request.state, "kept_answer", bytes(response.body) if may_be_kept else None)
    except BaseException:
        await run_in_threadpool(admin_access.forget_request, db, name, key)
        raise
    if 200 <= response.status_code < 300 and kept is not None:
        answer = {
            "body": base64.b64encode(kept).decode(),
            "headers": {each: response.headers[each] for each in _KEPT_HEADERS if each in response.headers},
        }
        await run_in_threadpool(admin_access.save_answer, db, name, key, status=response.status_code, answer=answer)
    else:
        await run_in_threadpool(admin_access.forget_request, db, name, key)
    return response


async def _request_hash(request: Request) -> str:
    """Return what makes two requests the same: method, address, precondition and body."""
    parts = (request.method, str(request.url.path), request.url.query, request.headers.get("if-match", ""))
    digest = hashlib.sha256("\n".join(parts).encode())
    digest.update(await request.body())
    return digest.hexdigest()


def _replayed(earlier: admin_access.EarlierRequest, request_hash: str) -> Response:
    if earlier.request_hash != request_hash:
        raise ProblemError(
            "idempotency-key-reused",
            f"The header {KEY_HEADER} was sent with another request within the last day; expected a new key. "
            "Nothing was changed.",
        )
    if earlier.status is None:
        raise ProblemError(
            "request-in-progress",
            f"A request with this {KEY_HEADER} is being executed; expected its end before a repeat.",
            headers={"Retry-After": "1"},
        )
    return Response(
        base64.b64decode(earlier.answer["body"]),
        status_code=earlier.status,
        headers={**earlier.answer["headers"], REPLAY_HEADER: "true"},
    )


def etag_of(state: str) -> str:
    """Return the ETag of a state token."""
    return f'"{state}"'


def state_of(
    if_match: Annotated[
        str | None,
        Header(
            description="The ETag of the mutation as it was shown. The act is refused if it has changed since.",
            examples=['"indeterminate.1.0.1f0e2d3c"'],
        ),
    ] = None,
) -> str:
    """Return the state token that the caller acts on. A request without one is refused."""
    if if_match is None:
        raise ProblemError(
            "precondition-required",
            "The header If-Match is missing; expected the ETag of the mutation as it was shown. Nothing was changed.",
        )
    if len(if_match) < 3 or not (if_match.startswith('"') and if_match.endswith('"')) or '"' in if_match[1:-1]:
        raise ProblemError(
            "invalid-request",
            "The header If-Match is no ETag of a mutation; expected one, in double quotes, as GET returned it. "
            "Nothing was changed.",
        )
    return if_match[1:-1]


SeenState = Annotated[str, Depends(state_of)]
