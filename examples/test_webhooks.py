"""Every subscriber gets every webhook once and in order, also when another subscriber is busy or a worker dies."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from examples import webhooks
from pipeline.testing import CrashPoint, Inline, assert_consumed

STATUSES = ["packed", "shipped", "delivered"]


class Subscriber(ThreadingHTTPServer):
    """A subscriber that ignores repeats. It answers 503 as often as it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: dict[str, str] = {}
        self.requests, self.busy = 0, 0


class _Handler(BaseHTTPRequestHandler):
    server: Subscriber

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests += 1
        is_busy = self.server.requests <= self.server.busy
        if not is_busy:
            self.server.seen.setdefault(self.headers["Webhook-Id"], body["status"])
        self.send_response(503 if is_busy else 204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def subscribers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Subscriber]]:
    """Two real HTTP servers."""
    servers = {"crm": Subscriber(), "erp": Subscriber()}
    for server in servers.values():
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    urls = {name: f"http://127.0.0.1:{server.server_port}/" for name, server in servers.items()}
    monkeypatch.setattr(webhooks, "SUBSCRIBERS", urls)
    yield servers
    for server in servers.values():
        server.shutdown()
        server.server_close()


@pytest.fixture
def run(pipeline_run: Callable[..., Inline]) -> Inline:
    """The workflow, with three changes of one order."""
    inline = pipeline_run(webhooks.shipping, connectors=[webhooks.hooks])
    changes = [webhooks.Change(order="7", status=status) for status in STATUSES]
    inline.publish(webhooks.changed, *changes, key="7")
    return inline


def test_a_subscriber_that_is_busy_gets_all_in_order_and_delays_no_other(
    subscribers: dict[str, Subscriber], run: Inline
) -> None:
    subscribers["erp"].busy = 4
    run.run()
    assert list(subscribers["crm"].seen.values()) == STATUSES
    assert list(subscribers["erp"].seen.values()) == []
    run.run_until_idle()
    assert_consumed(run, webhooks.webhooks)
    assert list(subscribers["erp"].seen.values()) == STATUSES


def test_a_worker_that_dies_during_the_fan_out_doubles_nothing(subscribers: dict[str, Subscriber], run: Inline) -> None:
    with run.crash_at(CrashPoint.NEXT_RAN):
        run.run()
    run.run_until_idle()
    assert_consumed(run, webhooks.webhooks)
    assert [list(each.seen.values()) for each in subscribers.values()] == [STATUSES] * 2
