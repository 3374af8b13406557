"""An agent's place, from Slurm's environment alone."""

from __future__ import annotations

import pytest

from hpcrun.errors import UserError
from hpcrun.node.placement import placement

IN_STEP = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_NODELIST": "gpu-[01-02],login1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "2",
}


def test_place_in_the_step() -> None:
    """Field reports: nodelist-bracket-commas, nodelist-dash-digits."""
    place = placement(IN_STEP | {"SLURM_RESTART_COUNT": "3"})
    assert place.nodes == ("gpu-01", "gpu-02", "login1")
    assert (place.host, place.restart, place.job_id) == ("login1", 3, "42")


def test_more_tasks_than_nodes_is_refused() -> None:
    """Field reports: torchrun-inside-many-tasks, tasks-uneven."""
    with pytest.raises(UserError, match=r"24 tasks on 3 nodes.*--ntasks-per-node=1"):
        placement(IN_STEP | {"SLURM_STEP_NUM_TASKS": "24"})


@pytest.mark.parametrize("missing", ["SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID"])
def test_nothing_is_guessed(missing: str) -> None:
    """Field reports: ntasks-unset, local-rank-missing-makes-many-rank0, missing-hostfile-runs-local."""
    environ = {name: value for name, value in IN_STEP.items() if name != missing}
    with pytest.raises(UserError, match=f"{missing} is not set"):
        placement(environ)


def test_outside_a_job_it_refuses() -> None:
    with pytest.raises(UserError, match="use hpcrun submit"):
        placement({})


@pytest.mark.parametrize("job_id", ["1", "99999999", "4294967294"])
def test_ports_are_legal_and_below_the_ephemeral_range(job_id: str) -> None:
    """Field report: master-port-out-of-range."""
    ports = placement(IN_STEP | {"SLURM_JOB_ID": job_id}).coordinator_ports()
    assert len(set(ports)) == 5
    assert all(20000 <= port < 30000 for port in ports)
