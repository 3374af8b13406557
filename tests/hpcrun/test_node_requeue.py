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
    now: float = 100.0

    def job_info(self, _: str) -> JobInfo:
        answer = Answer.SILENT if self.state is None else Answer.KNOWN
        return JobInfo(answer, state=self.state, restarts=self.restarts)

    def node_state(self, host: str) -> str:
        assert host == "c1"
        return self.node

    def requeue(self, job_id: str) -> None:
        if self.refuses:
            raise UserError("no")
        self.requeued.append(job_id)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    for name in ("job_info", "node_state", "requeue"):
        monkeypatch.setattr(requeue, name, getattr(fake, name))
    monkeypatch.setattr(requeue.time, "monotonic", lambda: fake.now)
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
