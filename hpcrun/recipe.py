"""The recipe: everything a user asks for, in one YAML file.

Fields are strict: an unknown key, a wrong type or an impossible combination is
an error with file and line before anything queues.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from hpcrun.config import Document, apply_override, load_yaml, validate
from hpcrun.schedule import ScheduleName
from hpcrun.units import TimeLimit, parse_bytes, parse_seconds

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def _text_or_integer(minimum: int) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": minimum}]})


def _whole(value: Any) -> Any:
    """``1e4`` is a whole number to people and to JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_name(value: Any) -> Any:
    if not isinstance(value, str) or not RUN_NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not a run name; use letters, digits, '.', '_' and '-', at most 63")
    return value


def _check_environment(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("must be a mapping of variable names to values")
    for name, text in value.items():
        _check_variable(name)
        if isinstance(text, bool) or not isinstance(text, str | int):
            raise ValueError(f"{name}: put quotes around {text!r}, so that it arrives as you wrote it")
        if isinstance(text, str) and "\0" in text:
            raise ValueError(f"{name}: holds a NUL character, which no environment can carry")
    return {name: str(text) for name, text in value.items()}


def _check_variable(value: Any) -> Any:
    if not isinstance(value, str) or not VARIABLE_NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not a name that the shell accepts for a variable")
    return value


def _check_interval(value: Any) -> Any:
    """Steps as a number; ``30m`` and ``auto`` stay text, because a bare number is never seconds here."""
    whole = _whole(value)
    if isinstance(whole, int) and not isinstance(whole, bool) and whole > 0:
        return whole
    if value == "auto":
        return value
    if isinstance(value, str) and not value.isdigit():
        with suppress(ValueError):
            parse_seconds(value)
            return value
    raise ValueError(f"{value!r} is no interval; write a number of steps, a duration like 30m, or auto")


_NAME_SCHEMA = {"type": "string", "pattern": f"^{RUN_NAME.pattern}$"}
_VARIABLE_SCHEMA = {"type": "string", "pattern": f"^{VARIABLE_NAME.pattern}$"}
_ENVIRONMENT_SCHEMA = {
    "type": "object",
    "propertyNames": _VARIABLE_SCHEMA,
    "additionalProperties": {"type": ["string", "integer"]},
}

Whole = Annotated[int, BeforeValidator(_whole)]
Natural = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Seconds = Annotated[int, BeforeValidator(parse_seconds), _text_or_integer(minimum=1)]
ByteCount = Annotated[int, BeforeValidator(parse_bytes), _text_or_integer(minimum=0)]
Interval = Annotated[int | str, BeforeValidator(_check_interval), _text_or_integer(minimum=1)]
RunName = Annotated[str, BeforeValidator(_check_name), WithJsonSchema(_NAME_SCHEMA)]
Environment = Annotated[
    dict[str, str], BeforeValidator(_check_environment), WithJsonSchema(_ENVIRONMENT_SCHEMA)
]
VariableName = Annotated[str, BeforeValidator(_check_variable), WithJsonSchema(_VARIABLE_SCHEMA)]


class Section(BaseModel):
    """Base of all sections: unknown keys and loose types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RopeScaling(Section):
    """Rotary positions beyond the sequence that a model was first trained on."""

    kind: Literal["linear", "llama3"] = Field(
        description="linear divides all frequencies (Chen et al., 2306.15595); llama3 only the low ones"
    )
    factor: float = Field(gt=0, description="how much longer the sequence is than the original")
    original_sequence: Positive = Field(8192, description="llama3: tokens per sample of the first training")
    low_frequency: float = Field(1.0, gt=0, description="llama3: turns per original sequence, fully scaled")
    high_frequency: float = Field(4.0, gt=0, description="llama3: turns per original sequence, not scaled")

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        if self.high_frequency <= self.low_frequency:
            raise ValueError("high_frequency must be above low_frequency")
        return self


class Moe(Section):
    """Experts in place of the MLP (Shazeer et al., 2017; Fedus et al., 2101.03961)."""

    experts: Positive = Field(description="experts per block; divides by ep")
    top_k: Positive = Field(2, description="experts that each token visits")
    expert_ffn: Positive | None = Field(None, description="inner width of one expert; default: model.ffn")
    shared_experts: Natural = Field(0, description="experts that every token visits, beside the routed ones")
    dense_layers: Natural = Field(0, description="first blocks that keep a plain MLP")
    normalize: bool = Field(True, description="the weights of a token's experts sum to 1")
    capacity: float | None = Field(
        None, gt=0, description="tokens per expert, in fair shares of a micro-batch; default: drop none"
    )
    balance_loss: float = Field(0.01, ge=0, description="weight of the load-balancing loss (2101.03961)")
    z_loss: float = Field(0.0, ge=0, description="weight of the router's z-loss (Zoph et al., 2202.08906)")

    @model_validator(mode="after")
    def _check(self) -> Moe:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than experts {self.experts}")
        return self


class Model(Section):
    """A decoder-only transformer. The defaults are Llama's (Touvron et al., 2023)."""

    layers: Positive = Field(4, description="transformer blocks; at least one per pipeline stage")
    hidden: Positive = Field(128, description="width of the residual stream")
    heads: Positive = Field(4, description="query heads; divides by tp")
    kv_heads: Positive | None = Field(
        None, description="key and value heads (Ainslie et al., 2023); default: as many as heads"
    )
    head_dim: Positive | None = Field(None, description="width of one head; default: hidden / heads")
    ffn_hidden: Positive | None = Field(
        None, description="inner width of the MLP; default: 4 hidden for gelu, else 8/3 rounded up to 64"
    )
    vocab: Positive = Field(256, description="token ids are below this")
    sequence: Positive = Field(128, description="tokens per sample")
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="normalisation before each part")
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance in a norm")
    qk_norm: bool = Field(False, description="RMSNorm on each query and key head (Henry et al., 2020)")
    activation: Literal["swiglu", "gelu"] = Field("swiglu", description="of the MLP (Shazeer, 2020)")
    positions: Literal["rope", "learned"] = Field("rope", description="rotary (Su et al., 2021) or a table")
    rope_base: float = Field(10000.0, gt=0, description="base of the rotary positions")
    rope_scaling: RopeScaling | None = Field(None, description="for sequences longer than the original")
    biases: bool = Field(False, description="biases in attention and MLP, as in GPT-2")
    init_std: float = Field(0.02, gt=0, description="standard deviation of the initial weights")
    dropout: float = Field(0.0, ge=0, lt=1, description="on the output of attention and of the MLP")
    tie_embeddings: bool = Field(False, description="one matrix for input embedding and output layer")
    moe: Moe | None = Field(None, description="mixture of experts in place of the MLP")

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def ffn(self) -> int:
        if self.ffn_hidden:
            return self.ffn_hidden
        return 4 * self.hidden if self.activation == "gelu" else -(-8 * self.hidden // 3 // 64) * 64

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def expert_ffn(self) -> int:
        return (self.moe.expert_ffn if self.moe else None) or self.ffn

    def has_experts(self, layer: int) -> bool:
        """Whether block ``layer``, counted from 0, routes its tokens to experts."""
        return self.moe is not None and layer >= self.moe.dense_layers


class Data(Section):
    """Where tokens come from: a file that is one little-endian array of token ids."""

    path: str | None = Field(None, description="the token file; relative to the recipe's folder")
    dtype: Literal["uint8", "uint16", "uint32"] = Field("uint8", description="type of one token id")
    seed: Whole = Field(1234, description="seed of the sample order")
    document_end: Natural | None = Field(
        None, description="token that ends a document; attention and loss do not cross it"
    )
    allow_change: bool = Field(False, description="let a resumed run go on with other data or another order")


class Parallel(Section):
    """Sizes of the parallel dimensions, fastest first: tp, cp, dp, pp. See docs/parallelism.md."""

    tp: Positive = Field(1, description="tensor parallel size (Shoeybi et al., 2019)")
    sequence_parallel: bool = Field(
        False, description="split norms and dropout over tp too (Korthikanti et al., 2205.05198)"
    )
    cp: Positive = Field(1, description="context parallel size: ring attention (Liu et al., 2310.01889)")
    pp: Positive = Field(1, description="pipeline ranks")
    dp: Positive | None = Field(None, description="data parallel size; default: what the ranks leave")
    ep: Positive = Field(1, description="expert parallel size, inside dp x cp")
    schedule: ScheduleName = Field("1f1b", description="order of the pipeline's micro-batches")
    virtual_stages: Positive | None = Field(
        None, description="stages per pipeline rank; default: 2 for interleaved, zbv and dualpipev, else 1"
    )
    stage_layers: list[Natural] | None = Field(
        None, description="blocks of each stage in order; default: balanced by FLOPs, the head counted"
    )
    zero: Literal[0, 1, 2, 3] = Field(
        0, description="shard over data ranks: 1 optimizer, 2 and gradients, 3 and weights (1910.02054)"
    )
    zero_group: Positive | None = Field(
        None, description="ranks that share one copy of what zero shards; default: all data ranks"
    )
    offload: bool = Field(False, description="keep the optimizer's state, and its weights, in host memory")

    @property
    def stages_per_rank(self) -> int:
        default = 2 if self.schedule in ("interleaved", "zbv", "dualpipev") else 1
        return self.virtual_stages or default

    @property
    def stages(self) -> int:
        """Pipeline stages of the whole model."""
        return self.pp * self.stages_per_rank


class Train(Section):
    """Steps, batches and AdamW (Loshchilov and Hutter, 2019) with warm-up and a cosine."""

    steps: Positive = Field(100, description="optimizer steps of the whole run")
    global_batch: Positive = Field(8, description="samples per optimizer step over all ranks")
    micro_batch: Positive = Field(1, description="samples per forward pass of one rank")
    lr: float = Field(3e-4, gt=0, description="learning rate after the warm-up")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the cosine")
    warmup_steps: Natural = Field(0, description="steps over which the learning rate rises from 0")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay of matrices")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    clip_grad: float = Field(1.0, ge=0, description="largest global gradient norm; 0 does not clip")
    seed: Whole = Field(1234, description="seed of weights and dropout")
    log_every: Positive = Field(1, description="steps between lines of the metrics file")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="type of activations and gradients")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes CUDA where there is one")


