"""Serve the app, and end its open streams first when it shuts down."""

import socket

import uvicorn

from pipeline.api.live import Broadcaster


class StreamingServer(uvicorn.Server):
    """A server that waits for no stream when it shuts down."""

    def __init__(self, config: uvicorn.Config, broadcaster: Broadcaster) -> None:
        super().__init__(config)
        self.broadcaster = broadcaster

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then the connections."""
        self.broadcaster.close()
        await super().shutdown(sockets)
