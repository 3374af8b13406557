"""Where the shipped data lies: site configs, templates, modulefiles, recipes.

In a wheel the folders sit under ``hpcrun/_data``; in a checkout they are the
top-level folders. Both are found here and nowhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

DataFolder = Literal["site_configs", "sbatch_templates", "modules", "recipes"]

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT: dict[DataFolder, str] = {
    "site_configs": "site_configs",
    "sbatch_templates": "sbatch_templates",
    "modules": "modules",
    "recipes": "training/recipes",
}


def data_folder(name: DataFolder) -> Path:
    """The folder ``name`` of this installation, wheel or checkout.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    installed = _PACKAGE / "_data" / name
    if installed.is_dir():
        return installed
    checkout = _PACKAGE.parent / _CHECKOUT[name]
    if checkout.is_dir():
        return checkout
    raise FileNotFoundError(f"hpcrun's data folder {name!r} is neither {installed} nor {checkout}")