class Checkpoint(Section):
    """When checkpoints are written and how many stay. See docs/checkpoints.md."""

    every: Interval = Field(
        50,
        description="steps between checkpoints, or a duration (30m), or auto: by the measured cost of a save "
        "and the failure rate (Daly, 2006); the last step is always saved",
    )
    init: str | None = Field(
        None, description="folder of a checkpoint whose weights a new run begins with; relative to the recipe"
    )
    memory_every: Positive | None = Field(
        None, description="steps between copies in the memory of each node and of the next; default: none"
    )
    background: bool = Field(True, description="write behind the training, which stops for a copy only")
    busy: Literal["wait", "skip"] = Field(
        "wait", description="when a save is due and the last one has not ended: wait for it, or skip this one"
    )
    timeout: Seconds = Field(1800, description="time after which a save that has not ended is given up")
    on_failure: Literal["continue", "stop"] = Field(
        "continue", description="after a periodic save that failed: train on, or stop the run"
    )
    keep: Positive | None = Field(3, description="newest checkpoints to keep; null keeps all")
    keep_every: Positive | None = Field(
        None, description="keep those of steps that are multiples of this for ever"
    )
    keep_best: Positive | None = Field(None, description="keep so many with the lowest loss too")

    @property
    def every_steps(self) -> int | None:
        """None where the interval is a time."""
        return self.every if isinstance(self.every, int) else None

    @property
    def every_seconds(self) -> int | None:
        """None where the interval is a number of steps, or ``auto``."""
        return parse_seconds(self.every) if isinstance(self.every, str) and self.every != "auto" else None


