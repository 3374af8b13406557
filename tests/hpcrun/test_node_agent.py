"""One agent on this machine, from a run directory to its exit code, with commands as ranks."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrun.recipe import Recipe
from hpcrun.records import EXIT_REQUEUE, EXIT_STOP, RunDir, read_json_lines
from hpcrun.runs.runfile import RunFile, Versions, run_file_text
from hpcrun.sites.model import Scheduler, Site

RANKS = 3


def make_run(folder: Path, script: str, **fields: Any) -> RunDir:
    run = RunDir(folder / "agent-0000abcd")
    for part in (run.job, run.control, run.attempts, run.logs(1)):
        part.mkdir(parents=True)
    (run.job / "token").write_text("ab" * 32)
    recovery = {"node_timeout": 4, "start_timeout": 20} | fields.pop("recovery", {})
    recipe = {"command": ["/bin/sh", "-c", script], "recovery": recovery}
    file = RunFile(
        run=run.name,
        created="2026-01-01T00:00:00Z",
        nonce="n",
        versions=Versions(schema=1, hpcrun="0", python="3"),
        interpreter=sys.executable,
        working_dir=str(folder),
        nodes=fields.pop("nodes", 1),
        ranks_per_node=RANKS,
        site=Site(name="local", scheduler=Scheduler(kind="local")),
        recipe=Recipe.model_validate(recipe),
        **fields,
    )
    run.run_yaml.write_text(run_file_text(file))
    return run


started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def no_agent_is_left() -> Iterator[None]:
    """A failed assertion must not leave an agent behind that holds the output of the tests open."""
    yield
    while started:
        process = started.pop()
        process.kill()
        process.communicate()


def agent(run: RunDir, **env: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "hpcrun.node", str(run.path)],
        env=os.environ | {"SUBMITIT_LOCAL_JOB_ID": str(os.getpid()), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started.append(process)
    return process


def run_to_end(run: RunDir, **env: str) -> int:
    process = agent(run, **env)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    return process.returncode


def events(run: RunDir) -> list[dict[str, Any]]:
    found = [event for path in run.path.glob("events/*") for event in read_json_lines(path)]
    return sorted(found, key=lambda event: event["time"])


def log(run: RunDir, attempt: int, rank: int) -> str:
    return run.rank_log(attempt, rank).read_text()


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.02)


def test_every_rank_gets_its_place_and_the_run_ends_well(tmp_path: Path) -> None:
    """Field report: local-rank-missing-makes-many-rank0."""
    run = make_run(
        tmp_path, "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $HPCRUN_ATTEMPT"
    )
    assert run_to_end(run) == 0
    assert [log(run, 1, rank).split() for rank in range(RANKS)] == [
        [str(rank), str(rank), "3", "3", "127.0.0.1", "1"] for rank in range(RANKS)
    ]
    assert events(run)[-1]["event"] == "finished"
    with (run.job / f"{os.getpid()}_0_result.pkl").open("rb") as file:
        assert pickle.load(file) == ("success", 0)  # noqa: S301 - submitit's own format, written by us


def test_a_killed_rank_restarts_all_within_the_allocation(tmp_path: Path) -> None:
    """Field report: one-rank-dies-others-wait."""
    script = (
        "if [ $HPCRUN_ATTEMPT = 1 ]; then if [ $RANK = 1 ]; then kill -9 $$; fi; sleep 1000; fi; echo again"
    )
    run = make_run(tmp_path, script, recovery={"max_restarts": 2})
    assert run_to_end(run) == 0
    assert [log(run, 2, rank) for rank in range(RANKS)] == ["again\n"] * RANKS
    told = [event for event in events(run) if event["event"] == "restarting"]
    assert told[0]["reason"] == "rank 1 on localhost ended by signal 9"


def test_a_failing_command_is_not_repeated_unasked_and_its_code_is_the_jobs(tmp_path: Path) -> None:
    """Field reports: success-subset, hidden-default-requeue."""
    run = make_run(tmp_path, "[ $RANK = 2 ] && exit 7; sleep 1000")
    assert run_to_end(run) == 7
    assert run.last_attempt() == 1


@pytest.mark.parametrize("signum", [signal.SIGUSR2, signal.SIGTERM])
def test_a_notice_reaches_the_ranks_as_usr2_and_the_job_is_given_back(tmp_path: Path, signum: int) -> None:
    """Field report: sigterm-ignored."""
    script = "trap 'echo saved; exit 85' USR2; echo ready; while :; do sleep 0.1; done"
    run = make_run(tmp_path, script, recovery={"max_requeues": 1})
    process = agent(run)
    wait_for(lambda: all(run.rank_log(1, r).exists() and "ready" in log(run, 1, r) for r in range(RANKS)))
    process.send_signal(signum)
    assert process.wait(timeout=30) == EXIT_REQUEUE
    assert all("saved" in log(run, 1, rank) for rank in range(RANKS))


def test_ranks_never_outlive_a_killed_agent(tmp_path: Path) -> None:
    run = make_run(tmp_path, "echo $$; exec sleep 1000")
    process = agent(run)
    wait_for(lambda: all(run.rank_log(1, r).exists() and log(run, 1, r).strip() for r in range(RANKS)))
    pids = [int(log(run, 1, rank)) for rank in range(RANKS)]
    process.kill()
    process.wait()
    wait_for(lambda: not any(_alive(pid) for pid in pids))


def test_of_two_jobs_on_one_run_the_second_ends_quietly(tmp_path: Path) -> None:
    """Field report: resume-auto-first-run."""
    run = make_run(tmp_path, "trap 'exit 0' USR2; echo ready; while :; do sleep 0.1; done")
    first = agent(run)
    wait_for(lambda: run.rank_log(1, 0).exists() and "ready" in log(run, 1, 0))
    other = subprocess.Popen(["/bin/sleep", "1000"])
    try:
        assert run_to_end(run, SUBMITIT_LOCAL_JOB_ID=str(other.pid)) == 0
    finally:
        other.kill()
        other.wait()
    assert run.last_attempt() == 1
    assert any(event["event"] == "run_is_held" for event in events(run))
    first.send_signal(signal.SIGUSR2)
    assert first.wait(timeout=30) == 0


def test_secrets_reach_the_ranks_and_nothing_else(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"WANDB_API_KEY": "s3cr3t"}')
    secret.chmod(0o600)
    run = make_run(tmp_path, "test ${#WANDB_API_KEY} = 6", secrets_file=str(secret))
    assert run_to_end(run) == 0
    written = [path for path in run.path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert not written


def test_a_secrets_file_that_others_may_read_is_refused_in_one_line(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    secret.chmod(0o644)
    run = make_run(tmp_path, "true", secrets_file=str(secret))
    process = agent(run)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == EXIT_STOP
    assert errors == f"hpcrun: {secret}: others may read this secrets file; chmod 600 it\n"


def test_a_job_that_is_too_small_is_refused_in_one_line_not_requeued(tmp_path: Path) -> None:
    """Field report: world-product; an admin may submit by hand with the wrong --nodes."""
    run = make_run(tmp_path, "true", nodes=2)
    process = agent(run)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == EXIT_STOP
    assert errors == "hpcrun: this job has 1 nodes, the run needs 2: give sbatch --nodes\n"
    assert (run.job / f"exit-{os.getpid()}-0").read_text() == f"{EXIT_STOP}\n"


def test_a_run_file_with_a_mistake_stops_the_job_instead_of_requeueing_it(tmp_path: Path) -> None:
    """Field report: unknown-key, in a file that somebody edited while the job was queued."""
    run = make_run(tmp_path, "true")
    run.run_yaml.write_text(run.run_yaml.read_text().replace("ranks_per_node:", "ranks_pre_node:", 1))
    process = agent(run)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == EXIT_STOP
    assert "unknown key 'ranks_pre_node'" in errors and errors.count("\n") == 1
    assert (run.job / f"exit-{os.getpid()}-0").read_text() == f"{EXIT_STOP}\n"


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
