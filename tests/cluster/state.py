"""What a running cluster consists of, kept in a file so that `down` ends exactly that."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tests.cluster.errors import ClusterError
from tests.cluster.network import Network


def state_folder() -> Path:
    """The folder of the cluster: $HPCRUN_CLUSTER_DIR or /var/tmp/hpcrun-cluster."""
    return Path(os.environ.get("HPCRUN_CLUSTER_DIR", "/var/tmp/hpcrun-cluster")).absolute()


@dataclass
class Recorded:
    """A process that we started; its start time tells it from a later one with the same pid."""

    pid: int
    create_time: float

    @classmethod
    def of(cls, pid: int) -> "Recorded":
        return cls(pid, psutil.Process(pid).create_time())

    def process(self) -> psutil.Process | None:
        """The process while it lives, else None."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.create_time) < 1
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


@dataclass
class State:
    """Everything that `up` made, saved after each step."""

    folder: Path
    nodes: list[str]
    accounting: bool
    number: int = 0
    ready: bool = False
    processes: dict[str, Recorded] = field(default_factory=dict)

    @property
    def network(self) -> Network:
        return Network(self.number)

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    def log(self, name: str) -> Path:
        return self.folder / "log" / f"{name}.log"

    def save(self) -> None:
        values = asdict(self) | {"folder": str(self.folder)}
        temporary = self.folder / "state.json.new"
        temporary.write_text(json.dumps(values, indent=1))
        temporary.rename(self.folder / "state.json")

    def record(self, name: str, pid: int) -> None:
        self.processes[name] = Recorded.of(pid)
        self.save()

    def forget(self, name: str) -> None:
        self.processes.pop(name, None)
        self.save()

    def running(self, name: str) -> psutil.Process | None:
        """The recorded process of that name while it lives, else None."""
        recorded = self.processes.get(name)
        return recorded.process() if recorded else None

    def pid(self, name: str) -> int:
        """The pid of a process that must be alive; raises ClusterError when it is not."""
        process = self.running(name)
        if process is None:
            raise ClusterError(f"{name} is not running; its log is {self.log(name)}")
        return int(process.pid)


def load_state(folder: Path) -> State | None:
    """The state saved in `folder`, or None when no cluster is recorded there."""
    path = folder / "state.json"
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text())
        values["folder"] = Path(values["folder"])
        values["processes"] = {name: Recorded(**entry) for name, entry in values["processes"].items()}
        return State(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise ClusterError(f"{path} is not a cluster's state ({error}): move it away") from error


@contextlib.contextmanager
def locked(folder: Path, timeout: float = 180) -> Iterator[None]:
    """Hold off other `up`, `down` and `heal` commands on the same folder for up to `timeout` seconds."""
    # The lock is on the parent folder itself: a lock file would stay behind after `down`.
    descriptor = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(f"another command has held {folder} for {timeout:g} s") from error
                time.sleep(0.2)
        yield
    finally:
        os.close(descriptor)