class Resources(Section):
    """What the job asks of Slurm. None means: the site's default."""

    nodes: Positive = Field(1, description="nodes that train")
    spares: Natural = Field(0, description="nodes beyond `nodes` held ready to replace a lost one")
    gpus_per_node: Natural | None = Field(None, description="default: the site's")
    ranks_per_node: Positive | None = Field(None, description="default: gpus_per_node, or the site's")
    cpus_per_node: Positive | None = Field(None, description="default: the site's")
    memory: ByteCount | None = Field(None, description="memory per node, e.g. 64G; default: the site's")
    time: TimeLimit | None = Field(
        None, description="limit of one allocation: 90m, 36h, 2-12:00:00, 60 (minutes) or UNLIMITED"
    )
    partition: str | None = Field(None, description="default: the site's")
    account: str | None = Field(None, description="default: the site's")
    qos: str | None = Field(None, description="default: the site's")


class Recovery(Section):
    """What happens when something fails. See docs/recovery.md."""

    max_restarts: Natural | None = Field(
        None, description="restarts inside one allocation; default 10, for a command of your own 0"
    )
    max_requeues: Natural | None = Field(
        None,
        description="new allocations after a lost node, preemption or the time limit; default 20, "
        "for a command of your own 0",
    )
    node_timeout: Seconds = Field(30, description="silence after which a node counts as lost")
    start_timeout: Seconds = Field(300, description="time for all agents of an allocation to report")
    collective_timeout: Seconds = Field(300, description="time after which a stuck collective fails")
    node_failures_per_year: float | None = Field(
        None, gt=0, description="of one node, for checkpoint.every: auto; default: the site's, else 2.4"
    )
    save_margin: Seconds | None = Field(
        None, description="time before the limit at which the run saves and requeues; default: the site's"
    )

    def restarts_for(self, command: list[str]) -> int:
        """A command of the user's is not known to resume, so it is not repeated unasked."""
        return self.max_restarts if self.max_restarts is not None else (0 if command else 10)

    def requeues_for(self, command: list[str]) -> int:
        return self.max_requeues if self.max_requeues is not None else (0 if command else 20)


