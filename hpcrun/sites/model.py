"""The model of a site file.

Every field has a default, so that a new site starts from three lines and grows.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hpcrun.recipe import ByteCount, Positive, Seconds, Section
from hpcrun.units import TimeLimit, parse_seconds


def _seconds_or_zero(value: object) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else parse_seconds(value)


class Scheduler(Section):
    """How jobs reach the machine, and what the site's policy allows."""

    kind: Literal["slurm", "local"] = "slurm"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: TimeLimit = Field(TimeLimit(60), description="limit of a job that does not name one")
    max_time: TimeLimit = TimeLimit(None)
    max_nodes: Positive | None = None
    exclusive: bool = True
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    requeue_allowed: bool = True
    sbatch_options: list[str] = Field(
        default_factory=list, description="further options, written as #SBATCH lines, e.g. --switches=1"
    )


class Node(Section):
    """What one node offers."""

    gpus: int = Field(0, ge=0)
    gpu_type: str | None = None
    cpus: Positive | None = None
    memory: ByteCount | None = None
    ranks: Positive | None = Field(None, description="ranks per node where there is no GPU; default 1")


class Margins(Section):
    """Time kept back for an orderly end."""

    save: Seconds = Field(120, description="before the time limit: save and requeue")
    signal: Annotated[int, BeforeValidator(_seconds_or_zero)] = Field(
        60, description="Slurm may send --signal up to this much early (sbatch(1))"
    )


class Rendezvous(Section):
    """How ranks find one another."""

    interface: str | None = Field(None, description="bind agents and gloo/NCCL sockets to this interface")
    suffix: str = Field("", description="appended to a node's name to get its name on that network, e.g. -ib")


class Filesystem(Section):
    """Where runs lie, and what the file system needs."""

    runs: str | None = Field(None, description="folder of all runs; ~ and $VARIABLES are expanded")
    hdf5_locking: bool = Field(
        False, description="HDF5's own file locks; most Lustre and NFS mounts lack flock"
    )
    stripe_count: int | None = Field(None, description="Lustre stripes for the checkpoint folder; -1 is all")
    stripe_size: ByteCount | None = None
    purge_days: Positive | None = Field(None, description="files untouched for this long are deleted")
    quota_bytes: ByteCount | None = None


class Expectations(Section):
    """What the machine should do; plans and preflight checks compare against it."""

    node_failures_per_year: float | None = Field(None, ge=0, description="per node")
    intra_node_floor: float | None = Field(None, gt=0, description="all-reduce bus bandwidth, GB/s")
    inter_node_floor: float | None = Field(None, gt=0, description="all-reduce bus bandwidth, GB/s")
    gpu_hour_price: float | None = Field(None, ge=0)
    currency: str = "USD"


class Variable(Section):
    """One environment variable with the reason why it is set."""

    value: str
    reason: str


class Site(Section):
    """One cluster."""

    name: str
    description: str = ""
    scheduler: Scheduler = Field(default_factory=Scheduler)
    node: Node = Field(default_factory=Node)
    margins: Margins = Field(default_factory=Margins)
    rendezvous: Rendezvous = Field(default_factory=Rendezvous)
    filesystem: Filesystem = Field(default_factory=Filesystem)
    expectations: Expectations = Field(default_factory=Expectations)
    modules: list[str] = Field(default_factory=list, description="loaded in the batch script")
    environment: dict[str, Variable] = Field(default_factory=dict)
