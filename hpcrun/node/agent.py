"""The agent: one per node, from the start of the job to its end.

It keeps a connection to the coordinator, starts and kills this node's ranks on
its word, and kills them without it when the lease runs out. One loop, no locks;
only the lease has a thread of its own.
"""

from __future__ import annotations

import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address

from hpcrun.errors import UserError
from hpcrun.node.environment import rank_environment
from hpcrun.node.journal import RunJournal
from hpcrun.node.lease import Lease
from hpcrun.node.placement import Placement
from hpcrun.node.protocol import VERSION, Channel, Message, ProtocolError
from hpcrun.node.ranks import Launcher, RankExit, RankSpec
from hpcrun.node.server import Server
from hpcrun.records import EXIT_REQUEUE, RunDir
from hpcrun.runs.runfile import RunFile

_TICK = 0.1
_CONNECT_TIMEOUT = 2.0
_CONNECT_PAUSE = 1.0
_FLUSH_TIMEOUT = 2.0


@dataclass
class Notices:
    """Signals that have arrived; the handlers only set these."""

    save_reason: str | None = None

    def install(self) -> None:
        signal.signal(signal.SIGUSR2, lambda *_: self._note("the time limit is near (SIGUSR2)"))
        signal.signal(signal.SIGTERM, lambda *_: self._note("the scheduler ends the job (SIGTERM)"))

    def _note(self, reason: str) -> None:
        self.save_reason = self.save_reason or reason


@dataclass
class _Work:
    """The ranks of one attempt on this node."""

    attempt: int
    live: set[int] = field(default_factory=set)
    stopping: bool = False
    stop_reported: bool = False


@dataclass(frozen=True)
class Duty:
    """What an agent has to do, and where."""

    run: RunDir
    file: RunFile
    place: Placement
    token: bytes
    environment: dict[str, str]
    """Of every rank, before its place is added."""
    lead_begins: float | None
    """Wall-clock time at which the run must save because the limit is near."""