class Recipe(Section):
    """One run: what to train, on what, and how it survives."""

    name: RunName = Field("run", description="first part of the run's folder and name of the job")
    model: Model = Field(default_factory=Model)
    data: Data = Field(default_factory=Data)
    parallel: Parallel = Field(default_factory=Parallel)
    train: Train = Field(default_factory=Train)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    resources: Resources = Field(default_factory=Resources)
    recovery: Recovery = Field(default_factory=Recovery)
    environment: Environment = Field(
        default_factory=dict, description="variables for every rank; they win over the site's"
    )
    secrets: list[VariableName] = Field(
        default_factory=list, description="variables that reach the ranks by a 0600 file, never a script"
    )
    command: list[str] = Field(
        default_factory=list, description="run this once per rank instead of hpcrun's trainer"
    )

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        both = sorted(set(self.secrets) & set(self.environment))
        if both:
            raise ValueError(f"{both[0]} stands in both environment and secrets; keep it in secrets only")
        return self


def load_recipe(path: Path, overrides: tuple[str, ...] = ()) -> Recipe:
    """Read and check one recipe file, with ``--set`` overrides applied.

    Relative paths in it are relative to the recipe's folder.

    Raises:
        UserError: with file, line and key of every mistake.
    """
    document = load_yaml(path)
    return recipe_from(document, overrides, path.resolve().parent)


def recipe_from(document: Document, overrides: tuple[str, ...], folder: Path) -> Recipe:
    """The recipe in ``document``; relative paths in it are relative to ``folder``."""
    for override in overrides:
        apply_override(document, override)
    recipe = validate(document, Recipe)
    data = recipe.data.model_copy(update={"path": _absolute(recipe.data.path, folder)})
    checkpoint = recipe.checkpoint.model_copy(update={"init": _absolute(recipe.checkpoint.init, folder)})
    return recipe.model_copy(update={"data": data, "checkpoint": checkpoint})


def _absolute(path: str | None, folder: Path) -> str | None:
    return None if path is None else str(folder / Path(path).expanduser())
