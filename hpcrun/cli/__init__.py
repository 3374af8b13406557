"""The command line: one module per command, imported only when that command runs.

A command module parses, calls and shows; it holds no logic of its own.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from hpcrun import __version__
from hpcrun.errors import UserError, one_line

COMMANDS: dict[str, tuple[str, str]] = {
    "submit": ("hpcrun.cli.submit:command", "Submit a recipe, or a command of your own, as a Slurm job."),
    "ls": ("hpcrun.cli.ls:command", "List your runs."),
    "status": ("hpcrun.cli.status:command", "What a run is doing, and what happened to it."),
    "logs": ("hpcrun.cli.logs:command", "Show what the ranks of a run printed."),
    "cancel": ("hpcrun.cli.cancel:command", "Stop a run, with a last checkpoint where it can."),
    "resume": ("hpcrun.cli.resume:command", "Continue a run from its newest checkpoint that verifies."),
    "ckpt": ("hpcrun.cli.ckpt:command", "Look into checkpoints, verify, compare, convert and remove them."),
    "recipe": ("hpcrun.cli.recipe:command", "Check a recipe; print the schema of recipes."),
    "bench": ("hpcrun.cli.bench:command", "Measure how fast this machine trains and saves."),
    "demo": ("hpcrun.cli.demo:command", "Train on this machine, lose a rank, and see the run go on."),
}
"""Name -> (where the click command is, its line in ``hpcrun --help``)."""


class LazyGroup(click.Group):
    """A group whose help needs no command module, so that it answers in a blink."""

    commands_at: dict[str, tuple[str, str]] = COMMANDS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands_at:
            return None
        module, attribute = self.commands_at[cmd_name][0].split(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.commands_at.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.commands_at and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.commands_at, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(self.commands_at)}"
            raise UserError(f"no command {name!r}; {hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpcrun")
def group() -> None:
    """Submit multi-node training to Slurm, and see it finish whatever fails on the way.

    \b
    Example:
      hpcrun recipe check recipe.yaml
      hpcrun submit recipe.yaml
      hpcrun status
    """


def main(args: Sequence[str] | None = None) -> NoReturn:
    """The console script: run one command and exit with its status.

    0 on success, 2 with one line on stderr for what the user can mend, 130 after Ctrl-C.
    """
    try:
        status = group.main(args, prog_name="hpcrun", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        _fail(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "hpcrun"
        _fail(f"{error.format_message().rstrip('.')} (see '{command} --help')")
    except click.ClickException as error:
        _fail(error.format_message())
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # The reader left. Without a stdout the interpreter has nothing to flush, and to complain of, at exit.
        sys.stdout = None
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> NoReturn:
    click.echo(f"hpcrun: {one_line(message)}", err=True)
    sys.exit(2)
