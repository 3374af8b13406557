"""ls, status, logs, cancel and resume from the command line, with Slurm's commands stood in for."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrun.cli import main
from hpcrun.runs.logs import Tail, follow_logs
from hpcrun.runs.runfile import read_run_file
from tests.hpcrun.made_runs import MadeRun, StandIns


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    monkeypatch.setenv("HPCRUN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HPCRUN_SITE", "generic-slurm")
    return StandIns(tmp_path, monkeypatch)


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    made = MadeRun(tmp_path / "runs")
    made.job("7")
    return made


class Hpcrun:
    """Runs one command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: str, code: int = 0) -> str:
        """Its output; on an expected failure its one line on stderr."""
        with pytest.raises(SystemExit) as ended:
            main(args)
        out, self.err = self._capsys.readouterr()
        assert ended.value.code == code, (out, self.err)
        if code == 2:
            assert self.err.startswith("hpcrun: ") and self.err.count("\n") == 1
        return self.err if code else out

    def json(self, *args: str) -> Any:
        return json.loads(self(*args, "--json"))


@pytest.fixture
def hpcrun(capsys: pytest.CaptureFixture[str]) -> Hpcrun:
    return Hpcrun(capsys)


def trained(made: MadeRun) -> None:
    made.start()
    made.steps(1, 25)
    made.checkpoint(20)


def recovered(made: MadeRun) -> None:
    trained(made)
    made.event("rank_exited", host="c2", rank=3, code=None, signal=9)
    made.event("restarting", reason="rank 3 on c2 ended by signal 9", restart=1)
    made.now += 4
    made.start(from_step=20)
    made.steps(21, 30)


def test_status_json_has_the_agreed_keys(hpcrun: Hpcrun, made: MadeRun, slurm: StandIns) -> None:
    recovered(made)
    slurm.job("RUNNING")
    told = hpcrun.json("status", "tiny")
    assert {key: told[key] for key in ("run", "state", "job_id", "step", "total_steps", "attempts")} == {
        "run": "tiny-0000abcd",
        "state": "running",
        "job_id": "7",
        "step": 30,
        "total_steps": 80,
        "attempts": 2,
    }
    assert (told["nodes"], told["last_checkpoint_step"], told["slurm"]) == (["c1", "c2"], 20, "ok")
    assert (told["loss"], told["tokens_per_s"]) == (0.3, 100.0)
    (recovery,) = told["recoveries"]
    assert (recovery["what"], recovery["rank"], recovery["node"]) == ("rank died", 3, "c2")
    assert (recovery["resumed_step"], recovery["steps_repeated"], recovery["seconds"]) == (20, 5, 10.0)


def test_status_is_plain_text_that_tells_the_recovery(hpcrun: Hpcrun, made: MadeRun, slurm: StandIns) -> None:
    recovered(made)
    slurm.job("RUNNING")
    text = hpcrun("status")
    assert "step        30 of 80" in text
    assert "recovered: rank died (rank 3 on c2: killed by signal 9 (out of memory?))" in text
    assert "\x1b" not in text


def test_status_says_that_slurm_is_silent(hpcrun: Hpcrun, made: MadeRun, slurm: StandIns) -> None:
    """Field report: squeue-timeout-means-finished."""
    trained(made)
    slurm.silent()
    assert "7 (Slurm is silent)" in hpcrun("status", "7")
    assert hpcrun.json("status", "7")["state"] == "running"


def test_ls_lists_newest_first_and_json_is_a_list(hpcrun: Hpcrun, made: MadeRun, slurm: StandIns) -> None:
    trained(made)
    slurm.job("PENDING")
    MadeRun(made.run.path.parent, "later-0000ffff")
    header, first, second = hpcrun("ls").splitlines()
    assert header.split()[:4] == ["RUN", "STATE", "JOB", "STEP"]
    assert first.split()[:3] == ["later-0000ffff", "unknown", "-"]
    assert second.split()[:6] == ["tiny-0000abcd", "requeued", "7", "25", "of", "80"]
    assert [told["run"] for told in hpcrun.json("ls")] == ["later-0000ffff", "tiny-0000abcd"]


