"""What the machine must offer before a cluster can start."""

import os
import shutil
import subprocess

# One command that stands for each Debian package.
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurm-client": "sbatch",
    "munge": "munged",
    "iproute2": "ip",
    "util-linux": "nsenter",
}
ACCOUNTING_PACKAGES = {"slurmdbd": "slurmdbd", "mariadb-server": "mariadbd"}
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


NEEDS_ROOT = "the test cluster needs root (namespaces, a bridge, slurmd)"


def missing_packages(accounting: bool = True) -> list[str]:
    """Debian packages whose commands are not installed, by name."""
    wanted = PACKAGES | (ACCOUNTING_PACKAGES if accounting else {})
    return [package for package, command in wanted.items() if shutil.which(command, path=SYSTEM_PATH) is None]


def unavailable_reason(accounting: bool = True) -> str | None:
    """Why no cluster can start on this machine, in one line, or None when one can."""
    if os.geteuid() != 0:
        return NEEDS_ROOT
    if missing := missing_packages(accounting):
        return f"the test cluster needs Debian packages: apt-get install {' '.join(missing)}"
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    if probe.returncode != 0:
        return f"the test cluster needs to make namespaces: {probe.stderr.strip()}"
    return None
