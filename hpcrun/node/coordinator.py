"""Who trains, and what happens when someone is lost: the decisions, without sockets.

The coordinator runs in the first node's agent. It gathers the agents, claims a
numbered attempt, hands out rank blocks, and walks the recovery ladder: restart
all ranks, replace a lost node by a spare, or give the job back to Slurm.
"""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Protocol

from hpcrun.node.protocol import Message
from hpcrun.records import EXIT_DONE, EXIT_REQUEUE, EXIT_STOP

_EXIT_GRACE = 60.0
_SPARE_GRACE = 10.0
_BLAME_GRACE = 1.0
"""A killed rank takes its peers down by errors of their own, which may be reported first."""
_LOOK_AROUND = 5.0
"""Seconds between looks into the run directory."""
_SAVE_REMINDER = 2.0
"""A rank that has not installed its handler yet ignores the signal, so it is sent again."""


class Link(Protocol):
    """A way to one agent."""

    closed: bool

    def send(self, message: Message) -> None: ...


class Journal(Protocol):
    """Where facts and claims go."""

    def event(self, event: str, **fields: Any) -> None: ...

    def claim(self, **facts: Any) -> tuple[int, str] | None:
        """(attempt, claim) of the next attempt, or None when another job holds the run."""

    def superseded(self) -> bool:
        """Whether another job has claimed a later attempt."""

    def stop_wanted(self) -> bool:
        """Whether the user has asked for the run to stop (control/STOP)."""


@dataclass
class Member:
    """One agent as the coordinator sees it."""

    node: int
    host: str
    incarnation: str
    address: str
    """As the coordinator sees it."""
    coordinator_address: str
    """The coordinator's, as this agent sees it."""
    port: int
    """Free on this node when it last said so."""
    link: Link
    heard: float
    stopped: bool = True


@dataclass(frozen=True)
class Policy:
    """What the run allows."""

    nodes: int
    spares: int
    ranks_per_node: int
    node_timeout: float
    start_timeout: float
    max_restarts: int
    may_requeue: bool


class Phase(enum.Enum):
    GATHERING = "gathering"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


@dataclass(frozen=True)
class _Failure:
    """A rank that ended by an exit code of its own."""

    rank: int
    host: str
    status: int
    at: float


@dataclass
class _Attempt:
    number: int
    claim: str
    blocks: dict[int, int]
    """Node index -> first rank."""
    exits: dict[int, int] = field(default_factory=dict)
    """Rank -> exit code, 128 + n for signal n."""
    first_exit: float | None = None
    failure: _Failure | None = None


