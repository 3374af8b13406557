"""The environment of a rank."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.node.protocol import Message
from hpcrun.records import RunDir
from hpcrun.runs.runfile import RunFile


def base_environment(
    environ: Mapping[str, str], file: RunFile, scratch: Path, memory: Path | None
) -> dict[str, str]:
    """What all ranks of a node share: the batch script's exports, the secrets and the agent's folders."""
    folders = {"HPCRUN_HEARTBEAT_DIR": str(scratch)}
    if memory:
        folders["HPCRUN_MEMORY_DIR"] = str(memory)
    return dict(environ) | read_secrets(file.secrets_file) | folders


def rank_environment(run: RunDir, order: Message, rank: int, local_rank: int) -> dict[str, str]:
    """What one rank of one attempt gets; the names are those of torchrun."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(order["world"]),
        "LOCAL_WORLD_SIZE": str(order["ranks"]),
        "NODE_RANK": str(order["first_rank"] // order["ranks"]),
        "MASTER_ADDR": order["master_addr"],
        "MASTER_PORT": str(order["master_port"]),
        "HPCRUN_RUN_DIR": str(run.path),
        "HPCRUN_ATTEMPT": str(order["attempt"]),
        "HPCRUN_CLAIM": order["claim"],
    }


def read_secrets(path: str | None) -> dict[str, str]:
    """Variables from the owner-only file that submission wrote outside the run directory.

    Raises:
        UserError: the file is gone, or others may read it.
    """
    if path is None:
        return {}
    try:
        mode = Path(path).stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UserError(f"{path}: others may read this secrets file; chmod 600 it")
        values: dict[str, str] = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(
            f"{path}: the secrets file cannot be read: {error.strerror}; resume the run anew"
        ) from error
    return values
