"""Seal values that the database and the broker must not read, and open them again. Pure: no I/O.

A workflow declares a codec. Payloads, plans, parameters, results and states are then sealed before they leave the
process, and opened when they are read. A sealed value is a JSON object with one key, ``$encrypted``, which names the
key and has the ciphertext. It is bound to its place, such as the topic and the message id: at another place it cannot
be opened.
"""

import base64
import binascii
import json
from dataclasses import replace
from typing import Any, Protocol

from pipeline.domain.errors import MissingKeyError, TamperedError
from pipeline.domain.failures import Failure

MARKER = "$encrypted"
_FORMAT = "pipeline/1"  #: a part of what every ciphertext is bound to

#: Errors whose text is written by this package, from ids and names alone. The text of any other may quote a value.
_TEXTS_WITHOUT_VALUES = frozenset({"MissingKeyError", "ReservationError", "TamperedError", "WorkerLost"})


class Codec(Protocol):
    """Encrypts and decrypts bytes. ``context`` names the place, and must be authenticated with the ciphertext.

    ``decode`` raises ``MissingKeyError`` if it does not have the key, and ``TamperedError`` if the ciphertext or its
    context is not what ``encode`` was given.
    """

    @property
    def key_id(self) -> str:
        """The id of the key that ``encode`` uses."""

    def encode(self, plain: bytes, context: bytes) -> bytes: ...

    def decode(self, data: bytes, context: bytes, key_id: str) -> bytes: ...


class Sealed(dict[str, Any]):
    """A value that this process has sealed."""


class Unreadable(dict[str, Any]):
    """A sealed value that this process could not open, with the reason."""

    def __init__(self, sealed: dict[str, Any], error: MissingKeyError | TamperedError) -> None:
        super().__init__(sealed)
        self.error = error


def is_sealed(value: Any) -> bool:
    """Return whether a value is sealed, and not opened."""
    return isinstance(value, dict) and MARKER in value and len(value) == 1


def key_id_of(value: Any) -> str:
    """Return the id of the key of a sealed value; empty if it does not name one."""
    inner = value[MARKER]
    key_id = inner.get("key") if isinstance(inner, dict) else None
    return key_id if isinstance(key_id, str) else ""


def seal(codec: Codec, value: Any, *place: object) -> Sealed:
    """Encrypt a JSON value for a place."""
    plain = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    data = codec.encode(plain, _context(place))
    return Sealed({MARKER: {"key": codec.key_id, "data": base64.b64encode(data).decode()}})


def unseal(codec: Codec, value: Any, *place: object) -> Any:
    """Decrypt a value that was sealed for this place."""
    inner, key_id = value[MARKER], key_id_of(value)
    what = _describe_place(place)
    try:
        data = base64.b64decode(inner["data"], validate=True)
        return json.loads(codec.decode(data, _context(place), key_id))
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise TamperedError(f"The encrypted {what} is not in the form that it was written in.") from None
    except TamperedError:
        raise TamperedError(
            f"The encrypted {what} was changed, was moved here from another row, or was encrypted with another key of "
            f"the id {key_id!r}. Restore it from a backup, or give this process the right key."
        ) from None


def opened(value: Any) -> Any:
    """Return a value that code may use. Raise if it is sealed: this process could not open it, or has no codec."""
    if isinstance(value, dict) and MARKER in value:
        if isinstance(value, Unreadable):
            raise value.error
        if len(value) == 1:
            raise missing_key(key_id_of(value))
    return value


def missing_key(key_id: str) -> MissingKeyError:
    """Return the error of a process that lacks a key."""
    return MissingKeyError(
        f"A value is encrypted with the key {key_id!r}, and this process does not have that key; expected it among "
        "the keys of the codec. Give it back, then resume the workflow: nothing is lost."
    )


def description(value: Any) -> dict[str, str]:
    """Describe a sealed value for people."""
    error = value.error if isinstance(value, Unreadable) else None
    if isinstance(error, TamperedError):
        return {MARKER: f"with key {key_id_of(value)}; {error}"}
    return {MARKER: f"with key {key_id_of(value)}; this process has no such key"}


def private_text(error_type: str) -> str:
    """Return what is kept instead of the text of an error that may quote an encrypted value."""
    return f"{error_type or 'an answer'}: its text may quote an encrypted value, so it is not kept"


def without_text(failure: Failure) -> Failure:
    """Return a failure of an encrypted workflow without the text of its error."""
    if failure.error_type in _TEXTS_WITHOUT_VALUES:
        return failure
    return replace(failure, message=private_text(failure.error_type))


def _context(place: tuple[object, ...]) -> bytes:
    return json.dumps([_FORMAT, *map(str, place)]).encode()


def _describe_place(place: tuple[object, ...]) -> str:
    return " ".join(map(str, place))
