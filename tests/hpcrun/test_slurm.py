"""Talking to Slurm: host lists, states, silence. Stand-in commands; the real ones are in tests/slurm."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrun.errors import UserError
from hpcrun.slurm import control
from hpcrun.slurm.command import SlurmSilent, run_slurm
from hpcrun.slurm.hosts import expand_hosts
from hpcrun.slurm.query import Answer, find_job, job_info, node_state
from hpcrun.slurm.states import base_state, has_ended

StandIn = Callable[..., Path]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Puts a small script in place of one Slurm command, on a PATH without the real ones."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv(
        "PATH", f"{folder}:/usr/bin:/bin" if not Path("/usr/bin/squeue").exists() else str(folder)
    )

    def make(name: str, out: str = "", err: str = "", code: int = 0) -> Path:
        script = folder / name
        calls = tmp_path / f"{name}.calls"
        script.write_text(
            f"#!/bin/sh\necho \"$@\" >> '{calls}'\n/usr/bin/env > '{tmp_path}/{name}.env'\n"
            f"/bin/cat <<'EOF'\n{out}\nEOF\necho '{err}' >&2\nexit {code}\n"
        )
        script.chmod(0o755)
        return calls

    return make


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("c1", ["c1"]),
        ("gpu-[01-03,07],login1", ["gpu-01", "gpu-02", "gpu-03", "gpu-07", "login1"]),
        ("c2,c1", ["c2", "c1"]),
        ("rack[1-2]n[8-9]", ["rack1n8", "rack1n9", "rack2n8", "rack2n9"]),
        ("a-1-2,b[098-101]", ["a-1-2", "b098", "b099", "b100", "b101"]),
        ("tux[0-1].cluster.example", ["tux0.cluster.example", "tux1.cluster.example"]),
    ],
)
def test_host_lists(nodelist: str, hosts: list[str]) -> None:
    """Field reports: nodelist-bracket-commas, nodelist-dash-digits, nodelist-scontrol-missing."""
    assert expand_hosts(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["c[1-", "c[1-3", "c[a-b]"])
def test_what_is_no_host_list_is_refused(nodelist: str) -> None:
    with pytest.raises(UserError, match="not a Slurm node list"):
        expand_hosts(nodelist)


def test_only_known_ends_are_ends() -> None:
    """Field reports: unknown-state-names, timeout-is-success."""
    assert has_ended("CANCELLED by 1000") and has_ended("TIMEOUT") and has_ended("OUT_OF_MEMORY")
    assert not has_ended("LAUNCH_FAILED_SOMEHOW") and not has_ended("") and not has_ended("COMPLETING")
    assert base_state("CANCELLED by 1000") == "CANCELLED"


SHOWN = (
    "JobId=42 JobName=a JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=3 BatchFlag=1 "
    "TimeLimit=01:00:00 EndTime=2026-01-02T03:04:05 NodeList=c[1-2] BatchHost=c1 Comment=hpcrun:x:y"
)


def test_a_running_job(stand_in: StandIn) -> None:
    stand_in("scontrol", SHOWN)
    info = job_info("42")
    assert (info.answer, info.state, info.restarts, info.nodes) == (Answer.KNOWN, "RUNNING", 3, ("c1", "c2"))
    assert info.end_time is not None


@pytest.mark.parametrize(
    ("err", "code"),
    [
        ("Unable to contact slurm controller (connect failure)", 1),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", 1),
        ("Socket timed out", 0),
    ],
)
def test_silence_is_not_an_end(stand_in: StandIn, err: str, code: int) -> None:
    """Field report: squeue-timeout-means-finished."""
    stand_in("scontrol", "", err, code)
    info = job_info("42")
    assert (info.answer, info.state) == (Answer.SILENT, None)


def test_a_missing_command_is_silence(stand_in: StandIn) -> None:
    assert job_info("42").answer is Answer.SILENT
    assert node_state("c1") == ""


def test_a_forgotten_job_is_found_in_accounting(stand_in: StandIn) -> None:
    stand_in("scontrol", "", "slurm_load_jobs error: Invalid job id specified", 1)
    stand_in("sacct", "CANCELLED by 1000|2|c[1-2]|0:0")
    info = job_info("42")
    assert (info.state, info.restarts, info.nodes) == ("CANCELLED", 2, ("c1", "c2"))


def test_a_forgotten_job_without_accounting_is_unknown_not_finished(stand_in: StandIn) -> None:
    """Field report: no-accounting."""
    stand_in("scontrol", "", "slurm_load_jobs error: Invalid job id specified", 1)
    stand_in("sacct", "", "Slurm accounting storage is disabled", 1)
    info = job_info("42")
    assert (info.answer, info.state) == (Answer.UNKNOWN_JOB, None)


@pytest.mark.parametrize("state", ["down*", "down", "idle*", "mixed"])
def test_a_nodes_state_is_slurms_own_word(stand_in: StandIn, state: str) -> None:
    stand_in("sinfo", state)
    assert node_state("c1") == state


def test_the_users_shell_does_not_reach_slurms_commands(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Field report: sbatch-env-overrides-script."""
    for name in ("SBATCH_PARTITION", "SLURM_JOB_ID", "SQUEUE_FORMAT", "SLURM_CLUSTERS", "SECRET"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/elsewhere/slurm.conf")
    stand_in("squeue")
    run_slurm(["squeue"])
    seen = dict(
        line.split("=", 1) for line in (tmp_path / "squeue.env").read_text().splitlines() if "=" in line
    )
    assert seen["SLURM_CONF"] == "/elsewhere/slurm.conf"
    assert not {"SBATCH_PARTITION", "SLURM_JOB_ID", "SQUEUE_FORMAT", "SLURM_CLUSTERS", "SECRET"} & set(seen)


def test_a_hanging_command_ends(stand_in: StandIn, tmp_path: Path) -> None:
    script = Path(os.environ["PATH"].split(":")[0]) / "squeue"
    script.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    script.chmod(0o755)
    with pytest.raises(SlurmSilent, match="gave no answer in 0 s"):
        run_slurm(["squeue"], timeout=0.3)


def test_a_refusal_is_one_line_with_slurms_words(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in("sbatch", "", "sbatch: error: invalid partition specified: nope", 1)
    with pytest.raises(UserError, match="sbatch: sbatch: error: invalid partition specified: nope"):
        control.submit_script(tmp_path / "x", "hpcrun:a:b")


def test_a_lost_answer_of_sbatch_is_looked_up_never_repeated(stand_in: StandIn, tmp_path: Path) -> None:
    calls = stand_in("sbatch", "", "sbatch: error: Batch job submission failed: Socket timed out", 1)
    stand_in("squeue", "77|hpcrun:other:1\n78|hpcrun:a:b")
    assert control.submit_script(tmp_path / "x", "hpcrun:a:b") == "78"
    assert len(calls.read_text().splitlines()) == 1
    assert find_job("hpcrun:none:0") is None


def test_a_job_that_has_ended_meanwhile_is_found_too(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in("sbatch", "", "sbatch: error: Batch job submission failed: Socket timed out", 1)
    calls = stand_in("squeue", "78|hpcrun:a:b")
    control.submit_script(tmp_path / "x", "hpcrun:a:b")
    assert "-t all" in calls.read_text()


def test_when_nothing_is_known_the_user_is_told_how_to_look(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in("sbatch", "", "Unable to contact slurm controller", 1)
    stand_in("squeue", "", "Unable to contact slurm controller", 1)
    with pytest.raises(
        control.SubmissionUnknown, match="look for the comment hpcrun:a:b with squeue before you submit again"
    ):
        control.submit_script(tmp_path / "x", "hpcrun:a:b")


@pytest.mark.parametrize(
    ("said", "job_id"),
    [
        ("3969755", "3969755"),
        ("Submitted batch job 3969755 on cluster nautilus", "3969755"),
        ("75168975;clustername", "75168975"),
        ("--> Verifying job 5 ...OK\n" * 12 + "Submitted batch job 55473\n", "55473"),
    ],
)
def test_the_job_id_is_found_in_what_sites_print(
    stand_in: StandIn, tmp_path: Path, said: str, job_id: str
) -> None:
    """Field report: sbatch-output-forms."""
    stand_in("sbatch", said)
    assert control.submit_script(tmp_path / "x", "hpcrun:a:b") == job_id


@pytest.mark.parametrize("said", ["", "Thank you for using nautilus 2"])
def test_an_answer_without_a_job_id_is_looked_up(stand_in: StandIn, tmp_path: Path, said: str) -> None:
    """Field report: sbatch-output-forms; the empty answer is no id."""
    stand_in("sbatch", said)
    stand_in("squeue", "78|hpcrun:a:b")
    assert control.submit_script(tmp_path / "x", "hpcrun:a:b") == "78"


def test_no_job_and_no_id_is_an_error(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_LOOKS", 1)
    stand_in("sbatch")
    stand_in("squeue")
    with pytest.raises(UserError, match="sbatch gave no job id but ''; no job was queued"):
        control.submit_script(tmp_path / "x", "hpcrun:a:b")


@pytest.mark.parametrize(
    "words", ["TimeLimit=UNLIMITED EndTime=Unknown", "TimeLimit=Partition_Limit EndTime=N/A"]
)
def test_a_job_without_a_time_limit_has_no_end_time(stand_in: StandIn, words: str) -> None:
    """Field report: time-limit-words."""
    stand_in("scontrol", f"JobId=42 JobState=RUNNING Restarts=0 {words} NodeList=c1")
    assert job_info("42").end_time is None
