"""``make peers``: OLMo-core and DeepSpeed beside the trainer, on the model of bench-small.yaml.

Peers run their own training steps, unmodified, without their trainers' logging. All candidates do one
optimizer step per round on two CPU ranks with one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleZBVZeroBubble
from torch.nn import functional as F

from hpcrun.bench.interleave import interleave
from hpcrun.errors import UserError
from hpcrun.recipe import Recipe, load_recipe
from training.bench.__main__ import make_tokens
from training.bench.bare import Decoder
from training.bench.candidates import rate, trainer_step
from training.bench.ranks import Ranks, Step

Peer = Callable[[torch.device], Step]
RECIPE = Path(__file__).parents[2] / "training" / "recipes" / "bench-small.yaml"
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "single": (1, {}),
    "dp2": (2, {"dp": 2}),
    "zero3": (2, {"dp": 2, "zero": 3}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2 zero bubble": (2, {"pp": 2, "schedule": "zbv"}),
}


def samples(recipe: Recipe, ranks: int) -> torch.Tensor:
    """This rank's share of one global batch, (samples, sequence)."""
    generator = torch.Generator().manual_seed(dist.get_rank() % ranks)
    share = recipe.train.global_batch // ranks
    return torch.randint(recipe.model.vocab, (share, recipe.model.sequence), generator=generator)


def olmo(recipe: Recipe, layout: str, device: torch.device) -> Step:
    """OLMo-core's train module: zero_grads, train_batch, optim_step."""
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig
    from olmo_core.train import train_module as parts

    model, train = recipe.model, recipe.train
    network = TransformerConfig.llama_like(
        d_model=model.hidden,
        vocab_size=model.vocab,
        n_layers=model.layers,
        n_heads=model.heads,
        n_kv_heads=model.kv,
        hidden_size_multiple_of=16,
    )
    assert network.block.feed_forward.hidden_size == model.ffn
    optim = AdamWConfig(lr=train.lr, betas=(train.beta1, train.beta2), weight_decay=train.weight_decay)
    common: dict[str, Any] = {
        "rank_microbatch_size": train.micro_batch * model.sequence,
        "max_sequence_length": model.sequence,
        "optim": optim,
        "max_grad_norm": train.clip_grad,
    }
    ranks = 1
    if layout in ("dp2", "zero3"):
        ranks = 2
    if layout != "single":
        kind_of_data = "ddp" if layout == "dp2" else "fsdp"
        common["dp_config"] = parts.TransformerDataParallelConfig(name=kind_of_data)
    if layout == "tp2":
        common["tp_config"] = parts.TransformerTensorParallelConfig(degree=2)
    config = parts.TransformerTrainModuleConfig(**common)
    module: Any = config.build(network.build(init_device="cpu"), device=device)
    module._trainer = types.SimpleNamespace(
        record_metric=lambda *_, **__: None,
        record_ce_loss=lambda *_, **__: None,
        dp_process_group=module.dp_process_group,
        global_batch_size=train.global_batch * model.sequence,
        global_step=1,
    )
    module.pre_train()
    tokens = samples(recipe, ranks)

    def step() -> None:
        module.zero_grads()
        module.train_batch({"input_ids": tokens.clone()})
        module.optim_step()

    return step


