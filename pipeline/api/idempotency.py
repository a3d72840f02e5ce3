"""Execute a POST with an ``Idempotency-Key`` once: a repeat within a day gets the same answer.

The key belongs to its caller. Only answers of success are kept: a request that was refused changed nothing, and its key
is free again.
"""

import base64
import hashlib
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from pipeline.admin import api_requests
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
    earlier = await run_in_threadpool(api_requests.begin, db, name, key, await _request_hash(request))
    if earlier is not None:
        return _replayed(earlier, await _request_hash(request))
    try:
        response = await execute(request)
        is_kept = 200 <= response.status_code < 300 and response.headers.get("cache-control") != "no-store"
    except BaseException:
        await run_in_threadpool(api_requests.forget, db, name, key)
        raise
    if is_kept:
        answer = {
            "body": base64.b64encode(bytes(response.body)).decode(),
            "headers": {each: response.headers[each] for each in _KEPT_HEADERS if each in response.headers},
        }
        await run_in_threadpool(api_requests.save_answer, db, name, key, status=response.status_code, answer=answer)
    else:
        await run_in_threadpool(api_requests.forget, db, name, key)
    return response


async def _request_hash(request: Request) -> str:
    """Return what makes two requests the same: method, address, precondition and body."""
    parts = (request.method, str(request.url.path), request.url.query, request.headers.get("if-match", ""))
    digest = hashlib.sha256("\n".join(parts).encode())
    digest.update(await request.body())
    return digest.hexdigest()


def _replayed(earlier: api_requests.EarlierRequest, request_hash: str) -> Response:
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
