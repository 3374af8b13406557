"""Run directories as agents and trainers leave them, and Slurm's commands, without any of them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrun.recipe import Recipe
from hpcrun.records import CLAIM, RESUMED, JsonLines, RunDir, checkpoint_name, claim_attempt, replace_text
from hpcrun.runs.runfile import RunFile, Versions, run_file_text
from hpcrun.sites.model import Scheduler, Site

_RECIPE = {"train": {"steps": 80}, "resources": {"nodes": 2, "ranks_per_node": 2}}


class MadeRun:
    """A run directory whose clock only this test moves."""

    def __init__(
        self,
        runs: Path,
        name: str = "tiny-0000abcd",
        kind: str = "slurm",
        recipe: dict[str, Any] | None = None,
    ) -> None:
        self.run = RunDir(runs / name)
        for part in ("job", "control", "attempts", "events", "metrics", "logs", "checkpoints"):
            (self.run.path / part).mkdir(parents=True)
        file = RunFile(
            run=name,
            created="2026-01-01T00:00:00Z",
            nonce="n",
            versions=Versions(schema=1, hpcrun="0", python="3"),
            interpreter=sys.executable,
            working_dir=str(runs),
            nodes=2,
            ranks_per_node=2,
            site=Site(name="test", scheduler=Scheduler.model_validate({"kind": kind})),
            recipe=Recipe.model_validate(_RECIPE | (recipe or {})),
        )
        self.run.run_yaml.write_text(run_file_text(file))
        self._kind = kind
        self.now = time.time() - 10_000
        """Seconds since the epoch, as the run's files have them."""
        self.job_id = ""
        self.restart = 0
        self.attempt = 0

    def job(self, job_id: str) -> None:
        """A job was submitted."""
        self.job_id, self.restart = job_id, 0
        log = JsonLines(self.run.job / "jobs.jsonl")
        log.write(time=self.now, job_id=job_id, kind=self._kind)
        log.close()

    def event(self, event: str, host: str = "c1", at: float | None = None, **fields: Any) -> None:
        """One line of the agent on ``host``."""
        self._write(f"{host}-{self.job_id}-{self.restart}", event, at, host=host, **fields)

    def trainer(self, event: str, **fields: Any) -> None:
        self._write("trainer", event, None, **fields)

    def _write(self, writer: str, event: str, at: float | None, **fields: Any) -> None:
        log = JsonLines(self.run.events(self.attempt, writer))
        log.write(time=self.now if at is None else at, event=event, attempt=self.attempt, **fields)
        log.close()

    def start(self, nodes: tuple[str, ...] = ("c1", "c2"), from_step: int = 0) -> None:
        """The next attempt is claimed and its trainer has loaded its checkpoint."""
        claimed = claim_attempt(self.run, job_id=self.job_id, restart=self.restart)
        assert claimed
        self.attempt = claimed[0]
        claim = {"claim": claimed[1], "time": self.now, "job_id": self.job_id, "restart": self.restart}
        replace_text(self.run.attempt(self.attempt) / CLAIM, json.dumps(claim))
        self.event("attempt_started", nodes=list(nodes), world=4, reason="first start")
        for node in nodes:
            self.event("ranks_started", host=node, first_rank=0, ranks=2)
        replace_text(self.run.attempt(self.attempt) / RESUMED, json.dumps({"step": from_step}))
        folder = checkpoint_name(from_step, self.attempt) if from_step else None
        self.trainer("training_started", start_step=from_step, total_steps=80, checkpoint=folder)

    def steps(self, first: int, last: int, seconds: float = 1.0) -> None:
        """Steps ``first`` to ``last`` are logged, ``seconds`` apart."""
        log = JsonLines(self.run.metrics(self.attempt))
        for step in range(first, last + 1):
            self.now += seconds
            log.write(time=self.now, attempt=self.attempt, step=step, loss=9.0 / step, tokens_per_s=100.0)
        log.close()

    def checkpoint(self, step: int) -> None:
        folder = self.run.checkpoints / checkpoint_name(step, self.attempt)
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")

    def finish(self, code: int, reason: str) -> None:
        self.event("finished", code=code, reason=reason)

    def log(self, rank: int, text: str) -> None:
        """What a rank of the newest attempt printed so far."""
        path = self.run.rank_log(self.attempt, rank)
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(text)


class StandIns:
    """Slurm's commands as small shell scripts, first on PATH; each call is noted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder / "slurm-bin"
        self._folder.mkdir()
        self._calls = folder / "calls"
        self._calls.touch()
        monkeypatch.setenv("PATH", f"{self._folder}:/usr/bin:/bin")
        for name in ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo", "srun"):
            self.says(name, "", code=0)

    def says(self, name: str, out: str, err: str = "", code: int = 0, first: str = "") -> None:
        """``name`` prints this and exits so, after the shell line ``first``."""
        lines = ["#!/bin/sh", f"printf '%s\\n' \"{name} $*\" >> '{self._calls}'", first]
        lines += ["cat <<'END'", out, "END"] if out else []
        lines += ["cat >&2 <<'END'", err, "END"] if err else []
        path = self._folder / name
        path.write_text("\n".join([*lines, f"exit {code}", ""]))
        path.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        return [line for line in self._calls.read_text().splitlines() if line.split()[0] == name]

    def job(self, state: str, reason: str = "None", restarts: int = 0, nodes: str = "(null)") -> None:
        """scontrol knows the job."""
        self.says(
            "scontrol",
            f"JobId=7 JobName=tiny JobState={state} Reason={reason} Restarts={restarts} "
            f"TimeLimit=01:00:00 EndTime=Unknown NodeList={nodes}",
        )

    def forgotten(self, accounting: str | None = None) -> None:
        """slurmctld has forgotten the job; ``accounting`` is a row of sacct, None without accounting."""
        self.says("scontrol", "", "slurm_load_jobs error: Invalid job id specified", 1)
        if accounting is None:
            self.says("sacct", "", "Slurm accounting storage is disabled", 1)
        else:
            self.says("sacct", accounting)

    def silent(self) -> None:
        refused = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
        for name in ("scontrol", "squeue", "scancel", "sbatch"):
            self.says(name, "", refused, 1)
