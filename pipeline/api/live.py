"""Send changes to open streams as server-sent events.

One task per process asks the database for changes once per second while at least one stream is open, however many
there are. Each batch of changes has a mark, which is the ``id`` of its events. A client that reconnects with
``Last-Event-ID`` gets what it missed. If that is no longer in memory it gets the event ``reset``, and reads again.
A stream that does not take its events in time is closed; its client reconnects. So is one that is open for two minutes:
when its client reconnects, it is found out again who calls, and with which rights.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.admin.changes import Changes, Mark

log = logging.getLogger(__name__)

HEARTBEAT = b": still here\n\n"
_RETRY = b"retry: 2000\n\n"  #: milliseconds until a client reconnects
_RETRY_SOON = b"retry: 100\n\n"  #: after an end that is no failure
_RESET = b"event: reset\ndata: {}\n\n"
_MAX_KEPT = 300  #: batches of changes that a reconnecting client can catch up with
_MAX_QUEUED = 100  #: batches that a stream may leave untaken
_ACT_FIELDS = ("actor", "act", "workflow", "run_id", "mutation_id")

Scope = frozenset[str] | None  #: the only workflows whose changes a stream gets; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """How often the database is asked, and how often a silent stream shows that it lives."""

    period: float = 1.0  #: seconds
    heartbeat: float = 15.0
    lifetime: float = 120.0  #: after it a stream ends, so that a caller without rights by now gets nothing more


class _Stream:
    """One open stream. A batch of changes waits in it until the client takes it; None ends it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Changes | None] = asyncio.Queue(maxsize=_MAX_QUEUED)

    def end(self) -> None:
        while not self.queue.empty():
            self.queue.get_nowait()
        self.queue.put_nowait(None)


class Broadcaster:
    """Ask for changes once for all streams of this process.

    ``read`` returns the changes since a mark; without a mark it returns the newest mark and no changes.
    """

    def __init__(self, read: Callable[[Mark | None], Changes], options: LiveOptions | None = None) -> None:
        self._read, self._options = read, options or LiveOptions()
        self._streams: set[_Stream] = set()
        self._kept: deque[Changes] = deque(maxlen=_MAX_KEPT)
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    @property
    def stream_count(self) -> int:
        """Return how many streams are open."""
        return len(self._streams)

    async def events(self, scope: Scope = None, last_mark: str | None = None) -> AsyncIterator[bytes]:
        """Yield the events of one stream until its client leaves, its lifetime is over or the process shuts down."""
        if self._is_closed:
            return
        stream = _Stream()
        missed = self._missed(last_mark)
        self._open(stream)
        try:
            yield _RETRY if missed is not None else _RETRY + _RESET
            for batch in missed or ():
                yield _encoded(batch, scope)
            end = time.monotonic() + self._options.lifetime
            while time.monotonic() < end:
                try:
                    taken = await asyncio.wait_for(stream.queue.get(), self._options.heartbeat)
                except TimeoutError:
                    yield HEARTBEAT
                    continue
                if taken is None:
                    return
                if text := _encoded(taken, scope):
                    yield text
            yield _RETRY_SOON
        finally:
            self._streams.discard(stream)

    def close(self) -> None:
        """End every stream, so that the server can shut down. May be called from any thread."""
        self._is_closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_streams)

    def _open(self, stream: _Stream) -> None:
        """Add a stream, and start the task that asks if there is none."""
        self._loop = asyncio.get_running_loop()
        self._streams.add(stream)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._ask_while_open())

    def _missed(self, last_mark: str | None) -> list[Changes] | None:
        """Return the batches after a mark; None if they are not known here."""
        if last_mark is None:
            return []
        kept = list(self._kept)
        for number, batch in enumerate(kept):
            if batch.mark.token == last_mark:
                return kept[number + 1 :]
        return None

    async def _ask_while_open(self) -> None:
        mark = self._kept[-1].mark if self._kept else None
        while self._streams:
            try:
                batch = await asyncio.to_thread(self._read, mark)
            except Exception as error:  # noqa: BLE001 - the database comes back, and the streams stay open
                log.warning("changes cannot be read; the streams wait: %s", type(error).__name__)
            else:
                if mark is None or not batch.is_empty:
                    self._send(batch)
                mark = batch.mark
            await asyncio.sleep(self._options.period)

    def _send(self, batch: Changes) -> None:
        self._kept.append(batch)
        for stream in list(self._streams):
            try:
                stream.queue.put_nowait(batch)
            except asyncio.QueueFull:
                log.info("a stream does not take its events; it is closed")
                self._streams.discard(stream)
                stream.end()

    def _end_streams(self) -> None:
        for stream in list(self._streams):
            stream.end()


def _encoded(batch: Changes, scope: Scope) -> bytes:
    """Return the changes in scope as events. All carry the mark, so a client resumes behind the whole batch."""
    return "".join(
        f"id: {batch.mark.token}\nevent: {kind}\ndata: {json.dumps(data, default=str)}\n\n"
        for kind, data in _events(batch, scope)
    ).encode()


def _events(batch: Changes, scope: Scope) -> Iterator[tuple[str, dict[str, Any]]]:
    for item in batch.items:
        if scope is None or item.workflow in scope:
            yield item.kind, asdict(item)
    for act in batch.acts:
        if scope is None or act.workflow in scope:
            yield "act", {"id": str(act.id), "at": act.at} | {name: getattr(act, name) for name in _ACT_FIELDS}
    if scope is None:
        yield "attention", {"waiting": batch.waiting, "oldest_at": batch.oldest_at, "at": batch.at}
    else:
        yield "mark", {"at": batch.at}
