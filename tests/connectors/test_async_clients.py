"""An async connector keeps its client from call to call, for every caller."""

from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest

from pipeline import Applied, Call, Connector, NotFound, PrepareResult, Verdict, Workflow, mutation, read
from pipeline.connectors import event_loop
from pipeline.store.database import Database
from pipeline.testing import Inline


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.do_GET()

    def log_message(self, *_: Any) -> None: ...


class Payments(Connector):
    name = "payments"

    def __init__(self, url: str) -> None:
        self.client = httpx.AsyncClient(base_url=url, timeout=30)

    @read
    async def rate(self) -> Any:
        return (await self.client.get("/rate")).json()

    @mutation(timeout=timedelta(seconds=25), settle=timedelta(0))
    async def charge(self, _: Call, *, n: int) -> Any:
        answer = (await self.client.post(f"/charges/{n}")).json()
        if n == 0:
            raise TimeoutError("the answer was lost")
        return answer

    @charge.reconcile
    async def find(self, _: Call, *, n: int) -> Verdict:
        found = await self.client.get(f"/charges/{n}")
        return Applied(found.json()) if found.is_success else NotFound()


@pytest.fixture
def payments() -> Iterator[Payments]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        made = Payments(f"http://127.0.0.1:{server.server_port}")
        yield made
        event_loop.await_result(made.client.aclose())
        server.shutdown()


def test_calls_reads_and_reconciles_share_one_client(db: Database, payments: Payments) -> None:
    workflow = Workflow("billing", concurrency=4)
    orders, refunds = workflow.topic("orders"), workflow.topic("refunds")

    @workflow.consumer(subscribes=[orders])
    class Plain:
        def prepare(self, ctx: Any, _: Any) -> PrepareResult:
            ctx.payments.rate()
            pending = ctx.peek(orders, limit=1)
            return PrepareResult(reserve=pending, data=pending[0].payload) if pending else PrepareResult.nothing()

        def mutate(self, ctx: Any, prepared: Any) -> Any:
            return ctx.payments.charge(**prepared.data)

        def next(self, ctx: Any, prepared: Any, result: Any) -> None: ...

    @workflow.consumer(subscribes=[refunds])
    class Async(Plain):
        async def prepare(self, ctx: Any, _: Any) -> PrepareResult:  # type: ignore[override]
            await ctx.payments.rate()
            pending = ctx.peek(refunds, limit=1)
            return PrepareResult(reserve=pending, data=pending[0].payload) if pending else PrepareResult.nothing()

    run = Inline(db, [workflow], connectors=[payments])
    for n in range(3):
        run.publish(orders, {"n": n})
        run.publish(refunds, {"n": n})
        run.run()
    run.run_until_idle()
    assert [(row.status, row.params["n"]) for row in run.ledger()] == [("applied", n) for n in (0, 0, 1, 1, 2, 2)]
    assert {row.status for row in run.runs()} == {"committed"}
