"""Files of a run: names, claims, lines, whole replacement."""

from __future__ import annotations

import json
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from hpcrun.records import (
    JsonLines,
    RunDir,
    checkpoint_name,
    claim_attempt,
    parse_checkpoint_name,
    read_claim,
    read_json_lines,
    replace_text,
    write_event,
)


def test_of_many_that_claim_at_once_exactly_one_wins(tmp_path: Path) -> None:
    """Field report: local-rank-missing-makes-many-rank0 (one does the claiming, others know it)."""
    run, claimers = RunDir(tmp_path), 8
    for attempt in range(1, 21):
        barrier = Barrier(claimers)

        def claim(barrier: Barrier = barrier) -> tuple[int, str] | None:
            barrier.wait(timeout=10)
            return claim_attempt(run, job=1)

        with ThreadPoolExecutor(claimers) as pool:
            wins = [won for won in pool.map(lambda _: claim(), range(claimers)) if won]
        numbers = [number for number, _ in wins]
        assert len(set(numbers)) == len(numbers) >= 1
        assert run.last_attempt() == max(numbers) >= attempt
        for number, mark in wins:
            assert read_claim(run, number)["claim"] == mark


def test_attempts_are_ordered_as_numbers(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.last_attempt() == 0
    for name in ("0009", "0010", "9999", "10000", "junk"):
        (run.attempts / name).mkdir(parents=True)
    assert run.last_attempt() == 10000
    assert claim_attempt(run) is not None
    assert run.last_attempt() == 10001


def test_a_claim_without_its_file_reads_as_empty(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.attempt(1).mkdir(parents=True)
    assert read_claim(run, 1) == {}


def test_checkpoint_names_parse_as_numbers() -> None:
    """Field report: retention-string-sort."""
    steps = [900, 1000, 99999, 100000]
    names = [checkpoint_name(step, 2) for step in steps]
    assert sorted(names) == names
    assert [parse_checkpoint_name(name) for name in names] == [(step, 2) for step in steps]


@pytest.mark.parametrize(
    "name",
    [
        "step_40",
        "step_00000040",
        "step_00000040.old",
        "step_00000040.a0001.tmp",
        "step_0000004٣.a0001",
        "latest",
        "40",
    ],
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    """Field reports: killed-mid-save, several-last-checkpoints."""
    assert parse_checkpoint_name(name) is None


def test_lines_are_strict_json_whatever_the_numbers(tmp_path: Path) -> None:
    """Field report: nan-in-json."""
    log = JsonLines(tmp_path / "deep" / "m.jsonl")
    log.write(
        step=5, loss=float("nan"), norms=[float("inf"), -float("inf"), 1.5], nested={"x": (float("nan"),)}
    )
    log.close()

    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    record = json.loads((tmp_path / "deep" / "m.jsonl").read_text(), parse_constant=no_constants)
    assert record == {"step": 5, "loss": "nan", "norms": ["inf", "-inf", 1.5], "nested": {"x": ["nan"]}}


def test_torn_and_foreign_lines_are_skipped(tmp_path: Path) -> None:
    """Field report: metrics-cut-line."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(
        b'{"step": 1}\n\n\xff\xfe\x00junk\n[1, 2]\n5\n{"step": 2}{"step": 3}\n{"step": 4}\n{"step": 5, "lo'
    )
    assert [record["step"] for record in read_json_lines(path)] == [1, 4]
    path.write_bytes(b"")
    assert list(read_json_lines(path)) == []
    assert list(read_json_lines(tmp_path / "missing")) == []


def test_a_writer_that_follows_a_torn_line_loses_nothing_of_its_own(tmp_path: Path) -> None:
    """Field report: metrics-cut-line."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    log = JsonLines(path)
    log.write(step=3)
    log.close()
    assert [record["step"] for record in read_json_lines(path)] == [1, 3]


def test_events_carry_their_time(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "e.jsonl")
    write_event(log, "started", node="c1")
    log.close()
    (event,) = read_json_lines(tmp_path / "e.jsonl")
    assert (event["event"], event["node"]) == ("started", "c1")
    assert event["time"] > 1.7e9


def test_replace_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    replace_text(path, "old", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600

    def full_disk(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        replace_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_costs_lines_but_neither_the_writer_nor_later_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on file sizes stands in for the full disk: the first write is cut, the next ones fail."""
    log = JsonLines(tmp_path / "log")
    log.write(n=1)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12, before[1]))
    try:
        log.write(n=2)
        log.write(n=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    log.write(n=4)
    assert [record["n"] for record in read_json_lines(tmp_path / "log")] == [1, 4]
    assert "log: a line is lost: File too large" in capsys.readouterr().err
