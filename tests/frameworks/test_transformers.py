"""What the trainer has trained computes the same in Hugging Face's transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from hpcrun.cli.ckpt import command
from hpcrun.recipe import Recipe
from tests.ranks import run_ranks
from tests.training.runs import checkpoints, recipe, train_on
from training.data.tokens import Samples
from training.launch import under_torchrun
from training.parallel.tensor import VocabParallelTable
from training.train import StopRequest, Trainer

pytestmark = pytest.mark.slow

GPT2 = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "biases": True}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_sequence": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "llama-tied-biased": {"tie_embeddings": True, "biases": True},
    "llama-scaled": {"rope_scaling": LLAMA3, "rope_base": 5e5},
    "llama-linear": {"rope_scaling": {"kind": "linear", "factor": 2.0}},
    "qwen3": {"qk_norm": True, "kv_heads": 2, "head_dim": 16},
    "gpt2": GPT2 | {"tie_embeddings": True},
    "gpt2-untied": GPT2,
}


def logits_of(wanted: Recipe, out: str) -> list[Any]:
    """Of the next global batch of a run, (samples, sequence, vocab)."""
    seen = []
    losses = VocabParallelTable.losses

    def recording(self: VocabParallelTable, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append((x.detach() @ self.weight.detach().t())[..., : self.held].transpose(0, 1))
        return losses(self, x, target)

    VocabParallelTable.losses = recording  # type: ignore[method-assign]
    trainer = Trainer(wanted, under_torchrun(os.environ, Path(out)), torch.device("cpu"), StopRequest())
    trainer._resume()
    trainer.parts.pipeline.run(trainer.parts.batches.cut(trainer._next_samples()), 1.0)
    logits: list[Any] = torch.cat(seen).tolist()
    return logits


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "tokens.bin"
    path.write_bytes(np.random.default_rng(3).integers(0, 61, 4000, dtype=np.uint8).tobytes())
    return path


@pytest.mark.parametrize("name", MODELS)
def test_the_exported_model_has_the_same_logits(tokens: Path, tmp_path: Path, name: str) -> None:
    """Field report: export-from-tp-shards. The run trains with tp 2 and pp 2, so nothing is in one place."""
    transformers = pytest.importorskip("transformers")
    common: dict[str, dict[str, Any]] = {
        "model": MODELS[name],
        "train": {"steps": 3},
        "data": {"path": str(tokens)},
    }
    run_ranks(4, train_on, recipe(tokens, parallel={"tp": 2, "pp": 2}, **common), str(tmp_path / "run"))
    last = tmp_path / "run" / "checkpoints" / checkpoints(tmp_path / "run")[-1]
    words = ["export", "--to", "hf", str(last), str(tmp_path / "hf"), "--max-shard-size", "20KB"]
    done = CliRunner().invoke(command, words, standalone_mode=False)
    assert done.exception is None

    wanted = recipe(tokens, **common)
    (ours,) = run_ranks(1, logits_of, wanted, str(tmp_path / "run"))
    batch = Samples(wanted).batch(3 * wanted.train.global_batch, wanted.train.global_batch)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        theirs = model(batch[:, :-1]).logits
    assert torch.tensor(ours).shape == theirs.shape
    assert (torch.tensor(ours) - theirs).abs().max() < 1e-5
    assert theirs.std() > 0.05


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_goes_on_training_here(tokens: Path, tmp_path: Path, name: str) -> None:
    """Saved by transformers itself, imported, and the first loss is the one that transformers computes."""
    transformers = pytest.importorskip("transformers")
    wanted = recipe(tokens, model=MODELS[name], train={"steps": 1})
    run_ranks(1, train_on, wanted, str(tmp_path / "run"))
    last = tmp_path / "run" / "checkpoints" / checkpoints(tmp_path / "run")[-1]
    invoke = CliRunner().invoke
    invoke(command, ["export", "--to", "hf", str(last), str(tmp_path / "once")], standalone_mode=False)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "once")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "hf")
    words = ["import", "--from", "hf", str(tmp_path / "hf"), str(tmp_path / "start")]
    done = invoke(command, words, standalone_mode=False)
    assert done.exception is None, done.exception

    from hpcrun.config import parse_yaml
    from hpcrun.recipe import recipe_from

    printed = recipe_from(parse_yaml(done.output, "printed"), (), tmp_path)
    begun = wanted.model_copy(update={"model": printed.model, "checkpoint": printed.checkpoint})
    ours = torch.tensor(run_ranks(1, logits_of, begun, str(tmp_path / "new"))[0])
    batch = Samples(wanted).batch(0, wanted.train.global_batch)
    model.eval()
    with torch.no_grad():
        theirs = model(batch[:, :-1]).logits
    assert (ours - theirs).abs().max() < 1e-5
