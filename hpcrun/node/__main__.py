"""``python -P -m hpcrun.node RUN_DIR``: the agent of one node, started by srun as one task per node."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hpcrun.errors import UserError
from hpcrun.node.agent import Agent, Duty, Notices
from hpcrun.node.coordinator import Coordinator, Policy
from hpcrun.node.environment import base_environment
from hpcrun.node.journal import RunJournal
from hpcrun.node.memory import node_memory
from hpcrun.node.placement import Placement, placement
from hpcrun.node.ranks import CommandLauncher, Launcher, TrainerLauncher
from hpcrun.node.requeue import GiveBack, end_frozen_agents
from hpcrun.node.result import clear_result, write_result
from hpcrun.node.server import Server, listen
from hpcrun.records import EXIT_STOP, RunDir
from hpcrun.runs.runfile import RunFile, read_run_file
from hpcrun.slurm.query import job_info


def main() -> int:
    notices = Notices()
    notices.install()
    parser = argparse.ArgumentParser(prog="python -m hpcrun.node", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    run = RunDir(parser.parse_args().run_dir.resolve())
    place = None
    try:
        place = placement(os.environ)
        return _serve(run, read_run_file(run), place, notices)
    except UserError as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.filename or run.path}: {error.strerror or error}"
    with suppress(OSError):  # the run's disk may be full
        print(f"hpcrun: {reason}", file=sys.stderr)
        if place and place.index == 0:
            write_result(run, place, EXIT_STOP)
    return EXIT_STOP


def _serve(run: RunDir, file: RunFile, place: Placement, notices: Notices) -> int:
    """Be the agent, and on the first node the coordinator, until the job's end is known."""
    scratch = Path(tempfile.mkdtemp(prefix=f"hpcrun-{place.job_id}-"))
    try:
        with node_memory(place.job_id, file.run) as memory:
            environment = base_environment(os.environ, file, scratch, memory)
            return _agent(run, file, place, notices, environment)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _agent(
    run: RunDir, file: RunFile, place: Placement, notices: Notices, environment: dict[str, str]
) -> int:
    journal = RunJournal(run, place, lambda holder: _is_alive(holder, place))
    token = bytes.fromhex((run.job / "token").read_text())
    server = coordinator = None
    if place.index == 0:
        clear_result(run, place)
        coordinator = Coordinator(_policy(file, place), journal)
        address = _interface_address(file.site.rendezvous.interface)
        server = Server(listen(address, place.coordinator_ports()), file.run, token, coordinator)
    launcher = _launcher(run, file, place, environment)
    duty = Duty(run, file, place, token, environment, _lead_begins(file, place))
    agent = Agent(duty, launcher, journal, notices, server, GiveBack(place, journal).as_survivor)
    code = agent.run()
    if coordinator:
        write_result(run, place, code)
        if place.slurm:
            end_frozen_agents(coordinator.unheard, place, journal)
    return code


def _launcher(run: RunDir, file: RunFile, place: Placement, environment: dict[str, str]) -> Launcher:
    if file.recipe.command:
        return CommandLauncher(file.recipe.command)
    log = run.path / "logs" / f"parent-{place.host}-{place.job_id}-{place.restart}.log"
    return TrainerLauncher(file.interpreter, environment, log)


def _policy(file: RunFile, place: Placement) -> Policy:
    recovery = file.recipe.recovery
    if len(place.nodes) < file.nodes:
        raise UserError(
            f"this job has {len(place.nodes)} nodes, the run needs {file.nodes}: give sbatch --nodes"
        )
    return Policy(
        nodes=file.nodes,
        spares=len(place.nodes) - file.nodes,
        ranks_per_node=file.ranks_per_node,
        node_timeout=recovery.node_timeout,
        start_timeout=recovery.start_timeout,
        max_restarts=recovery.restarts_for(file.recipe.command),
        may_requeue=file.site.scheduler.requeue_allowed
        and place.restart < recovery.requeues_for(file.recipe.command),
    )


def _lead_begins(file: RunFile, place: Placement) -> float | None:
    """When the run must save because the time limit is near; None without a limit."""
    end = job_info(place.job_id).end_time if place.slurm else None
    margin = file.recipe.recovery.save_margin or file.site.margins.save
    return None if end is None else end - margin


def _interface_address(interface: str | None) -> str:
    if interface is None:
        return "0.0.0.0"
    found = psutil.net_if_addrs().get(interface, [])
    for address in found:
        if address.family.name == "AF_INET":
            return str(address.address)
    known = ", ".join(sorted(psutil.net_if_addrs()))
    raise UserError(
        f"rendezvous.interface {interface!r} has no IPv4 address on this node; interfaces here: {known}"
    )


def _is_alive(holder: dict[str, Any], place: Placement) -> bool:
    """Whether the job that made a claim is still running."""
    job_id = str(holder["job_id"])
    if not place.slurm:
        return psutil.pid_exists(int(job_id)) if job_id.isdigit() else False
    info = job_info(job_id)
    return info.state == "RUNNING" and info.restarts == holder["restart"]


if __name__ == "__main__":
    sys.exit(main())
