"""The proxy applies its faults to connections and requests, over real sockets."""

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from pipeline.connectors.sdk import Call
from pipeline.testing import (
    Fault,
    FaultyProxy,
    fault_proxy,
    is_complete_http_request,
    is_complete_lines,
    is_complete_postgres_messages,
)
from tests.support.wait import wait_for
from tests.testing.conformance_server import AnswerError, World, get, post


def within(seconds: float, key: str = "k") -> Call:
    return Call.within(key, timedelta(seconds=seconds))


def sent(proxy: FaultyProxy, seconds: float = 20, key: str = "k") -> dict[str, object]:
    return post(proxy.url, "/plain", within(seconds, key), {"what": "x" * 10})


def test_requests_pass_until_a_fault_is_set(world: World, proxy: FaultyProxy) -> None:
    assert sent(proxy) == {"id": "thing-k"}
    assert get(proxy.url, within(20)).status_code == 200
    assert [seen.fault for seen in proxy.requests] == [Fault.PASSES, Fault.PASSES]


def test_connections_are_refused_until_it_is_released_and_the_port_stays_the_same(
    world: World, proxy: FaultyProxy
) -> None:
    url = proxy.url
    proxy.refuse_connections()
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            sent(proxy)
    assert world.requests == []
    proxy.restore()
    assert sent(proxy) == {"id": "thing-k"}
    assert proxy.url == url


def test_an_open_connection_is_cut_when_the_server_goes_down(world: World, proxy: FaultyProxy) -> None:
    with socket.create_connection((proxy.host, proxy.port), 30) as line:
        line.sendall(b"GET /things/x HTTP/1.1\r\nHost: h\r\n\r\n")
        heard = b""
        while not heard.endswith(b"{}"):
            heard += line.recv(65536)
        proxy.refuse_connections()
        with pytest.raises(ConnectionResetError):
            line.recv(65536)


@pytest.mark.parametrize(
    ("fault", "error", "effects"),
    [
        (Fault.TIMES_OUT_BEFORE, TimeoutError, 0),
        (Fault.RESETS_BEFORE, ConnectionResetError, 0),
        (Fault.RESETS_AFTER, ConnectionResetError, 1),
        (Fault.TIMES_OUT_AFTER, TimeoutError, 1),
        (Fault.DRIPS, TimeoutError, 1),
        (Fault.FAILS_AFTER, AnswerError, 1),
        (Fault.BUSY, AnswerError, 0),
        (Fault.UNAVAILABLE, AnswerError, 0),
    ],
)
def test_a_fault_happens_to_one_request_and_the_next_one_passes(
    fault: Fault, error: type[Exception], effects: int, world: World, proxy: FaultyProxy
) -> None:
    proxy.will(fault)
    with pytest.raises(error):
        sent(proxy, 1.5 if error is TimeoutError else 20, "broken")
    wait_for(lambda: proxy.requests)
    assert proxy.requests[0].fault is fault
    wait_for(lambda: world.effects("broken") == effects)
    assert sent(proxy) == {"id": "thing-k"}
    assert proxy.pending_faults == 0


def test_faults_are_for_requests_in_a_row(world: World, proxy: FaultyProxy) -> None:
    proxy.will(Fault.BUSY, Fault.PASSES, Fault.UNAVAILABLE)
    for status in (429, 201, 503):
        if status == 201:
            sent(proxy)
            continue
        with pytest.raises(AnswerError) as caught:
            sent(proxy)
        assert caught.value.response.status_code == status


def test_busy_has_a_retry_after_header_and_failing_has_the_given_status(world: World, proxy: FaultyProxy) -> None:
    proxy.will(Fault.BUSY)
    proxy.will(Fault.FAILS_AFTER, status=504)
    with pytest.raises(AnswerError) as busy:
        sent(proxy)
    assert busy.value.response.headers["Retry-After"] == "7"
    with pytest.raises(AnswerError) as failed:
        sent(proxy)
    assert failed.value.response.status_code == 504


