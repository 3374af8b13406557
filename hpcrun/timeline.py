"""When the actions of a pipeline schedule run, and what they keep in memory. No torch.

Each rank runs its list strictly in order, sends without waiting and waits for what it
receives, as the trainer does: a schedule that runs to its end here cannot deadlock there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hpcrun.schedule import Action, Kind


@dataclass(frozen=True)
class Costs:
    """Time of the actions of a stage, in any one unit; B takes ``input + weight``.

    ``transfer`` passes before the result of an action is on another rank.
    Actions of stage i take ``scale[i]`` times as long; empty means all alike.
    """

    forward: float = 1
    input: float = 1
    weight: float = 1
    transfer: float = 0
    scale: Sequence[float] = ()

    def of(self, action: Action) -> float:
        """How long ``action`` takes."""
        cost = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.input + self.weight,
            Kind.INPUT: self.input,
            Kind.WEIGHT: self.weight,
        }[action.kind]
        return cost * self.scale[action.stage] if self.scale else cost


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when an action runs, in the unit of its costs; the step starts at 0."""

    action: Action
    start: float
    end: float


def simulate(lists: Sequence[Sequence[Action]], costs: Costs) -> list[list[Span]]:
    """Runs ``lists``, one per rank: each action as soon as its rank is free and its inputs are there.

    Raises:
        ValueError: the lists deadlock, or need what no list has. Names the action at
            which each stuck rank waits, and for what (I stands for I or B).
    """
    last = max(action.stage for todo in lists for action in todo)
    done: dict[Action, tuple[int, float]] = {}
    timeline: list[list[Span]] = [[] for _ in lists]

    def missing(action: Action) -> list[Action]:
        return [need for need in _needs(action, last) if need not in done]

    moved = True
    while moved:
        moved = False
        for rank, (todo, spans) in enumerate(zip(lists, timeline, strict=True)):
            while len(spans) < len(todo) and not missing(todo[len(spans)]):
                action = todo[len(spans)]
                start = spans[-1].end if spans else 0.0
                for at, end in (done[need] for need in _needs(action, last)):
                    start = max(start, end + (0 if at == rank else costs.transfer))
                spans.append(Span(action, start, start + costs.of(action)))
                done[_result(action)] = rank, spans[-1].end
                moved = True
    stuck = [
        f"rank {rank} at {todo[len(spans)]} waits for {' and '.join(map(str, missing(todo[len(spans)])))}"
        for rank, (todo, spans) in enumerate(zip(lists, timeline, strict=True))
        if len(spans) < len(todo)
    ]
    if stuck:
        raise ValueError("the schedule does not run to its end: " + "; ".join(stuck))
    return timeline


def bubble(timeline: Sequence[Sequence[Span]]) -> float:
    """The share of all ranks' time, from the start to the last end of any, that is idle."""
    spans = [span for rank in timeline for span in rank]
    busy = sum(span.end - span.start for span in spans)
    return 1 - busy / (len(timeline) * max(span.end for span in spans))


def in_flight(lists: Sequence[Sequence[Action]]) -> list[int]:
    """Per rank the most (stage, micro-batch) pairs whose activations are alive at once.

    They live from F to the end of B, or of W where the backward is split.
    """
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: 0, Kind.WEIGHT: -1}
    return [max(accumulate((change[action.kind] for action in todo), initial=0)) for todo in lists]


def draw(timeline: Sequence[Sequence[Span]]) -> str:
    """A row per rank, for people: kind and micro-batch, in lower case for a rank's later stages."""
    spans = [span for rank in timeline for span in rank]
    width = max(len(f"{span.action.kind}{span.action.micro_batch}") for span in spans) + 1
    columns = width / min(span.end - span.start for span in spans if span.end > span.start)
    rows = []
    for rank, own in enumerate(timeline):
        row = f"rank {rank:<{len(str(len(timeline) - 1))}}  "
        margin, first = len(row), min(span.action.stage for span in own)
        for span in own:
            kind = str(span.action.kind) if span.action.stage == first else span.action.kind.lower()
            cell = f"{kind}{span.action.micro_batch}"
            start, end = (margin + round(time * columns) for time in (span.start, span.end))
            row = row.ljust(start) + cell.ljust(end - start - 1, "-") + " "
        rows.append(row.rstrip())
    return "\n".join(rows)


def _needs(action: Action, last: int) -> list[Action]:
    """What ``action`` waits for, of its own and the next stages; ``last`` is the last stage."""
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
    if kind is Kind.FORWARD:
        return [Action(Kind.FORWARD, stage - 1, micro_batch)] if stage else []
    if kind is Kind.WEIGHT:
        return [Action(Kind.INPUT, stage, micro_batch)]
    above = [Action(Kind.INPUT, stage + 1, micro_batch)] if stage < last else []
    return [Action(Kind.FORWARD, stage, micro_batch), *above]


def _result(action: Action) -> Action:
    """The name under which others wait for ``action``: a B gives the input gradient of an I."""
    if action.kind is Kind.BACKWARD:
        return Action(Kind.INPUT, action.stage, action.micro_batch)
    return action
