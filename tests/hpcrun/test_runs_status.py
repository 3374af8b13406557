"""The state of a run: its own record joined with what Slurm says, or does not say."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrun.errors import UserError
from hpcrun.runs.find import find_run, run_at
from hpcrun.runs.status import EndWatch, RunStatus, run_status, statuses
from tests.hpcrun.made_runs import MadeRun, StandIns


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return StandIns(tmp_path, monkeypatch)


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    made = MadeRun(tmp_path / "runs")
    made.job("7")
    return made


def running(made: MadeRun) -> None:
    made.start()
    made.steps(1, 25)
    made.checkpoint(20)


def state(made: MadeRun) -> str:
    return run_status(made.run).state


def test_a_waiting_job_is_queued_with_slurms_reason(made: MadeRun, slurm: StandIns) -> None:
    slurm.job("PENDING", reason="Resources")
    status = run_status(made.run)
    assert (status.state, status.reason, status.slurm, status.job_id) == ("queued", "Resources", "ok", "7")
    assert (status.step, status.total_steps, status.attempts) == (0, 80, 0)


def test_a_held_job_tells_how_to_release_it(made: MadeRun, slurm: StandIns) -> None:
    """Field report: held-after-launch-failure."""
    slurm.job("PENDING", reason="launch_failed_requeued_held")
    assert "scontrol release 7" in (run_status(made.run).reason or "")


def test_a_running_job_is_starting_until_its_ranks_are_there(made: MadeRun, slurm: StandIns) -> None:
    slurm.job("RUNNING", nodes="c[1-2]")
    assert state(made) == "starting"
    made.event("node_joined", node="c1", address="10.0.0.1")
    assert state(made) == "starting"
    running(made)
    status = run_status(made.run)
    assert (status.state, status.step, status.last_checkpoint_step) == ("running", 25, 20)
    assert (status.nodes, status.attempts, status.total_steps) == (["c1", "c2"], 1, 80)
    assert status.updated is not None and status.updated > 100


def test_a_requeued_job_that_waits_is_requeued_and_then_starting(made: MadeRun, slurm: StandIns) -> None:
    """Field report: unknown-state-names."""
    running(made)
    made.finish(85, "the time limit is near")
    slurm.job("PENDING", reason="BeginTime", restarts=1)
    assert (state(made), run_status(made.run).requeues) == ("requeued", 1)
    slurm.job("RUNNING", restarts=1)
    assert state(made) == "starting"


@pytest.mark.parametrize(("code", "expected"), [(0, "completed"), (86, "failed"), (3, "failed")])
@pytest.mark.parametrize("slurm_knows", [True, False])
def test_the_runs_own_word_says_how_it_ended(
    made: MadeRun, slurm: StandIns, code: int, expected: str, slurm_knows: bool
) -> None:
    """Field report: no-accounting."""
    running(made)
    made.finish(code, "because")
    if slurm_knows:
        slurm.job("COMPLETED" if code == 0 else "FAILED")
    else:
        slurm.forgotten()
    status = run_status(made.run)
    assert (status.state, status.reason) == (expected, "because")
    assert status.slurm == ("ok" if slurm_knows else "no accounting")


def test_an_agent_that_could_not_start_leaves_its_exit_code(made: MadeRun, slurm: StandIns) -> None:
    slurm.forgotten()
    (made.run.job / "exit-7-0").write_text("86\n")
    assert state(made) == "failed"


@pytest.mark.parametrize(
    ("ended_as", "expected"),
    [
        ("CANCELLED", "cancelled"),
        ("FAILED", "failed"),
        ("OUT_OF_MEMORY", "failed"),
        ("TIMEOUT", "lost"),
        ("NODE_FAIL", "lost"),
        ("PREEMPTED", "lost"),
        ("COMPLETED", "lost"),
    ],
)
def test_a_job_that_ended_without_a_word_of_the_run_is_never_completed(
    made: MadeRun, slurm: StandIns, ended_as: str, expected: str
) -> None:
    """Field reports: timeout-is-success, preempt-mode-cancel."""
    running(made)
    slurm.job(ended_as)
    status = run_status(made.run)
    assert (status.state, status.slurm_state) == (expected, ended_as)
    slurm.forgotten(accounting=f"{ended_as}|0|c[1-2]|0:0")
    assert state(made) == expected


@pytest.mark.parametrize("accounting", [None, ""])
def test_a_job_that_nobody_knows_any_more_is_unknown(
    made: MadeRun, slurm: StandIns, accounting: str | None
) -> None:
    running(made)
    slurm.forgotten(accounting)
    status = run_status(made.run)
    assert status.state == "unknown"
    assert status.slurm == ("no accounting" if accounting is None else "unknown job")
    made.finish(85, "c1: the scheduler ends the job (SIGTERM)")
    assert state(made) == "lost"


@pytest.mark.parametrize("word", ["FROBNICATED", "REQUEUE_HOLD", "SUSPENDED", "STAGE_OUT", "RESIZING"])
def test_no_state_but_a_known_end_ends_a_run(made: MadeRun, slurm: StandIns, word: str) -> None:
    """Field report: unknown-state-names."""
    running(made)
    slurm.job(word)
    status = run_status(made.run)
    assert status.state in ("running", "requeued")
    assert status.slurm_state == word


@pytest.mark.parametrize(
    "err",
    [
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    ],
)
def test_a_silent_slurm_ends_nothing(made: MadeRun, slurm: StandIns, err: str) -> None:
    """Field report: squeue-timeout-means-finished."""
    slurm.says("scontrol", "", err, 1)
    status = run_status(made.run)
    assert (status.state, status.slurm) == ("queued", "silent")
    running(made)
    status = run_status(made.run)
    assert (status.state, status.slurm, status.step) == ("running", "silent", 25)
    assert err.split(": ")[1] in (status.reason or "")
    made.finish(85, "the time limit is near")
    assert state(made) == "requeued"
    assert not EndWatch(made.run).over()
    made.restart = 1
    made.start(from_step=20)
    made.finish(0, "all ranks finished")
    assert state(made) == "completed"


def test_many_runs_ask_a_silent_slurm_once_and_ended_ones_never(tmp_path: Path, slurm: StandIns) -> None:
    slurm.silent()
    made = []
    for number in range(4):
        made.append(MadeRun(tmp_path / "many", f"tiny-0000000{number}"))
        made[-1].job(str(number))
    running(made[0])
    made[0].finish(0, "all ranks finished")
    found = statuses([one.run for one in made])
    assert [status.state for status in found] == ["completed", "queued", "queued", "queued"]
    assert [status.slurm for status in found] == ["not asked", "silent", "silent", "silent"]
    assert len(slurm.calls("scontrol")) == 1


def test_stop_makes_an_end_a_cancellation(made: MadeRun, slurm: StandIns) -> None:
    (made.run.control / "STOP").touch()
    slurm.job("CANCELLED")
    assert state(made) == "cancelled"
    slurm.forgotten()
    assert state(made) == "cancelled"
    running(made)
    made.finish(86, "control/STOP is there")
    slurm.silent()
    assert state(made) == "cancelled"


def test_a_second_job_that_found_the_run_held_says_nothing_of_it(made: MadeRun, slurm: StandIns) -> None:
    """Field report: resume-auto-first-run."""
    running(made)
    made.now += 1
    made.job("8")
    made.event("run_is_held", job_id="7")
    made.finish(0, "another job holds this run")
    slurm.job("RUNNING")
    status = run_status(made.run)
    assert (status.state, status.job_id) == ("running", "7")


def test_a_resumed_run_speaks_of_its_new_job(made: MadeRun, slurm: StandIns) -> None:
    running(made)
    made.finish(86, "rank 1 on c1 ended by exit code 1")
    made.now += 1
    made.job("8")
    slurm.job("PENDING")
    status = run_status(made.run)
    assert (status.state, status.job_id, status.step) == ("queued", "8", 25)


def test_restarts_and_requeues_are_counted_apart(made: MadeRun, slurm: StandIns) -> None:
    running(made)
    made.start(from_step=20)
    made.restart = 1
    made.start(from_step=20)
    slurm.job("RUNNING", restarts=1)
    status = run_status(made.run)
    assert (status.attempts, status.restarts, status.requeues) == (3, 1, 1)
    assert (status.step, [told.by for told in status.recoveries]) == (20, ["restart", "requeue"])


def test_a_checkpoint_that_a_later_attempt_passed_over_is_not_the_newest(
    made: MadeRun, slurm: StandIns
) -> None:
    """Field report: resume-file-vs-saved-file."""
    running(made)
    made.checkpoint(25)
    made.start(from_step=20)
    slurm.job("RUNNING")
    assert run_status(made.run).last_checkpoint_step == 20
    made.checkpoint(37)
    assert run_status(made.run).last_checkpoint_step == 37


def test_a_failed_save_is_told_until_one_succeeds(made: MadeRun, slurm: StandIns) -> None:
    """Field report: async-failure-unseen."""
    running(made)
    slurm.job("RUNNING")
    made.trainer("checkpoint_failed", step=30, reason="rank 1 on c1: No space left on device")
    assert "No space left" in (run_status(made.run).save_failure or "")
    made.now += 1
    made.trainer("checkpoint_saved", step=40)
    assert run_status(made.run).save_failure is None


def test_a_local_job_lives_as_long_as_its_own_process(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "runs", kind="local")
    script = "import sys; sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(made.run.job)], stdin=subprocess.PIPE
    ) as process:
        made.job(str(process.pid))
        running(made)
        assert state(made) == "running"
        assert process.stdin
        process.stdin.close()
    assert state(made) == "lost"


def test_a_pid_that_is_another_process_by_now_is_not_the_job(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "runs", kind="local")
    with subprocess.Popen(["sleep", "100"]) as process:
        made.job(str(process.pid))
        running(made)
        assert state(made) == "lost"
        process.kill()


def test_a_loss_that_is_no_number_stays_text(made: MadeRun, slurm: StandIns) -> None:
    """Field report: nan-in-json."""
    running(made)
    path = made.run.metrics(1)
    path.write_text(path.read_text() + f'{{"time": {time.time()}, "step": 26, "loss": "nan"}}\n')
    slurm.job("RUNNING")
    status: RunStatus = run_status(made.run)
    assert (status.loss, status.step) == ("nan", 26)


# Which run is meant


def test_a_run_is_found_by_name_prefix_recipe_job_and_path(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for number, name in enumerate(["gpt-0000aaaa", "gpt-1b-0000bbbb", "other-0000cccc"]):
        MadeRun(runs, name).job(f"10{number}")
    for text, name in {
        "gpt-1b-0000bbbb": "gpt-1b-0000bbbb",
        "gpt": "gpt-0000aaaa",
        "gpt-1b": "gpt-1b-0000bbbb",
        "oth": "other-0000cccc",
        "102": "other-0000cccc",
    }.items():
        assert find_run(text, runs).name == name
    found = run_at(str(runs / "gpt-0000aaaa"))
    assert found and found.name == "gpt-0000aaaa"


def test_an_ambiguous_or_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("gpt-0000aaaa", "gpt-0000bbbb"):
        MadeRun(runs, name)
    with pytest.raises(UserError, match=r"2 runs.*gpt-0000bbbb, gpt-0000aaaa"):
        find_run("gpt", runs)
    with pytest.raises(UserError, match="no run 'x' among the 2"):
        find_run("x", runs)
    with pytest.raises(UserError, match="no run '' among the 0"):
        find_run("", tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no run\.yaml"):
        run_at(str(tmp_path))
