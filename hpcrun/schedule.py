"""Pipeline schedules: what each pipeline rank does, in which order. No torch.

A schedule is one list of actions per rank. Whatever the actions cost, the lists run to
their end if each rank keeps its order, sends without waiting and waits for what it
receives; :mod:`hpcrun.timeline` does so on paper.

Bubbles below are idle time per rank for p ranks with v stages each and at least p
micro-batches (zbv 2 p - 1), when F, I and W of a stage take the same time t each.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Literal

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]

_V_SHAPED: tuple[ScheduleName, ...] = ("zbv", "dualpipev")


class Kind(StrEnum):
    """What an action computes: outputs, or gradients of inputs (I), weights (W) or both (B)."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of one stage, numbered over the whole model, for one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


def stages_of(name: ScheduleName, pp: int, virtual_stages: int, rank: int) -> tuple[int, ...]:
    """The stages on pipeline ``rank``, in model order.

    zbv and dualpipev lay them in a V, down the ranks and back up; the others in loops.
    """
    if name in _V_SHAPED:
        return rank, 2 * pp - 1 - rank
    return tuple(range(rank, pp * virtual_stages, pp))


def rank_of(name: ScheduleName, pp: int, virtual_stages: int, stage: int) -> int:
    """The pipeline rank that has ``stage``, one of ``pp * virtual_stages``."""
    if name in _V_SHAPED:
        return min(stage, 2 * pp - 1 - stage)
    return stage % pp


def virtual_stages_problem(name: ScheduleName, virtual_stages: int) -> str | None:
    """Why ``name`` cannot have so many stages per rank; None when it can."""
    if name in ("interleaved", "zero_bubble"):
        least = 2 if name == "interleaved" else 1
        fits, need = virtual_stages >= least, f"{least} or more"
    else:
        exact = 2 if name in _V_SHAPED else 1
        fits, need = virtual_stages == exact, f"exactly {exact}"
    return None if fits else f"schedule {name} needs virtual_stages {need}, not {virtual_stages}"


def micro_batch_problem(name: ScheduleName, pp: int, virtual_stages: int, micro_batches: int) -> str | None:
    """Why ``name`` cannot run so many micro-batches per step; None when it can."""
    least = 2 * pp if name == "dualpipev" else 1
    if micro_batches >= least:
        return None
    return f"schedule {name} with pp {pp} needs {least} or more micro-batches, not {micro_batches}"


def actions(name: ScheduleName, pp: int, virtual_stages: int, micro_batches: int) -> list[list[Action]]:
    """What each pipeline rank does in one training step.

    Per stage, F and then I, W or B each take the micro-batches in order.

    Raises:
        ValueError: the schedule does not run with so many stages or micro-batches.
    """
    problem = virtual_stages_problem(name, virtual_stages) or micro_batch_problem(
        name, pp, virtual_stages, micro_batches
    )
    if problem:
        raise ValueError(problem)
    lists = []
    for rank in range(pp):
        if name == "zbv":
            steps = _zbv(pp, rank, micro_batches)
        elif name == "dualpipev":
            steps = _dualpipev(pp, rank, micro_batches)
        else:
            steps = _looped(name, pp, rank, virtual_stages, micro_batches)
        numbered = _numbered(steps, stages_of(name, pp, virtual_stages, rank))
        lists.append([action for action in numbered if action.micro_batch < micro_batches])
    return lists


