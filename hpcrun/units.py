"""Times and sizes as people write them.

Times follow sbatch(1), ``--time``: "minutes", "minutes:seconds",
"hours:minutes:seconds", "days-hours", "days-hours:minutes",
"days-hours:minutes:seconds"; Slurm rounds up to whole minutes. Our own forms
``90m``, ``1h30m``, ``36h``, ``2d`` are added because nobody mistakes them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})", re.ASCII)
_SUFFIXED = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[KMGTP]?)(?P<binary>i?)(?P<byte>B?)", re.ASCII)
_UNLIMITED_WORDS = {"unlimited", "infinite", "infinity"}
_TIME_HELP = "write 90m, 1h30m, 36h, 2-12:00:00 (days-hours:minutes:seconds), 60 (minutes) or UNLIMITED"
_PREFIXES = ("", "K", "M", "G", "T", "P")


def _seconds(text: str) -> int:
    """Seconds of one legal time text; ValueError says what is wrong with it."""
    suffixed = _SUFFIXED.fullmatch(text)
    if suffixed and any(suffixed.groups()):
        days, hours, minutes, seconds = (int(group or 0) for group in suffixed.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    clock = _CLOCK.fullmatch(text)
    if not clock:
        raise ValueError(f"{text!r} is not a time; {_TIME_HELP}")
    parts = [int(part) for part in clock["parts"].split(":")]
    if any(part > 59 for part in parts[1:]):
        raise ValueError(f"{text!r} has minutes or seconds above 59; {_TIME_HELP}")
    if clock["days"] is not None:
        if parts[0] > 23:
            raise ValueError(f"{text!r} has more than 23 hours beside its days; {_TIME_HELP}")
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return ((int(clock["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 1:
        return parts[0] * 60
    if len(parts) == 2:
        return parts[0] * 60 + parts[1]
    return (parts[0] * 60 + parts[1]) * 60 + parts[2]


@dataclass(frozen=True)
class TimeLimit:
    """A Slurm time limit in whole minutes; ``minutes is None`` means no limit."""

    minutes: int | None

    @classmethod
    def parse(cls, value: object) -> TimeLimit:
        """Read what a user wrote, with sbatch's meaning (a bare number is minutes).

        Raises:
            ValueError: negative, fractional, ``1:60:00`` or not a time at all.
        """
        if isinstance(value, TimeLimit):
            return value
        text = str(value)
        if text.lower() in _UNLIMITED_WORDS:
            return cls(None)
        seconds = _seconds(text)
        return cls(None) if seconds == 0 else cls(-(-seconds // 60))

    @property
    def seconds(self) -> int | None:
        return None if self.minutes is None else self.minutes * 60

    def slurm(self) -> str:
        """As ``D-HH:MM:SS`` or ``UNLIMITED``."""
        if self.minutes is None:
            return "UNLIMITED"
        days, rest = divmod(self.minutes, 24 * 60)
        return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"

    def words(self) -> str:
        """In words, so that ``60`` meaning an hour surprises nobody."""
        if self.minutes is None:
            return "no limit"
        days, rest = divmod(self.minutes, 24 * 60)
        named = [(days, "day"), (rest // 60, "hour"), (rest % 60, "minute")]
        return " ".join(f"{n} {unit}{'s' if n != 1 else ''}" for n, unit in named if n)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda limit: limit.slurm(), return_schema=core_schema.str_schema()
            ),
            json_schema_input_schema=core_schema.union_schema(
                [core_schema.str_schema(), core_schema.int_schema(ge=0)]
            ),
        )


def parse_seconds(value: object) -> int:
    """A duration in seconds: ``30`` (seconds) or ``30s``, ``5m``, ``1h30m``.

    Raises:
        ValueError: not a whole, positive duration.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SUFFIXED.fullmatch(value) if isinstance(value, str) else None
    if match and any(match.groups()):
        seconds = _seconds(str(value))
        if seconds:
            return seconds
    raise ValueError(f"{value!r} is not a duration; write 30s, 5m, 1h30m (a bare number is seconds)")


def parse_bytes(value: object) -> int:
    """A size in bytes: ``512``, ``64K``, ``1.5GiB``, ``2TB``.

    ``K``, ``KiB`` and so on are powers of 1024 as in Slurm's ``--mem``; ``KB`` and
    so on are powers of 1000.

    Raises:
        ValueError: not a size, or a fraction of a byte.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if not match or (match["binary"] and not (match["prefix"] and match["byte"])):
        raise ValueError(f"{value!r} is not a size; write 512, 64K, 1.5GiB or 2TB")
    base = 1000 if match["byte"] and not match["binary"] else 1024
    size = Decimal(match["number"]) * base ** _PREFIXES.index(match["prefix"])
    if size != int(size):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(size)


def show_bytes(count: float) -> str:
    """``count`` bytes for a person: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} PiB"


def show_seconds(seconds: float) -> str:
    """A duration for a person: ``42 s``, ``3 min 5 s``, ``2 h 10 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
