"""Strangers on the control channel's port are dropped, whatever they send, and the meeting goes on."""

import contextlib
import json
import logging
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxglue.distributed.channel import ControlChannel
from jaxglue.distributed.frames import FRAME_BYTES, Connection, FrameError
from jaxglue.distributed.handshake import Hello, prove
from jaxglue.distributed.meeting import listen

TOKEN = b"secret of the run"
HELLO = {"index": 1, "count": 2, "host": "attacker", "challenge": "0" * 64, "proof": "0" * 64}


def frame(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack(">I", len(data)) + data


def hello(**changes) -> bytes:
    return frame(json.dumps(HELLO | changes))


ATTACKS = {
    "index of another type": hello(index="x"),
    "index in a list": hello(index=[1]),
    "negative index": hello(index=-1),
    "boolean index": hello(index=True),
    "index beyond the count": hello(index=99),
    "index of 4,000 digits": frame(json.dumps(HELLO).replace('"index": 1', '"index": ' + "9" * 4000)),
    "other count without the secret": hello(count=3),
    "impostor of process 1": hello(),
    "host of another type": hello(host={"a": 1}),
    "proof that is no text": hello(proof=[1]),
    "proof outside ASCII": hello(proof="é" * 64),
    "lone surrogates": frame('{"index": 1, "count": 2, "host": "\\ud800", "challenge": "\\ud800", "proof": "\\ud800"}'),
    "no hello": frame("{}"),
    "a list": frame("[1, 2]"),
    "depth bomb": frame("[" * 60_000),
    "deep object": frame('{"a":' * 10_000),
    "not UTF-8": frame(b"\xff\xfe" * 9),
    "not finite": frame("NaN"),
    "a web browser": b"GET / HTTP/1.1\r\n\r\n",
    "an endless line": b"x" * 2**20,
    "a frame of 4 GiB": struct.pack(">I", 2**32 - 1) + b"{",
    "half a frame": frame("{}")[:5],
    "nothing": b"",
}


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def open_channel(port):
    def make(index, token=TOKEN, timeout=10.0):
        return ControlChannel(
            index, 2, ("127.0.0.1", port), token=token, timeout=timeout, lost=lambda line: pytest.fail(line)
        )

    return make


def connect(port) -> socket.socket:
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port))


@pytest.fixture
def strangers(port):
    """Open a connection for each attack, once process 0 listens; all stay open and silent."""
    opened = []

    def attack():
        for data in ATTACKS.values():
            opened.append(connect(port))
            with contextlib.suppress(OSError):  # dropped while sending
                opened[-1].sendall(data)
        slow = connect(port)
        opened.append(slow)
        threading.Thread(target=drip, args=(slow,), daemon=True).start()

    yield attack
    for connected in opened:
        connected.close()


def drip(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for byte in hello() * 9:
            connected.sendall(bytes([byte]))
            time.sleep(0.1)


def test_meeting_goes_on_under_attack(open_channel, strangers, caplog):
    with ThreadPoolExecutor(2) as pool, caplog.at_level(logging.WARNING):
        first = pool.submit(open_channel, 0)
        strangers()
        begun = time.monotonic()
        channels = [pool.submit(open_channel, 1).result(8), first.result(8)][::-1]
        assert time.monotonic() - begun < 4.0  # silent strangers hold nobody up
        values = [pool.submit(channel.all_gather_object, index) for index, channel in enumerate(channels)]
        assert [value.result(8) for value in values] == [[0, 1]] * 2
    for reason in (
        "has another token",
        "introduces itself in another form",
        "sends a frame of more than 65536",
        "sends no JSON object",
    ):
        assert f"127.0.0.1 was dropped: it {reason}" in caplog.text
    for channel in channels:
        channel.close()


def test_meeting_keeps_its_deadline_under_attack(open_channel, strangers):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(open_channel, 0, timeout=2.0)
        begun = time.monotonic()
        strangers()
        with pytest.raises(ValueError, match="these did not join in time: 1"):
            first.result(8)
        assert time.monotonic() - begun < 4.0


def test_other_token_is_named_on_both_sides(open_channel, caplog):
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(open_channel, 0, timeout=2.0)
        second = pool.submit(open_channel, 1, token=b"another", timeout=1.0)
        with pytest.raises(ValueError, match=r"could not reach process 0 .* has another token"):
            second.result(8)
        with pytest.raises(ValueError, match="did not join in time: 1"):
            first.result(8)
    assert "a connection from 127.0.0.1 was dropped: it has another token" in caplog.text


def test_impostor_of_process_0_cannot_end_a_run(port):
    """A server without the secret, which refuses politely, is not believed."""
    pair = socket.socketpair()
    server, client = Connection.__new__(Connection), Connection.__new__(Connection)
    for end, connected in zip((server, client), pair, strict=True):
        end.socket, end._lock, end._limit = connected, threading.Lock(), 2**16
    server.send({"challenge": "0" * 64})
    server.send({"refused": "give up"})
    with pytest.raises(FrameError, match=r"introduces itself in another form|another token"):
        prove(client, TOKEN, Hello(1, 2, "here"), time.monotonic() + 2.0)


def test_recorded_hello_is_worthless(port, open_channel):
    """What an honest process sent to one challenge proves nothing to the next."""
    server, recorded = listen(("127.0.0.1", port)), []
    with server, ThreadPoolExecutor(1) as pool:
        honest = pool.submit(open_channel, 1, timeout=0.5)
        peer = Connection(server.accept()[0])
        peer.send({"challenge": "0" * 64})
        recorded.append(peer.receive(time.monotonic() + 2.0))
        peer.close()
        server.close()
        with pytest.raises(ValueError, match="could not reach"):
            honest.result(8)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(open_channel, 0, timeout=1.0)
        replay = Connection(connect(port))
        replay.receive(time.monotonic() + 2.0)
        replay.send(recorded[0])
        with pytest.raises(FrameError):
            replay.receive(time.monotonic() + 2.0)
        with pytest.raises(ValueError, match="did not join in time"):
            first.result(8)


def test_listens_on_the_coordinators_interface_alone(port, monkeypatch):
    with listen(("127.0.0.1", port)) as server:
        assert server.getsockname() == ("127.0.0.1", port)
    with pytest.raises(ValueError, match=r"192\.0\.2\.1 is no address of .*: give a name or address of that host"):
        listen(("192.0.2.1", port))
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]
    )
    with listen(("node1", 0)) as server:  # Debian's own entry for a host's name
        assert server.getsockname()[0] == "0.0.0.0"


def test_long_messages_are_refused_where_they_begin(open_channel):
    with ThreadPoolExecutor(2) as pool:
        channels = [made.result(8) for made in [pool.submit(open_channel, index) for index in (0, 1)]]
        with pytest.raises(ValueError, match="at most 16777216 fit a frame"):
            channels[1].all_gather_object("x" * FRAME_BYTES)
    for channel in channels:
        channel.close()
