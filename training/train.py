"""The training loop of one rank. Read it from top to bottom."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcrun.config import Document, load_yaml, validate
from hpcrun.errors import UserError
from hpcrun.layout import Layout, make_layout
from hpcrun.recipe import Recipe
from hpcrun.records import EXIT_DONE, EXIT_REQUEUE, EXIT_STOP, RESUMED, JsonLines, replace_text, write_event
from training.assemble import assemble
from training.checkpoint.load import Restored, begin_with, newest_step, restore
from training.checkpoint.local import LocalTensor
from training.checkpoint.memory import memory_tier
from training.checkpoint.saver import SaveError
from training.data.tokens import Samples
from training.launch import Launch, choose_device, join, under_agent
from training.model.micro_batch import MicroBatch
from training.monitor.heartbeat import Heartbeat
from training.monitor.memory import peak_memory
from training.monitor.stopwatch import PHASES, lap, watch
from training.monitor.utilisation import Utilisation, device_name, product_type
from training.optim.adamw import learning_rate, set_step, update
from training.parallel.collectives import all_reduce_
from training.parallel.mesh import Mesh
from training.saves import Saves
from training.state import RandomState, local_tensors


class StopRequest:
    """Set by SIGUSR2 or SIGTERM: save at the next step boundary and end. SIGUSR1 is NCCL's."""

    def __init__(self) -> None:
        self.wanted = False
        for signum in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(signum, self._note)

    def _note(self, *_: object) -> None:
        self.wanted = True


@dataclass(frozen=True)
class Totals:
    """A step's sums over all ranks."""

    loss: float
    grad_norm: float
    stop: bool
    save: bool
    """A checkpoint is due after this step."""
    saved: bool
    """The save in flight has ended, well or badly."""
    kept: bool
    """All ranks have ended their copy in memory."""
    expert_imbalance: float | None
    """The busiest expert's tokens over the fair share, mean over blocks and micro-batches."""


