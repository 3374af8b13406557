"""The one exception that becomes a single line on the user's terminal."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. The command line prints it on one line and exits 2."""


def one_line(text: str) -> str:
    """``text`` with every run of white space, line ends included, folded to one space."""
    return " ".join(text.split())
