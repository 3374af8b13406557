"""What a run directory tells of its attempts: merged metrics, and recoveries with their causes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.runs.story import last_line, read_events, read_metrics, recoveries
from tests.hpcrun.made_runs import MadeRun


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    made = MadeRun(tmp_path)
    made.job("7")
    made.start()
    made.steps(1, 25)
    return made


def test_a_later_attempt_wins_where_two_logged_the_same_step(made: MadeRun) -> None:
    made.start(from_step=20)
    made.steps(21, 30)
    lines = read_metrics(made.run)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert [line["attempt"] for line in lines] == [1] * 20 + [2] * 10


def test_torn_and_foreign_lines_are_skipped(made: MadeRun) -> None:
    """Field report: metrics-cut-line."""
    path = made.run.metrics(1)
    path.write_bytes(b"\x00\xff\n[1, 2]\n" + path.read_bytes() + b'{"step": 26, "lo')
    assert [line["step"] for line in read_metrics(made.run)] == list(range(1, 26))
    assert (last_line(path) or {})["step"] == 25


def test_the_last_line_is_found_behind_a_tail_of_junk_longer_than_one_read(made: MadeRun) -> None:
    with made.run.metrics(1).open("ab") as file:
        file.write(b"x" * 200_000)
    assert (last_line(made.run.metrics(1)) or {})["step"] == 25


def test_events_come_by_time_and_know_their_job(made: MadeRun) -> None:
    made.event("late", host="a-b", at=made.now + 5)
    made.event("early", host="c9", at=1.0)
    told = read_events(made.run)
    assert (told[0]["event"], told[-1]["event"]) == ("early", "late")
    assert (told[-1]["job"], told[-1]["job_restart"], told[-1]["attempt"]) == ("7", 0, 1)


def test_an_undisturbed_run_has_no_recovery(made: MadeRun) -> None:
    made.finish(0, "all ranks finished")
    assert recoveries(made.run) == []


def test_a_dead_rank_is_named_and_what_it_cost_is_counted(made: MadeRun) -> None:
    """Field report: oom-kill-named."""
    noticed = made.now = made.now + 1
    made.event("rank_exited", host="c2", rank=3, code=None, signal=9)
    made.event("restarting", reason="rank 3 on c2 ended by signal 9", restart=1)
    made.event("rank_exited", host="c1", rank=0, code=1, signal=None)
    made.now += 4
    made.start(from_step=20)
    made.steps(21, 30)
    (told,) = recoveries(made.run)
    assert (told.what, told.by, told.rank, told.node) == ("rank died", "restart", 3, "c2")
    assert told.reason == "rank 3 on c2: killed by signal 9 (out of memory?)"
    assert (told.noticed, told.resumed_step, told.steps_repeated) == (noticed, 20, 5)
    assert told.checkpoint == "step_00000020.a0002"
    assert (told.first_step_seconds, told.seconds) == (5.0, 10.0)
    assert "from step 20, 5 steps repeated" in told.describe()


def test_a_lost_node_is_the_cause_even_when_ranks_died_of_it_first(made: MadeRun) -> None:
    made.event("rank_exited", host="c1", rank=0, code=1, signal=None)
    made.event("restarting", reason="rank 0 on c1 ended by exit code 1", restart=1)
    made.event("node_lost", node="c2", reason="silent for 10.2 s")
    made.start(nodes=("c1", "c3"), from_step=20)
    (told,) = recoveries(made.run)
    assert (told.what, told.node, told.reason) == ("node lost", "c2", "lost c2: silent for 10.2 s")


def test_a_lost_spare_is_not_taken_for_the_cause(made: MadeRun) -> None:
    made.event("node_lost", node="c4", reason="silent for 10.2 s")
    made.event("rank_exited", host="c2", rank=3, code=7, signal=None)
    made.event("restarting", reason="rank 3 on c2 ended by exit code 7", restart=1)
    made.start(from_step=20)
    assert [told.reason for told in recoveries(made.run)] == ["rank 3 on c2: exit code 7"]


def test_when_the_first_node_is_cut_off_its_survivors_are_believed(made: MadeRun) -> None:
    made.event("node_lost", host="c1", node="c2", reason="silent for 10.2 s")
    made.finish(85, "lost c2: 1 of 2 nodes gone, or this one is cut off")
    made.event("coordinator_unreachable", host="c2", node="c1")
    made.event("requeued", host="c2", job_id="7")
    made.restart = 1
    made.start(nodes=("c2", "c3"), from_step=20)
    (told,) = recoveries(made.run)
    assert (told.what, told.by, told.node) == ("node lost", "requeue", "c1")


def test_when_another_node_is_cut_off_its_own_view_is_not_believed(made: MadeRun) -> None:
    made.event("coordinator_unreachable", host="c2", node="c1")
    made.event("node_lost", host="c1", node="c2", reason="silent for 10.2 s")
    made.finish(85, "lost c2: 1 of 2 nodes gone, or this one is cut off")
    made.event("requeued", host="c1", job_id="7")
    made.restart = 1
    made.start(nodes=("c1", "c3"), from_step=20)
    assert [told.node for told in recoveries(made.run)] == ["c2"]


@pytest.mark.parametrize(
    ("reason", "what"),
    [
        ("c1: the time limit is near (SIGUSR2)", "time limit"),
        ("c1: the scheduler ends the job (SIGTERM)", "preempted"),
        ("control/STOP is there", "stopped"),
    ],
)
def test_an_asked_for_end_tells_who_asked(made: MadeRun, reason: str, what: str) -> None:
    made.event("save_requested", reason=reason)
    made.now += 1
    made.event("rank_exited", rank=0, code=85, signal=None)
    made.finish(85, reason)
    made.restart = 1
    made.start(from_step=25)
    (told,) = recoveries(made.run)
    assert (told.what, told.by, told.reason, told.steps_repeated) == (what, "requeue", reason, 0)


def test_a_cancelled_and_resumed_run_was_not_preempted(made: MadeRun) -> None:
    asked = "c1: the scheduler ends the job (SIGTERM)"
    made.event("save_requested", reason=asked)
    made.finish(86, f"{asked}; control/STOP is there")
    made.now += 1
    made.job("8")
    made.start(from_step=25)
    (told,) = recoveries(made.run)
    assert (told.what, told.by) == ("stopped", "resume")


def test_an_allocation_that_never_started_an_attempt_is_not_the_cause(made: MadeRun) -> None:
    made.event("save_requested", reason="c1: the time limit is near (SIGUSR2)")
    made.finish(85, "c1: the time limit is near (SIGUSR2)")
    made.restart = 1
    made.event("node_lost", host="c3", node="c1", reason="silent for 10.2 s")
    made.finish(85, "1 of 2 agents reported in 300 s")
    made.restart = 2
    made.start(from_step=25)
    assert [told.what for told in recoveries(made.run)] == ["time limit"]


def test_an_end_without_a_word_is_dated_by_the_last_sign_of_life(made: MadeRun) -> None:
    last_logged = made.now
    made.job("8")
    made.now += 100
    made.event("node_joined", node="c1", address="10.0.0.1")
    made.start(from_step=20)
    (told,) = recoveries(made.run)
    assert (told.what, told.by) == ("requeue", "resume")
    # The claim was made by the real clock, later than the made one.
    assert told.noticed >= last_logged
    assert told.reason == "attempt 1 ended without a word"


def test_an_attempt_that_died_before_it_loaded_loses_no_count_of_steps(made: MadeRun) -> None:
    """Field report: preempted-again-before-first-save."""
    made.restart = 1
    made.start(from_step=20)
    (made.run.attempt(2) / "resumed.json").unlink()
    made.restart = 2
    made.start(from_step=20)
    second, third = recoveries(made.run)
    assert (second.resumed_step, second.steps_repeated, second.seconds) == (None, None, None)
    assert (third.resumed_step, third.steps_repeated) == (20, 5)