def test_ls_of_no_runs_is_no_error(hpcrun: Hpcrun, tmp_path: Path, slurm: StandIns) -> None:
    assert hpcrun.json("ls") == []
    assert "no runs" in hpcrun("ls", "--runs", str(tmp_path / "elsewhere"))
    assert "no run in" in hpcrun("status", code=2)


# Logs


def test_logs_show_few_ranks_with_prefixes_and_one_rank_plain(
    hpcrun: Hpcrun, made: MadeRun, slurm: StandIns
) -> None:
    trained(made)
    made.log(0, "old\n")
    made.start(from_step=20)
    made.log(0, "zero\n")
    made.log(3, "three\nthe end without a line end")
    assert hpcrun("logs").splitlines() == [
        "[rank 0] zero",
        "[rank 3] three",
        "[rank 3] the end without a line end",
    ]
    assert hpcrun("logs", "--rank", "0") == "zero\n"
    assert hpcrun("logs", "--attempt", "1", "--rank", "0") == "old\n"
    assert "ranks with one: 0, 3" in hpcrun("logs", "--rank", "9", code=2)
    files = hpcrun.json("logs", "--rank", "0")["logs"]
    assert [(file["attempt"], file["rank"], file["bytes"]) for file in files] == [(1, 0, 4), (2, 0, 5)]


def test_logs_of_many_ranks_are_those_of_the_rank_that_logs(
    hpcrun: Hpcrun, tmp_path: Path, slurm: StandIns
) -> None:
    made = MadeRun(tmp_path / "runs", recipe={"parallel": {"pp": 2, "tp": 1}})
    made.job("7")
    made.start()
    for rank in range(6):
        made.log(rank, f"from {rank}\n")
    assert hpcrun("logs") == "from 0\n"


def test_logs_before_any_rank_are_the_jobs_own(hpcrun: Hpcrun, made: MadeRun, slurm: StandIns) -> None:
    slurm.job("PENDING", reason="Priority")
    assert hpcrun("logs") == ""
    assert "is queued (Priority)" in hpcrun.err
    (made.run.job / "slurm-7.out").write_text("module: command not found\n")
    (made.run.job / "exit-7-0").write_text("86\n")
    slurm.job("FAILED")
    assert hpcrun("logs") == "module: command not found\n"
    assert "is failed" in hpcrun.err


def test_following_goes_on_with_the_next_attempt_and_ends_with_the_run(made: MadeRun) -> None:
    trained(made)
    made.log(1, "one\nhal")
    seen: list[tuple[int, int, str]] = []
    ended = threading.Event()
    reader = threading.Thread(target=lambda: seen.extend(follow_logs(made.run, 1, ended.is_set)))
    follow = follow_logs(made.run, 1, ended.is_set)
    assert next(follow) == (1, 1, "one")
    made.log(1, "f\n")
    assert next(follow) == (1, 1, "half")
    made.log(1, "last words")
    made.start(from_step=20)
    assert next(follow) == (1, 1, "last words")
    made.log(1, "again\n")
    assert next(follow) == (2, 1, "again")
    ended.set()
    reader.start()
    reader.join(20)
    assert seen == [(2, 1, "again")]


def test_a_log_that_was_cut_short_is_read_from_its_start(tmp_path: Path) -> None:
    """Field report: metrics-cut-line."""
    path = tmp_path / "log"
    path.write_text("a long first line\n")
    tail = Tail(path)
    assert list(tail.lines()) == ["a long first line"]
    path.write_text("new\n")
    assert list(tail.lines()) == ["new"]


def test_follow_from_the_command_line_ends_when_the_run_has(
    hpcrun: Hpcrun, made: MadeRun, slurm: StandIns
) -> None:
    trained(made)
    made.log(0, "zero\n")
    made.finish(0, "all ranks finished")
    assert hpcrun("logs", "-f") == "[rank 0] zero\n"
    assert "leave --attempt" in hpcrun("logs", "-f", "--attempt", "1", code=2)


# Cancel


def test_cancel_writes_stop_and_then_scancels(hpcrun: Hpcrun, made: MadeRun, slurm: StandIns) -> None:
    trained(made)
    slurm.job("RUNNING")
    stop = made.run.control / "STOP"
    slurm.says("scancel", "", first=f"test -e '{stop}' || exit 9")
    assert "job 7 is cancelled" in hpcrun("cancel", "tiny")
    assert slurm.calls("scancel") == ["scancel 7"]
    assert stop.exists()


def test_cancel_with_save_leaves_a_running_job_to_save_but_not_a_waiting_one(
    hpcrun: Hpcrun, made: MadeRun, slurm: StandIns
) -> None:
    trained(made)
    slurm.job("RUNNING")
    assert "saves at its next step" in hpcrun.json("cancel", "tiny", "--save")["done"]
    assert not slurm.calls("scancel")
    slurm.job("PENDING")
    hpcrun("cancel", "tiny", "--save")
    assert slurm.calls("scancel") == ["scancel 7"]


def test_cancel_while_slurm_is_silent_leaves_stop_and_says_so(
    hpcrun: Hpcrun, made: MadeRun, slurm: StandIns
) -> None:
    slurm.silent()
    assert "control/STOP is in place" in hpcrun("cancel", "tiny", code=2)
    assert (made.run.control / "STOP").exists()


def test_cancel_of_what_is_over_is_no_failure_but_of_a_completed_run_it_is(
    hpcrun: Hpcrun, made: MadeRun, slurm: StandIns
) -> None:
    trained(made)
    slurm.forgotten()
    assert "had ended already" in hpcrun("cancel", "tiny")
    made.finish(0, "all ranks finished")
    (made.run.control / "STOP").unlink()
    assert "has completed" in hpcrun("cancel", "tiny", code=2)
    assert not (made.run.control / "STOP").exists()


def test_cancel_of_a_local_run_ends_its_process(hpcrun: Hpcrun, tmp_path: Path, slurm: StandIns) -> None:
    made = MadeRun(tmp_path / "runs", kind="local")
    script = "import time; time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", script, str(made.run.job)]) as process:
        made.job(str(process.pid))
        hpcrun("cancel", "tiny")
        assert process.wait(timeout=20) == -15
    assert not slurm.calls("scancel")


# Resume


def test_resume_submits_a_new_job_for_the_same_folder(hpcrun: Hpcrun, made: MadeRun, slurm: StandIns) -> None:
    """Field reports: resume-file-vs-saved-file, requeue-same-second-run-dir."""
    trained(made)
    (made.run.control / "STOP").touch()
    slurm.job("CANCELLED")
    slurm.says("sbatch", "8")
    told = hpcrun.json("resume", "tiny")
    assert (told["run"], told["job_id"], told["from_step"]) == ("tiny-0000abcd", "8", 20)
    assert told["path"] == str(made.run.path)
    assert not (made.run.control / "STOP").exists()
    assert not list(made.run.path.glob("run.yaml.*"))
    slurm.job("PENDING")
    assert hpcrun.json("status", "8")["state"] == "queued"


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "FROBNICATED"])
def test_resume_refuses_while_a_job_may_live(
    hpcrun: Hpcrun, made: MadeRun, slurm: StandIns, state: str
) -> None:
    trained(made)
    slurm.job(state)
    assert f"job 7 of tiny-0000abcd is {state}" in hpcrun("resume", "tiny", code=2)
    slurm.silent()
    assert "cannot be known" in hpcrun("resume", "tiny", code=2)
    assert not slurm.calls("sbatch")


def test_resume_with_changes_keeps_the_old_run_yaml(hpcrun: Hpcrun, made: MadeRun, slurm: StandIns) -> None:
    trained(made)
    before = made.run.run_yaml.read_text()
    slurm.forgotten()
    slurm.says("sbatch", "8")
    hpcrun("resume", "tiny", "--time", "2h", "--partition", "long", "--set", "train.lr=1e-5")
    recipe = read_run_file(made.run).recipe
    assert (recipe.resources.partition, recipe.train.lr, recipe.train.steps) == ("long", 1e-5, 80)
    assert recipe.resources.time and recipe.resources.time.minutes == 120
    assert (made.run.path / "run.yaml.1").read_text() == before
    script = (made.run.job / "run.sbatch").read_text()
    assert "--partition=long" in script and "--time=0-02:00:00" in script


