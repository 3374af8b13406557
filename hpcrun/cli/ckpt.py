"""``hpcrun ckpt``: a group whose commands are loaded when they run."""

from __future__ import annotations

import click

from hpcrun.cli import LazyGroup


class _Group(LazyGroup):
    commands_at = {
        "ls": ("hpcrun.cli.ckpt_inspect:ls", "List the checkpoints of a run."),
        "show": ("hpcrun.cli.ckpt_inspect:show", "What is in a checkpoint: tensors, shapes, layout, step."),
        "verify": ("hpcrun.cli.ckpt_inspect:verify", "Whether a checkpoint is whole."),
        "diff": ("hpcrun.cli.ckpt_inspect:diff", "How two checkpoints differ."),
        "prune": ("hpcrun.cli.ckpt_inspect:prune", "Remove old checkpoints, and what failed saves left."),
    }


_EXAMPLE = """\b
Example:
  hpcrun ckpt ls my-run
  hpcrun ckpt verify --deep my-run
"""


@click.group(cls=_Group, epilog=_EXAMPLE)
def command() -> None:
    """Look into checkpoints, verify, compare and remove them."""
