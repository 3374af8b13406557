"""``hpcrun submit`` on a real Slurm: from odd places, with odd environments, preempted, out of time."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcrun.records import RunDir
from hpcrun.runs.story import read_events, read_metrics
from tests.cluster import Cluster
from tests.installed import Installed
from tests.slurm.runs import RECIPE, finish, start, status, step_of, wait_for_step, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

SMALL = ["--site", "testcluster", "--nodes", "2", "--set", "resources.ranks_per_node=2"]


def submit(
    cluster: Cluster, installed: Installed, folder: Path, *words: str, **env: str
) -> subprocess.CompletedProcess[str]:
    cluster.run(["mkdir", "-p", "--", str(folder)])
    command = [*installed.hpcrun, "submit", *words]
    return cluster.run(command, cwd=folder, env=env, check=False, timeout=90)


def submitted(cluster: Cluster, installed: Installed, folder: Path, *words: str, **env: str) -> RunDir:
    done = submit(cluster, installed, folder, *words, "--json", **env) if "--" not in words else None
    if done is None:
        at = words.index("--")
        done = submit(cluster, installed, folder, *words[:at], "--json", *words[at:], **env)
    assert done.returncode == 0, done.stderr
    return RunDir(Path(json.loads(done.stdout)["path"]))


def rank_logs(run: RunDir, attempt: int = 1) -> list[str]:
    return [path.read_text() for path in sorted(run.logs(attempt).glob("rank*.log"))]


ODD = {
    "clean": {},
    "from inside a job": {
        "SLURM_JOB_ID": "1",
        "SLURM_NNODES": "7",
        "SLURM_NTASKS": "9",
        "SLURM_MEM_PER_NODE": "1",
    },
    "sbatch variables": {"SBATCH_PARTITION": "nope", "SBATCH_TIMELIMIT": "1", "SBATCH_EXPORT": "NONE"},
    "python variables": {"PYTHONPATH": "/nowhere", "PYTHONSTARTUP": "/nowhere/x.py"},
}


@pytest.mark.parametrize("odd", ODD)
def test_a_command_runs_once_per_rank_whatever_the_callers_environment(
    cluster: Cluster, installed: Installed, odd: str
) -> None:
    """Field reports: submit-from-inside-a-job, sbatch-env-overrides-script, export-none-site."""
    folder = cluster.shared / f"odd {odd} $(x) 'q'"
    shown = "$RANK/$WORLD_SIZE $LOCAL_RANK $CUDA_VISIBLE_DEVICES [$1] [$2] $PYTHONNOUSERSITE ${SECRET:-none}"
    script = f'echo "{shown}"; pwd'
    words = [*SMALL, "--", "sh", "-c", script, "-", "a b,c", "$(id)"]
    run = submitted(cluster, installed, folder, *words, SECRET="s", **ODD[odd])
    assert finish(cluster, installed, run, 90)["state"] == "completed"
    expected = [f"{rank}/4 {rank % 2} 0,1,2,3 [a b,c] [$(id)] 1 none\n{folder}\n" for rank in range(4)]
    assert rank_logs(run) == expected


@pytest.mark.parametrize("name", ["-dash %j 100%", os.fsdecode(b"caf\xe9 'no text'")])
def test_paths_with_a_leading_dash_percent_signs_or_bytes_that_are_no_text(
    cluster: Cluster, installed: Installed, name: str
) -> None:
    """Field report: workdir-with-space."""
    folder = cluster.shared / name
    run = submitted(cluster, installed, folder, *SMALL, "--", "true")
    assert finish(cluster, installed, run, 90)["state"] == "completed"
    assert [path.name for path in run.job.glob("slurm-*.out")]


def test_a_dry_run_touches_nothing_and_prints_what_would_run(cluster: Cluster, installed: Installed) -> None:
    folder = cluster.shared / "dry"
    done = submit(cluster, installed, folder, *SMALL, "--dry-run", "--", "true")
    assert done.stdout.startswith("#!/bin/bash\n") and "hpcrun.node" in done.stdout
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--partition", "nope"], "invalid partition"),
        (["--time", "1:60:00"], "minutes or seconds above 59"),
        (["--nodes", "9"], "allows 4"),
        (["--set", "resources.tmie=3"], "did you mean 'resources.time'"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line_and_leaves_nothing(
    cluster: Cluster, installed: Installed, words: list[str], said: str
) -> None:
    """Field report: time-format-table."""
    folder = cluster.shared / "refused"
    done = submit(cluster, installed, folder, *SMALL, *words, "--", "true")
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert [*folder.glob("runs/*")] == []


def test_a_failing_command_fails_the_job_once_with_its_own_code(
    cluster: Cluster, installed: Installed
) -> None:
    """Field reports: success-subset, hidden-default-requeue."""
    run = submitted(
        cluster, installed, cluster.shared / "fails", *SMALL, "--", "sh", "-c", "[ $RANK != 3 ] || exit 7"
    )
    ended = finish(cluster, installed, run, 90)
    assert (ended["state"], ended["attempts"]) == ("failed", 1)
    assert cluster.wait_state(ended["job_id"], "FAILED")["ExitCode"] == "7:0"


def test_a_secret_reaches_the_ranks_but_neither_script_nor_slurm(
    cluster: Cluster, installed: Installed
) -> None:
    words = [*SMALL, "--set", "secrets=[API_KEY]", "--", "sh", "-c", "echo ${#API_KEY}"]
    run = submitted(cluster, installed, cluster.shared / "secret", *words, API_KEY="s3cr3t-value")
    ended = finish(cluster, installed, run, 90)
    assert rank_logs(run) == ["12\n"] * 4
    assert (
        "s3cr3t"
        not in cluster.run(
            ["scontrol", "write", "batch_script", str(ended["job_id"]), "-"], check=False
        ).stdout
    )
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cr3t-value" in path.read_bytes()]


def test_wait_ends_with_the_run(cluster: Cluster, installed: Installed) -> None:
    done = submit(cluster, installed, cluster.shared / "wait", *SMALL, "--wait", "--", "sleep", "3")
    assert done.returncode == 0 and "completed" in done.stdout
    failed = submit(cluster, installed, cluster.shared / "wait", *SMALL, "--wait", "--", "false")
    assert failed.returncode == 1 and "failed" in failed.stdout


def events(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == name]


def assert_saved_where_it_stopped(run: RunDir) -> None:
    """The second attempt goes on from the very step at which the first one stopped."""
    (asked,) = events(run, "stopping")
    first, second = events(run, "training_started")[:2]
    assert first["start_step"] == 0
    assert second["start_step"] == asked["step"] > 0
    steps = [line["step"] for line in read_metrics(run)]
    assert steps == list(range(1, second["total_steps"] + 1))


def test_a_preempted_run_saves_and_goes_on_where_it_stopped(cluster: Cluster, installed: Installed) -> None:
    """Field reports: preempt-mode-cancel, sigterm-ignored."""
    run = start(cluster, installed, RECIPE, "preempted", "--partition", "low")
    wait_for_step(run, 15)
    thief = ["sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "-t1", "--wrap", "sleep 5"]
    stolen = cluster.run(thief, cwd=cluster.shared).stdout.strip()
    wait_until(lambda: run.last_attempt() >= 2, 150, "a second attempt", cluster, run)
    assert finish(cluster, installed, run)["state"] == "completed"
    cluster.wait_state(stolen, ["COMPLETED"], 30)
    assert_saved_where_it_stopped(run)


def test_a_run_out_of_time_saves_before_the_limit_and_goes_on(cluster: Cluster, installed: Installed) -> None:
    """Field report: timeout-is-success; the lead is counted from the limit."""
    options = ["--time", "2", "--set", "recovery.save_margin=40s", "--set", "train.steps=400"]
    run = start(cluster, installed, RECIPE, "limit", *options)
    wait_until(lambda: run.last_attempt() >= 2, 200, "a second attempt", cluster, run)
    wait_until(lambda: bool(events(run, "training_started")[1:]), 60, "its start", None, run)
    (asked,) = events(run, "stopping")
    assert events(run, "training_started")[1]["start_step"] == asked["step"] > 0
    cluster.run([*installed.hpcrun, "cancel", str(run.path)])
    assert finish(cluster, installed, run)["state"] == "cancelled"


def test_a_killed_rank_is_replaced_within_the_allocation(cluster: Cluster, installed: Installed) -> None:
    """Field report: oom-kill-named."""
    run = start(cluster, installed, RECIPE, "killed")
    wait_for_step(run, 15)
    node = events(run, "attempt_started")[0]["nodes"][1]
    cluster.on_node(node, ["pkill", "-9", "-n", "-f", "[t]raining.zygote"])
    ended = finish(cluster, installed, run)
    assert (ended["state"], ended["attempts"], ended["job_id"]) == (
        "completed",
        2,
        status(cluster, installed, run)["job_id"],
    )
    assert "ended by signal 9" in events(run, "restarting")[0]["reason"]
    assert step_of(run) == 80


def test_an_admin_continues_a_run_by_hand(cluster: Cluster, installed: Installed) -> None:
    run = start(cluster, installed, RECIPE, "by-hand", "--set", "train.steps=40")
    wait_for_step(run, 15)
    cluster.run([*installed.hpcrun, "cancel", str(run.path)])
    assert finish(cluster, installed, run)["state"] == "cancelled"
    (run.control / "STOP").unlink()
    script = installed.site_packages / "hpcrun" / "_data" / "sbatch_templates" / "by-hand.sbatch"
    words = ["sbatch", "--parsable", "--nodes=2", "--time=10", str(script), str(run.path)]
    job = cluster.run(words, cwd=run.path, env={"HPCRUN_PYTHON": str(installed.python)}).stdout.strip()
    assert cluster.wait_state(job, ["COMPLETED", "FAILED"], 120)["JobState"] == "COMPLETED"
    assert [line["step"] for line in read_metrics(run)] == list(range(1, 41))
    assert events(run, "training_started")[-1]["start_step"] >= 10
