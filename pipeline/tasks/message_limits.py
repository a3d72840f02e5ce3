"""Bound what a message from outside may cost before a worker has read it.

- A compressed body is unpacked up to a limit: a few hundred kilobytes can hold a gigabyte of zeros.
- A body that is nested too deeply is refused: Celery pickles it for the pool, which overflows Python's stack.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from kombu import compression

MAX_BODY = 64 * 2**20  #: bytes of an unpacked body
MAX_DEPTH = 128  #: lists and objects inside each other; a payload may have half of that


def bound_decompression() -> None:
    """Replace the decoders of kombu by ones that stop at the limit. A method without such a decoder is refused."""
    registry: Any = compression  # kombu has no types here
    for content_type in registry.encoders():
        encoder, _ = registry.get_encoder(content_type)
        registry.register(encoder, _DECODERS.get(content_type, _refuse), content_type)


def is_too_deep(body: Any) -> bool:
    """Return whether lists and objects are nested deeper than a worker can pass on."""
    level = [body]
    for _ in range(MAX_DEPTH):
        level = [inner for item in level if isinstance(item, list | dict) for inner in _members(item)]
        if not level:
            return False
    return True


def _members(item: list[Any] | dict[str, Any]) -> list[Any]:
    return [inner for inner in (item.values() if isinstance(item, dict) else item) if isinstance(inner, list | dict)]


def _refuse(_: bytes) -> bytes:
    raise ValueError("this compression is not accepted; expected gzip, bzip2 or lzma")


def _unpack(unpacker: Any, body: bytes) -> bytes:
    unpacked: bytes = unpacker.decompress(body, MAX_BODY + 1)
    if len(unpacked) > MAX_BODY:
        raise ValueError(f"the body has more than {MAX_BODY} bytes when it is unpacked")
    if not unpacker.eof:
        raise ValueError("the compressed body is incomplete")
    return unpacked


_DECODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "application/x-gzip": lambda body: _unpack(zlib.decompressobj(), body),
    "application/x-bz2": lambda body: _unpack(bz2.BZ2Decompressor(), body),
    "application/x-lzma": lambda body: _unpack(lzma.LZMADecompressor(), body),
}
