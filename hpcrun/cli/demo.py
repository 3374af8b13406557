"""``hpcrun demo``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(epilog="Example: hpcrun demo --folder demo")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("demo"), help="Where the run goes.")
def command(folder: Path) -> None:
    """Train a small GPT here, lose a rank on the way, and see it go on.

    Needs neither Slurm nor a GPU; takes a few minutes on two cores.
    """
    from hpcrun import demo
    from hpcrun.runs.story import recoveries

    folder = folder.resolve()
    click.echo("Making a data set from Python's own library ...")
    tokens = demo.prepare_tokens(folder)
    run = demo.start(folder, tokens)
    click.echo(f"Submitted {run.name}: 4 ranks, TP=2 x PP=2; importing torch takes some seconds ...")
    demo.follow(run, click.echo)
    click.echo("\nLoss:")
    for line in demo.loss_curve(run):
        click.echo(line)
    click.echo("\nRecovery:")
    for recovery in recoveries(run):
        click.echo(f"  {recovery.describe()}")
    click.echo(
        f"\nEverything lies in {run.path}:\n"
        "  run.yaml      exactly what ran\n"
        "  metrics/      one line per step and attempt\n"
        "  events/       what happened, by node\n"
        "  logs/         one file per rank and attempt\n"
        "  checkpoints/  HDF5 per rank and a manifest\n"
        f"Look again with: hpcrun status {run.path}"
    )
