"""``--help`` answers in a blink, has an example, and mistakes are one line."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from hpcrun import __version__
from hpcrun.cli import COMMANDS, group, main


def every_command() -> list[tuple[str, ...]]:
    """Argument lists of all commands and their subcommands."""
    context = click.Context(group)
    found: list[tuple[str, ...]] = []
    for name in COMMANDS:
        found.append((name,))
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            found += [(name, below) for below in command.list_commands(context)]
    return found


def printed(script: str) -> list[str]:
    """Lines that ``script`` prints in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_help_loads_no_command() -> None:
    lines = printed(
        "import sys\nfrom hpcrun.cli import group\n"
        "group.main(['--help'], prog_name='hpcrun', standalone_mode=False)\n"
        "print(*[name for name in sys.modules if name.startswith(('hpcrun.cli.', 'torch', 'submitit'))])\n"
    )
    assert lines[-1] == ""
    for name, (_, text) in COMMANDS.items():
        assert f"  {name:<7} {text}" in lines


def test_no_help_loads_torch_or_submitit() -> None:
    """One process for all: what any of them loads stays in sys.modules."""
    lines = printed(
        "import sys\nfrom hpcrun.cli import group\n"
        f"for args in {every_command()!r}:\n"
        "    group.main([*args, '--help'], prog_name='hpcrun', standalone_mode=False)\n"
        "print('loaded', *{'torch', 'submitit', 'training'} & set(sys.modules))\n"
    )
    assert lines[-1] == "loaded"


@pytest.mark.parametrize("args", every_command(), ids=" ".join)
def test_every_help_has_an_example(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*args, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "Example" in shown
    assert f"hpcrun {' '.join(args)}" in shown.split("Example", 1)[1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hpcrun, version {__version__}\n"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["recipes"], "hpcrun: no command 'recipes'; did you mean 'recipe'?"),
        (["zzzzzz"], "hpcrun: no command 'zzzzzz'; commands: submit, "),
        (["recipe", "check"], "hpcrun: Missing argument 'FILE' (see 'hpcrun recipe check --help')"),
        (["recipe", "check", "--wrld", "1"], "hpcrun: No such option '--wrld'"),
        (["recipe", "check", "/nope/r.yaml"], "hpcrun: /nope/r.yaml: cannot be read: No such file"),
        (["--frob"], "hpcrun: No such option '--frob'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    args: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(line)
    assert told.err.count("\n") == 1


def test_ctrl_c_is_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(context: click.Context) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(group, "invoke", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["demo"])
    assert ended.value.code == 130
    assert capsys.readouterr().err.strip() == ""


def test_a_reader_that_leaves_is_no_error() -> None:
    """As ``hpcrun recipe schema | head -1``."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "hpcrun", "recipe", "schema"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == ""
    assert child.wait(timeout=60) == 1


def test_without_arguments_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Usage: hpcrun")
    assert len(lines) > len(COMMANDS)
