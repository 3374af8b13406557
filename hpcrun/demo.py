"""``hpcrun demo``: the whole arc on one machine, without Slurm and without a GPU.

Builds a data set from Python's own library, trains a small GPT on four ranks (two
tensor parallel x two pipeline stages), kills one rank on the way, and shows how
the run went on.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from hpcrun.datafiles import data_folder
from hpcrun.errors import UserError
from hpcrun.launch.request import Options
from hpcrun.launch.submit import draft, submit
from hpcrun.manifest import checkpoints_newest_first
from hpcrun.recipe import load_recipe
from hpcrun.records import RunDir
from hpcrun.runs.story import read_events, read_metrics
from hpcrun.sites.registry import find_site

_POLL = 0.3
_LONGEST = 600.0
Say = Callable[[str], None]


def prepare_tokens(folder: Path) -> Path:
    """A token file of the bytes of Python's standard library, made once.

    Raises:
        UserError: the trainer's packages are not installed.
    """
    tokens = folder / "stdlib.bin"
    if not tokens.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "training.data.prepare", "--stdlib", str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise UserError(f"the data set could not be made: {done.stderr.strip() or done.stdout.strip()}")
    return tokens


def start(folder: Path, tokens: Path) -> RunDir:
    """Submit the demo's recipe to the ``local`` site."""
    recipe = load_recipe(data_folder("recipes") / "demo.yaml", (f"data.path={tokens}",))
    site, _ = find_site("local")
    drafted = draft(recipe, site, Options(runs=folder, snapshot=False))
    submit(drafted)
    return drafted.run


def follow(run: RunDir, say: Say) -> None:
    """Say each logged step and kill one rank once the run has something to resume from.

    Raises:
        UserError: the run failed or did not end in time.
    """
    killed = False
    deadline = time.monotonic() + _LONGEST
    for step, line in _new_lines(run, deadline):
        say(line)
        if not killed and step >= _kill_step(run):
            killed = True
            victim = _ranks(run)[-1]
            say(f"  -> killing one of the four ranks (pid {victim.pid}) with SIGKILL, as the OOM killer does")
            victim.kill()
    ended = _end(run)
    if ended is None or ended["code"] != 0:
        reason = ended["reason"] if ended else f"no end after {_LONGEST:.0f} s"
        raise UserError(f"the demo did not finish: {reason}; see {run.path}/logs")


def _new_lines(run: RunDir, deadline: float) -> Iterator[tuple[int, str]]:
    seen: set[tuple[int, int]] = set()
    while time.monotonic() < deadline:
        over = _end(run) is not None
        for line in read_metrics(run):
            key = (line["attempt"], line["step"])
            if key not in seen:
                seen.add(key)
                yield (
                    line["step"],
                    (
                        f"  attempt {line['attempt']}  step {line['step']:4d}  loss {line['loss']:.4f}  "
                        f"grad norm {line['grad_norm']:.3f}  {line['tokens_per_s']:,.0f} tokens/s"
                    ),
                )
        if over:
            return
        time.sleep(_POLL)


def _kill_step(run: RunDir) -> float:
    """Two steps beyond the first checkpoint, so that the restart has steps to repeat."""
    newest = next(checkpoints_newest_first(run), None)
    return newest[0] + 2 if newest else float("inf")


def _ranks(run: RunDir) -> list[psutil.Process]:
    """The rank processes of this run: the children of its warm parent."""
    found = []
    for agent in psutil.process_iter(["cmdline"]):
        command = agent.info["cmdline"] or []
        if "hpcrun.node" in command and str(run.path) in command:
            found += [rank for parent in agent.children() for rank in parent.children()]
    if not found:
        raise UserError(f"no rank of {run.name} is alive; see {run.path}/logs")
    return sorted(found, key=lambda process: process.pid)


def _end(run: RunDir) -> dict[str, object] | None:
    return next((event for event in read_events(run) if event["event"] == "finished"), None)


def loss_curve(run: RunDir, width: int = 64, height: int = 10) -> list[str]:
    """The loss over the steps as lines of text."""
    losses = [float(line["loss"]) for line in read_metrics(run)]
    columns = min(width, len(losses))
    means = []
    for column in range(columns):
        part = losses[column * len(losses) // columns : (column + 1) * len(losses) // columns]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    rows = [round((high - value) / span * (height - 1)) for value in means]
    lines = []
    for row in range(height):
        label = high - span * row / (height - 1)
        lines.append(f"  {label:6.3f} |" + "".join("*" if at == row else " " for at in rows))
    return [*lines, "         +" + "-" * columns, f"          step 1 .. {len(losses)}"]
