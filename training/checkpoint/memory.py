"""Every rank's state in the memory of its node and of the next one: restored in seconds, without a disk.

A generation is one step's state of all ranks. Each rank writes its own in a file under the folder that
the agent keeps in ``/dev/shm``, and there is a copy of it on the next node, sent by the process group. Two
generations lie there: one is overwritten only when all ranks have the other, own and copy, verified.
After a failure all ranks agree on the newest generation of which every rank's state is somewhere.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from hpcrun.manifest import superseder
from hpcrun.recipe import Recipe
from hpcrun.records import RunDir, replace_text, resumed_steps
from training.checkpoint.local import LocalTensor
from training.checkpoint.staging import pack, packed_bytes, placed
from training.launch import Launch
from training.monitor.memory import free_host_memory
from training.parallel.exchange import broadcast_json, gather_json, rank_of_job, ranks_in_job
from training.parallel.mesh import Mesh

_SLOTS = (0, 1)
_HEADER_BYTES = 32 << 10
_CHUNK = 256 << 20
"""Bytes of one message between nodes."""


@dataclass(frozen=True)
class Header:
    """What a file in memory holds. It is written when the file's bytes are whole."""

    owner: int
    step: int
    attempt: int
    layout: dict[str, int]
    names: str
    """Hash of names, boxes and dtypes of the owner's tensors, in order."""
    bytes: int
    hash: str
    """xxh3-64 (hex) of them all."""
    state: dict[str, Any]


@dataclass(frozen=True)
class FromMemory:
    """What was restored."""

    step: int
    layout: dict[str, int]
    state: dict[str, Any]


