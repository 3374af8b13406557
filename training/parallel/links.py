"""Activations and their gradients between pipeline ranks.

Both ends of a link know the sender's list of actions, so the receiver asks in the order of sending:
NCCL has no tags. A receive is posted before it is needed, so that it overlaps with computing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpcrun.schedule import Action, Kind
from training.monitor.stopwatch import watch
from training.parallel.mesh import Mesh

_AHEAD = 2
"""Receives posted beyond the one that is waited for."""


@dataclass(frozen=True)
class Message:
    """The input of ``stage`` (forward), or the gradient of its output, for one micro-batch."""

    forward: bool
    stage: int
    micro_batch: int


def messages(actions: Sequence[Action], rank_of: Sequence[int]) -> list[tuple[int, Message]]:
    """What a rank sends, in order, and to which pipeline rank. ``rank_of`` tells each stage's rank."""
    found = []
    for action in actions:
        if action.kind is Kind.WEIGHT:
            continue
        forward = action.kind is Kind.FORWARD
        stage = action.stage + (1 if forward else -1)
        if 0 <= stage < len(rank_of) and rank_of[stage] != rank_of[action.stage]:
            found.append((rank_of[stage], Message(forward, stage, action.micro_batch)))
    return found


class _Inbox:
    """What one other rank sends here in one step."""

    def __init__(self, group: dist.ProcessGroup | None, source: int, expected: list[Message]) -> None:
        self._group, self._source = group, source
        self._expected = deque(enumerate(expected))
        self._posted: deque[tuple[Message, torch.Tensor, dist.Work]] = deque()
        self._arrived: dict[Message, torch.Tensor] = {}

    def take(self, message: Message, like: torch.Tensor) -> torch.Tensor:
        while message not in self._arrived:
            self._post(like)
            found, tensor, work = self._posted.popleft()
            with watch("communication"):
                work.wait()
            self._arrived[found] = tensor
        self._post(like)
        return self._arrived.pop(message)

    def _post(self, like: torch.Tensor) -> None:
        while self._expected and len(self._posted) <= _AHEAD:
            number, message = self._expected.popleft()
            tensor = torch.empty_like(like)
            work = dist.irecv(tensor, self._source, group=self._group, tag=number)
            assert work is not None
            self._posted.append((message, tensor, work))


class Links:
    """All messages of one rank in one step.

    ``like`` is a tensor of the shape and type that every message has.
    """

    def __init__(
        self, mesh: Mesh, lists: Sequence[Sequence[Action]], rank_of: Sequence[int], like: torch.Tensor
    ) -> None:
        self._mesh, self._like, self._rank_of = mesh, like, rank_of
        me = mesh.at.pp
        self._at_once = mesh.pp is not None and dist.get_backend(mesh.pp) == "fake"
        self._inboxes = {}
        for source, actions in enumerate(lists):
            expected = [message for target, message in messages(actions, rank_of) if target == me]
            if expected:
                self._inboxes[source] = _Inbox(mesh.link(source, me), mesh.stage_rank(source), expected)
        self._local: dict[Message, torch.Tensor] = {}
        self._sent: dict[int, int] = {}
        self._sending: deque[tuple[torch.Tensor, dist.Work]] = deque()

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Without waiting; a stage on this rank finds it here."""
        target = self._rank_of[message.stage]
        if target == self._mesh.at.pp:
            self._local[message] = tensor
            return
        number = self._sent.get(target, 0)
        self._sent[target] = number + 1
        tensor = tensor.contiguous()
        group = self._mesh.link(self._mesh.at.pp, target)
        work = dist.isend(tensor, self._mesh.stage_rank(target), group=group, tag=number)
        assert work is not None
        self._sending.append((tensor, work))
        while self._sending and (self._at_once or self._sending[0][1].is_completed()):
            self._sending.popleft()

    def take(self, message: Message) -> torch.Tensor:
        """Wait for ``message``."""
        if message in self._local:
            return self._local.pop(message)
        neighbour = message.stage + (-1 if message.forward else 1)
        return self._inboxes[self._rank_of[neighbour]].take(message, self._like)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        with watch("communication"):
            for _, work in self._sending:
                work.wait()
        self._sending.clear()
