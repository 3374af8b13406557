"""The rendered batch script at work, with stand-ins for srun and scontrol."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcrun.launch.request import Options
from hpcrun.launch.submit import draft
from hpcrun.recipe import Recipe
from hpcrun.sites.model import Site

RUNNING = "JobId=42 JobState=RUNNING Reason=None Requeue=1 Restarts={} BatchFlag=1"


class Job:
    """A script and the machine it runs on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._slurm, self.tools = folder / "slurm", folder / "bin"
        self._slurm.mkdir()
        self.tools.mkdir()
        for tool in ("bash", "cat", "env", "hostname", "timeout"):
            (self.tools / tool).symlink_to(
                next(Path(p, tool) for p in ("/bin", "/usr/bin") if Path(p, tool).exists())
            )
        (self.tools / "sleep").symlink_to("/bin/true")
        self.shows(RUNNING.format(0))

    def command(self, name: str, body: str) -> None:
        """Put a small script in place of ``name``."""
        path = self._slurm / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def shows(self, job: str) -> None:
        """What ``scontrol show job`` says."""
        calls = self._folder / "scontrol.calls"
        self.command("scontrol", f"echo \"$*\" >> '{calls}'\n[ $1 = show ] && echo '{job}'\nexit 0")

    @property
    def requeued(self) -> bool:
        calls = self._folder / "scontrol.calls"
        return calls.exists() and "requeue 42\n" in calls.read_text()

    def run(
        self,
        code: int,
        *,
        word: int | None = None,
        restart: int = 0,
        word_of: int | None = None,
        env: Mapping[str, str] | None = None,
        **site: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run the script; srun ends with ``code``, and the first agent of ``word_of`` has left ``word``."""
        recipe = Recipe.model_validate({"command": ["true"], "recovery": {"max_requeues": 2}})
        item = draft(
            recipe, Site.model_validate({"name": "s"} | site), Options(runs=self._folder, snapshot=False)
        )
        item.run.job.mkdir(parents=True)
        answer = item.run.job / f"exit-42-{restart if word_of is None else word_of}"
        leave = f"echo {word} > '{answer}'; " if word is not None else ""
        self.command("srun", f"env > '{self._folder}/srun.env'; {leave}exit {code}")
        environment = {"PATH": f"{self._slurm}:{self.tools}", "SLURM_JOB_ID": "42"} | dict(env or {})
        if restart:
            environment["SLURM_RESTART_COUNT"] = str(restart)
        return subprocess.run(
            ["bash"], input=item.script, env=environment, capture_output=True, text=True, timeout=30
        )

    @property
    def stepped(self) -> bool:
        return (self._folder / "srun.env").exists()

    @property
    def step_environment(self) -> dict[str, str]:
        lines = (self._folder / "srun.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.chdir(tmp_path)
    return Job(tmp_path)


@pytest.mark.parametrize(
    ("code", "word", "requeued", "ends"),
    [
        (0, 0, False, 0),
        (0, 7, False, 7),
        (137, 0, False, 0),
        (1, 86, False, 86),
        (137, 85, True, 85),
        (137, None, True, 85),
        (0, None, False, 0),
    ],
)
def test_the_first_agents_word_decides_and_a_silent_death_requeues(
    job: Job, code: int, word: int | None, requeued: bool, ends: int
) -> None:
    """srun's own code tells of any node, also of one that was replaced. Field report: success-subset."""
    done = job.run(code, word=word)
    assert (done.returncode, job.requeued) == (ends, requeued), done.stderr


def test_the_word_of_an_earlier_start_does_not_count(job: Job) -> None:
    assert job.run(0, word=86, word_of=0, restart=1).returncode == 0


@pytest.mark.parametrize(
    "shown", ["", RUNNING.format(2), RUNNING.format(10), RUNNING.format(1).replace("RUNNING", "COMPLETING")]
)
def test_only_a_job_that_runs_in_this_very_restart_is_requeued(job: Job, shown: str) -> None:
    job.shows(shown)
    assert job.run(85, word=85, restart=1).returncode == 85
    assert not job.requeued
    job.shows(RUNNING.format(1))
    job.run(85, word=85, restart=1)
    assert job.requeued


def test_a_step_that_never_starts_is_not_requeued_for_ever(job: Job) -> None:
    job.shows(RUNNING.format(2))
    assert job.run(1, restart=2).returncode == 1
    assert not job.requeued


def test_variables_of_an_outer_job_do_not_reach_the_step(job: Job) -> None:
    """Field reports: submit-from-inside-a-job, submit-from-gpu-node-mutex-mem, export-none-site."""
    outer = {"SLURM_MEM_PER_CPU": "1", "SLURM_MEM_PER_GPU": "1", "SLURM_MEM_PER_NODE": "1"}
    outer |= {"SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_EXPORT_ENV": "NONE"}
    assert job.run(0, word=0, env=outer).returncode == 0
    assert not outer.keys() - {"SLURM_EXPORT_ENV"} & job.step_environment.keys()
    assert job.step_environment["SLURM_EXPORT_ENV"] == "ALL"


def module(body: str) -> dict[str, str]:
    """A ``module`` command as a shell function that the job inherits; $2 is the module's name."""
    return {"BASH_FUNC_module%%": f"() {{ {body}\n}}"}


LOADS = "export LOADEDMODULES=${LOADEDMODULES:+$LOADEDMODULES:}$2/1.0; export FROM_MODULE=$UNSET$2"


def test_modules_are_loaded_and_may_read_unset_variables(job: Job) -> None:
    done = job.run(0, word=0, env=module(LOADS), modules=["cuda", "it's"])
    assert done.returncode == 0, done.stderr
    assert job.step_environment["LOADEDMODULES"] == "cuda/1.0:it's/1.0"
    assert job.step_environment["FROM_MODULE"] == "it's"


@pytest.mark.parametrize("loaded", ["nope", "nope/2.1", "other:nope/2.1:third"])
def test_a_module_that_is_loaded_already_is_fine(job: Job, loaded: str) -> None:
    assert (
        job.run(0, word=0, env=module("true") | {"LOADEDMODULES": loaded}, modules=["nope"]).returncode == 0
    )


@pytest.mark.parametrize("body", ["echo 'no such module' >&2; return 0", f"{LOADS}; return 1"])
def test_a_module_that_is_missing_stops_the_job(job: Job, body: str) -> None:
    """Field report: module-purge-and-sticky; ``module load`` may report success."""
    done = job.run(0, env=module(body) | {"LOADEDMODULES": "nope2/1"}, modules=["nope"])
    assert done.returncode == 86 and "cannot load module nope on" in done.stderr
    assert not job.stepped


def test_without_the_modules_nothing_trains_under_another_python(job: Job) -> None:
    """Field report: module-command-missing; where there is no module command that is said."""
    done = job.run(0, modules=["no-such-module"])
    assert done.returncode == 86
    assert "no module command on" in done.stderr or "cannot load module no-such-module" in done.stderr
    assert not job.stepped


def test_a_module_that_unloads_slurm_does_no_harm(job: Job) -> None:
    """Field report: module-purge-and-sticky."""
    unloads = f"{LOADS}; PATH=${{PATH#*:}}"
    done = job.run(85, word=85, env=module(unloads), modules=["cuda"])
    assert job.requeued, done.stderr
    assert job.step_environment["PATH"] == str(job.tools)
