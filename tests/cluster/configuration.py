"""The text of Slurm's configuration files."""

import os
from pathlib import Path

from tests.cluster.network import CONTROLLER_NAME
from tests.cluster.state import State

CPUS_PER_NODE = 8
GPUS_PER_NODE = 4
# Not Slurm's own ports, which a system Slurm may use.
FIRST_PORT = 16817
GRACE_TIME = 20


def _ports(state: State) -> tuple[int, int, int]:
    """Ports of slurmctld, slurmd and slurmdbd."""
    first = FIRST_PORT + 10 * state.number
    return first, first + 1, first + 2


def slurm_conf(state: State) -> str:
    """Text of slurm.conf."""
    folder, network = state.folder, state.network
    controller_port, node_port, database_port = _ports(state)
    lines = f"""\
ClusterName=hpcrun
SlurmctldHost={CONTROLLER_NAME}({network.controller_address})
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/slurmctld
SlurmdSpoolDir={folder}/slurmd-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldDebug=verbose
SlurmdDebug=verbose
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=10
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=5
""".splitlines()
    if state.accounting:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={CONTROLLER_NAME}",
            f"AccountingStoragePort={database_port}",
            # With munge the "password" is the socket of the munged that slurmdbd trusts.
            f"AccountingStoragePass={folder}/munge/socket",
            "JobAcctGatherType=jobacct_gather/linux",
            "JobAcctGatherFrequency=5",
        ]
    for node in state.nodes:
        lines.append(
            f"NodeName={node} NodeAddr={network.address(node)} Sockets=1 CoresPerSocket={CPUS_PER_NODE}"
            f" ThreadsPerCore=1 RealMemory=16000 Gres=gpu:{GPUS_PER_NODE}"
        )
    # A job preempts those of a strictly lower tier: `main` shares `low`'s and so leaves it alone.
    common = "Nodes=ALL DefaultTime=30 MaxTime=INFINITE"
    lines += [
        f"PartitionName=main {common} Default=YES PriorityTier=1 PreemptMode=OFF",
        f"PartitionName=low {common} PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_TIME}",
        f"PartitionName=high {common} PriorityTier=10 PreemptMode=OFF",
    ]
    return "\n".join(lines) + "\n"


def slurmdbd_conf(state: State) -> str:
    """Text of slurmdbd.conf; the database is reached over its socket as root, so there is no password."""
    return f"""\
DbdHost={CONTROLLER_NAME}
DbdPort={_ports(state)[2]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={state.folder}/munge/socket
PidFile={state.folder}/slurmdbd.pid
DebugLevel=info
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""


def write_files(state: State) -> None:
    """Write all configuration files and make the stand-in GPUs."""
    etc = state.slurm_conf.parent
    etc.mkdir()
    (etc / "slurm.conf").write_text(slurm_conf(state))
    (etc / "gres.conf").write_text(f"Name=gpu File={state.folder}/gpus/gpu[0-{GPUS_PER_NODE - 1}]\n")
    (etc / "hosts").write_text(state.network.hosts_file(state.nodes))
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    # Empty: a name server that does not answer costs every reverse look-up seconds.
    (etc / "resolv.conf").write_text("")
    if state.accounting:
        (etc / "slurmdbd.conf").write_text(slurmdbd_conf(state))
        (etc / "slurmdbd.conf").chmod(0o600)
    _make_gpus(state.folder / "gpus")


def _make_gpus(folder: Path) -> None:
    folder.mkdir()
    for index in range(GPUS_PER_NODE):
        # Slurm wants a character device; /dev/null's numbers are there on every machine.
        os.mknod(folder / f"gpu{index}", 0o20666, os.makedev(1, 3))