def test_a_late_response_is_the_servers_own(world: World, proxy: FaultyProxy) -> None:
    proxy.will(Fault.ANSWERS_LATE, delay=timedelta(seconds=0.3))
    began = time.monotonic()
    assert sent(proxy) == {"id": "thing-k"}
    assert time.monotonic() - began >= 0.3


def test_a_late_commit_arrives_after_the_client_has_given_up(world: World, proxy: FaultyProxy) -> None:
    proxy.will(Fault.COMMITS_LATE, delay=timedelta(seconds=0.5))
    call = within(1.5)
    with pytest.raises(TimeoutError):
        post(proxy.url, "/plain", call, {"what": "x"})
    wait_for(lambda: world.effects("k") == 1)
    assert world.times[0] >= call.ends_at + 0.5  # it gave up, and the request did not arrive for a while
    wait_for(lambda: proxy.requests[0].is_over)


def test_a_late_commit_arrives_on_release_though_its_client_keeps_the_line(world: World, proxy: FaultyProxy) -> None:
    proxy.will(Fault.COMMITS_LATE, delay=timedelta(0))
    with socket.create_connection((proxy.host, proxy.port), 30) as line:
        line.sendall(b"POST /plain HTTP/1.1\r\nHost: h\r\nIdempotency-Key: kept\r\nContent-Length: 0\r\n\r\n")
        wait_for(lambda: proxy.requests)
        assert world.effects("kept") == 0
        proxy.restore()
        wait_for(lambda: world.effects("kept") == 1)


