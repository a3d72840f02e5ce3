"""A way to a server over another port: with TLS in front of it, or with every piece of data late."""

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class _Relay:
    def __init__(self, port: int, late: float, tls: ssl.SSLContext | None) -> None:
        self.port, self.late, self.tls = port, late, tls
        self.is_begun, self.own_port = threading.Event(), 0

    async def serve(self) -> None:
        self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._connect, "127.0.0.1", 0, ssl=self.tls) as server:
            self.own_port = server.sockets[0].getsockname()[1]
            self.is_begun.set()
            await self.stop.wait()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs, to_them = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass_on(reader, to_them), self._pass_on(theirs, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while data := await reader.read(65536):
                    await asyncio.sleep(self.late)
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()


@contextmanager
def relayed(port: int, *, late: float = 0.0, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Yield a port of this machine that leads to another one. Each piece of data is ``late`` by so many seconds."""
    relay = _Relay(port, late, tls)
    thread = threading.Thread(target=lambda: asyncio.run(relay.serve()))
    thread.start()
    try:
        assert relay.is_begun.wait(30)
        yield relay.own_port
    finally:
        relay.loop.call_soon_threadsafe(relay.stop.set)
        thread.join(30)
        assert not thread.is_alive()
