"""``hpcrun ckpt``: a group whose commands are loaded when they run."""

from __future__ import annotations

from typing import Any

import click

from hpcrun.cli import LazyGroup
from hpcrun.errors import UserError


class _Group(LazyGroup):
    commands_at = {
        "ls": ("hpcrun.cli.ckpt_inspect:ls", "List the checkpoints of a run."),
        "show": ("hpcrun.cli.ckpt_inspect:show", "What is in a checkpoint: tensors, shapes, layout, step."),
        "verify": ("hpcrun.cli.ckpt_inspect:verify", "Whether a checkpoint is whole."),
        "diff": ("hpcrun.cli.ckpt_inspect:diff", "How two checkpoints differ."),
        "prune": ("hpcrun.cli.ckpt_inspect:prune", "Remove old checkpoints, and what failed saves left."),
        "reshard": ("hpcrun.cli.ckpt_convert:reshard", "Write a checkpoint anew, cut for another layout."),
        "export": ("hpcrun.cli.ckpt_convert:export", "Write a checkpoint's weights in another format."),
        "import": ("hpcrun.cli.ckpt_convert:import_", "Make a checkpoint of weights from another format."),
    }

    def invoke(self, ctx: click.Context) -> Any:
        """What the disk refuses is one line, wherever it happens."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            raise UserError(f"{place}{error.strerror or error}") from error


_EXAMPLE = """\b
Example:
  hpcrun ckpt ls my-run
  hpcrun ckpt verify --deep my-run
  hpcrun ckpt export --to hf my-run model-hf
"""


@click.group(cls=_Group, epilog=_EXAMPLE)
def command() -> None:
    """Look into checkpoints, verify, compare, convert and remove them."""