class Agent:
    """Runs until the coordinator says how the job ends, or is silent for too long."""

    def __init__(
        self,
        duty: Duty,
        launcher: Launcher,
        journal: RunJournal,
        notices: Notices,
        server: Server | None,
        give_back: Callable[[bool], bool],
    ) -> None:
        self._run, self._file, self._place = duty.run, duty.file, duty.place
        self._token = duty.token
        self._environment = duty.environment
        self._lead_begins = duty.lead_begins
        self._launcher = launcher
        self._journal = journal
        self._notices = notices
        self._server = server
        self._give_back = give_back
        self._timeout = self._file.recipe.recovery.node_timeout
        self._lease = Lease(self._timeout / 2, launcher.kill)
        self._channel: Channel | None = None
        self._incarnation = ""
        self._joined = False
        self._heard = self._answered = time.monotonic()
        self._next_beat = 0.0
        self._next_connect = 0.0
        self._work: _Work | None = None
        self._code: int | None = None

    def run(self) -> int:
        """Returns the exit code of the job as this agent knows it."""
        while self._code is None:
            if self._server:
                self._server.poll()
            self._notice_time_limit()
            self._receive()
            self._connect()
            self._beat()
            self._watch_ranks()
            time.sleep(_TICK)
        self._launcher.close()
        if self._channel:
            self._channel.close()
        if self._server:
            self._flush(self._server)
        return self._code

    def _notice_time_limit(self) -> None:
        """The lead may have begun before this process could hear a signal."""
        if self._lead_begins is not None and time.time() > self._lead_begins:
            self._notices.save_reason = self._notices.save_reason or "the time limit is near"
            self._lead_begins = None

    # Talking to the coordinator

    def _connect(self) -> None:
        """Each connection is an incarnation: whoever comes back comes without ranks, as a spare."""
        if self._lease.expired:
            self._disconnect(f"lease lost: the coordinator was silent for {self._silence:.1f} s")
        elif self._channel and self._channel.closed:
            self._disconnect("the connection to the coordinator broke")
        now = time.monotonic()
        if self._channel and self._silence > self._timeout:
            self._disconnect(f"the coordinator was silent for {self._silence:.1f} s")
        if self._channel or self._launcher.busy or now < self._next_connect:
            return
        self._next_connect = now + _CONNECT_PAUSE
        sock, refused = _dial(self._coordinator_address(), self._place.coordinator_ports())
        if sock:
            self._incarnation = secrets.token_hex(4)
            self._answered = self._heard = now
            self._channel = Channel(sock, self._token, accepted=False)
            self._channel.send(self._hello())
        elif self._joined and self._silence > self._timeout:
            self._without_coordinator(refused)
        elif not self._joined and self._silence > self._file.recipe.recovery.start_timeout:
            raise UserError(
                f"{self._place.host}: no coordinator on {self._place.nodes[0]} after {self._silence:.0f} s"
            )

    def _without_coordinator(self, refused: bool) -> None:
        """Its node is gone, or only its process, or it is this node that is cut off."""
        if self._give_back(refused):
            self._code = EXIT_REQUEUE

    def _disconnect(self, reason: str) -> None:
        self._launcher.kill()
        self._journal.event("disconnected", reason=reason)
        self._work = None
        self._lease.reset()
        if self._channel:
            self._channel.close()
            self._channel = None

    @property
    def _silence(self) -> float:
        return time.monotonic() - self._heard

    def _coordinator_address(self) -> str:
        name = self._place.nodes[0]
        if self._place.slurm:
            name += self._file.site.rendezvous.suffix
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            raise UserError(
                f"{self._place.host}: cannot resolve {name}, the first node of the job: {error}; "
                "see rendezvous.suffix in the site file"
            ) from error
        if self._place.index and ip_address(address).is_loopback:
            raise UserError(
                f"{self._place.host}: {name}, the first node of the job, resolves to {address} here; "
                "mend /etc/hosts or set rendezvous.suffix in the site file"
            )
        return address

    def _hello(self) -> Message:
        return {
            "type": "hello",
            "version": VERSION,
            "run": self._file.run,
            "node": self._place.index,
            "host": self._place.host,
            "incarnation": self._incarnation,
            "port": _free_port(),
        }

    def _send(self, kind: str, **fields: object) -> None:
        if self._channel and not self._channel.closed:
            self._channel.send({"type": kind, "node": self._place.index} | fields)

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + min(1.0, self._timeout / 10)
        self._send("heartbeat", incarnation=self._incarnation, sent=now)
        if self._notices.save_reason:
            self._send("save", reason=f"{self._place.host}: {self._notices.save_reason}")

    def _receive(self) -> None:
        if self._channel is None:
            return
        try:
            messages = self._channel.poll()
        except ProtocolError as error:
            self._journal.event("protocol_error", reason=str(error))
            self._channel.close()
            return
        for message in messages:
            self._handle(message)

    def _handle(self, message: Message) -> None:
        kind = message["type"]
        if kind == "beat":
            self._heard = time.monotonic()
            self._joined = True
            self._answered = message["sent"]
            if self._work:
                self._lease.renew(self._answered)
        elif kind == "start":
            self._start(message)
        elif kind == "stop" and self._work and message["attempt"] == self._work.attempt:
            self._stop_ranks()
        elif kind == "save" and self._work and message["attempt"] == self._work.attempt:
            self._launcher.send_signal(signal.SIGUSR2)
        elif kind == "rejoin":
            self._disconnect("the coordinator has given this node up")
        elif kind == "finish":
            self._code = message["code"]

    # This node's ranks

    def _start(self, order: Message) -> None:
        self._journal.enter(order["attempt"])
        first = order["first_rank"]
        ranks = range(first, first + order["ranks"])
        self._run.logs(order["attempt"]).mkdir(parents=True, exist_ok=True)
        self._work = _Work(order["attempt"], set(ranks))
        self._lease.renew(self._answered)
        specs = [
            RankSpec(
                rank=rank,
                env=self._environment | rank_environment(self._run, order, rank, rank - first),
                log=self._run.rank_log(order["attempt"], rank),
                cwd=self._file.working_dir,
            )
            for rank in ranks
        ]
        self._launcher.start(specs)
        self._journal.event("ranks_started", first_rank=first, ranks=len(specs))

    def _stop_ranks(self) -> None:
        assert self._work is not None
        self._work.stopping = True
        self._launcher.kill()

    def _watch_ranks(self) -> None:
        for ended in self._launcher.poll():
            if self._work and ended.rank in self._work.live:
                self._work.live.discard(ended.rank)
                if not self._work.stopping:
                    self._report(ended)
        work = self._work
        if work and work.stopping and not work.live and not work.stop_reported:
            work.stop_reported = True
            self._send("stopped", attempt=work.attempt, port=_free_port())

    def _report(self, ended: RankExit) -> None:
        assert self._work is not None
        self._journal.event("rank_exited", rank=ended.rank, code=ended.code, signal=ended.signal)
        self._send(
            "exited",
            attempt=self._work.attempt,
            rank=ended.rank,
            code=ended.code,
            signal=ended.signal,
            host=self._place.host,
        )

    def _flush(self, server: Server) -> None:
        """Let the other agents hear how it ends; each closes its connection then."""
        deadline = time.monotonic() + _FLUSH_TIMEOUT
        while server.connections and time.monotonic() < deadline:
            server.poll()
            time.sleep(_TICK)


def _dial(address: str, ports: list[int]) -> tuple[socket.socket | None, bool]:
    """A connection to the first port that answers, or (None, whether the host refused them all)."""
    for port in ports:
        try:
            return socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT), False
        except ConnectionRefusedError:
            continue
        except OSError:
            return None, False
    return None, True


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])
