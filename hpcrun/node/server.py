"""The coordinator's sockets: accepts agents, checks who they are, passes messages on."""

from __future__ import annotations

import socket

from hpcrun.errors import UserError
from hpcrun.node.coordinator import Coordinator, Member
from hpcrun.node.protocol import VERSION, Channel, Message, ProtocolError


def listen(address: str, ports: list[int]) -> socket.socket:
    """A listening socket on the first free port of ``ports``.

    Raises:
        UserError: all are taken.
    """
    for port in ports:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
        except OSError:
            sock.close()
            continue
        sock.listen(1024)
        sock.setblocking(False)
        return sock
    raise UserError(f"none of the ports {ports} is free on the first node; something else holds all of them")


class Server:
    """Moves messages between the agents' connections and the coordinator."""

    def __init__(self, sock: socket.socket, run: str, token: bytes, coordinator: Coordinator) -> None:
        self._sock = sock
        self._run = run
        self._token = token
        self._coordinator = coordinator
        self._channels: list[Channel] = []

    def poll(self) -> None:
        """Accept what is waiting and handle every message that has arrived."""
        self._accept()
        for channel in self._channels:
            try:
                for message in channel.poll():
                    self._handle(channel, message)
            except (ProtocolError, ValueError, KeyError, TypeError):
                channel.close()
        self._channels = [channel for channel in self._channels if not channel.closed]
        self._coordinator.tick()

    @property
    def connections(self) -> int:
        return len(self._channels)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            self._channels.append(Channel(sock, self._token, accepted=True))

    def _handle(self, channel: Channel, message: Message) -> None:
        kind = message["type"]
        if kind == "hello":
            self._hello(channel, message)
        elif kind == "heartbeat":
            self._coordinator.heartbeat(message["node"], message["incarnation"], message["sent"], channel)
        elif kind == "exited":
            self._coordinator.rank_exited(
                message["attempt"], message["rank"], message["code"], message["signal"], message["host"]
            )
        elif kind == "stopped":
            self._coordinator.stopped(message["node"], message["attempt"], message["port"])
        elif kind == "save":
            self._coordinator.save_and_stop(message["reason"])

    def _hello(self, channel: Channel, message: Message) -> None:
        if (message["version"], message["run"]) != (VERSION, self._run):
            raise ProtocolError(f"version {message['version']} of run {message['run']}")
        member = Member(
            node=message["node"],
            host=message["host"],
            incarnation=message["incarnation"],
            address=channel.peer_address,
            coordinator_address=channel.own_address,
            port=message["port"],
            link=channel,
            heard=self._coordinator.now(),
        )
        self._coordinator.hello(member)