class Coordinator:
    """The state of one allocation. Feed it messages and time; it answers through links."""

    def __init__(self, policy: Policy, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._journal = journal
        self._clock = clock
        self._began = clock()
        self._members: dict[int, Member] = {}
        self._lost: set[int] = set()
        self.unheard: set[str] = set()
        """Hosts that were lost though their connections never closed: cut off, or a frozen agent."""
        self._attempt: _Attempt | None = None
        self._blocks: dict[int, int] = {}
        self._restarts = 0
        self._why = "first start"
        self._save_reason: str | None = None
        self._save_told = -_SAVE_REMINDER
        self._looked = self._began
        self.phase = Phase.GATHERING
        self.code: int | None = None

    def now(self) -> float:
        return self._clock()

    # What agents say

    def hello(self, member: Member) -> None:
        """An agent has connected, for the first time or again after it was lost."""
        known = self._members.get(member.node)
        if known and known.incarnation == member.incarnation:
            known.link, known.heard = member.link, self._clock()
            return
        if known:
            self._lose(known, "its agent started again")
        self._lost.discard(member.node)
        self.unheard.discard(member.host)
        self._members[member.node] = member
        self._journal.event("node_joined", node=member.host, address=member.address)
        if self.phase is Phase.FINISHED:
            member.link.send({"type": "finish", "code": self.code})

    def heartbeat(self, node: int, incarnation: str, sent: float, link: Link) -> None:
        member = self._members.get(node)
        if member and member.incarnation == incarnation:
            member.heard = self._clock()
            link.send({"type": "beat", "sent": sent})
        else:
            link.send({"type": "rejoin"})

    def rank_exited(self, attempt: int, rank: int, code: int | None, signum: int | None, host: str) -> None:
        current = self._attempt
        if current is None or attempt != current.number or self.phase is not Phase.RUNNING:
            return
        status = code if code is not None else 128 + (signum or 0)
        current.exits[rank] = status
        current.first_exit = current.first_exit or self._clock()
        if status in (EXIT_DONE, EXIT_REQUEUE):
            if len(current.exits) == self._world and current.failure is None:
                self._all_exited(current)
        elif signum or status == EXIT_STOP:
            self._rank_failed(rank, host, status, signum)
        elif current.failure is None:
            current.failure = _Failure(rank, host, status, self._clock())

    def stopped(self, node: int, attempt: int, port: int) -> None:
        """All ranks of this agent are gone."""
        member = self._members.get(node)
        if member and self._attempt and attempt == self._attempt.number:
            member.stopped, member.port = True, port

    def save_and_stop(self, reason: str) -> None:
        """A time limit or preemption is near: save at the next step, then requeue."""
        if self._save_reason or self.phase is Phase.FINISHED:
            return
        self._save_reason = reason
        self._journal.event("save_requested", reason=reason)
        if self.phase is not Phase.RUNNING:
            self._finish(EXIT_REQUEUE, reason)

    # What time brings

    def tick(self) -> None:
        """Look at the clock: lost nodes, a complete gathering, ranks that never end."""
        for member in list(self._members.values()):
            silent = self._clock() - member.heard
            if silent > self._policy.node_timeout and self.phase is not Phase.FINISHED:
                self._lose(member, f"silent for {silent:.1f} s")
        if self.phase is Phase.GATHERING:
            self._gather()
        elif self.phase is Phase.RUNNING:
            self._watch()
        elif self.phase is Phase.STOPPING and all(m.stopped for m in self._members.values()):
            self._begin()

    @property
    def _world(self) -> int:
        return self._policy.nodes * self._policy.ranks_per_node

    def _gather(self) -> None:
        waited = self._clock() - self._began
        present = len(self._members)
        wanted = self._policy.nodes + self._policy.spares
        if present == wanted or (present >= self._policy.nodes and waited > _SPARE_GRACE):
            self._begin()
        elif waited > self._policy.start_timeout:
            self._finish(EXIT_REQUEUE, f"{present} of {wanted} agents reported in {waited:.0f} s")

    def _watch(self) -> None:
        assert self._attempt is not None
        if self._clock() - self._looked > _LOOK_AROUND:
            self._looked = self._clock()
            if self._journal.superseded():
                self._finish(EXIT_DONE, "another job has taken this run over")
                return
            if self._journal.stop_wanted():
                self.save_and_stop("control/STOP is there")
        if self._save_reason and self._clock() - self._save_told > _SAVE_REMINDER:
            self._save_told = self._clock()
            self._tell_members({"type": "save", "attempt": self._attempt.number})
        failure = self._attempt.failure
        if failure and self._clock() - failure.at > _BLAME_GRACE:
            self._rank_failed(failure.rank, failure.host, failure.status, None)
            return
        first = self._attempt.first_exit
        if first is not None and self._clock() - first > _EXIT_GRACE:
            left = sorted(set(range(self._world)) - set(self._attempt.exits))
            self._restart(f"ranks {left} did not end within {_EXIT_GRACE:.0f} s of the first")

    def _begin(self) -> None:
        """Claim the next attempt and start its ranks on the nodes that are there."""
        blocks = self._assign_blocks()
        if blocks is None:
            self._finish(EXIT_REQUEUE, f"{len(self._members)} nodes left, {self._policy.nodes} needed")
            return
        hosts = [self._members[node].host for node in sorted(blocks, key=blocks.__getitem__)]
        claimed = self._journal.claim(nodes=hosts, world=self._world, reason=self._why)
        if claimed is None:
            self._finish(EXIT_DONE, "another job holds this run")
            return
        number, claim = claimed
        self._attempt = _Attempt(number, claim, blocks)
        self._blocks = blocks
        first = self._members[min(blocks, key=blocks.__getitem__)]
        self._journal.event("attempt_started", nodes=hosts, world=self._world, reason=self._why)
        for node, first_rank in blocks.items():
            member = self._members[node]
            member.stopped = False
            member.link.send(
                {
                    "type": "start",
                    "attempt": number,
                    "claim": claim,
                    "first_rank": first_rank,
                    "ranks": self._policy.ranks_per_node,
                    "world": self._world,
                    "master_addr": self._reachable_address(first),
                    "master_port": first.port,
                }
            )
        self.phase = Phase.RUNNING

    def _reachable_address(self, member: Member) -> str:
        """Its own agent may reach the coordinator by loopback; the others know better."""
        if ip_address(member.address).is_loopback:
            for other in self._members.values():
                if not ip_address(other.coordinator_address).is_loopback:
                    return other.coordinator_address
        return member.address

    def _assign_blocks(self) -> dict[int, int] | None:
        """Rank blocks by node: survivors keep theirs, spares take those of lost nodes."""
        kept = {node: block for node, block in self._blocks.items() if node in self._members}
        free = sorted(node for node in self._members if node not in kept)
        size = self._policy.ranks_per_node
        missing = sorted(set(range(0, self._world, size)) - set(kept.values()))
        if len(free) < len(missing):
            return None
        return kept | dict(zip(free, missing, strict=False))

    # What goes wrong

    def _rank_failed(self, rank: int, host: str, status: int, signum: int | None) -> None:
        how = f"signal {signum}" if signum else f"exit code {status}"
        reason = f"rank {rank} on {host} ended by {how}"
        if status == EXIT_STOP:
            self._finish(EXIT_DONE if self._journal.superseded() else EXIT_STOP, reason)
        elif self._save_reason or signum == signal.SIGTERM:
            # Slurm's own SIGTERM goes to every process of the job, the agents' may come later.
            self._finish(EXIT_REQUEUE, reason)
        elif self._restarts >= self._policy.max_restarts:
            self._finish(status, f"{reason}; {self._restarts} restarts were allowed and used")
        else:
            self._restart(reason)

    def _restart(self, reason: str) -> None:
        assert self._attempt is not None
        self._restarts += 1
        self._why = reason
        self._journal.event("restarting", reason=reason, restart=self._restarts)
        self.phase = Phase.STOPPING
        self._tell_members({"type": "stop", "attempt": self._attempt.number})

    def _lose(self, member: Member, why: str) -> None:
        del self._members[member.node]
        self._lost.add(member.node)
        if not member.link.closed:
            self.unheard.add(member.host)
        self._journal.event("node_lost", node=member.host, reason=why)
        known = len(self._members) + len(self._lost)
        if self.phase in (Phase.GATHERING, Phase.FINISHED):
            return
        if 2 * len(self._lost) >= known and known > 1:
            self._finish(
                EXIT_REQUEUE,
                f"lost {member.host}: {len(self._lost)} of {known} nodes gone, or this one is cut off",
            )
        elif member.node in self._blocks and self.phase is Phase.RUNNING:
            self._restart(f"lost {member.host}: {why}")

    def _all_exited(self, attempt: _Attempt) -> None:
        if all(status == EXIT_DONE for status in attempt.exits.values()):
            self._finish(EXIT_DONE, "all ranks finished")
        elif all(status == EXIT_REQUEUE for status in attempt.exits.values()):
            self._finish(EXIT_REQUEUE, self._save_reason or "the ranks asked for it")
        else:
            self._restart("some ranks finished and others saved and stopped")

    def _finish(self, code: int, reason: str) -> None:
        if code == EXIT_REQUEUE and self._journal.stop_wanted():
            code, reason = EXIT_STOP, f"{reason}; control/STOP is there"
        elif code == EXIT_REQUEUE and not self._policy.may_requeue:
            code, reason = EXIT_STOP, f"{reason}; no requeue is left or allowed"
        self.code = code
        self.phase = Phase.FINISHED
        self._journal.event("finished", code=code, reason=reason)
        self._tell_members({"type": "finish", "code": code})

    def _tell_members(self, message: Message) -> None:
        for member in self._members.values():
            member.link.send(message)