class Trainer:
    """Model, optimizer, data and records of one rank.

    ``consumed`` counts samples of the endless order: it, not the step, is the place in the data,
    because a resumed run may have another global batch.
    """

    def __init__(self, recipe: Recipe, launch: Launch, device: torch.device, stop: StopRequest) -> None:
        self.recipe, self.launch, self.stop = recipe, launch, stop
        self.layout = _layout(recipe, launch.world)
        self.heartbeat = Heartbeat(launch.heartbeats, launch.rank)
        self.heartbeat.beat("start", 0)
        timeout = timedelta(seconds=recipe.recovery.collective_timeout)
        self.mesh = Mesh(self.layout, launch.rank, device, timeout, recipe)
        self.parts = assemble(recipe, self.mesh)
        self.samples = Samples(recipe)
        products = product_type(recipe.train.precision, device)
        self.utilisation = Utilisation(recipe.model, device_name(device), products, launch.world)
        self.random = RandomState(launch.rank, device)
        self.step = self.consumed = 0
        leads = launch.rank == 0
        self.events = JsonLines(launch.run.events(launch.attempt, "trainer")) if leads else None
        self.metrics = JsonLines(launch.metrics) if leads else None
        self.saves = Saves(recipe, launch, self.layout, self._event)
        self.memory = memory_tier(recipe, launch, self.mesh)
        self.loss: float | None = None

    def train(self) -> int:
        """Train to the last step, or until asked to stop. Returns the exit code."""
        try:
            return self._train()
        finally:
            self.saves.drain()

    def _train(self) -> int:
        self._resume()
        steps = self.recipe.train.steps
        while self.step < steps:
            totals = self.train_step()
            last = self.step == steps
            if totals.saved:
                self.saves.conclude()
            if totals.stop and not last:
                self._event("stopping", step=self.step)
            if last or totals.stop or totals.save:
                self._save(must=last or totals.stop)
            self._keep(totals.kept)
            if totals.stop and not last:
                return EXIT_REQUEUE
        self._event("training_finished", step=self.step)
        self.heartbeat.beat("done", self.step)
        return EXIT_DONE

    def train_step(self) -> Totals:
        """One optimizer step."""
        lap()
        began = time.monotonic()
        train, parts = self.recipe.train, self.parts
        self.heartbeat.beat("step", self.step + 1)
        parts.noise.step = self.step + 1
        with watch("data"):
            batch = parts.batches.cut(self._next_samples())
            targets = self._targets(batch)
        with self._precision():
            loss = parts.pipeline.run(batch, 1.0 / targets)
        totals = self._totals(loss / targets)
        if not math.isfinite(totals.grad_norm):
            raise FloatingPointError(
                f"step {self.step + 1}: the gradient norm is {totals.grad_norm}; "
                "lower train.lr or train.clip_grad"
            )
        lr = learning_rate(self.step + 1, train)
        clip = min(1.0, train.clip_grad / (totals.grad_norm + 1e-6)) if train.clip_grad else 1.0
        with watch("optimizer"):
            update(parts.optimizer, parts.sharding.shards, lr, clip)
            parts.sharding.publish()
        self.step += 1
        self.consumed += train.global_batch
        self.loss = totals.loss
        self._log(totals, lr, time.monotonic() - began)
        return totals

    def _next_samples(self) -> torch.Tensor:
        """This data parallel rank's share of the next global batch."""
        share = self.recipe.train.global_batch // self.layout.dp
        return self.samples.batch(self.consumed + self.mesh.at.dp * share, share)

    def _targets(self, batch: list[MicroBatch]) -> int:
        """Targets of the global batch that count: each weighs the same, wherever it is computed."""
        if self.recipe.data.document_end is None:
            return self.recipe.train.global_batch * self.recipe.model.sequence
        mine = torch.tensor(sum(one.counted for one in batch), device=self.mesh.device)
        return max(1, int(all_reduce_(mine, self.mesh.data)))

    def _totals(self, loss: torch.Tensor) -> Totals:
        """What all ranks have to agree on, in one sum over the world."""
        first = self.mesh.at.tp == 0
        imbalance, terms = self.parts.load.take() if first else (0.0, 0)
        kept = self.memory is not None and self.memory.ready
        asked = [self.stop.wanted, self.saves.due(self.step + 1), self.saves.decided, kept]
        told = [*map(float, asked), imbalance, float(terms)]
        mine = torch.cat(
            [
                loss.view(1) if first else torch.zeros_like(loss.view(1)),
                self.parts.sharding.square().view(1),
                torch.tensor(told, dtype=torch.float64, device=self.mesh.device),
            ]
        )
        with watch("communication"):
            if self.layout.world > 1:
                dist.all_reduce(mine)
            total, square, stop, save, saved, keeping, imbalance, terms = mine.tolist()
        norm = math.sqrt(square) if square >= 0 else math.nan
        kept = keeping == self.layout.world
        return Totals(total, norm, stop > 0, save > 0, saved > 0, kept, imbalance / terms if terms else None)

    def _precision(self) -> torch.autocast | nullcontext[None]:
        """bf16 computes matrix products in bf16; weights, norms, loss and gradients stay fp32."""
        if self.recipe.train.precision == "bf16":
            return torch.autocast(self.mesh.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _resume(self) -> None:
        """Continue from memory, or the newest checkpoint that verifies, or start from the seed."""
        self.heartbeat.beat("load", 0)
        run, tensors = self.launch.run, self._state()
        checkpoint = self._from_memory(tensors) or self._from_disk(tensors)
        if self.launch.rank == 0:
            replace_text(run.attempt(self.launch.attempt) / RESUMED, json.dumps({"step": self.step}) + "\n")
        self._event(
            "training_started",
            layout=asdict(self.layout),
            world=self.layout.world,
            start_step=self.step,
            total_steps=self.recipe.train.steps,
            checkpoint=checkpoint,
        )

    def _from_memory(self, tensors: list[LocalTensor]) -> str | None:
        if self.memory is None:
            return None
        restored = self.memory.restore(self.launch.run, tensors, newest_step(self.launch.run))
        if restored:
            self._go_on(restored.step, restored.state, restored.layout)
        if reason := self.memory.lacks_room(tensors):
            self._event("memory_copy_skipped", step=self.step, reason=reason)
            self.memory = None
        return "memory" if restored else None

    def _from_disk(self, tensors: list[LocalTensor]) -> str | None:
        """The name of the checkpoint, or the folder whose weights the run begins with; None for the seed."""
        model, init = self.recipe.model.model_dump(), self.recipe.checkpoint.init
        restored = restore(self.launch.run, model, tensors)
        if restored:
            self._compare(restored)
            self._go_on(restored.step, restored.state, restored.layout)
            for name, reason in restored.rejected:
                self._event("checkpoint_rejected", folder=name, reason=reason)
            return restored.folder.name
        if init:
            begin_with(Path(init), model, tensors)
            self.parts.sharding.publish()
        return init

    def _go_on(self, step: int, state: dict[str, Any], layout: dict[str, int]) -> None:
        """After the tensors have been filled: everything else."""
        self.step, self.consumed = step, state["samples"]
        set_step(self.parts.optimizer, step)
        self.parts.sharding.publish()
        if layout == asdict(self.layout):
            self.random.apply()

    def _compare(self, restored: Restored) -> None:
        """Refuse other data than the checkpoint's run had; tell of other changes in how it trains.

        Raises:
            UserError: the data differ, and ``data.allow_change`` is not set.
        """
        data = changes("data", restored.state["data"], self.samples.identity)
        if data and not self.recipe.data.allow_change:
            raise UserError(
                f"{restored.folder.name} was trained on other data: {', '.join(data)}; put the old data "
                "back, or set data.allow_change to go on with these"
            )
        changed = data + changes("train", restored.state["train"], self.recipe.train.model_dump())
        if changed:
            self._event("recipe_changed", changes=changed)

    def _save(self, must: bool) -> None:
        """Save now; in the background unless it ``must`` be on disk before the run goes on."""
        self.heartbeat.beat("save", self.step)
        self.saves.save(self.step, self._facts(), self._state(), must)

    def _keep(self, ready: bool) -> None:
        """Copy the state to memory, if it is time and all ranks are ``ready``."""
        every = self.recipe.checkpoint.memory_every
        if self.memory is None or not every or self.step % every:
            return
        if ready:
            self.memory.start(self.step, self._facts(), self._state())
        else:
            reason = self.memory.failure or "the copy before has not ended on all ranks"
            self._event("memory_copy_skipped", step=self.step, reason=reason)

    def _facts(self) -> dict[str, Any]:
        """State that is no tensor."""
        return {
            "step": self.step,
            "samples": self.consumed,
            "loss": self.loss,
            "data": self.samples.identity,
            "train": self.recipe.train.model_dump(),
        }

    def _state(self) -> list[LocalTensor]:
        """Weights, moments and generators of now."""
        self.random.refresh()
        return local_tensors(self.parts.sharding.shards, self.parts.optimizer, self.random)

    def _log(self, totals: Totals, lr: float, seconds: float) -> None:
        """One line of metrics. loss: mean over the targets of the global batch, in nats."""
        train, model = self.recipe.train, self.recipe.model
        phases = lap()
        if self.metrics is None or (self.step % train.log_every and self.step != train.steps):
            return
        tokens = train.global_batch * model.sequence
        self.metrics.write(
            time=time.time(),
            attempt=self.launch.attempt,
            step=self.step,
            loss=totals.loss,
            grad_norm=totals.grad_norm,
            lr=lr,
            tokens=self.consumed * model.sequence,
            tokens_per_s=tokens / seconds,
            **self.utilisation.of(tokens / seconds),
            step_s=seconds,
            **{f"{phase}_s": round(phases[phase], 6) for phase in PHASES},
            peak_memory_bytes=peak_memory(self.mesh.device),
            **({"expert_imbalance": totals.expert_imbalance} if model.moe else {}),
        )

    def _event(self, event: str, **fields: object) -> None:
        if self.events is not None:
            write_event(self.events, event, attempt=self.launch.attempt, host=socket.gethostname(), **fields)


def main_from_environment() -> int:
    """A rank that hpcrun's agent has started: everything it needs stands in its environment."""
    stop = StopRequest()

    def run() -> int:
        launch = under_agent(os.environ)
        recipe = recipe_of_run(load_yaml(launch.run.run_yaml))
        device = choose_device(recipe, launch.local_rank)
        join(launch.rank, launch.world, device, timedelta(seconds=recipe.recovery.collective_timeout))
        return Trainer(recipe, launch, device, stop).train()

    return guarded(run)


def guarded(run: Callable[[], int]) -> int:
    """Run a rank; an exit code for whatever happens, and its reason as the last line of the log."""
    try:
        return run()
    except (UserError, SaveError) as error:
        code, reason = EXIT_STOP, str(error)
    except Exception as error:  # noqa: BLE001 - the reason must reach the log whatever it is
        place = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"
        code, reason = 1, f"{place}: {type(error).__name__}: {error}"
        with suppress(OSError):
            traceback.print_exc()
    with suppress(OSError):  # the log may lie on a full disk
        print(f"hpcrun: {reason}", file=sys.stderr)
    return code


def recipe_of_run(document: Document) -> Recipe:
    """The ``recipe`` section of a run.yaml.

    Raises:
        UserError: there is none, or it is not valid.
    """
    section = document.data.get("recipe")
    if not isinstance(section, dict):
        raise UserError(f"{document.source}: no recipe section: not a run.yaml")
    lines = {path[1:]: line for path, line in document.lines.items() if path[:1] == ("recipe",)}
    return validate(Document(document.source, section, lines), Recipe)


def changes(section: str, before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """``section.key old -> new`` of every key whose value differs."""
    return [
        f"{section}.{key} {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(set(before) | set(now))
        if before.get(key) != now.get(key)
    ]


def _layout(recipe: Recipe, world: int) -> Layout:
    try:
        return make_layout(recipe, world)
    except ValueError as error:
        raise UserError(str(error)) from error
