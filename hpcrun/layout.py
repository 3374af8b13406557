"""Arithmetic of a layout: who is where, which layers, how many micro-batches. No torch.

Dimension order, fastest first: tp, cp, dp, pp. So tensor parallel peers are
neighbours and stay inside a node; pipeline stages are farthest apart
(Narayanan et al., 2021, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcrun.recipe import Model, Recipe


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

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Where global ``rank`` stands."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp, cp, dp, pp)

    def rank(self, at: Coordinates) -> int:
        """The global rank at ``at``; the inverse of :meth:`coordinates`."""
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def logging_rank(self) -> int:
        """The rank that has the loss and writes metrics: first of the last stage."""
        return self.rank(Coordinates(0, 0, 0, self.pp - 1))

    def __str__(self) -> str:
        return f"TP={self.tp} x CP={self.cp} x DP={self.dp} x PP={self.pp}"


def stage_layers(layers: int, pp: int, stage: int) -> range:
    """Global layer numbers of one pipeline stage; ``layers`` divides by ``pp``."""
    per_stage = layers // pp
    return range(stage * per_stage, (stage + 1) * per_stage)


def padded_vocab(vocab: int, tp: int) -> int:
    """The vocabulary rounded up so that every tensor parallel rank has equally many rows."""
    return -(-vocab // tp) * tp


def parameter_count(model: Model) -> int:
    """Weights of the whole model, vocabulary unpadded, tied embeddings once.

    Per block: q and o (hidden x hidden), k and v (hidden x kv_heads x head size), gate, up
    and down (hidden x ffn), two norms; no biases (Touvron et al., 2023).
    """
    hidden = model.hidden
    attention = 2 * hidden * hidden + 2 * hidden * model.kv * model.head_size
    block = attention + 3 * hidden * model.ffn + 2 * hidden
    embeddings = model.vocab * hidden * (1 if model.tie_embeddings else 2)
    return model.layers * block + embeddings + hidden


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
            f"pp {parallel.pp} = {fixed}; change them or the number of ranks"
        )
    layout = Layout(parallel.tp, parallel.cp, parallel.dp or world // fixed, parallel.pp)
    if layout.world != world:
        raise ValueError(
            f"parallel.tp {layout.tp} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp} = {layout.world}, "
            f"but the job has {world} ranks"
        )
    problems = model_problems(recipe) + batch_problems(recipe, layout)
    if problems:
        raise ValueError("; ".join(problems))
    return layout


def model_problems(recipe: Recipe) -> list[str]:
    """What in the model does not divide by tp, pp or itself; empty when all fits."""
    model, parallel = recipe.model, recipe.parallel
    problems = []
    if model.hidden % model.heads:
        problems.append(f"model.hidden {model.hidden} does not divide by model.heads {model.heads}")
    elif model.head_size % 2:
        problems.append(
            f"model.hidden / model.heads = {model.head_size} is odd; rotary positions need it even"
        )
    if model.heads % model.kv:
        problems.append(f"model.heads {model.heads} does not divide by model.kv_heads {model.kv}")
    for key, size in (("heads", model.heads), ("kv_heads", model.kv), ("ffn_hidden", model.ffn)):
        if size % parallel.tp:
            problems.append(f"model.{key} {size} does not divide by parallel.tp {parallel.tp}")
    if model.layers % parallel.pp:
        problems.append(
            f"model.layers {model.layers} does not divide by parallel.pp {parallel.pp}; "
            f"the nearest that do are {_nearest(model.layers, parallel.pp)}"
        )
    if parallel.cp > 1:
        problems.append("parallel.cp above 1 is not available in the trainer yet; set it to 1")
    return problems


def batch_problems(recipe: Recipe, layout: Layout) -> list[str]:
    """What in the batch arithmetic does not come out whole; empty when all fits."""
    train = recipe.train
    per_pass = train.micro_batch * layout.dp
    if train.global_batch % per_pass:
        return [
            f"train.global_batch {train.global_batch} does not divide by train.micro_batch "
            f"{train.micro_batch} x dp {layout.dp} = {per_pass}; "
            f"the nearest that do are {_nearest(train.global_batch, per_pass)}"
        ]
    return []


def micro_batches(recipe: Recipe, layout: Layout) -> int:
    """Micro-batches per optimizer step of one data parallel rank."""
    return recipe.train.global_batch // (recipe.train.micro_batch * layout.dp)


def _nearest(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f"{below} and {below + divisor}" if below else str(divisor)