class MemoryTier:
    """The copies of one rank's state. Methods are collective unless they say otherwise.

    Args:
        folder: on this node, shared by its ranks.
        local_ranks: ranks of a node; rank r lives on node r // local_ranks.
        group: of all ranks, for tensors on the host; used by one thread beside the training.
    """

    def __init__(
        self,
        folder: Path,
        local_ranks: int,
        attempt: int,
        layout: dict[str, int],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._folder, self._local_ranks = folder, local_ranks
        self._attempt, self._layout, self._group = attempt, layout, group
        self._rank, self._world = rank_of_job(), ranks_in_job()
        self._last = -1
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    @property
    def ready(self) -> bool:
        """Whether this rank has ended the generation before, well. Not collective."""
        return self._failure is None and (self._thread is None or not self._thread.is_alive())

    @property
    def failure(self) -> str | None:
        """Why this rank keeps no more copies. Not collective."""
        return self._failure

    def lacks_room(self, tensors: list[LocalTensor]) -> str | None:
        """Why the copies cannot be kept, the same words on every rank; None if they can."""
        sizes = gather_json(packed_bytes(tensors))
        source = self._source
        need = 2 * (sizes[self._rank] + (sizes[source] if source is not None else 0))
        there = sum(path.stat().st_size for owner in self._kept() for path in self._files(owner))
        room = os.statvfs(self._folder)
        free = min(free_host_memory(), room.f_bavail * room.f_frsize // self._local_ranks)
        short = (
            f"rank {self._rank} needs {need - there} bytes, {free} are free" if need - there > free else None
        )
        return next(filter(None, gather_json(short)), None)

    def start(self, step: int, state: dict[str, Any], tensors: list[LocalTensor]) -> None:
        """Begin a generation: copy the values of now; the rest goes on in a thread."""
        slot = self._free_slot()
        try:
            for owner in self._kept():
                self._header_path(owner, slot).unlink(missing_ok=True)
            buffer = _map(self._path(self._rank, slot), packed_bytes(tensors))
        except OSError as error:
            self._failure = f"{error.filename or self._folder}: {error.strerror}"
            return
        pack(tensors, buffer)
        names, size = names_of(tensors), buffer.numel()
        header = Header(self._rank, step, self._attempt, self._layout, names, size, "", state)
        self._thread = threading.Thread(target=self._spread, args=(header, buffer, slot), daemon=True)
        self._thread.start()

    def restore(self, run: RunDir, tensors: list[LocalTensor], not_before: int) -> FromMemory | None:
        """Fill ``tensors`` from the newest generation that is whole; None if there is none.

        ``not_before``: the step of the newest checkpoint on disk, on rank 0.
        """
        mine = [asdict(header) | {"slot": slot} for header, slot in self._mine()]
        listed = gather_json([mine, names_of(tensors)])
        names = [names for _, names in listed]
        everything = [
            _Held(rank, one["slot"], _header(one)) for rank, (found, _) in enumerate(listed) for one in found
        ]
        spoiled: set[int] = set()
        while True:
            plan = self._plan(run, everything, names, not_before, spoiled) if self._rank == 0 else None
            plan = broadcast_json(plan)
            if plan is None:
                return None
            buffer = self._fetch([everything[index] for index in plan])
            whole = gather_json(buffer is not None)
            if buffer is not None and all(whole):
                break
            spoiled |= {index for index, good in zip(plan, whole, strict=True) if not good}
        for stored, tensor in zip(placed(tensors, buffer), tensors, strict=True):
            tensor.data.copy_(stored.data)
        header = everything[plan[self._rank]].header
        self._last = header.step
        return FromMemory(header.step, header.layout, header.state)

    @property
    def _target(self) -> int | None:
        """The rank on the next node that keeps a copy of this rank's state."""
        return None if self._world <= self._local_ranks else (self._rank + self._local_ranks) % self._world

    @property
    def _source(self) -> int | None:
        return None if self._world <= self._local_ranks else (self._rank - self._local_ranks) % self._world

    def _kept(self) -> list[int]:
        """Whose state this rank writes here."""
        return [self._rank] if self._source is None else [self._rank, self._source]

    def _spread(self, header: Header, buffer: torch.Tensor, slot: int) -> None:
        """The thread of a generation: hash, exchange with the neighbours, then say that it is there."""
        try:
            header = _header(asdict(header) | {"hash": _hash(buffer)})
            copied = self._exchange(header, buffer, slot)
            for one in filter(None, (header, copied)):
                replace_text(self._header_path(one.owner, slot), json.dumps(asdict(one)))
            self._last = header.step
        except Exception as error:  # noqa: BLE001 - training goes on; the disk still has its checkpoints
            self._failure = f"{type(error).__name__}: {error}"

    def _exchange(self, header: Header, buffer: torch.Tensor, slot: int) -> Header | None:
        """Send this rank's state to the next node, and keep the previous node's."""
        target, source = self._target, self._source
        if target is None or source is None:
            return None
        text = json.dumps(asdict(header)).encode()
        if len(text) > _HEADER_BYTES:
            raise ValueError(f"the state takes {len(text)} bytes of JSON, {_HEADER_BYTES} is the most")
        ours = torch.frombuffer(bytearray(text.ljust(_HEADER_BYTES)), dtype=torch.uint8)
        theirs = torch.empty_like(ours)
        self._wait(self._send(ours, target), self._receive(theirs, source))
        told = _header(json.loads(bytes(theirs.numpy())))
        copy = _map(self._path(source, slot), told.bytes)
        self._wait(self._send(buffer, target), self._receive(copy, source))
        if _hash(copy) != told.hash:
            raise ValueError(f"the state of rank {source} did not arrive as it was sent")
        return told

    def _fetch(self, sources: list[_Held]) -> torch.Tensor | None:
        """This rank's state, from this node or sent by the rank that has it; None if it has changed."""
        work: list[dist.Work] = []
        kept = []
        mine = sources[self._rank]
        for held in sources:
            if held.rank == self._rank and not self._same_node(held.header.owner):
                kept.append(_map(self._path(held.header.owner, held.slot), held.header.bytes))
                work += self._send(kept[-1], held.header.owner)
        if self._same_node(mine.rank):
            buffer = _map(self._path(self._rank, mine.slot), mine.header.bytes)
        else:
            buffer = torch.empty(mine.header.bytes, dtype=torch.uint8)
            work += self._receive(buffer, mine.rank)
        self._wait(work)
        return buffer if _hash(buffer) == mine.header.hash else None

    def _plan(
        self, run: RunDir, everything: list[_Held], names: list[str], not_before: int, spoiled: set[int]
    ) -> list[int] | None:
        """On rank 0: the index of every rank's state in the newest generation that is whole.

        A state on the owner's node goes before a copy elsewhere.
        """
        starts = resumed_steps(run)
        found: dict[tuple[int, int], dict[int, int]] = {}
        for index, held in enumerate(everything):
            header = held.header
            usable = header.owner < self._world and header.names == names[header.owner]
            usable = usable and header.layout == self._layout and header.step >= not_before
            if usable and index not in spoiled:
                places = found.setdefault((header.step, header.attempt), {})
                local = held.rank // self._local_ranks == header.owner // self._local_ranks
                if local or header.owner not in places:
                    places[header.owner] = index
        for (step, attempt), places in sorted(found.items(), reverse=True):
            if len(places) == self._world and not superseder(starts, step, attempt):
                return [places[owner] for owner in range(self._world)]
        return None

    def _mine(self) -> Iterator[tuple[Header, int]]:
        """Of the files on this node, those that this rank speaks for."""
        for path in sorted(self._folder.glob("rank*.json")):
            with suppress(OSError, ValueError, TypeError, KeyError):
                header = _header(json.loads(path.read_text()))
                slot = int(path.name.split(".")[1])
                mine = header.owner % self._local_ranks == self._rank % self._local_ranks
                if mine and self._path(header.owner, slot).stat().st_size == header.bytes:
                    yield header, slot

    def _free_slot(self) -> int:
        """The slot that does not hold the last whole generation."""
        for slot in _SLOTS:
            with suppress(OSError, ValueError):
                if json.loads(self._header_path(self._rank, slot).read_text())["step"] == self._last:
                    return 1 - slot
        return 0

    def _same_node(self, rank: int) -> bool:
        return rank // self._local_ranks == self._rank // self._local_ranks

    def _path(self, owner: int, slot: int) -> Path:
        return self._folder / f"rank{owner:05d}.{slot}"

    def _header_path(self, owner: int, slot: int) -> Path:
        return self._folder / f"rank{owner:05d}.{slot}.json"

    def _files(self, owner: int) -> list[Path]:
        return [path for slot in _SLOTS if (path := self._path(owner, slot)).exists()]

    def _send(self, data: torch.Tensor, target: int) -> list[dist.Work]:
        return [work for part in data.split(_CHUNK) if (work := dist.isend(part, target, self._group))]

    def _receive(self, data: torch.Tensor, source: int) -> list[dist.Work]:
        return [work for part in data.split(_CHUNK) if (work := dist.irecv(part, source, self._group))]

    @staticmethod
    def _wait(*work: list[dist.Work]) -> None:
        for part in work:
            for one in part:
                one.wait()


def memory_tier(recipe: Recipe, launch: Launch, mesh: Mesh) -> MemoryTier | None:
    """The tier that the recipe asks for; None without an agent's folder. Collective."""
    asked = recipe.checkpoint.memory_every is not None and launch.memory is not None
    if not all(gather_json(asked)) or launch.memory is None:
        return None
    group = mesh.host_group()
    return MemoryTier(launch.memory, launch.local_world, launch.attempt, asdict(mesh.layout), group)


@dataclass(frozen=True)
class _Held:
    """A file in memory, and the rank that speaks for it."""

    rank: int
    slot: int
    header: Header


def names_of(tensors: list[LocalTensor]) -> str:
    """A hash of what the tensors are: two ranks with the same one can swap their bytes."""
    told = [[tensor.name, tensor.box, str(tensor.data.dtype)] for tensor in tensors]
    return xxhash.xxh3_64_hexdigest(json.dumps(told).encode())


def _header(told: dict[str, Any]) -> Header:
    return Header(**{key: told[key] for key in Header.__dataclass_fields__})


def _hash(buffer: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(buffer.numpy().data)


def _map(path: Path, size: int) -> torch.Tensor:
    """A file in memory as a tensor of bytes; its pages are taken now, because later a lack of them kills."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(fd, size)
        if size:
            os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
