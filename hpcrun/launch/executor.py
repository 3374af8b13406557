"""submitit, with our script and our command.

submitit's pickle is written and never read: the batch script starts the agent,
which leaves the result file that ``submitit.Job.result()`` waits for.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from submitit import LocalExecutor
from submitit.local.local import LocalJob
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from hpcrun.errors import UserError
from hpcrun.slurm.control import submit_script

_FOREVER = 10 * 365 * 24 * 60.0
"""Minutes. submitit's local executor ends a job after two by default."""


def _started_by_script(run_dir: str) -> None:
    """Stands in the pickle for what really runs: ``python -m hpcrun.node RUN_DIR``."""


class SlurmRun(SlurmExecutor):
    """Submits one rendered script."""

    def __init__(self, folder: Path, script: str, comment: str) -> None:
        super().__init__(folder)
        self._script = script
        self._comment = comment

    def _submit_command(self, command: str) -> SlurmJob[None]:
        path = self.folder / "run.sbatch"
        path.write_bytes(os.fsencode(self._script))
        path.chmod(0o700)
        job_id = submit_script(path, self._comment)
        return SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])


class LocalRun(LocalExecutor):
    """Starts the agent on this machine."""

    def __init__(self, folder: Path, agent: list[str]) -> None:
        super().__init__(folder)
        self._agent = agent

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join(self._agent)


def start_slurm(folder: Path, script: str, comment: str, run_dir: str) -> str:
    """Submit to Slurm; returns the job id.

    Raises:
        UserError: no srun here, or sbatch refused.
    """
    try:
        executor = SlurmRun(folder, script, comment)
    except RuntimeError as error:
        raise UserError("srun is not on PATH: submit on a login node, or use --site local") from error
    return str(executor.submit(_started_by_script, run_dir).job_id)


def start_local(folder: Path, agent: list[str], gpus: int, minutes: int | None, run_dir: str) -> str:
    """Start the agent here, detached from this process; returns the controller's pid as job id."""
    executor = LocalRun(folder, ["env", f"CUDA_VISIBLE_DEVICES={visible_gpus(gpus)}", *agent])
    executor.update_parameters(timeout_min=minutes or _FOREVER, stderr_to_stdout=True)
    job: LocalJob[None] = executor.submit(_started_by_script, run_dir)
    return str(job.job_id)


def visible_gpus(count: int) -> str:
    """CUDA_VISIBLE_DEVICES for ``count`` GPUs: the first of the caller's own; none for 0, as on Slurm.

    submitit would number them anew from 0 and take another user's.
    """
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = map(str, range(count)) if own is None else own.split(",")[:count]
    return ",".join(devices)
