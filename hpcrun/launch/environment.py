"""The environment of a job, with a reason for each variable."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hpcrun.recipe import Recipe
from hpcrun.sites.model import Site


@dataclass(frozen=True)
class Export:
    """One exported variable."""

    name: str
    value: str
    reason: str


def job_environment(recipe: Recipe, site: Site) -> list[Export]:
    """The job's variables: hpcrun's own, then the site's, then the recipe's, which win."""
    exports = {export.name: export for export in _own(site)}
    for name, variable in site.environment.items():
        exports[name] = Export(name, variable.value, f"site {site.name}: {variable.reason}")
    for name, value in recipe.environment.items():
        exports[name] = Export(name, value, "the recipe's environment")
    return list(exports.values())


def _own(site: Site) -> list[Export]:
    locking = "TRUE" if site.filesystem.hdf5_locking else "FALSE"
    own = [
        Export("OMP_NUM_THREADS", "1", "one rank must not take the cores of the others"),
        Export("PYTHONNOUSERSITE", "1", "packages in ~/.local must not shadow the job's"),
        Export("HDF5_USE_FILE_LOCKING", locking, "filesystem.hdf5_locking of the site"),
        Export(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "a failed collective ends its rank, so that all restart"
        ),
    ]
    interface = site.rendezvous.interface
    if interface:
        own += [
            Export("GLOO_SOCKET_IFNAME", interface, "rendezvous.interface of the site"),
            Export(
                "NCCL_SOCKET_IFNAME", f"={interface}", "rendezvous.interface of the site, matched exactly"
            ),
        ]
    if os.environ.get("SLURM_CONF"):
        own.append(Export("SLURM_CONF", os.environ["SLURM_CONF"], "as set where the job was submitted"))
    return own
