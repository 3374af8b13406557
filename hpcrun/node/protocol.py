"""Messages between agents and their coordinator.

A message is a 4-byte length, an HMAC-SHA256 and JSON. The accepting side opens
with 16 random bytes; every HMAC covers them, the direction and a counter, so that
a message can be neither forged, replayed nor reflected.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

VERSION = 1
_LENGTH = struct.Struct("!I")
_MAC = 32
_NONCE = 16
_LONGEST = 1 << 20

Message = dict[str, Any]


class ProtocolError(Exception):
    """The other side is not one of this run's agents, or speaks another version."""


class Channel:
    """One non-blocking connection. The caller polls; nothing here waits."""

    def __init__(self, sock: socket.socket, token: bytes, *, accepted: bool) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._token = token
        self._ours, self._theirs = (b"s", b"c") if accepted else (b"c", b"s")
        self._nonce = secrets.token_bytes(_NONCE) if accepted else b""
        self._out = bytearray(self._nonce)
        self._waiting: list[bytes] = []
        self._in = bytearray()
        self._sent = self._received = 0
        self.closed = False

    @property
    def peer_address(self) -> str:
        """The other side's address as this side sees it."""
        return str(self._sock.getpeername()[0])

    @property
    def own_address(self) -> str:
        """This side's address as the other side sees it."""
        return str(self._sock.getsockname()[0])

    def send(self, message: Message) -> None:
        """Queue one message; :meth:`poll` moves the bytes."""
        self._waiting.append(json.dumps(message).encode())
        self._flush()

    def poll(self) -> list[Message]:
        """Move bytes both ways and return what has arrived whole.

        Raises:
            ProtocolError: a wrong HMAC, or a message longer than 1 MiB.
        """
        self._flush()
        while not self.closed:
            try:
                data = self._sock.recv(65536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
            self._in += data
        if not self._nonce and len(self._in) >= _NONCE:
            self._nonce = bytes(self._in[:_NONCE])
            del self._in[:_NONCE]
            self._flush()
        return list(self._messages()) if self._nonce else []

    def close(self) -> None:
        self.closed = True
        self._sock.close()

    def _messages(self) -> list[Message]:
        messages = []
        while len(self._in) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in)
            if length > _LONGEST:
                raise ProtocolError(f"a message of {length} bytes: this is not an hpcrun agent")
            end = _LENGTH.size + _MAC + length
            if len(self._in) < end:
                break
            mac = bytes(self._in[_LENGTH.size : _LENGTH.size + _MAC])
            body = bytes(self._in[_LENGTH.size + _MAC : end])
            if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, body)):
                raise ProtocolError("a message with a wrong signature: another run's agent, or a stranger")
            self._received += 1
            del self._in[:end]
            messages.append(json.loads(body))
        return messages

    def _mac(self, direction: bytes, count: int, body: bytes) -> bytes:
        covered = self._nonce + direction + count.to_bytes(8, "big") + body
        return hmac.digest(self._token, covered, hashlib.sha256)

    def _flush(self) -> None:
        if self._nonce:
            for body in self._waiting:
                self._out += _LENGTH.pack(len(body)) + self._mac(self._ours, self._sent, body) + body
                self._sent += 1
            self._waiting.clear()
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while self._out and not self.closed:
                try:
                    del self._out[: self._sock.send(self._out)]
                except BlockingIOError:
                    raise
                except OSError:
                    self.closed = True
