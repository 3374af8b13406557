"""The mesh: the one owner of all process groups.

Every rank makes every group, in the same order, because ``new_group`` is collective.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from hpcrun.layout import Coordinates, Layout

Key = Callable[[Coordinates], tuple[int, ...]]


class Mesh:
    """This rank's place in the layout, and the groups it takes part in.

    Attributes:
        at: this rank's coordinates.
        tp, dp, pp: peers along one dimension.
        replica: all ranks that hold one copy of the model together (same cp and dp).
        tied: the first and last stage, which share tied embeddings; None in between.
    """

    def __init__(self, layout: Layout, rank: int, device: torch.device, timeout: timedelta) -> None:
        self.layout = layout
        self.rank = rank
        self.device = device
        self.at = layout.coordinates(rank)
        self._timeout = timeout
        self.tp = self._group(lambda at: (at.cp, at.dp, at.pp))
        self.dp = self._group(lambda at: (at.tp, at.cp, at.pp))
        self.pp = self._group(lambda at: (at.tp, at.cp, at.dp))
        self.replica = self._group(lambda at: (at.cp, at.dp))
        self.tied = self._group(lambda at: (at.tp, at.cp, at.dp), lambda at: at.pp in (0, layout.pp - 1))

    @property
    def first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.at.pp == self.layout.pp - 1

    def _group(
        self, key: Key, member: Callable[[Coordinates], bool] = lambda at: True
    ) -> dist.ProcessGroup | None:
        """The group of all ranks with this rank's ``key``; None when it has one member."""
        ranks_by_key: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.layout.world):
            at = self.layout.coordinates(rank)
            if member(at):
                ranks_by_key.setdefault(key(at), []).append(rank)
        mine = None
        for ranks in ranks_by_key.values():
            if len(ranks) > 1:
                group = dist.new_group(ranks, timeout=self._timeout)
                if self.rank in ranks:
                    mine = group
        return mine


def all_reduce_(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Reduce in place over ``group``; a group of one leaves the tensor as it is."""
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor
