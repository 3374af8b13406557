"""What a rank allocates and sends, operation by operation, without a device to measure on."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from training._torch import TorchDispatchMode, tree_leaves

NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
}


@dataclass
class Traffic:
    """Collectives of one kind in one group."""

    count: int = 0
    bytes: int = 0
    """Of the larger of what goes in and what comes out, on this rank."""


class Accounting(TorchDispatchMode):
    """Counts the bytes of living tensors and of collectives while it is entered.

    Attributes:
        bytes: of all storages that were made inside and are alive.
        peak: the most that ``bytes`` has been.
        traffic: by (group name, operation).
    """

    def __init__(self, name_of: Callable[[dist.ProcessGroup], str]) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)
        self._name_of = name_of
        self._alive: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._send(func, args)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._track(leaf.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.finalize(storage, self._free, key, size)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def _free(self, key: int, size: int) -> None:
        self.bytes -= size
        del self._alive[key]

    def _send(self, func: Any, args: Any) -> None:
        operation = NAMES.get(func._schema.name.removeprefix("c10d::"))
        if operation is None:
            return
        group = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg))
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        traffic = self.traffic[self._name_of(dist.ProcessGroup.unbox(group)), operation]
        traffic.count += 1
        traffic.bytes += max(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())
