"""Starting and following runs on the test cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from hpcrun.records import RunDir, read_json_lines
from tests.cluster import Cluster
from tests.installed import Installed

RECIPE = """\
name: cut
model: {layers: 4, hidden: 64, heads: 4, sequence: 64, vocab: 256}
parallel: {tp: 2, pp: 2, dp: 2}
train: {steps: 80, global_batch: 16, micro_batch: 2, warmup_steps: 10}
checkpoint: {every: 10}
resources: {nodes: 2, gpus_per_node: 4, time: 20m}
recovery: {node_timeout: 10}
"""


def start(cluster: Cluster, installed: Installed, recipe: str, name: str, *options: str) -> RunDir:
    """Submit ``recipe`` as the ordinary user; its data is Python's own library."""
    folder = cluster.shared / name
    cluster.run(["mkdir", "-p", str(folder)])
    tokens = cluster.shared / "tokens.bin"
    if not tokens.exists():
        prepare = [str(installed.python), "-P", "-m", "training.data.prepare", "--stdlib", str(tokens)]
        cluster.run(prepare, timeout=120)
    file = folder / "recipe.yaml"
    cluster.run(["tee", str(file)], input=recipe)
    command = [*installed.hpcrun, "submit", str(file), "--site", "testcluster", "--json"]
    command += ["--name", name, "--set", f"data.path={tokens}", *options]
    answer = json.loads(cluster.run(command, cwd=folder, timeout=120).stdout)
    return RunDir(folder / answer["path"])


def status(cluster: Cluster, installed: Installed, run: RunDir) -> dict[str, Any]:
    """What ``hpcrun status --json`` says."""
    told = cluster.run([*installed.hpcrun, "status", str(run.path), "--json"], timeout=60).stdout
    answer: dict[str, Any] = json.loads(told)
    return answer


def finish(cluster: Cluster, installed: Installed, run: RunDir, seconds: float = 240) -> dict[str, Any]:
    """Wait until the run has ended and return its last status."""
    last: dict[str, Any] = {}

    def ended() -> bool:
        last.update(status(cluster, installed, run))
        return last["state"] in ("completed", "failed", "cancelled", "lost")

    wait_until(ended, seconds, "the end of the run", cluster, run)
    return last


def step_of(run: RunDir) -> int:
    """The last step that the newest attempt has logged."""
    lines = list(read_json_lines(run.metrics(run.last_attempt())))
    return int(lines[-1]["step"]) if lines else 0


def wait_for_step(run: RunDir, step: int, seconds: float = 150) -> None:
    wait_until(lambda: step_of(run) >= step, seconds, f"step {step}", None, run)


def wait_until(
    condition: Callable[[], bool], seconds: float, what: str, cluster: Cluster | None, run: RunDir
) -> None:
    """Poll; with a cluster, lift the wait that Slurm puts on a requeued job, as a user may."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            queue = cluster.run(["scontrol", "show", "job"], check=False).stdout if cluster else ""
            raise AssertionError(f"waited {seconds} s for {what}; {queue}{_evidence(run)}")
        if cluster:
            _lift_requeue_wait(cluster)
        time.sleep(0.5)


def _lift_requeue_wait(cluster: Cluster) -> None:
    waiting = cluster.run(["squeue", "-h", "-t", "PD", "-o", "%i %r"], check=False).stdout
    for line in waiting.splitlines():
        job_id, _, reason = line.partition(" ")
        if reason == "BeginTime":
            cluster.run(["scontrol", "update", f"jobid={job_id}", "starttime=now"], check=False)


def _evidence(run: RunDir) -> str:
    tail = []
    for path in sorted(
        [*run.path.glob("events/*"), *run.path.glob("job/*.out"), *run.path.glob("logs/**/*.log")]
    ):
        text = path.read_text(errors="replace")[-600:]
        if text.strip():
            tail.append(f"--- {path.relative_to(run.path)}\n{text}")
    return "\n" + "\n".join(tail)
