"""``python -m training.dryrun RECIPE --world N --rank R``: one rank of a job of any size, on paper.

Builds the real trainer of that rank on fake tensors in a fake process group and runs one step: what
it allocates and sends is counted, nothing is computed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpcrun.errors import UserError
from hpcrun.layout import Layout, make_layout, micro_batches
from hpcrun.recipe import Recipe, load_recipe
from hpcrun.schedule import actions, micro_batch_problem
from hpcrun.timeline import in_flight
from hpcrun.units import show_bytes
from training._torch import FakeStore, FakeTensorMode
from training.assemble import Parts, assemble
from training.model.micro_batch import MicroBatch
from training.monitor.accounting import Accounting, Traffic
from training.optim.adamw import update
from training.parallel.dispatch import Dispatch
from training.parallel.mesh import Mesh

_GROUPS = ("tp", "kv", "cp", "ep", "pp", "tied", "data", "shard", "replicas")
_EXPERT_GROUPS = ("expert_shard", "expert_replicas", "expert_data")


@dataclass(frozen=True)
class Report:
    """What one rank needs and sends in one optimizer step. Sizes in bytes.

    Attributes:
        place: the rank's coordinates.
        micro_batches: of the step, and how many were run: counts are scaled from those.
        parameters: weights that stay; under zero 3 this rank's shards.
        gradients: that stay from micro-batch to micro-batch.
        optimizer: moments, and under ``offload`` the weights in host memory.
        activations: the most that one step needs beyond these and its tokens: what backward waits for;
            under zero 3 also the gathered weights, under zero 2 and 3 the gradients before their sum.
        traffic: collectives by group and operation; bytes of the larger of input and output.
    """

    place: str
    layout: str
    micro_batches: int
    micro_batches_run: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    traffic: dict[str, Traffic]

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


class _PaperMesh(Mesh):
    """Makes this rank's own groups only: nobody else is there to take part in others."""

    def _new_group(self, ranks: list[int]) -> dist.ProcessGroup | None:
        return dist.new_group(ranks) if self.rank in ranks else None

    def name_of(self, group: dist.ProcessGroup) -> str:
        """The dimension that ``group`` is of; the first one where it serves several."""
        known = {name: getattr(self, name) for name in (*_GROUPS, *_EXPERT_GROUPS)}
        return next((name for name, own in known.items() if own is not None and own == group), "world")


def dry_run(recipe: Recipe, world: int, rank: int) -> Report:
    """One step of ``rank`` of ``world`` on paper. The process must have no process group.

    Raises:
        ValueError: the layout does not fit the ranks.
    """
    layout = make_layout(recipe, world)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        return _report(recipe, layout, rank)
    finally:
        dist.destroy_process_group()


def _report(recipe: Recipe, layout: Layout, rank: int) -> Report:
    count = micro_batches(recipe, layout)
    run = _enough(recipe, layout, count, layout.coordinates(rank).pp)
    device = torch.device("cpu")
    mesh = _PaperMesh(layout, rank, device, timedelta(minutes=1), recipe)
    first = _step(recipe, mesh, run)
    traffic = first.traffic
    if run < count:
        second = _step(recipe, mesh, run + 1).traffic
        traffic = {
            name: Traffic(
                one.count + (count - run) * (second[name].count - one.count),
                one.bytes + (count - run) * (second[name].bytes - one.bytes),
            )
            for name, one in traffic.items()
        }
    return Report(
        place=str(mesh).split(" on ")[0],
        layout=str(layout),
        micro_batches=count,
        micro_batches_run=run,
        parameters=first.parameters,
        gradients=first.gradients,
        optimizer=first.optimizer,
        activations=first.activations,
        traffic=traffic,
    )


def _enough(recipe: Recipe, layout: Layout, count: int, pp: int) -> int:
    """The fewest micro-batches with which pipeline rank ``pp`` keeps as many as with all, and two more."""
    parallel = recipe.parallel
    schedule, stages = parallel.schedule, parallel.stages_per_rank

    def kept(number: int) -> int:
        return in_flight(actions(schedule, layout.pp, stages, number))[pp]

    most = kept(count)
    for number in range(1, count):
        if not micro_batch_problem(schedule, layout.pp, stages, number) and kept(number) >= most:
            return min(number + 2, count)
    return count


