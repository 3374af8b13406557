"""Messages between agents: whole, authenticated, never replayed."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from hpcrun.node.protocol import Channel, Message, ProtocolError

TOKEN = b"t" * 32


def pair(client_token: bytes = TOKEN) -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left, TOKEN, accepted=True), Channel(right, client_token, accepted=False)


def received(poll: Callable[[], list[Message]]) -> list[Message]:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        messages = poll()
        if messages:
            return messages
    return []


def test_messages_arrive_whole_and_in_order_both_ways() -> None:
    server, client = pair()
    client.send({"n": 1})
    client.send({"n": 2, "text": "x" * 100_000})
    got: list[Message] = []
    deadline = time.monotonic() + 5
    while len(got) < 2 and time.monotonic() < deadline:
        client.poll()
        got += server.poll()
    assert [message["n"] for message in got] == [1, 2]
    server.send({"n": 3})
    assert received(client.poll) == [{"n": 3}]


def test_a_stranger_without_the_token_is_refused() -> None:
    server, client = pair(client_token=b"x" * 32)
    client.send({"n": 1})
    server.poll()
    client.poll()
    with pytest.raises(ProtocolError, match="wrong signature"):
        received(server.poll)


def test_a_recorded_message_cannot_be_replayed_on_another_connection() -> None:
    recorder, right = socket.socketpair()
    client = Channel(right, TOKEN, accepted=False)
    recorder.sendall(b"n" * 16)
    client.send({"type": "stop"})
    client.poll()
    recorded = recorder.recv(65536)

    left, thief = socket.socketpair()
    server = Channel(left, TOKEN, accepted=True)
    server.poll()
    thief.sendall(recorded)
    with pytest.raises(ProtocolError, match="wrong signature"):
        received(server.poll)


def test_garbage_is_refused_without_reading_it_all() -> None:
    left, right = socket.socketpair()
    server = Channel(left, TOKEN, accepted=True)
    server.poll()
    right.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64)
    with pytest.raises(ProtocolError, match="not an hpcrun agent"):
        received(server.poll)


def test_a_closed_connection_is_noticed() -> None:
    server, client = pair()
    client.close()
    deadline = time.monotonic() + 5
    while not server.closed and time.monotonic() < deadline:
        server.poll()
    assert server.closed
