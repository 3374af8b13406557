"""The coordinator's decisions, with a clock and links of our own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from hpcrun.node.coordinator import Coordinator, Member, Phase, Policy
from hpcrun.node.protocol import Message
from hpcrun.records import EXIT_DONE, EXIT_REQUEUE, EXIT_STOP


@dataclass
class FakeLink:
    sent: list[Message] = field(default_factory=list)
    closed: bool = False

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def kinds(self) -> list[str]:
        return [message["type"] for message in self.sent]

    def last(self, kind: str) -> Message:
        return [message for message in self.sent if message["type"] == kind][-1]


@dataclass
class FakeJournal:
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    attempts: int = 0
    held: bool = False
    newer: bool = False
    stop: bool = False

    def event(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def claim(self, **facts: Any) -> tuple[int, str] | None:
        if self.held:
            return None
        self.attempts += 1
        return self.attempts, f"claim{self.attempts}"

    def superseded(self) -> bool:
        return self.newer

    def stop_wanted(self) -> bool:
        return self.stop

    def reason(self, event: str) -> str:
        return str([fields for name, fields in self.events if name == event][-1]["reason"])


class Allocation:
    """A coordinator with agents that answer unless they are silenced."""

    def __init__(self, nodes: int, spares: int = 0, ranks: int = 2, **policy: Any) -> None:
        settings = {"max_restarts": 3, "may_requeue": True} | policy
        self.now = 0.0
        self.journal = FakeJournal()
        self.coordinator = Coordinator(
            Policy(nodes, spares, ranks, node_timeout=30, start_timeout=300, **settings),
            self.journal,
            clock=lambda: self.now,
        )
        self.links: dict[int, FakeLink] = {}
        self.incarnations: dict[int, str] = {}
        self.silent: set[int] = set()

    def join(self, *nodes: int, incarnation: str = "a") -> None:
        for node in nodes:
            self.links[node] = FakeLink()
            self.incarnations[node] = incarnation
            self.coordinator.hello(
                Member(
                    node,
                    f"c{node}",
                    incarnation,
                    f"10.0.0.{node}",
                    "10.0.0.0",
                    5000,
                    self.links[node],
                    self.now,
                )
            )

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 1
            for node, link in self.links.items():
                if node not in self.silent:
                    self.coordinator.heartbeat(node, self.incarnations[node], self.now, link)
            self.coordinator.tick()

    def confirm_stopped(self) -> None:
        for node, link in self.links.items():
            if node not in self.silent and "stop" in link.kinds():
                self.coordinator.stopped(node, self.journal.attempts, 6000)
        self.coordinator.tick()

    def exit_all(self, code: int, ranks: int) -> None:
        for rank in range(ranks):
            self.coordinator.rank_exited(self.journal.attempts, rank, code, None, "c0")


def started(nodes: int = 2, spares: int = 0, **policy: Any) -> Allocation:
    allocation = Allocation(nodes, spares, **policy)
    allocation.join(*range(nodes + spares))
    allocation.wait(1)
    assert allocation.coordinator.phase is Phase.RUNNING
    return allocation


def test_waits_for_all_nodes_and_gives_contiguous_blocks_in_node_order() -> None:
    allocation = Allocation(nodes=3)
    allocation.join(2, 0)
    allocation.wait(20)
    assert allocation.coordinator.phase is Phase.GATHERING
    allocation.join(1)
    allocation.wait(1)
    starts = {node: link.last("start") for node, link in allocation.links.items()}
    assert {node: start["first_rank"] for node, start in starts.items()} == {0: 0, 1: 2, 2: 4}
    assert {start["master_addr"] for start in starts.values()} == {"10.0.0.0"}
    assert {start["world"] for start in starts.values()} == {6}


def test_starts_without_a_missing_spare_but_not_without_a_needed_node() -> None:
    allocation = Allocation(nodes=2, spares=1)
    allocation.join(0, 1)
    allocation.wait(15)
    assert allocation.coordinator.phase is Phase.RUNNING


def test_gives_the_job_back_when_a_node_never_reports() -> None:
    allocation = Allocation(nodes=2)
    allocation.join(0)
    allocation.wait(302)
    assert allocation.coordinator.code == EXIT_REQUEUE
    assert "1 of 2 agents" in allocation.journal.reason("finished")


def test_address_of_the_first_node_is_never_loopback_for_others() -> None:
    """Field report: hostname-maps-to-loopback."""
    allocation = Allocation(nodes=2)
    link = FakeLink()
    allocation.coordinator.hello(Member(0, "c0", "a", "127.0.0.1", "127.0.0.1", 5000, link, 0.0))
    allocation.coordinator.hello(Member(1, "c1", "a", "10.0.0.1", "10.0.0.9", 5001, FakeLink(), 0.0))
    allocation.coordinator.tick()
    assert link.last("start")["master_addr"] == "10.0.0.9"


def test_a_dead_rank_restarts_all_ranks_as_a_new_attempt_after_all_have_stopped() -> None:
    """Field report: one-rank-dies-others-wait."""
    allocation = started()
    allocation.coordinator.rank_exited(1, 3, None, 9, "c1")
    assert all("stop" in link.kinds() for link in allocation.links.values())
    allocation.coordinator.stopped(0, 1, 6000)
    allocation.coordinator.tick()
    assert allocation.coordinator.phase is Phase.STOPPING
    allocation.coordinator.stopped(1, 1, 6001)
    allocation.coordinator.tick()
    start = allocation.links[1].last("start")
    assert (start["attempt"], start["claim"], start["master_port"]) == (2, "claim2", 6000)
    assert "rank 3 on c1 ended by signal 9" in allocation.journal.reason("restarting")


def test_a_failure_counts_even_when_the_last_rank_to_end_succeeds() -> None:
    """Field report: success-subset."""
    allocation = started(max_restarts=0)
    for rank, code in ((0, 0), (3, 7), (1, 0), (2, 0)):
        allocation.coordinator.rank_exited(1, rank, code, None, "c0")
    allocation.wait(2)
    assert (allocation.coordinator.code, allocation.journal.attempts) == (7, 1)


def test_the_killed_rank_is_blamed_not_the_peers_that_fail_because_of_it() -> None:
    """Field report: oom-kill-named."""
    allocation = started()
    allocation.coordinator.rank_exited(1, 0, 1, None, "c0")
    allocation.coordinator.rank_exited(1, 3, None, 9, "c1")
    assert "rank 3 on c1 ended by signal 9" in allocation.journal.reason("restarting")


def test_an_exit_of_an_earlier_attempt_changes_nothing() -> None:
    allocation = started()
    allocation.coordinator.rank_exited(1, 0, None, 9, "c0")
    allocation.confirm_stopped()
    allocation.coordinator.rank_exited(1, 1, 1, None, "c0")
    assert allocation.coordinator.phase is Phase.RUNNING


def test_restarts_are_bounded_and_the_last_exit_code_is_the_jobs() -> None:
    """Field report: success-subset: a failing rank is never a success of the others."""
    allocation = started(max_restarts=1)
    allocation.coordinator.rank_exited(1, 0, 7, None, "c0")
    allocation.wait(2)
    allocation.confirm_stopped()
    allocation.coordinator.rank_exited(2, 0, 7, None, "c0")
    allocation.wait(2)
    assert allocation.coordinator.code == 7


def test_success_needs_every_rank() -> None:
    allocation = started()
    for rank in range(3):
        allocation.coordinator.rank_exited(1, rank, 0, None, "c0")
    assert "finish" not in allocation.links[1].kinds()
    allocation.coordinator.rank_exited(1, 3, 0, None, "c1")
    assert allocation.coordinator.code == EXIT_DONE
    assert allocation.links[1].last("finish")["code"] == EXIT_DONE


def test_a_rank_that_never_ends_does_not_hold_the_job() -> None:
    allocation = started()
    for rank in range(3):
        allocation.coordinator.rank_exited(1, rank, 0, None, "c0")
    allocation.wait(62)
    assert "ranks [3]" in allocation.journal.reason("restarting")


def test_an_error_that_a_restart_cannot_mend_stops_the_run() -> None:
    allocation = started()
    allocation.coordinator.rank_exited(1, 2, EXIT_STOP, None, "c1")
    assert allocation.coordinator.code == EXIT_STOP


def test_a_spare_takes_the_lost_nodes_rank_block_unchanged() -> None:
    allocation = started(nodes=3, spares=1)
    allocation.silent.add(1)
    allocation.wait(32)
    assert allocation.journal.reason("node_lost").startswith("silent for 3")
    allocation.confirm_stopped()
    blocks = {node: allocation.links[node].last("start")["first_rank"] for node in (0, 2, 3)}
    assert blocks == {0: 0, 2: 4, 3: 2}
    assert allocation.links[1].kinds().count("start") == 1


def test_a_healed_node_comes_back_as_a_spare() -> None:
    allocation = started(nodes=2, spares=1)
    allocation.silent.add(1)
    allocation.wait(32)
    allocation.confirm_stopped()
    allocation.coordinator.heartbeat(1, "a", allocation.now, allocation.links[1])
    assert allocation.links[1].kinds()[-1] == "rejoin"
    allocation.silent.clear()
    allocation.join(1, incarnation="b")
    allocation.silent.add(2)
    allocation.wait(32)
    allocation.confirm_stopped()
    assert allocation.links[1].last("start")["first_rank"] == 2


def test_losing_half_of_the_agents_fences_this_side_and_gives_the_job_back() -> None:
    allocation = started(nodes=2)
    allocation.silent.add(1)
    allocation.wait(32)
    assert allocation.coordinator.code == EXIT_REQUEUE
    assert "1 of 2 nodes gone" in allocation.journal.reason("finished")


def test_no_requeue_when_none_is_left_or_the_site_forbids_it() -> None:
    """Field report: hidden-default-requeue."""
    allocation = started(nodes=2, may_requeue=False)
    allocation.silent.add(1)
    allocation.wait(32)
    assert allocation.coordinator.code == EXIT_STOP


def test_a_notice_makes_all_ranks_save_and_is_repeated_until_they_have_heard_it() -> None:
    """Field report: preempted-again-before-first-save: the signal may come before the handler."""
    allocation = started()
    allocation.coordinator.save_and_stop("time limit")
    allocation.wait(6)
    assert all(link.kinds().count("save") >= 2 for link in allocation.links.values())
    allocation.exit_all(EXIT_REQUEUE, ranks=4)
    assert allocation.coordinator.code == EXIT_REQUEUE


def test_a_notice_before_the_start_gives_the_job_back_at_once() -> None:
    allocation = Allocation(nodes=2)
    allocation.join(0)
    allocation.coordinator.save_and_stop("time limit")
    assert allocation.coordinator.code == EXIT_REQUEUE


def test_a_rank_that_slurm_has_ended_is_not_restarted_in_a_dying_job() -> None:
    allocation = started()
    allocation.coordinator.rank_exited(1, 0, None, 15, "c0")
    assert allocation.coordinator.code == EXIT_REQUEUE
    assert allocation.journal.attempts == 1


def test_stop_wanted_ends_in_stop_not_requeue() -> None:
    allocation = started()
    allocation.journal.stop = True
    allocation.wait(8)
    assert "save" in allocation.links[0].kinds()
    allocation.exit_all(EXIT_REQUEUE, ranks=4)
    assert allocation.coordinator.code == EXIT_STOP


def test_the_loser_of_two_jobs_on_one_run_ends_quietly() -> None:
    allocation = Allocation(nodes=1)
    allocation.journal.held = True
    allocation.join(0)
    allocation.wait(1)
    assert allocation.coordinator.code == EXIT_DONE
    assert "start" not in allocation.links[0].kinds()


def test_a_run_that_another_job_took_over_is_let_go() -> None:
    allocation = started()
    allocation.journal.newer = True
    allocation.wait(8)
    assert allocation.coordinator.code == EXIT_DONE


@pytest.mark.parametrize("late", [1, 40])
def test_a_late_agent_hears_how_the_job_ended(late: float) -> None:
    allocation = started()
    allocation.exit_all(0, ranks=4)
    allocation.now += late
    link = FakeLink()
    allocation.coordinator.hello(Member(1, "c1", "z", "10.0.0.1", "10.0.0.0", 1, link, allocation.now))
    assert link.last("finish")["code"] == EXIT_DONE
