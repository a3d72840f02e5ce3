"""Parsers of bytes from outside, fed with what no sender should send: each answers, or refuses in its own words.

A hundred examples per parser here; `make fuzz` tries a million.
"""

import base64
import json
import tempfile
import unicodedata
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from hypothesis import given
from hypothesis import strategies as st
from kombu.connection import Connection

from pipeline.admin import access, pages, provider_export
from pipeline.admin.events import EventFilter
from pipeline.api import preconditions
from pipeline.api.problems import ProblemError
from pipeline.connectors import error_table, http_exchange
from pipeline.domain import payloads
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.values import DEFAULT_LIMITS
from pipeline.ingest import queue
from pipeline.tasks import message_limits
from pipeline.telemetry import spans
from pipeline.text import printable_text, single_line, visible_text
from pipeline.worker import outcomes

TEXTS = st.text() | st.sampled_from(["\0", "\ud800", "\u202e", "\x1b[31m", "1e999", "-0", "9" * 5000, "NaN", "\ufeff"])
BYTES = st.binary() | TEXTS.map(lambda text: text.encode(errors="surrogatepass"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
DEEP = st.integers(100, 2000).map(lambda levels: "[" * levels + "]" * levels)
WRITTEN = JSON.map(json.dumps) | DEEP | TEXTS
PART = st.sampled_from(["body", "headers", "properties", "content-type", "content-encoding"])
PROPERTY = st.sampled_from(["delivery_tag", "delivery_info", "body_encoding", "reply_to", "priority"])
CONTENT = st.sampled_from(
    ["application/json", "text/html; charset=idna", "text/plain; charset=utf-7", "x/y"]
) | st.text(st.characters(min_codepoint=32, max_codepoint=126))


def refusal(kinds: type[Exception], parse: Callable[..., Any], *given: Any) -> str:
    """How a parser refuses this; empty if it does not. An error of another kind fails the test."""
    try:
        parse(*given)
    except kinds as error:
        return str(error)
    return ""


def entry(parts: dict[str, Any], properties: dict[str, Any]) -> str:
    """A message as Celery writes it into a Redis list, with some parts replaced."""
    where = {"exchange": "", "routing_key": "pipeline.publish"}
    usual = {"delivery_tag": "tag", "delivery_info": where, "body_encoding": "base64"}
    whole = {"body": "W1tdLCB7fSwge31d", "headers": {"task": "pipeline.publish"}, "content-type": "application/json"}
    return json.dumps({**whole, "content-encoding": "utf-8", "properties": usual | properties, **parts})


@given(WRITTEN | st.builds(entry, st.dictionaries(PART, JSON), st.dictionaries(PROPERTY, JSON)))
def test_every_entry_of_a_queue_becomes_a_message_that_can_be_kept(text: str) -> None:
    with Connection("memory://") as connection:  # type: ignore[no-untyped-call]
        read = message_limits._parsed_entry(text)
        message: Any = message_limits.EntryMessage(read, channel=connection.default_channel)
    assert isinstance(message.delivery_tag, str)
    assert message.delivery_info["routing_key"] is not None
    json.dumps(message._raw, default=str)
    assert isinstance(message.body or b"", str | bytes)


@given(JSON | st.tuples(JSON, JSON, JSON).map(list) | st.dictionaries(st.sampled_from(["args", "kwargs"]), JSON), JSON)
def test_every_body_of_a_message_is_taken_or_has_a_problem(body: Any, headers: Any) -> None:
    message = type("Message", (), {"payload": body, "headers": headers, "properties": {}})()
    assert isinstance(message_limits.problem_of(message), str | None)


@given(st.sampled_from(sorted(message_limits._DECODERS)), st.binary(max_size=2000))
def test_every_compressed_body_is_unpacked_or_refused(method: str, body: bytes) -> None:
    unpack = message_limits._DECODERS[method]
    if not refusal(Exception, unpack, body):  # the worker keeps the message, whatever the error
        assert len(unpack(body)) <= message_limits.MAX_BODY


@given(st.lists(st.tuples(st.sampled_from([b"data", b"traceparent", b"tracestate"]) | BYTES, BYTES), max_size=4))
def test_every_entry_of_a_stream_is_an_object_or_refused(fields: list[tuple[bytes, bytes]]) -> None:
    assert isinstance(queue.traceparent_of(tuple(fields)), str | None)
    said = refusal(ValueError, queue.payload_of, tuple(fields))
    assert visible_text(said) == said


@given(
    st.integers(100, 999),
    CONTENT,
    CONTENT,
    TEXTS.filter(str.isascii) | st.just(""),
    BYTES | WRITTEN.map(lambda text: text.encode(errors="replace")),
)
def test_every_answer_of_a_server_can_be_read_and_its_result_stored(
    status: int, content_type: str, encoding: str, after: str, body: bytes
) -> None:
    headers = [(b"content-type", content_type.encode()), (b"retry-after", after.encode()), (b"date", after.encode())]
    response = httpx.Response(status, headers=headers, content=body)
    read = http_exchange.read_response(response, keep=("content-type", "retry-after"), limit=1000)
    http_exchange.response_reading(read, {})
    assert "\n" not in read.snippet()
    json.dumps(outcomes.storable_result(read.result(), DEFAULT_LIMITS, "a call")).encode()
    refusal(zlib.error, http_exchange._unpacker(encoding), body, 10)


@given(TEXTS, TEXTS)
def test_every_retry_after_is_a_bounded_pause_or_none(value: str, date: str) -> None:
    found = error_table.read_status(429, value, date).after
    assert found is None or 0 <= found.total_seconds() <= 86_400


@given(
    st.sampled_from([".csv", ".jsonl"]), st.lists(BYTES | WRITTEN.map(lambda t: t.encode(errors="replace")), max_size=5)
)
def test_every_export_has_rows_or_is_refused(suffix: str, lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"export{suffix}"
        file.write_bytes(b"\n".join([b"key,note", *lines] if suffix == ".csv" else lines))
        said = refusal(InvalidInputError, lambda: list(provider_export.read_rows(file)))
    assert visible_text(said) == said


@given(TEXTS | WRITTEN.map(lambda text: base64.urlsafe_b64encode(text.encode(errors="replace")).decode()))
def test_every_cursor_is_a_position_or_refused(text: str) -> None:
    for parse in (pages._number, pages._pair, UUID):
        cursor = pages._Cursor[Any]("events", EventFilter(), 10, parse, None)
        said = refusal(InvalidInputError, cursor.position, text)
        assert visible_text(said) == said


@given(TEXTS)
def test_every_token_trace_and_state_is_read_or_refused(text: str) -> None:
    assert len(access._hash(text.encode(errors="replace").decode())) > 20
    spans.parse_traceparent(text)
    refusal(ProblemError, preconditions.state_of, text)


@given(WRITTEN)
def test_every_json_text_is_parsed_or_refused(text: str) -> None:
    def parse() -> None:
        payloads.checked_json(payloads.parsed_json(text, what="The text"), what="the payload", limit=10_000)

    refusal(InvalidInputError, parse).encode()


@given(TEXTS, st.integers(1, 50))
def test_every_text_is_shown_without_hidden_characters(text: str, limit: int) -> None:
    for shown in (visible_text(text), printable_text(text, limit), single_line(text, limit)):
        assert visible_text(shown) == shown
        assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
