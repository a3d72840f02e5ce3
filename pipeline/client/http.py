"""Publish events through the HTTP API, from a service that reaches neither the database nor the broker."""

import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import groupby
from typing import Any
from urllib.parse import quote

from pipeline.client.publishing import EventInputs, Receipt, serialize_events
from pipeline.domain.errors import InvalidInputError, RefusedError, UnavailableError
from pipeline.domain.values import DEFAULT_LIMITS, Limits
from pipeline.telemetry import spans

_MAX_BATCH = 1_000
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  #: seconds between two attempts
_TEMPORARY = frozenset({429, 502, 503, 504})
_WRONG_INPUT = frozenset({400, 404, 413, 422})
_UNKNOWN = "Whether the events are there is unknown; publish them again with the same message ids."


class HttpClient:
    """Publish through the HTTP API with an API token. Every call ends within ``timeout``.

    Up to 1,000 events of one topic are one transaction. A failed request is sent again until the time is over: message
    ids and an Idempotency-Key make that safe. A client that was made before a fork can be used in the child.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        limits: Limits = DEFAULT_LIMITS,
        timeout: timedelta = timedelta(seconds=30),
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidInputError(f"{url!r} is no address of the HTTP API; expected http://... or https://...")
        try:
            import httpx  # noqa: F401 - an extra
        except ImportError:
            raise InvalidInputError("HttpClient needs httpx: `pip install 'celery-durable-effects[http]'`.") from None
        self._url, self._token = url.rstrip("/"), token
        self._limits, self._seconds = limits, timeout.total_seconds()
        self._clients: dict[int, Any] = {}

    def publish(self, workflow: str, events: EventInputs, *, replace: bool = False) -> Receipt:
        """Publish events. They are committed when this returns, and the workflow is woken."""
        deadline = time.monotonic() + self._seconds
        outcomes: dict[str, list[str]] = {"new": [], "repeated": [], "replaced": []}
        for topic, batch in self._batches(events):
            path = f"/v1/workflows/{quote(workflow, safe='')}/topics/{quote(topic, safe='')}/events:batch"
            for each in self._send(path, {"events": batch, "replace": replace}, deadline)["events"]:
                outcomes[each["outcome"]].append(each["message_id"])
        return Receipt(**{name: tuple(dict.fromkeys(ids)) for name, ids in outcomes.items()})

    def close(self) -> None:
        """Close the connections of this process."""
        client = self._clients.pop(os.getpid(), None)
        if client is not None:
            client.close()

    def _batches(self, events: EventInputs) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Yield the events by topic, as many as one request takes."""
        here = spans.current_traceparent()
        rows = serialize_events(events, self._limits)
        for topic, group in groupby(sorted(rows, key=lambda row: str(row["topic"])), key=lambda row: row["topic"]):
            of_topic = [
                {name: value for name, value in row.items() if name != "topic"}
                | {"traceparent": row["traceparent"] or here}
                for row in group
            ]
            for first in range(0, len(of_topic), _MAX_BATCH):
                yield topic, of_topic[first : first + _MAX_BATCH]

    def _send(self, path: str, body: Mapping[str, Any], deadline: float) -> Any:
        """Send a request until it is answered for good, or the time is over."""
        import httpx

        headers = {"Authorization": f"Bearer {self._token}", "Idempotency-Key": secrets.token_urlsafe(24)}
        pause, problem = _FIRST_PAUSE, "no answer came in time"
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = self._client().post(f"{self._url}{path}", json=body, headers=headers, timeout=left)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if not _is_temporary(answer):
                    return _result(answer)
                problem = f"it answered {answer.status_code}: {_detail(answer)}"
            threading.Event().wait(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 2, _LONGEST_PAUSE)
        raise UnavailableError(f"The HTTP API cannot be used: {problem}. {_UNKNOWN}")

    def _client(self) -> Any:
        """Return the connections of this process. Those from before a fork belong to the parent."""
        import httpx

        pid = os.getpid()
        return self._clients.get(pid) or self._clients.setdefault(pid, httpx.Client())


def _is_temporary(answer: Any) -> bool:
    return answer.status_code in _TEMPORARY or _kind(answer).endswith(":request-in-progress")


def _result(answer: Any) -> Any:
    if answer.is_success:
        return answer.json()
    if answer.status_code in _WRONG_INPUT:
        raise InvalidInputError(f"The HTTP API did not take the events: {_detail(answer)}")
    raise RefusedError(f"The HTTP API refused the events with {answer.status_code}: {_detail(answer)}")


def _kind(answer: Any) -> str:
    return str(_problem(answer).get("type", ""))


def _detail(answer: Any) -> str:
    return str(_problem(answer).get("detail") or answer.reason_phrase)


def _problem(answer: Any) -> Mapping[str, Any]:
    """Return the problem that an answer has as its body; empty if it has none."""
    if answer.headers.get("content-type", "").partition(";")[0] != "application/problem+json":
        return {}
    found: Mapping[str, Any] = answer.json()
    return found
