"""The mesh: the one owner of all process groups.

Every rank makes every group, in the same order, because ``new_group`` is collective.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from hpcrun.layout import Coordinates, Layout
from hpcrun.recipe import Recipe

Key = Callable[[Coordinates], tuple[int, ...]]


class Mesh:
    """This rank's place in the layout, and the groups it takes part in; None for a group of one.

    Attributes:
        at: this rank's coordinates.
        tp: ranks that split a layer's matrices.
        kv: ranks of ``tp`` that hold copies of the same key heads, where tp exceeds the key heads.
        cp: ranks that split the sequence.
        pp: one rank of each pipeline stage, in their order.
        tied: the first and the last pipeline rank, which share tied embeddings.
        data: all ranks with the same dense weights (dp x cp, cp fastest).
        shard, replicas: ``data`` as a grid: ranks that share one copy of what ZeRO shards, and
            those that hold the same shard.
        ep: ranks of ``data`` that split the experts.
        expert_data, expert_shard, expert_replicas: the same for an expert's weights.
    """

    def __init__(
        self, layout: Layout, rank: int, device: torch.device, timeout: timedelta, recipe: Recipe
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.device = device
        self.at = layout.coordinates(rank)
        self._timeout = timeout
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        data, ep = layout.data, layout.ep
        zero = recipe.parallel.zero_group or data
        expert_zero = max(1, zero // ep)
        self.kv_copies = max(1, layout.tp // recipe.model.kv)

        def index(at: Coordinates) -> int:
            return layout.data_index(at)

        self.tp = self._group(lambda at: (at.cp, at.dp, at.pp))
        self.kv = self._group(lambda at: (at.cp, at.dp, at.pp, at.tp // self.kv_copies))
        self.cp = self._group(lambda at: (at.tp, at.dp, at.pp))
        self.pp = self._group(lambda at: (at.tp, at.cp, at.dp))
        self.tied = self._group(lambda at: (at.tp, at.cp, at.dp), lambda at: at.pp in (0, layout.pp - 1))
        self.data = self._group(lambda at: (at.tp, at.pp))
        self.shard = self._group(lambda at: (at.tp, at.pp, index(at) // zero))
        self.replicas = self._group(lambda at: (at.tp, at.pp, index(at) % zero))
        self.ep = self._group(lambda at: (at.tp, at.pp, index(at) // ep))
        self.expert_data = self._group(lambda at: (at.tp, at.pp, index(at) % ep))
        self.expert_shard = self._group(
            lambda at: (at.tp, at.pp, index(at) % ep, index(at) // ep // expert_zero)
        )
        self.expert_replicas = self._group(
            lambda at: (at.tp, at.pp, index(at) % ep, index(at) // ep % expert_zero)
        )
        self._links = {
            (source, target): self._directed(source, target)
            for step in (1, -1)
            for source in range(layout.pp)
            if layout.pp > 1 and (target := (source + step) % layout.pp) != source
        }

    def stage_rank(self, pp: int) -> int:
        """The global rank of pipeline rank ``pp`` with this rank's other coordinates."""
        return self.layout.rank(replace(self.at, pp=pp))

    def link(self, source: int, target: int) -> dist.ProcessGroup | None:
        """The group that carries activations from pipeline rank ``source`` to ``target``."""
        return self._links[source, target]

    def host_group(self) -> dist.ProcessGroup | None:
        """A new group of all ranks for tensors on the host. Collective."""
        return dist.new_group(backend="gloo", timeout=self._timeout) if self.layout.world > 1 else None

    def __str__(self) -> str:
        at = self.at
        return f"rank {self.rank} = pp{at.pp} dp{at.dp} cp{at.cp} tp{at.tp} on node {socket.gethostname()}"

    def _directed(self, source: int, target: int) -> dist.ProcessGroup | None:
        """NCCL runs a group's operations one after the other: each direction needs its own."""
        if self.device.type != "cuda":
            return self.pp
        return self._group(
            lambda at: (at.tp, at.cp, at.dp), lambda at: at.pp in (source, target), shared=False
        )

    def _group(
        self, key: Key, member: Callable[[Coordinates], bool] = lambda at: True, shared: bool = True
    ) -> dist.ProcessGroup | None:
        """The group of all ranks with this rank's ``key``; None when it has one member.

        Groups of the same ranks are one, unless they are not to be ``shared``.
        """
        ranks_by_key: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.layout.world):
            at = self.layout.coordinates(rank)
            if member(at):
                ranks_by_key.setdefault(key(at), []).append(rank)
        mine = None
        for ranks in ranks_by_key.values():
            if len(ranks) > 1:
                group = self._made.get(tuple(ranks)) if shared else None
                if group is None:
                    group = self._new_group(ranks)
                    self._made[tuple(ranks)] = group
                if self.rank in ranks:
                    mine = group
        return mine

    def _new_group(self, ranks: list[int]) -> dist.ProcessGroup | None:
        return dist.new_group(ranks, timeout=self._timeout)


def size_of(group: dist.ProcessGroup | None) -> int:
    """Ranks in ``group``; None stands for one."""
    return 1 if group is None else group.size()


def index_in(group: dist.ProcessGroup | None) -> int:
    """This rank's place in ``group``."""
    return 0 if group is None else group.rank()
