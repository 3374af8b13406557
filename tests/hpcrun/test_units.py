"""Times and sizes: what sbatch means by them, and what is refused."""

from __future__ import annotations

import pytest

from hpcrun.units import TimeLimit, parse_bytes, parse_seconds, show_bytes, show_seconds

# What sbatch 22.05.8 set for each legal form, in minutes; None is no limit.
SBATCH = {
    "60": 60,
    60: 60,
    "4:00": 4,
    "61:01": 62,
    "1:30:00": 90,
    "25:00:00": 25 * 60,
    "2-12": 60 * 60,
    "2-12:30": 60 * 60 + 30,
    "1-00:00:00": 24 * 60,
    "3-0:00": 3 * 24 * 60,
    "14-0": 14 * 24 * 60,
    "0:30": 1,
    "00:00:45": 1,
    "0": None,
    "UNLIMITED": None,
    "INFINITE": None,
}


@pytest.mark.parametrize(("written", "minutes"), SBATCH.items())
def test_time_means_what_sbatch_means(written: str | int, minutes: int | None) -> None:
    """Field report: time-format-table."""
    assert TimeLimit.parse(written).minutes == minutes


@pytest.mark.parametrize(
    ("written", "minutes"), {"90m": 90, "1h30m": 90, "36h": 2160, "2d": 2880, "90s": 2}.items()
)
def test_our_own_time_forms(written: str, minutes: int) -> None:
    assert TimeLimit.parse(written).minutes == minutes


@pytest.mark.parametrize(
    "written",
    [
        "-5",
        -5,
        "1h30",
        "1:60:00",
        "0:61",
        "1-24",
        "1-1:60",
        "  10 ",
        "10\n",
        "1.5",
        1.5,
        "3600.0",
        "",
        "m",
        True,
        "٣",
    ],
)
def test_other_times_are_refused_with_what_to_write(written: object) -> None:
    """Field report: time-format-table. sbatch takes -5 for 2982611 days and 1:60:00 for two hours."""
    with pytest.raises(ValueError, match=r"write 90m, 1h30m"):
        TimeLimit.parse(written)


@pytest.mark.parametrize("word", ["UNLIMITED", "unlimited", "INFINITE", "infinity"])
def test_no_limit_has_no_minutes(word: str) -> None:
    """Field report: time-limit-words."""
    limit = TimeLimit.parse(word)
    assert (limit.minutes, limit.seconds, limit.slurm(), limit.words()) == (
        None,
        None,
        "UNLIMITED",
        "no limit",
    )


@pytest.mark.parametrize("word", ["Partition_Limit", "NOT_SET", "INVALID", "Unknown", "N/A"])
def test_slurms_other_words_are_refused_by_name(word: str) -> None:
    """Field report: time-limit-words."""
    with pytest.raises(ValueError, match=word):
        TimeLimit.parse(word)


@pytest.mark.parametrize("written", SBATCH)
def test_slurm_reads_back_what_we_write(written: str | int) -> None:
    limit = TimeLimit.parse(written)
    assert TimeLimit.parse(limit.slurm()) == limit


def test_time_in_words() -> None:
    assert TimeLimit.parse(60).words() == "1 hour"
    assert TimeLimit.parse("2-01:02:00").words() == "2 days 1 hour 2 minutes"
    assert TimeLimit.parse("1").words() == "1 minute"


def test_durations_are_seconds() -> None:
    assert [parse_seconds(value) for value in (30, "30s", "5m", "1h30m")] == [30, 30, 300, 5400]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "30", "0s", "5 m", "", "1:30"])
def test_other_durations_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_seconds(value)


@pytest.mark.parametrize(
    ("written", "size"),
    {
        0: 0,
        "512": 512,
        "512B": 512,
        "64K": 64 * 1024,
        "64KiB": 64 * 1024,
        "64KB": 64_000,
        "1.5GiB": 3 << 29,
        "1.5 G": 3 << 29,
        "1.07GB": 1_070_000_000,
        "2TB": 2 * 10**12,
        "1PiB": 1 << 50,
    }.items(),
)
def test_sizes(written: str | int, size: int) -> None:
    assert parse_bytes(written) == size


@pytest.mark.parametrize("written", [-1, 1.5, True, "", "G", "5iB", "5Ki", "-1K", "1e3", "5X", "1,5G"])
def test_other_sizes_are_refused(written: object) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(written)


def test_a_fraction_of_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number of bytes"):
        parse_bytes("0.1K")


def test_sizes_and_durations_for_people() -> None:
    assert [show_bytes(n) for n in (12, 1536, 3 << 29, 1 << 50)] == ["12 B", "1.5 KiB", "1.5 GiB", "1.0 PiB"]
    assert [show_seconds(n) for n in (1.25, 42.4, 185, 7800)] == ["1.2 s", "42 s", "3 min 5 s", "2 h 10 min"]
