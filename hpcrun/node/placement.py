"""Where this agent stands in its job, from the scheduler's environment alone.

A host's own idea of its name is never asked: it may be localhost, a login alias
or the name on another network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcrun.errors import UserError
from hpcrun.slurm.hosts import expand_hosts

_FIRST_PORT = 20000
_PORTS = 10000
_STRIDE = 1009
_CANDIDATES = 5


@dataclass(frozen=True)
class Placement:
    """One agent's place: node ``index`` of ``nodes`` in restart ``restart`` of ``job_id``."""

    job_id: str
    restart: int
    nodes: tuple[str, ...]
    index: int
    slurm: bool
    step: str = "0"

    @property
    def host(self) -> str:
        return self.nodes[self.index]

    def coordinator_ports(self) -> list[int]:
        """Ports on the first node where the coordinator may listen, in order of preference.

        Derived from the job, so that no file has to travel through a caching file
        system; below Linux's ephemeral range (32768 and up).
        """
        start = sum(ord(letter) * 31**i for i, letter in enumerate(self.job_id)) + self.restart * 17
        return [_FIRST_PORT + (start + i * _STRIDE) % _PORTS for i in range(_CANDIDATES)]


def placement(environ: Mapping[str, str]) -> Placement:
    """Read the place of this agent.

    Raises:
        UserError: outside a job, or not exactly one task per node.
    """
    if "SLURM_JOB_ID" not in environ:
        return _local(environ)
    nodes = tuple(expand_hosts(_need(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")))
    tasks = int(_need(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    if tasks != len(nodes):
        raise UserError(
            f"{tasks} tasks on {len(nodes)} nodes ({','.join(nodes)}): hpcrun.node is one task per node; "
            "start it with srun --ntasks-per-node=1"
        )
    index = int(_need(environ, "SLURM_NODEID"))
    if index >= len(nodes):
        raise UserError(f"SLURM_NODEID is {index}, but the step has {len(nodes)} nodes")
    restart = int(environ.get("SLURM_RESTART_COUNT") or 0)
    step = environ.get("SLURM_STEP_ID") or "0"
    return Placement(environ["SLURM_JOB_ID"], restart, nodes, index, slurm=True, step=step)


def _local(environ: Mapping[str, str]) -> Placement:
    job_id = environ.get("SUBMITIT_LOCAL_JOB_ID")
    if not job_id:
        raise UserError(
            "neither SLURM_JOB_ID nor SUBMITIT_LOCAL_JOB_ID is set: hpcrun.node runs inside a job; "
            "use hpcrun submit"
        )
    return Placement(job_id, 0, ("localhost",), 0, slurm=False)


def _need(environ: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environ.get(name):
            return environ[name]
    raise UserError(f"{names[0]} is not set: start hpcrun.node with srun inside the job")
