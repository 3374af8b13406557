"""Finding the site file: named, from the environment, the machine's, or detected."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hpcrun.config import load_yaml, validate
from hpcrun.datafiles import data_folder
from hpcrun.errors import UserError
from hpcrun.sites.model import Site

SITE_VARIABLE = "HPCRUN_SITE"
_MACHINE_DEFAULT = Path("/etc/hpcrun/site.yaml")


def site_folders() -> list[Path]:
    """Where site files are looked for, the user's own first."""
    own = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return [own / "hpcrun" / "sites", Path("/etc/hpcrun/sites"), data_folder("site_configs")]


def known_sites() -> dict[str, Path]:
    """Every site file by name; a user's own hides a shipped one of the same name."""
    found: dict[str, Path] = {}
    for folder in site_folders():
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def load_site(path: Path) -> Site:
    """Read and check one site file.

    Raises:
        UserError: with file, line and key of every mistake.
    """
    return validate(load_yaml(path), Site)


def find_site(name: str | None = None) -> tuple[Site, str]:
    """The site and, for people, why it was chosen.

    ``name`` is a known name or a path of a YAML file; without one, $HPCRUN_SITE,
    /etc/hpcrun/site.yaml, and at last whether sbatch is on PATH decide.

    Raises:
        UserError: no such site, or a mistake in its file.
    """
    wanted, why = name, "by --site"
    if wanted is None and os.environ.get(SITE_VARIABLE):
        wanted, why = os.environ[SITE_VARIABLE], f"by ${SITE_VARIABLE}"
    if wanted is None and _MACHINE_DEFAULT.exists():
        wanted, why = str(_MACHINE_DEFAULT), "the machine's default"
    if wanted is None:
        slurm = shutil.which("sbatch")
        wanted = "generic-slurm" if slurm else "local"
        why = f"sbatch is {slurm}" if slurm else "no sbatch on PATH"
    if "/" in wanted or wanted.endswith((".yaml", ".yml")):
        return load_site(Path(wanted).expanduser()), why
    sites = known_sites()
    if wanted not in sites:
        raise UserError(f"no site {wanted!r} ({why}); known sites: {', '.join(sorted(sites))}")
    return load_site(sites[wanted]), why
