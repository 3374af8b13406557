"""The ordinary user whose jobs run on the cluster."""

import pwd
import shutil
from pathlib import Path

from tests.cluster import network
from tests.cluster.commands import call

USER = "hpcuser"
HOME = Path("/home") / USER
# Kept in the comment field: the last of several clusters to go down removes the user, not the first to come.
CREATED = "made by tests.cluster"
CREATED_WITHOUT_HOME = "made by tests.cluster but for the home"


def _comment() -> str | None:
    return next((entry.pw_gecos for entry in pwd.getpwall() if entry.pw_name == USER), None)


def make_user() -> None:
    """Create the ordinary user when it is missing."""
    if _comment() is not None:
        return
    comment = CREATED_WITHOUT_HOME if HOME.exists() else CREATED
    home = ["--create-home", f"--home-dir={HOME}"]
    call(["useradd", *home, "--shell=/bin/bash", f"--comment={comment}", USER])


def remove_user() -> None:
    """Remove the user, and the home, if `make_user` created them and no other cluster is up."""
    comment = _comment()
    if comment not in (CREATED, CREATED_WITHOUT_HOME) or network.others_exist():
        return
    call(["userdel", USER])
    if comment == CREATED:
        shutil.rmtree(HOME)


def as_user(argv: list[str]) -> list[str]:
    """`argv` as a command that runs with the ordinary user's rights."""
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups", "--", *argv]
