"""`python -m tests.cluster`: start, break, heal and stop a Slurm cluster on this machine."""

import shlex
import subprocess
import sys

import click

from tests.cluster.cluster import Cluster, down
from tests.cluster.errors import ClusterError


class _Group(click.Group):
    """Shows a ClusterError as one line and ends with exit code 2."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ClusterError as error:
            click.echo(f"error: {error}", err=True)
            for note in getattr(error, "__notes__", []):
                click.echo(f"  {note}", err=True)
            ctx.exit(2)


@click.group(cls=_Group)
def main() -> None:
    """A real multi-node Slurm on this machine. Needs root and Debian's Slurm packages."""


@main.command("up")
@click.option("--nodes", default=4, show_default=True, type=click.IntRange(1, 100))
@click.option("--accounting/--no-accounting", default=True, show_default=True)
def up_command(nodes: int, accounting: bool) -> None:
    """Start the cluster and wait until all nodes are idle."""
    cluster = Cluster.up(nodes, accounting)
    click.echo(f"up: {', '.join(cluster.nodes)}; shared folder {cluster.shared}")


@main.command("status")
def status_command() -> None:
    """Show daemons and nodes."""
    click.echo("\n".join(Cluster.attach().status()))


@main.command("cut")
@click.argument("node")
def cut_command(node: str) -> None:
    """Unplug NODE's network; its processes live on."""
    Cluster.attach().cut(node)


@main.command("crash")
@click.argument("node")
def crash_command(node: str) -> None:
    """Kill everything on NODE and empty its memory."""
    Cluster.attach().crash(node)


@main.command("heal")
@click.argument("node")
def heal_command(node: str) -> None:
    """Plug in and start NODE as needed, and wait until it takes jobs."""
    Cluster.attach().heal(node)


@main.command("env")
def env_command() -> None:
    """Print the shell lines that let Slurm's commands find the cluster."""
    click.echo(f"export SLURM_CONF={shlex.quote(Cluster.attach().env()['SLURM_CONF'])}")


@main.command("run", context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run_command(command: tuple[str, ...]) -> None:
    """Run COMMAND as the ordinary user on the login node, in the shared folder."""
    cluster = Cluster.attach()
    # No time limit: a person sits in front of it.
    sys.exit(subprocess.run(cluster.login_command(command), env=cluster.env(), check=False).returncode)


@main.command("down")
def down_command() -> None:
    """End and remove everything that `up` made."""
    click.echo("down" if down() else "no cluster is up")


if __name__ == "__main__":
    main(prog_name="python -m tests.cluster")