def deepspeed(recipe: Recipe, layout: str, device: torch.device) -> Step:
    """DeepSpeed's engine around the plain decoder, with torch's AdamW."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as ds

    train, ranks = recipe.train, dist.get_world_size()
    decoder = Decoder(recipe.model)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=train.lr, weight_decay=train.weight_decay)
    share = train.global_batch // ranks
    config = {
        "train_batch_size": train.global_batch,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": share // train.micro_batch,
        "gradient_clipping": train.clip_grad,
        "zero_optimization": {"stage": 3 if layout == "zero3" else 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = ds.initialize(model=decoder, optimizer=optimizer, config=config, dist_init_required=False)
    parts = samples(recipe, ranks).split(train.micro_batch)

    def step() -> None:
        for part in parts:
            engine.backward(engine(part, part))
            engine.step()

    return step


class Part(nn.Module):
    """Some blocks of the plain decoder; the first part embeds, the last gives logits."""

    def __init__(self, decoder: Decoder, number: int, count: int) -> None:
        super().__init__()
        size = len(decoder.layers) // count
        self.embedding = decoder.embedding if number == 0 else None
        self.layers = nn.ModuleList(list(decoder.layers)[number * size : (number + 1) * size])
        self.ends = nn.Sequential(decoder.norm, decoder.head) if number == count - 1 else None
        self.register_buffer("cos", decoder.cos, persistent=False)
        self.register_buffer("sin", decoder.sin, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x if self.ends is None else self.ends(x)


def pipelining(recipe: Recipe, layout: str, device: torch.device) -> Step:
    """torch.distributed.pipelining on the plain decoder: 1F1B, or ZBV with two parts per rank."""

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.flatten(0, 1), target.flatten())

    train, model, rank = recipe.train, recipe.model, dist.get_rank()
    zbv = "bubble" in layout
    numbers = [rank, 3 - rank] if zbv else [rank]
    count, decoder = 2 * len(numbers), Decoder(model)
    parts = [Part(decoder, number, count) for number in numbers]
    stages: list[Any] = [
        PipelineStage(part, n, count, device) for n, part in zip(numbers, parts, strict=True)
    ]
    micro_batches = train.global_batch // train.micro_batch
    schedule: Any = (
        ScheduleZBVZeroBubble(stages, micro_batches, loss_fn=loss)
        if zbv
        else Schedule1F1B(stages[0], micro_batches, loss_fn=loss)
    )
    weights = [weight for part in parts for weight in part.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=train.lr, weight_decay=train.weight_decay, fused=True)
    tokens = samples(recipe, 1)

    def step() -> None:
        schedule.step(*([tokens] if 0 in numbers else []), target=tokens if count - 1 in numbers else None)
        square = torch.stack(
            [weight.grad.square().sum() for weight in weights if weight.grad is not None]
        ).sum()
        dist.all_reduce(square)
        torch.nn.utils.clip_grads_with_norm_(weights, train.clip_grad, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()

    return step


PEERS: dict[str, Callable[[Recipe, str, torch.device], Step]] = {
    "OLMo-core": olmo,
    "DeepSpeed": deepspeed,
    "torch pipelining": pipelining,
}
KNOWN = {
    "OLMo-core": {"single", "dp2", "zero3", "tp2"},
    "DeepSpeed": {"single", "dp2", "zero3"},
    "torch pipelining": {"pp2", "pp2 zero bubble"},
}


def quiet(make: Peer, device: torch.device) -> Step:
    """Peers log to the standard output, which is for the figures."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return make(device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("layouts", nargs="*", default=list(LAYOUTS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        overrides = (f"data.path={folder}/tokens", "data.dtype=uint32")
        recipe = load_recipe(arguments.recipe, overrides)
        make_tokens(recipe, folder / "tokens")
        for layout in arguments.layouts:
            world, keys = LAYOUTS[layout]
            wanted = load_recipe(
                arguments.recipe, (*overrides, *(f"parallel.{key}={value}" for key, value in keys.items()))
            )
            makers: dict[str, Peer] = {
                "hpcrun": partial(trainer_step, wanted, folder / f"{layout} run"),
                **{
                    name: partial(peer, recipe, layout)
                    for name, peer in PEERS.items()
                    if layout in KNOWN[name]
                },
            }
            compare(recipe, layout, world, makers, folder / layout, arguments.rounds)
    return 0


def compare(
    recipe: Recipe, layout: str, world: int, makers: dict[str, Peer], folder: Path, rounds: int
) -> None:
    """Measure one layout and print a line of JSON."""
    tokens = recipe.train.global_batch * recipe.model.sequence
    ready, failed = {}, {}
    for name, make in makers.items():
        try:
            ranks = Ranks(world, recipe, folder / name, partial(quiet, make))
            ranks.step()
            ready[name] = ranks
        except UserError as error:
            failed[name] = str(error).strip().splitlines()[-1]
    rates = {name: partial(rate, ranks, tokens) for name, ranks in ready.items()}
    result = interleave(layout, rates, "tokens/s", rounds)
    for ranks in ready.values():
        ranks.close()
    medians = {name: round(result.median(name).median) for name in ready}
    ratios = {name: round(result.ratio("hpcrun", name).median, 3) for name in ready if name != "hpcrun"}
    told = {"layout": layout, "tokens/s": medians, "hpcrun over": ratios, "failed": failed}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    sys.exit(main())
