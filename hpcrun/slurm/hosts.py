"""Slurm's host lists, by ClusterShell."""

from __future__ import annotations

from ClusterShell.NodeSet import NodeSet, NodeSetParseError

from hpcrun.errors import UserError


def expand_hosts(nodelist: str) -> list[str]:
    """The hosts of a Slurm node list such as ``gpu-[01-03,07],login1``, in Slurm's order.

    Raises:
        UserError: not a node list.
    """
    hosts: list[str] = []
    try:
        for part in _split(nodelist):
            hosts += list(NodeSet(part))
    except NodeSetParseError as error:
        raise UserError(f"{nodelist!r} is not a Slurm node list: {error}") from error
    return hosts


def _split(nodelist: str) -> list[str]:
    """At commas outside brackets: NodeSet alone would sort the parts."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(nodelist):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(nodelist[start:position])
            start = position + 1
    return [*parts, nodelist[start:]]
