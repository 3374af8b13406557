"""Pipeline schedules, and the timeline that runs them on paper."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest

from hpcrun.schedule import (
    Action,
    Kind,
    ScheduleName,
    actions,
    micro_batch_problem,
    rank_of,
    stages_of,
    virtual_stages_problem,
)
from hpcrun.timeline import Costs, Span, bubble, draw, in_flight, simulate

NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
PLACES = [(name, v) for name in NAMES for v in (1, 2, 3) if not virtual_stages_problem(name, v)]
CASES = [(name, v, pp) for name, v in PLACES for pp in range(1, 9)]
UNIT = Costs()


def micro_batches(name: ScheduleName, v: int, pp: int) -> list[int]:
    """Few, many, and not divisible by ``pp``."""
    some = sorted({1, 2, 3, pp, pp + 1, 2 * pp, 2 * pp + 3, 3 * pp, 4 * pp - 1})
    return [m for m in some if not micro_batch_problem(name, pp, v, m)]


def parsed(text: str) -> list[Action]:
    return [Action(Kind(word[0]), *(int(number) for number in word[1:].split("."))) for word in text.split()]


def texts(lists: list[list[Action]]) -> list[str]:
    return [" ".join(map(str, todo)) for todo in lists]


def idle(timeline: list[list[Span]]) -> float:
    """Idle time per rank."""
    return bubble(timeline) * max(spans[-1].end for spans in timeline)


@pytest.mark.parametrize(("name", "v", "pp"), CASES)
def test_every_stage_is_on_one_rank(name: ScheduleName, v: int, pp: int) -> None:
    places = [stages_of(name, pp, v, rank) for rank in range(pp)]
    assert sorted(stage for stages in places for stage in stages) == list(range(pp * v))
    for rank, stages in enumerate(places):
        assert [rank_of(name, pp, v, stage) for stage in stages] == [rank] * v


def test_stages_stand_in_loops_or_in_a_v() -> None:
    assert [stages_of("interleaved", 3, 2, rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [stages_of("zbv", 3, 2, rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [stages_of("dualpipev", 3, 2, rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


@pytest.mark.parametrize(("name", "v", "pp"), CASES)
def test_every_stage_takes_every_micro_batch_once_and_in_order(name: ScheduleName, v: int, pp: int) -> None:
    for m in micro_batches(name, v, pp):
        for rank, todo in enumerate(actions(name, pp, v, m)):
            assert {action.stage for action in todo} == set(stages_of(name, pp, v, rank))
            for stage in stages_of(name, pp, v, rank):
                own = [action for action in todo if action.stage == stage]
                for kinds in ("F", "BI", "BW"):
                    assert [action.micro_batch for action in own if action.kind in kinds] == list(range(m))


@pytest.mark.parametrize(
    "costs", [UNIT, Costs(forward=1, input=3, weight=0.5, transfer=2)], ids=["unit", "uneven"]
)
@pytest.mark.parametrize(("name", "v", "pp"), CASES)
def test_every_action_follows_what_it_needs(name: ScheduleName, v: int, pp: int, costs: Costs) -> None:
    for m in micro_batches(name, v, pp):
        lists = actions(name, pp, v, m)
        timeline = simulate(lists, costs)
        assert [[span.action for span in spans] for spans in timeline] == lists
        for spans in timeline:
            assert all(before.end <= after.start for before, after in pairwise(spans))
        at: dict[tuple[str, int, int], Span] = {}
        for span in (span for spans in timeline for span in spans):
            for kind in "IW" if span.action.kind == "B" else span.action.kind:
                at[kind, span.action.stage, span.action.micro_batch] = span
        assert len(at) == 3 * pp * v * m
        for (kind, stage, micro_batch), span in at.items():
            if kind == "F" and stage:
                needed = [at["F", stage - 1, micro_batch]]
            elif kind == "I":
                needed = [at["F", stage, micro_batch]]
                needed += [at["I", stage + 1, micro_batch]] if stage + 1 < pp * v else []
            elif kind == "W" and span.action.kind == "W":
                needed = [at["I", stage, micro_batch]]
            else:
                needed = []
            for before in needed:
                far = rank_of(name, pp, v, before.action.stage) != rank_of(name, pp, v, stage)
                assert before.end + (costs.transfer if far else 0) <= span.start


@pytest.mark.parametrize(
    ("name", "v", "lists"),
    [
        (
            "gpipe",
            1,
            [
                "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2",
                "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2",
            ],
        ),
        (
            "1f1b",
            1,
            [
                "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2",
                "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2",
            ],
        ),
        (
            "zero_bubble",
            1,
            [
                "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
                "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",
            ],
        ),
        (
            "zbv",
            2,
            [
                "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2",
                "F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2",
            ],
        ),
    ],
)
def test_two_ranks_and_three_micro_batches(name: ScheduleName, v: int, lists: list[str]) -> None:
    assert texts(actions(name, 2, v, 3)) == lists


def test_interleaved_alternates_rounds_of_its_stages() -> None:
    assert texts(actions("interleaved", 2, 2, 4)) == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


def test_dualpipev_in_the_eight_steps_of_its_source() -> None:
    assert texts(actions("dualpipev", 2, 2, 4)) == [
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3 B3.1 F3.2 B0.0 B3.2 F3.3 B0.1 B3.3 I0.2 W0.2 I0.3 W0.3",
        "F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 F2.2 B1.0 F1.3 B2.1 F2.3 B1.1 B2.2 B1.2 I2.3 I1.3 W2.3 W1.3",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 1), (4, 2), (4, 8), (8, 32)])
def test_bubble_share_of_gpipe_and_1f1b(name: ScheduleName, pp: int, m: int) -> None:
    costs = Costs(forward=2, input=1, weight=1)
    assert bubble(simulate(actions(name, pp, 1, m), costs)) == pytest.approx((pp - 1) / (m + pp - 1))


@pytest.mark.parametrize(("name", "v"), PLACES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_idle_time_of_each_schedule(name: ScheduleName, v: int, pp: int) -> None:
    """In times of one F of a stage; stages are v times shorter, so v stages divide the bubble by v."""
    backwards = 3 if name in ("gpipe", "1f1b", "interleaved") else 1
    for m in (2 * pp, 2 * pp + 1, 3 * pp - 1, 5 * pp):
        if not micro_batch_problem(name, pp, v, m):
            assert idle(simulate(actions(name, pp, v, m), UNIT)) == pytest.approx(backwards * (pp - 1))


def test_order_of_the_schedules_by_bubble() -> None:
    places: list[tuple[ScheduleName, int]] = [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 2)]
    shares = [bubble(simulate(actions(name, 4, v, 8), UNIT)) for name, v in places]
    assert shares == pytest.approx([9 / 33, 9 / 57, 3 / 27, 3 / 51])
    assert bubble(simulate(actions("dualpipev", 4, 2, 8), UNIT)) == pytest.approx(3 / 51)


@pytest.mark.parametrize(("pp", "m"), [(1, 1), (4, 2), (4, 4), (4, 16), (8, 11)])
def test_activations_of_gpipe_and_1f1b(pp: int, m: int) -> None:
    assert in_flight(actions("gpipe", pp, 1, m)) == [m] * pp
    assert in_flight(actions("1f1b", pp, 1, m)) == [min(m, pp - rank) for rank in range(pp)]


@pytest.mark.parametrize(("pp", "m"), [(1, 1), (4, 3), (4, 4), (4, 16), (8, 24)])
def test_split_schedules_keep_what_the_first_rank_of_1f1b_keeps(pp: int, m: int) -> None:
    """A stage of v per rank keeps a v-th of the activations of one."""
    for v in (1, 2, 3):
        assert in_flight(actions("zero_bubble", pp, v, m)) == [v * min(m, pp)] * pp
    assert max(in_flight(actions("zbv", pp, 2, m))) == 2 * min(m, pp)


def test_activations_of_interleaved_and_dualpipev() -> None:
    assert in_flight(actions("interleaved", 4, 2, 8)) == [4 + 2 * 3 + 1, 4 + 2 * 2 + 1, 4 + 2 + 1, 4 + 1]
    assert in_flight(actions("interleaved", 4, 2, 11)) == [6 + 2 * 3 + 1, 11, 9, 7], "rounds of 5 and 6"
    assert in_flight(actions("dualpipev", 4, 2, 8)) == [2 * 4 + 1] * 4


@pytest.mark.parametrize("pp", [2, 4, 7])
def test_weights_fill_the_end_of_zero_bubble(pp: int) -> None:
    timeline = simulate(actions("zero_bubble", pp, 1, 3 * pp), UNIT)
    end = max(spans[-1].end for spans in timeline)
    for rank, spans in enumerate(timeline):
        first = next(number for number, span in enumerate(spans) if span.action.kind is Kind.INPUT)
        assert all(before.end == after.start for before, after in pairwise(spans[first:]))
        assert spans[-1].end == end
        assert [span.action.kind for span in spans[-rank - 1 :]] == [Kind.WEIGHT] * (rank + 1)


@pytest.mark.parametrize("pp", [1, 3, 4])
def test_dualpipev_pairs_a_forward_with_a_backward_of_the_other_stage(pp: int) -> None:
    m = 3 * pp
    for rank, todo in enumerate(actions("dualpipev", pp, 2, m)):
        pairs = [
            (forward, backward)
            for forward, backward in pairwise(todo)
            if forward.kind is Kind.FORWARD and backward.kind is Kind.BACKWARD
        ]
        assert all(forward.stage != backward.stage for forward, backward in pairs)
        assert len(pairs) == 2 * (m - 2 * pp + rank + 1) + pp - 1 - rank


def test_what_a_schedule_needs() -> None:
    fits = {name: [v for v in range(5) if virtual_stages_problem(name, v) is None] for name in NAMES}
    assert fits == {
        "gpipe": [1],
        "1f1b": [1],
        "interleaved": [2, 3, 4],
        "zero_bubble": [1, 2, 3, 4],
        "zbv": [2],
        "dualpipev": [2],
    }
    assert virtual_stages_problem("zbv", 1) == "schedule zbv needs virtual_stages exactly 2, not 1"
    assert (
        virtual_stages_problem("interleaved", 1)
        == "schedule interleaved needs virtual_stages 2 or more, not 1"
    )
    least = {name: min(m for m in range(99) if micro_batch_problem(name, 4, 2, m) is None) for name in NAMES}
    assert least == dict.fromkeys(NAMES, 1) | {"dualpipev": 8}


def test_actions_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="schedule 1f1b needs virtual_stages exactly 1, not 2"):
        actions("1f1b", 4, 2, 8)
    with pytest.raises(ValueError, match="schedule dualpipev with pp 4 needs 8 or more micro-batches, not 7"):
        actions("dualpipev", 4, 2, 7)


def test_costs_scale_and_transfer() -> None:
    lists = [parsed("F0.0 I0.0 W0.0"), parsed("F1.0 B1.0")]
    costs = Costs(forward=1, input=2, weight=4, transfer=0.5, scale=(1, 10))
    timeline = simulate(lists, costs)
    assert [(span.start, span.end) for span in timeline[0]] == [(0, 1), (72, 74), (74, 78)]
    assert [(span.start, span.end) for span in timeline[1]] == [(1.5, 11.5), (11.5, 71.5)]
    assert bubble(timeline) == pytest.approx(1 - (7 + 70) / (2 * 78))


def test_transfer_costs_nothing_within_a_rank() -> None:
    (spans,) = simulate([parsed("F0.0 F1.0 B1.0 B0.0")], Costs(transfer=100))
    assert spans[-1].end == 6


def test_activations_live_until_the_weights_are_done() -> None:
    assert in_flight([parsed("F0.0 I0.0 F0.1 W0.0 I0.1 W0.1"), parsed("F1.0 B1.0 F1.1 B1.1")]) == [2, 1]


def test_deadlock_names_the_blocked_actions() -> None:
    lists = [parsed("F0.0 B0.0 F0.1 B0.1"), parsed("F1.0 F1.1 B1.0 B1.1")]
    with pytest.raises(
        ValueError, match=r"rank 0 at B0\.0 waits for I1\.0; rank 1 at F1\.1 waits for F0\.1$"
    ):
        simulate(lists, UNIT)


@pytest.mark.parametrize(
    ("lists", "told"),
    [
        (
            ["B0.0", "F1.0 B1.0"],
            r"rank 0 at B0\.0 waits for F0\.0 and I1\.0; rank 1 at F1\.0 waits for F0\.0",
        ),
        (["F0.0 F0.1", "F1.0 F1.1 B1.2"], r"rank 1 at B1\.2 waits for F1\.2"),
        (["F0.0 W0.0"], r"rank 0 at W0\.0 waits for I0\.0"),
    ],
)
def test_what_never_happens_is_named(lists: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        simulate([parsed(todo) for todo in lists], UNIT)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_1f1b_with_one_warm_up_forward_less_deadlocks(rank: int) -> None:
    lists = actions("1f1b", 4, 1, 8)
    warm_up = 3 - rank
    lists[rank].insert(warm_up - 1, lists[rank].pop(warm_up + 1))
    assert lists[rank][warm_up - 1].kind is Kind.BACKWARD
    with pytest.raises(ValueError, match=f"rank {rank} at "):
        simulate(lists, UNIT)


def test_picture() -> None:
    assert draw(simulate(actions("1f1b", 2, 1, 2), UNIT)).splitlines() == [
        "rank 0  F0 F1       B0---    B1---",
        "rank 1     F0 B0--- F1 B1---",
    ]
    assert draw(simulate(actions("zbv", 2, 2, 2), UNIT)).splitlines() == [
        "rank 0  F0 F1    f0 i0 w0 f1 i1 w1 I0 W0    I1 W1",
        "rank 1     F0 f0 F1 f1 i0 w0 I0 W0 i1 w1 I1 W1",
    ]
