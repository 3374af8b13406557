"""Aligned plain text, the same on a terminal, in a pipe and in a log."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrun.units import show_seconds


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two blanks apart."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """``name  value`` lines; those without a value are left out."""
    shown = [(name, value) for name, value in rows if value]
    width = max(len(name) for name, _ in shown)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in shown)


def of_total(step: int, total: int | None) -> str:
    """``25 of 80``; a command of the user's has no total."""
    return f"{step} of {total}" if total is not None else str(step)


def age(seconds: float | None) -> str:
    """A duration for a person, ``-`` for none."""
    return "-" if seconds is None else show_seconds(seconds)