def _looped(name: ScheduleName, pp: int, rank: int, virtual_stages: int, micro_batches: int) -> list[str]:
    """Forwards, and the same sequence of backwards some warm-up later.

    gpipe (Huang et al., 2019): every forward first. Bubble 3 (p - 1) t.

    1f1b (Narayanan et al., 2019): the first backward as soon as it can be. Bubble the
    same; p - rank micro-batches in memory.

    interleaved (Narayanan et al., 2021, section 2.2): as 1f1b, over v stages in rounds of
    p micro-batches. Bubble 3 (p - 1) t where t is v times shorter. Micro-batches that do
    not divide by p go into larger rounds of about equal size, which take more memory.

    zero_bubble (Qi et al., 2023, ZB-H1): as 1f1b, with each W ``rank`` steps after its I
    so that W fills the end. Bubble (p - 1) t; p v stage activations, which is the memory
    of 1f1b on its first rank. With v > 1 in the same rounds as interleaved.
    """
    rounds = max(1, micro_batches // pp)
    starts = [micro_batches * number // rounds for number in range(rounds + 1)]
    sizes = [end - start for start, end in pairwise(starts)]
    forwards = [local for size in sizes for local in range(virtual_stages) for _ in range(size)]
    count, after = len(forwards), pp - 1 - rank
    until = {"gpipe": count, "1f1b": after, "interleaved": 2 * after, "zero_bubble": after}
    warm_up = until[name] + (virtual_stages - 1) * max(sizes)
    split = name == "zero_bubble"
    delay = rank if split else 0
    steps = []
    for step in range(count + warm_up + delay):
        if step < count:
            steps.append(f"F{forwards[step]}")
        if 0 <= step - warm_up < count:
            steps.append(f"{'I' if split else 'B'}{virtual_stages - 1 - forwards[step - warm_up]}")
        if split and step >= warm_up + delay:
            steps.append("W")
    return steps


def _zbv(pp: int, rank: int, micro_batches: int) -> list[str]:
    """ZB-V (Qi et al., 2023, section 6): bubble (p - 1) t, 2 p stage activations.

    Made for at least 2 p - 1 micro-batches; fewer run the same lists without the others.
    """
    after = pp - rank
    more = max(0, micro_batches - 2 * pp + 1)
    return (
        "F0 " * (2 * after - 1)
        + "F1 F0 " * rank
        + "F1 I1 W " * after
        + "F0 I0 W F1 I1 W " * (more + rank)
        + "I0 W F1 I1 W " * (after - 1)
        + "I0 I1 " * rank
        + "I0 W " * after
        + "W " * (2 * rank)
    ).split()


def _dualpipev(pp: int, rank: int, micro_batches: int) -> list[str]:
    """DualPipe cut in half (DeepSeek-V3, 2024, section 3.2.1): 2 p + 1 stage activations.

    Bubble (p - 1) t. Most F and B stand in pairs of opposite direction, so that each
    hides the other's expert communication.
    """
    after = pp - 1 - rank
    ending = [f"{'B' if step <= rank else 'I'}{1 - step % 2}" for step in range(2 * (rank + 1))]
    pattern = (
        "F0 " * (2 * after)
        + "F0 F1 " * (rank + 1)
        + "I1 W F1 " * after
        + "F0 B1 F1 B0 " * (micro_batches - 2 * pp + rank + 1)
        + "B1 F1 B0 " * after
        + " ".join(ending)
        + " W I0" * after
        + " W" * (rank + 1)
    )
    return pattern.split()


def _numbered(steps: list[str], stages: tuple[int, ...]) -> list[Action]:
    """``steps`` of one rank as actions: F1 is a forward of the second of its ``stages``.

    The micro-batches of a stage count up; W belongs to the oldest I without one.
    """
    taken: Counter[tuple[bool, int]] = Counter()
    waiting: deque[Action] = deque()
    numbered = []
    for step in steps:
        kind = Kind(step[0])
        if kind is Kind.WEIGHT:
            done = waiting.popleft()
            action = Action(kind, done.stage, done.micro_batch)
        else:
            stage = stages[int(step[1:])]
            action = Action(kind, stage, taken[kind is Kind.FORWARD, stage])
            taken[kind is Kind.FORWARD, stage] += 1
        if kind is Kind.INPUT:
            waiting.append(action)
        numbered.append(action)
    return numbered
