"""The form of an entry: exactly one field, ``data``, with a JSON object in UTF-8 whose keys are all different.

Beside it there may be what tracers write, ``traceparent`` and ``tracestate``, and nothing else.

Redis keeps the fields of an entry as pairs, in order, and takes a name twice. A client that makes a
dictionary of them drops one without a word, so here they stay pairs.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from redis import Redis

from pipeline.ingest.errors import Pairs, QueueError, plain
from pipeline.telemetry import contexts

FIELD = b"data"
_TRACEPARENT, _TRACESTATE = b"traceparent", b"tracestate"
_KNOWN = frozenset({FIELD, _TRACEPARENT, _TRACESTATE})
Entry = tuple[bytes, Pairs]
_MOST_NAMES, _LONGEST_NAME = 5, 40


def keep_pairs(client: Redis) -> None:
    """From now on this client answers with entries as they are: it belongs to a queue, and nobody is surprised."""
    client.set_response_callback("XREADGROUP", _streams)
    for command in ("XCLAIM", "XRANGE"):
        client.set_response_callback(command, entries_of)


def entries_of(reply: Any, **_: Any) -> list[Entry]:
    """Entries in their order. Redis 6.2 answers with nothing where an entry is gone."""
    return [(entry[0], _pairs(entry[1])) for entry in reply or () if entry is not None]


def _streams(reply: Any, **_: Any) -> list[tuple[bytes, list[Entry]]]:
    return [(name, entries_of(found)) for name, found in reply or ()]


def _pairs(flat: Sequence[bytes] | None) -> Pairs:
    given = flat or ()
    return tuple(zip(given[::2], given[1::2], strict=True))


def payload_of(fields: Pairs) -> dict[str, Any]:
    """The JSON object of an entry, or a ValueError that says what is wrong with it."""
    found = dict(fields)
    if FIELD not in found or len(found) != len(fields) or not found.keys() <= _KNOWN:
        raise ValueError(
            f"its fields are {_names(fields)}; expected exactly one, data, and beside it at most one traceparent "
            "and one tracestate"
        )
    try:
        payload = json.loads(str(found[FIELD], "utf-8"), parse_constant=_no_constant, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("its data is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"its data is no UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise ValueError(f"its data is no JSON: {error}") from None
    if not isinstance(payload, dict):
        raise ValueError(f"its data is a JSON {type(payload).__name__}; expected an object")
    return payload


def traceparent_of(fields: Pairs) -> str | None:
    """The trace that made an entry; None for nothing, and for what is no trace: it never costs the entry."""
    given = dict(fields).get(_TRACEPARENT, b"").decode(errors="replace")
    return given if contexts.parsed(given) is not None else None


def written(payload: Mapping[str, Any]) -> bytes:
    """A payload as an entry holds it."""
    if not isinstance(payload, dict):
        raise QueueError(f"The payload is a {type(payload).__name__}; expected a dict. Nothing was added.")
    try:
        return json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise QueueError(f"The payload is no JSON: {plain(str(error))}. Nothing was added.") from error


def _names(fields: Pairs) -> str:
    shown = [_shown(name.decode(errors="replace")) for name, _ in fields[:_MOST_NAMES]]
    more = [f"{len(fields) - _MOST_NAMES} more"] if len(fields) > _MOST_NAMES else []
    return ", ".join(shown + more) or "none"


def _shown(name: str) -> str:
    return plain(name, _LONGEST_NAME)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different: of two values for one key, parsers disagree which counts."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key '{_shown(name)}' is there twice")
        found[name] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
