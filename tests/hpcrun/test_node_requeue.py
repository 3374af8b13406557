"""Survivors give the job back once, in turn, and only when Slurm agrees that the first node is gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpcrun.errors import UserError
from hpcrun.node import requeue
from hpcrun.node.journal import RunJournal
from hpcrun.node.placement import Placement
from hpcrun.records import RunDir, read_json_lines
from hpcrun.slurm.query import Answer, JobInfo


@dataclass
class FakeSlurm:
    """What Slurm would say, and what it was asked to do."""

    state: str | None = "RUNNING"
    restarts: int = 1
    node: str = "down*"
    refuses: bool = False
    requeued: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    now: float = 100.0

    def job_info(self, _: str) -> JobInfo:
        answer = Answer.SILENT if self.state is None else Answer.KNOWN
        return JobInfo(answer, state=self.state, restarts=self.restarts)

    def node_state(self, host: str) -> str:
        assert host == "c1"
        return self.node

    def kill_step(self, job_id: str, step: str) -> None:
        self.killed.append(f"{job_id}.{step}")
        self.node = "down"

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def requeue(self, job_id: str) -> None:
        if self.refuses:
            raise UserError("no")
        self.requeued.append(job_id)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    for name in ("job_info", "node_state", "requeue", "kill_step"):
        monkeypatch.setattr(requeue, name, getattr(fake, name))
    monkeypatch.setattr(requeue.time, "monotonic", lambda: fake.now)
    monkeypatch.setattr(requeue.time, "sleep", fake.sleep)
    return fake


def survivor(folder: Path, index: int = 1) -> requeue.GiveBack:
    place = Placement("42", 1, ("c1", "c2", "c3"), index, slurm=True)
    return requeue.GiveBack(place, RunJournal(RunDir(folder), place, lambda _: False))


def after(slurm: FakeSlurm, seconds: float, agent: requeue.GiveBack, refused: bool = False) -> bool:
    slurm.now += seconds
    return agent.as_survivor(refused)


def test_the_survivors_take_turns(slurm: FakeSlurm, tmp_path: Path) -> None:
    second, third = survivor(tmp_path, 1), survivor(tmp_path, 2)
    assert not second.as_survivor(False) and not third.as_survivor(False)
    assert after(slurm, 6, second)
    assert slurm.requeued == ["42"]
    slurm.state, slurm.restarts = "PENDING", 2
    assert after(slurm, 6, third)
    assert slurm.requeued == ["42"]


def test_a_job_that_has_moved_on_is_left_alone(slurm: FakeSlurm, tmp_path: Path) -> None:
    """A requeue that comes late would hit the next attempt."""
    agent = survivor(tmp_path)
    agent.as_survivor(False)
    slurm.restarts = 2
    assert after(slurm, 6, agent)
    assert slurm.requeued == []
    told = [event for path in (tmp_path / "events").iterdir() for event in read_json_lines(path)]
    assert told[-1]["event"] == "requeue_not_needed"


def test_as_long_as_slurm_hears_the_first_node_nothing_is_done(slurm: FakeSlurm, tmp_path: Path) -> None:
    agent = survivor(tmp_path)
    slurm.node = "idle*"
    assert not agent.as_survivor(False)
    assert not after(slurm, 60, agent) and slurm.requeued == []
    slurm.node = "down"
    assert after(slurm, 6, agent) and slurm.requeued == ["42"]


def test_silence_and_refusal_are_tried_again(slurm: FakeSlurm, tmp_path: Path) -> None:
    agent = survivor(tmp_path)
    agent.as_survivor(False)
    slurm.state = None
    slurm.node = "idle*"
    assert not after(slurm, 6, agent)
    slurm.state, slurm.node, slurm.refuses = "RUNNING", "down*", True
    assert not after(slurm, 6, agent)
    slurm.refuses = False
    assert after(slurm, 6, agent)


def test_a_crashed_first_node_that_answers_again_is_not_taken_for_alive(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    """It refuses connections as a living node would, but no batch script is left on it."""
    agent = survivor(tmp_path)
    slurm.node = "allocated"
    assert not agent.as_survivor(True)
    assert not after(slurm, 60, agent, refused=True)
    slurm.node = "allocated*"
    assert not after(slurm, 100, agent, refused=True)
    slurm.node = "down*"
    assert after(slurm, 6, agent, refused=True) and slurm.requeued == ["42"]


def test_where_only_the_first_agent_died_its_batch_script_is_left_to_act(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    agent = survivor(tmp_path)
    slurm.node = "allocated"
    agent.as_survivor(True)
    assert not after(slurm, 6, agent, refused=True)
    assert not after(slurm, 100, agent, refused=True)
    assert after(slurm, 30, agent, refused=True)
    assert slurm.requeued == []


def test_a_frozen_agent_on_a_living_node_does_not_hold_the_job(slurm: FakeSlurm, tmp_path: Path) -> None:
    """srun waits for every task, so the batch script would come to requeue only at the time limit."""
    place = Placement("42", 1, ("c2", "c1"), 0, slurm=True, step="3")
    journal = RunJournal(RunDir(tmp_path), place, lambda _: False)
    slurm.node = "allocated"
    began = slurm.now
    requeue.end_frozen_agents({"c1"}, place, journal)
    assert slurm.killed == ["42.3"] and slurm.now - began > 120


def test_a_node_that_is_cut_off_is_left_to_slurm(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Placement("42", 1, ("c2", "c1"), 0, slurm=True)
    states = iter(["allocated"] * 5 + ["allocated*"] * 40 + ["down*"])
    monkeypatch.setattr(requeue, "node_state", lambda host: next(states))
    requeue.end_frozen_agents({"c1"}, place, RunJournal(RunDir(tmp_path), place, lambda _: False))
    assert slurm.killed == []