def test_resume_that_slurm_refuses_changes_nothing(hpcrun: Hpcrun, made: MadeRun, slurm: StandIns) -> None:
    trained(made)
    before = made.run.run_yaml.read_text()
    (made.run.control / "STOP").touch()
    slurm.forgotten()
    slurm.says("sbatch", "", "sbatch: error: invalid partition specified: long", 1)
    assert "invalid partition" in hpcrun("resume", "tiny", "--partition", "long", code=2)
    assert made.run.run_yaml.read_text() == before
    assert (made.run.control / "STOP").exists()
    assert not list(made.run.path.glob("run.yaml.*"))


def test_resume_of_a_completed_run_needs_more_steps(hpcrun: Hpcrun, made: MadeRun, slurm: StandIns) -> None:
    made.start()
    made.steps(1, 80)
    made.checkpoint(80)
    made.finish(0, "all ranks finished")
    slurm.job("COMPLETED")
    slurm.says("sbatch", "8")
    assert "step 80 of 80; raise the number with --set train.steps" in hpcrun("resume", "tiny", code=2)
    assert hpcrun.json("resume", "tiny", "--set", "train.steps=100")["from_step"] == 80


def test_resume_before_the_first_checkpoint_starts_from_step_0(
    hpcrun: Hpcrun, made: MadeRun, slurm: StandIns
) -> None:
    """Field report: resume-auto-first-run."""
    slurm.job("CANCELLED")
    slurm.says("sbatch", "8")
    assert hpcrun.json("resume", "tiny")["from_step"] == 0


def test_resume_names_a_mistake_in_a_change(hpcrun: Hpcrun, made: MadeRun, slurm: StandIns) -> None:
    slurm.job("CANCELLED")
    assert "did you mean 'train.lr'" in hpcrun("resume", "tiny", "--set", "train.lrr=1", code=2)
    assert "4 ranks do not divide" in hpcrun("resume", "tiny", "--set", "parallel.tp=3", code=2)
    assert not slurm.calls("sbatch")


def test_resume_writes_the_secrets_anew(
    hpcrun: Hpcrun, tmp_path: Path, slurm: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeRun(tmp_path / "runs", recipe={"secrets": ["API_KEY"]})
    made.job("7")
    path = tmp_path / "state" / "secrets.json"
    text = made.run.run_yaml.read_text()
    made.run.run_yaml.write_text(text.replace("secrets_file: null", f"secrets_file: {path}"))
    slurm.job("CANCELLED")
    slurm.says("sbatch", "8")
    monkeypatch.delenv("API_KEY", raising=False)
    assert "API_KEY is not set" in hpcrun("resume", "tiny", code=2)
    monkeypatch.setenv("API_KEY", "s3cret")
    hpcrun("resume", "tiny")
    assert json.loads(path.read_text()) == {"API_KEY": "s3cret"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert "s3cret" not in made.run.run_yaml.read_text()


def test_every_command_answers_in_time_while_slurmctld_hangs(
    hpcrun: Hpcrun, made: MadeRun, slurm: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report: squeue-timeout-means-finished."""
    trained(made)
    monkeypatch.setattr("hpcrun.slurm.command.run_slurm.__defaults__", (1.0,))
    slurm.says("scontrol", "", first="exec sleep 100")
    slurm.says("scancel", "", first="exec sleep 100")
    began = time.monotonic()
    assert hpcrun.json("status", "tiny")["slurm"] == "silent"
    assert hpcrun.json("ls")[0]["state"] == "running"
    hpcrun("cancel", "tiny", code=2)
    hpcrun("resume", "tiny", code=2)
    assert time.monotonic() - began < 10
