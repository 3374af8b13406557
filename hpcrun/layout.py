"""Arithmetic of a layout: who is where, which layers, how many micro-batches. No torch.

Dimension order, fastest first: tp, cp, dp, pp. So tensor parallel peers are
neighbours and stay inside a node; pipeline stages are farthest apart
(Narayanan et al., 2021, section 3). Experts are spread over ep neighbours of the
data ranks (dp x cp), so expert parallelism takes no ranks of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcrun.counts import block_flops, head_flops
from hpcrun.recipe import Model, Parallel, Recipe
from hpcrun.schedule import micro_batch_problem, virtual_stages_problem


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands in each dimension."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """The sizes of the parallel dimensions of one launch."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def data(self) -> int:
        """Ranks that see different tokens with the same weights."""
        return self.dp * self.cp

    def coordinates(self, rank: int) -> Coordinates:
        """Where global ``rank`` stands."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp, cp, dp, pp)

    def rank(self, at: Coordinates) -> int:
        """The global rank at ``at``; the inverse of :meth:`coordinates`."""
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def data_index(self, at: Coordinates) -> int:
        """Place among the data ranks, cp fastest."""
        return at.dp * self.cp + at.cp

    def __str__(self) -> str:
        text = f"TP={self.tp} x CP={self.cp} x DP={self.dp} x PP={self.pp}"
        return f"{text} (EP={self.ep})" if self.ep > 1 else text


def stage_layers(model: Model, parallel: Parallel) -> list[range]:
    """Global layer numbers of each stage, in the order of the stages.

    ``parallel.stage_layers`` decides; without it, the dearest stage is as cheap as can be, by
    FLOPs, where the last stage also carries the output layer. Among equals early stages get fewer
    layers: under 1F1B they keep the most activations.
    """
    stages = parallel.stages
    counts = parallel.stage_layers or _balanced(model, stages)
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def _balanced(model: Model, stages: int) -> list[int]:
    block = sum(block_flops(model, layer) for layer in range(model.layers)) / model.layers
    counts = [1] * stages
    loads = [block] * (stages - 1) + [block + head_flops(model)]
    for _ in range(model.layers - stages):
        stage = min(range(stages), key=lambda one: (loads[one], -one))
        counts[stage] += 1
        loads[stage] += block
    return counts


def padded_vocab(vocab: int, tp: int) -> int:
    """The vocabulary rounded up so that every tensor parallel rank has equally many rows."""
    return -(-vocab // tp) * tp


def make_layout(recipe: Recipe, world: int) -> Layout:
    """The layout of ``recipe`` on ``world`` ranks.

    Raises:
        ValueError: the sizes do not multiply to ``world``, or heads, layers or
            batches do not divide. Each message names the keys and what would fit.
    """
    parallel = recipe.parallel
    fixed = parallel.tp * parallel.cp * parallel.pp
    if parallel.dp is None and world % fixed:
        raise ValueError(
            f"{world} ranks do not divide by parallel.tp {parallel.tp} x cp {parallel.cp} x "
            f"pp {parallel.pp} = {fixed}; change them or the number of ranks" + _possible(recipe, world)
        )
    layout = Layout(parallel.tp, parallel.cp, parallel.dp or world // fixed, parallel.pp, parallel.ep)
    if layout.world != world:
        raise ValueError(
            f"parallel.tp {layout.tp} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp} = {layout.world}, "
            f"but the job has {world} ranks" + _possible(recipe, world)
        )
    problems = layout_problems(recipe, layout)
    if problems:
        raise ValueError("; ".join(problems) + _possible(recipe, world))
    return layout


def layout_problems(recipe: Recipe, layout: Layout) -> list[str]:
    """What keeps ``recipe`` from running on ``layout``; empty when all fits."""
    return (
        _model_problems(recipe.model)
        + _tensor_problems(recipe, layout)
        + _pipeline_problems(recipe, layout)
        + _data_problems(recipe, layout)
        + _batch_problems(recipe, layout)
    )


def micro_batches(recipe: Recipe, layout: Layout) -> int:
    """Micro-batches per optimizer step of one data parallel rank."""
    return recipe.train.global_batch // (recipe.train.micro_batch * layout.dp)


def _model_problems(model: Model) -> list[str]:
    problems = []
    if model.head_dim is None and model.hidden % model.heads:
        problems.append(f"model.hidden {model.hidden} does not divide by model.heads {model.heads}")
    elif model.positions == "rope" and model.head_size % 2:
        problems.append(f"a head of width {model.head_size} is odd; rotary positions need it even")
    if model.heads % model.kv:
        problems.append(f"model.heads {model.heads} does not divide by model.kv_heads {model.kv}")
    return problems


def _tensor_problems(recipe: Recipe, layout: Layout) -> list[str]:
    model, tp, cp = recipe.model, layout.tp, layout.cp
    sizes = [("heads", model.heads)]
    if any(not model.has_experts(layer) for layer in range(model.layers)):
        sizes.append(("ffn_hidden", model.ffn))
    if model.moe:
        sizes.append(("moe.expert_ffn", model.expert_ffn))
    problems = [f"model.{key} {size} does not divide by parallel.tp {tp}" for key, size in sizes if size % tp]
    if model.kv % tp and tp % model.kv:
        problems.append(
            f"model.kv_heads {model.kv} and parallel.tp {tp}: one must divide the other, so that each rank "
            "has whole key heads or a copy of one"
        )
    if cp > 1 and model.sequence % (2 * cp):
        problems.append(
            f"model.sequence {model.sequence} does not divide by 2 x parallel.cp {cp}: "
            "the ring's zigzag gives each rank two chunks"
        )
    if recipe.parallel.sequence_parallel and (model.sequence // cp) % tp:
        problems.append(
            f"model.sequence {model.sequence} / cp {cp} does not divide by parallel.tp {tp}, "
            "which parallel.sequence_parallel splits it over"
        )
    return problems


def _pipeline_problems(recipe: Recipe, layout: Layout) -> list[str]:
    model, parallel, pp = recipe.model, recipe.parallel, layout.pp
    problem = virtual_stages_problem(parallel.schedule, parallel.stages_per_rank)
    if problem:
        return [problem]
    stages = pp * parallel.stages_per_rank
    counts = parallel.stage_layers
    problems = []
    if counts is not None and len(counts) != stages:
        problems.append(f"parallel.stage_layers has {len(counts)} entries for {stages} stages")
    elif counts is not None and sum(counts) != model.layers:
        problems.append(f"parallel.stage_layers adds up to {sum(counts)}, model.layers is {model.layers}")
    elif counts is None and model.layers < stages:
        problems.append(
            f"model.layers {model.layers} is fewer than the {stages} stages of parallel.pp {pp} x "
            f"{parallel.stages_per_rank} virtual stages"
        )
    return problems


def _data_problems(recipe: Recipe, layout: Layout) -> list[str]:
    model, parallel, ep = recipe.model, recipe.parallel, layout.ep
    problems = []
    if ep > 1 and model.moe is None:
        problems.append(f"parallel.ep {ep} needs experts; set model.moe")
    elif model.moe and model.moe.experts % ep:
        problems.append(f"model.moe.experts {model.moe.experts} does not divide by parallel.ep {ep}")
    if layout.data % ep:
        problems.append(f"parallel.ep {ep} does not divide the {layout.data} data ranks (dp x cp)")
    size = parallel.zero_group
    if size is not None and parallel.zero == 0:
        problems.append(f"parallel.zero_group {size} shards nothing: parallel.zero is 0")
    elif size is not None and layout.data % size:
        problems.append(f"parallel.zero_group {size} does not divide the {layout.data} data ranks (dp x cp)")
    elif size is not None and size % ep and ep % size:
        problems.append(f"parallel.zero_group {size} and ep {ep}: one must divide the other")
    return problems


def _batch_problems(recipe: Recipe, layout: Layout) -> list[str]:
    train = recipe.train
    per_pass = train.micro_batch * layout.dp
    if train.global_batch % per_pass:
        return [
            f"train.global_batch {train.global_batch} does not divide by train.micro_batch "
            f"{train.micro_batch} x dp {layout.dp} = {per_pass}; "
            f"the nearest that do are {_nearest(train.global_batch, per_pass)}"
        ]
    parallel = recipe.parallel
    problem = micro_batch_problem(
        parallel.schedule, layout.pp, parallel.stages_per_rank, micro_batches(recipe, layout)
    )
    return [problem] if problem else []


def _nearest(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f"{below} and {below + divisor}" if below else str(divisor)


def _possible(recipe: Recipe, world: int) -> str:
    """The three layouts nearest to the recipe's that do run on ``world`` ranks, as text."""
    parallel = recipe.parallel
    wanted = (parallel.tp, parallel.cp, parallel.pp)
    fitting = []
    for tp in _divisors(world):
        for cp in _divisors(world // tp) if parallel.cp > 1 else [1]:
            for pp in _divisors(world // tp // cp):
                layout = Layout(tp, cp, world // tp // cp // pp, pp, parallel.ep)
                free = recipe.model_copy(update={"parallel": parallel.model_copy(update={"pp": pp})})
                if not layout_problems(free, layout):
                    distance = sum(
                        abs(math.log2(size / aim)) for size, aim in zip((tp, cp, pp), wanted, strict=True)
                    )
                    fitting.append((distance, f"tp {tp} x cp {cp} x dp {layout.dp} x pp {pp}"))
    if not fitting:
        return ""
    return "; possible on these ranks: " + ", ".join(text for _, text in sorted(fitting)[:3])


def _divisors(value: int) -> list[int]:
    return [size for size in range(1, value + 1) if value % size == 0]
