"""The batch script, from sbatch_templates/run.sbatch.j2."""

from __future__ import annotations

import shlex

import jinja2

from hpcrun import __version__
from hpcrun.datafiles import data_folder
from hpcrun.errors import UserError, one_line
from hpcrun.launch.environment import job_environment
from hpcrun.launch.request import Request
from hpcrun.records import RunDir
from hpcrun.runs.runfile import RunFile
from hpcrun.sites.model import Site

_TEMPLATE = "run.sbatch.j2"


def batch_script(run: RunDir, file: RunFile, request: Request) -> str:
    """The text of the script that sbatch gets; every value in it is quoted."""
    loader = jinja2.FileSystemLoader(data_folder("sbatch_templates"))
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"quote": lambda value: shlex.quote(str(value)), "comment": one_line}
    recovery = file.recipe.recovery
    requeues = recovery.requeues_for(file.recipe.command) if file.site.scheduler.requeue_allowed else 0
    return environment.get_template(_TEMPLATE).render(
        run=file.run,
        version=__version__,
        site=file.site.name,
        script=shlex.quote(str(script_path(run))),
        options=sbatch_options(run, file, request),
        run_dir=run.path,
        max_requeues=requeues,
        modules=file.site.modules,
        environment=job_environment(file.recipe, file.site),
        srun_options=srun_options(request, file.site),
        agent=[file.interpreter, "-P", "-m", "hpcrun.node", str(run.path)],
    )


def script_path(run: RunDir) -> str:
    """Where the script lies, for a person who submits it again."""
    return str(run.job / "run.sbatch")


def sbatch_options(run: RunDir, file: RunFile, request: Request) -> list[str]:
    """The #SBATCH lines, without the prefix."""
    site = file.site
    options = {
        "job-name": request.name,
        "nodes": str(request.nodes + request.spares),
        "ntasks-per-node": "1",
        "time": request.time.slurm(),
        "comment": job_comment(file),
        "output": f"{_pattern(str(run.job))}/slurm-%j.out",
        "open-mode": "append",
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
        "constraint": site.scheduler.constraint,
        "cpus-per-task": str(request.cpus_per_node) if request.cpus_per_node else None,
        "mem": f"{-(-request.memory // 1024**2)}M" if request.memory else None,
        "signal": _signal(file, request),
    }
    lines = [f"--{name}={_option(value)}" for name, value in options.items() if value is not None]
    lines += _gpu_options(request, site)
    lines += ["--exclusive"] if site.scheduler.exclusive else []
    lines += ["--no-kill", "--requeue" if site.scheduler.requeue_allowed else "--no-requeue"]
    return lines + site.scheduler.sbatch_options


def srun_options(request: Request, site: Site) -> list[str]:
    """One agent per node; the step outlives a lost node and a failed agent."""
    options = [f"--nodes={request.nodes + request.spares}", "--ntasks-per-node=1"]
    options += ["--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--unbuffered"]
    if request.cpus_per_node:
        options.append(f"--cpus-per-task={request.cpus_per_node}")
    return options + _gpu_options(request, site)


def job_comment(file: RunFile) -> str:
    """By this a job is found again when sbatch's answer was lost."""
    return f"hpcrun:{file.run}:{file.nonce}"


def save_lead(file: RunFile) -> int:
    """Seconds before the time limit at which the run saves."""
    return file.recipe.recovery.save_margin or file.site.margins.save


def _signal(file: RunFile, request: Request) -> str | None:
    """``USR2@lead``: only where the limit leaves room, or Slurm would send it at once."""
    lead = save_lead(file) + file.site.margins.signal
    limit = request.time.seconds
    return None if limit is None or lead >= limit else f"USR2@{lead}"


def _gpu_options(request: Request, site: Site) -> list[str]:
    if not request.gpus_per_node or site.scheduler.gpu_request == "none":
        return []
    kind = f"{site.node.gpu_type}:" if site.node.gpu_type and site.scheduler.gpu_request == "gres" else ""
    if site.scheduler.gpu_request == "gres":
        return [f"--gres=gpu:{kind}{request.gpus_per_node}"]
    return [f"--gpus-per-node={request.gpus_per_node}"]


def _pattern(path: str) -> str:
    """A literal path in a file name pattern of sbatch, where % begins a replacement."""
    return path.replace("%", "%%")


def _option(value: str) -> str:
    """A value in an #SBATCH line, which sbatch splits like a shell but without expansions.

    Raises:
        UserError: it holds both kinds of quotes or a control character.
    """
    if any(ord(letter) < 32 for letter in value):
        raise UserError(f"{value!r} holds a control character, which no #SBATCH line can carry")
    if not set(value) & set(" \t\"'\\#;&|<>()$`*?[]{}~!"):
        return value
    if '"' not in value and "\\" not in value:
        return f'"{value}"'
    if "'" not in value:
        return f"'{value}'"
    raise UserError(
        f"{value!r} holds both kinds of quotes, which no #SBATCH line can carry; choose another path"
    )