@dataclass(frozen=True)
class _Counted:
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    traffic: dict[str, Traffic]


def _step(recipe: Recipe, mesh: _PaperMesh, count: int) -> _Counted:
    accounting = Accounting(mesh.name_of)
    with FakeTensorMode(allow_non_fake_inputs=True), accounting:
        parts = assemble(recipe, mesh, micro_batches=count, plan=Dispatch.evenly, draw=False)
        made = accounting.bytes
        batch = [_micro_batch(recipe, mesh, number) for number in range(count)]
        tokens = accounting.bytes - made
        accounting.peak = accounting.bytes
        bf16 = recipe.train.precision == "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            parts.pipeline.run(batch, 1.0)
        peak, gradients = accounting.peak, _gradient_bytes(parts)
        dist.all_reduce(torch.zeros(5, dtype=torch.float64))
        update(parts.optimizer, parts.sharding.shards, recipe.train.lr, 1.0)
        parts.sharding.publish()
    parameters = _bytes(shard.device_values for shard in parts.sharding.shards)
    optimizer = _bytes(value for state in parts.optimizer.state.values() for value in state.values())
    if recipe.parallel.offload:
        optimizer += _bytes(shard.values for shard in parts.sharding.shards)
    return _Counted(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=peak - tokens - parameters - gradients - optimizer,
        traffic={f"{group} {name}": one for (group, name), one in sorted(accounting.traffic.items())},
    )


def _micro_batch(recipe: Recipe, mesh: Mesh, number: int) -> MicroBatch:
    size, sequence = recipe.train.micro_batch, recipe.model.sequence
    shape = (size, sequence // mesh.layout.cp)
    ends = recipe.data.document_end is not None
    return MicroBatch(
        number,
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.int64),
        torch.ones(shape, dtype=torch.bool) if ends else None,
        torch.zeros(size, sequence, dtype=torch.int64) if ends else None,
    )


def _gradient_bytes(parts: Parts) -> int:
    """Of what lies there at the end of the step: buckets under zero 0 and 1, and the shards."""
    found: list[torch.Tensor] = []
    for shard in parts.sharding.shards:
        candidates = (shard.grad, shard.parameter.grad, shard.parameter.gradient)
        found += [tensor for tensor in candidates if tensor is not None]
    return _bytes(found)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each once."""
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def _text(report: Report) -> str:
    rows = [
        (name, getattr(report, name))
        for name in ("parameters", "gradients", "optimizer", "activations", "total")
    ]
    lines = [
        f"{report.place} of {report.layout}",
        f"{report.micro_batches} micro-batches per step, {report.micro_batches_run} run on paper",
        "",
        *(f"{name:<12}{show_bytes(size):>12}  {size:>18,} bytes" for name, size in rows),
        "",
        f"{'collectives per step':<28}{'count':>8}{'bytes':>20}",
        *(f"{name:<28}{one.count:>8,}{one.bytes:>20,}" for name, one in report.traffic.items()),
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.dryrun", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--world", type=int, help="ranks of the job; default: nodes x ranks_per_node")
    parser.add_argument("--rank", type=int, default=0, help="the rank to look at")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(words)
    try:
        recipe = load_recipe(arguments.recipe, tuple(arguments.overrides))
        world = arguments.world or _world(recipe)
        if not 0 <= arguments.rank < world:
            raise UserError(f"--rank {arguments.rank} is not below the {world} ranks of the job")
        report = dry_run(recipe, world, arguments.rank)
    except (UserError, ValueError) as error:
        print(f"hpcrun: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(report) | {"total": report.total}) if arguments.json else _text(report))
    return 0


def _world(recipe: Recipe) -> int:
    resources, parallel = recipe.resources, recipe.parallel
    per_node = resources.ranks_per_node or resources.gpus_per_node
    if per_node:
        return resources.nodes * per_node
    if parallel.dp:
        return parallel.tp * parallel.cp * parallel.dp * parallel.pp
    raise UserError("the recipe does not tell the number of ranks; give --world")


if __name__ == "__main__":
    sys.exit(main())