def test_a_request_that_has_only_just_met_its_fault_is_released_too(
    world: World, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, hold = threading.Event(), fault_proxy._ProxyConnection._hold_client

    def held_later(line: fault_proxy._ProxyConnection) -> None:
        released.wait(30)
        hold(line)

    monkeypatch.setattr(fault_proxy._ProxyConnection, "_hold_client", held_later)
    proxy.will(Fault.COMMITS_LATE, delay=timedelta(0))
    with socket.create_connection((proxy.host, proxy.port), 30) as line:
        line.sendall(b"POST /plain HTTP/1.1\r\nHost: h\r\nIdempotency-Key: kept\r\nContent-Length: 0\r\n\r\n")
        wait_for(lambda: proxy.requests)
        proxy.restore()
        released.set()
        wait_for(lambda: world.effects("kept") == 1)


def test_a_connection_is_cut_only_after_the_server_has_answered_that_request(world: World, proxy: FaultyProxy) -> None:
    head = b"POST /plain HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nIdempotency-Key: "
    for again in range(10):
        with socket.create_connection((proxy.host, proxy.port), 30) as line:
            line.sendall(head + b"first\r\n\r\n")
            heard = b""
            while not heard.endswith(b"}"):
                heard += line.recv(65536)
            proxy.will(Fault.RESETS_AFTER)
            line.sendall(head + f"second-{again}\r\n\r\n".encode())
            with pytest.raises(ConnectionResetError):
                line.recv(65536)
            assert world.effects(f"second-{again}") == 1


def test_a_request_can_arrive_twice_with_one_response(world: World, proxy: FaultyProxy) -> None:
    proxy.will(Fault.SENDS_TWICE)
    assert sent(proxy) == {"id": "thing-k"}
    assert world.effects("k") == 2


def test_connections_are_refused_while_the_server_is_down(world: World) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with FaultyProxy("127.0.0.1", taken.getsockname()[1]) as proxy, pytest.raises(ConnectionResetError):
            sent(proxy)


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server of no protocol at all: it greets, and echoes everything."""
    door = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                line, _ = door.accept()
            except OSError:
                return
            with line:
                line.sendall(b"hello ")
                try:
                    while data := line.recv(65536):
                        line.sendall(data)
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield door.getsockname()
    door.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    door.close()


def test_a_silent_client_ends_a_request_of_any_protocol(echo: tuple[str, int]) -> None:
    quiet = timedelta(seconds=2)  # longer than it takes to send the second half
    with FaultyProxy(*echo, idle_gap=quiet) as proxy, socket.create_connection((proxy.host, proxy.port), 30) as line:
        assert line.recv(10) == b"hello "
        line.sendall(b"one ")
        line.sendall(b"request")
        assert line.recv(100) == b"one request"
        line.sendall(b"another")
        assert line.recv(100) == b"another"
        assert [seen.data for seen in proxy.requests] == [b"one request", b"another"]


def test_a_fault_waits_for_the_request_with_the_effect(echo: tuple[str, int]) -> None:
    with (
        FaultyProxy(*echo, is_complete=is_complete_lines, has_effect=lambda data: b"COMMIT" in data) as proxy,
        socket.create_connection((proxy.host, proxy.port), 30) as line,
    ):
        proxy.will(Fault.RESETS_BEFORE)
        assert line.recv(10) == b"hello "
        line.sendall(b"INSERT\r\n")
        assert line.recv(100) == b"INSERT\r\n"
        assert proxy.pending_faults == 1
        line.sendall(b"COMMIT\r\n")
        with pytest.raises(ConnectionResetError):
            line.recv(100)
        assert [(seen.has_effect, seen.fault) for seen in proxy.requests] == [
            (False, Fault.PASSES),
            (True, Fault.RESETS_BEFORE),
        ]


def test_a_fault_can_be_for_any_request_at_all(echo: tuple[str, int]) -> None:
    with (
        FaultyProxy(*echo, is_complete=is_complete_lines, has_effect=lambda data: b"COMMIT" in data) as proxy,
        socket.create_connection((proxy.host, proxy.port), 30) as line,
    ):
        proxy.will(Fault.RESETS_BEFORE, any_request=True)
        assert line.recv(10) == b"hello "
        line.sendall(b"INSERT\r\n")
        with pytest.raises(ConnectionResetError):
            line.recv(100)


def test_a_client_that_stops_sending_still_gets_its_response(echo: tuple[str, int]) -> None:
    with FaultyProxy(*echo) as proxy, socket.create_connection((proxy.host, proxy.port), 30) as line:
        line.sendall(b"last words")
        line.shutdown(socket.SHUT_WR)
        heard = b""
        while piece := line.recv(100):
            heard += piece
        assert heard == b"hello last words"


def test_nothing_of_a_proxy_is_left_when_it_is_closed(echo: tuple[str, int]) -> None:
    with FaultyProxy(*echo) as proxy:
        proxy.will(Fault.TIMES_OUT_BEFORE)
        with socket.create_connection((proxy.host, proxy.port), 30) as line:
            line.sendall(b"held")
            wait_for(lambda: proxy.requests)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((proxy.host, proxy.port), 30)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("faulty")] == []


@pytest.mark.parametrize(
    ("data", "is_whole"),
    [
        (b"GET / HTTP/1.1\r\nHost: h\r\n", False),
        (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", True),
        (b"POST / HTTP/1.1\r\ncontent-LENGTH: 4\r\n\r\nabc", False),
        (b"POST / HTTP/1.1\r\ncontent-LENGTH: 4\r\n\r\nabcd", True),
        (b"POST / HTTP/1.1\r\nContent-Length: four\r\n\r\n", True),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", False),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", True),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", True),
    ],
)
def test_an_http_request_is_whole_with_the_body_its_head_promises(data: bytes, is_whole: bool) -> None:
    assert is_complete_http_request(data) is is_whole


@pytest.mark.parametrize(
    ("data", "is_whole"),
    [
        (b"\0\0\0\x08\x04\xd2\x16\x2f", True),
        (b"\0\0\0\x09\x04\xd2\x16\x2f", False),
        (b"Q\0\0\0\x0bCOMMIT\0", True),
        (b"Q\0\0\0\x0bCOMM", False),
        (b"Q\0\0", False),
        (b"X\0\0\0\x04", True),
        (b"Q\0\0\0\x0bCOMMIT\0X\0\0\0\x04", True),
        (b"Q\0\0\0\x0bCOMMIT\0X\0", False),
    ],
)
def test_messages_of_postgres_are_complete_at_their_declared_length(data: bytes, is_whole: bool) -> None:
    assert is_complete_postgres_messages(data) is is_whole
