"""The machines of the cluster: the login node, which is also the controller's, and the compute nodes."""

from collections.abc import Sequence

import psutil

from tests.cluster.commands import wait_for
from tests.cluster.errors import ClusterError
from tests.cluster.network import CONTROLLER_NAME
from tests.cluster.processes import end, must_live, start_daemon
from tests.cluster.state import State

LOGIN = "login"

# Arguments: host name, folder of configuration files.
_NAME_AND_RESOLVER = """
set -e
hostname "$1"
for file in hosts nsswitch.conf resolv.conf; do mount --bind "$2/$file" "/etc/$file"; done
"""
_LOGIN_SCRIPT = _NAME_AND_RESOLVER + 'touch "$3"\nexec sleep infinity\n'
# The shell stays as the node's process 1 and reaps orphans, which slurmd would not.
_NODE_SCRIPT = (
    _NAME_AND_RESOLVER
    + """
for folder in /tmp /dev/shm; do mount -t tmpfs -o mode=1777,size=2g tmpfs "$folder"; done
slurmd -D -N "$1" &
wait $!
"""
)


def start_login(state: State) -> None:
    """Start the login node: a host name and a resolver of its own, the network of the host."""
    etc = str(state.slurm_conf.parent)
    ready = state.folder / "login-ready"
    script = ["bash", "-c", _LOGIN_SCRIPT, "login", CONTROLLER_NAME, etc, str(ready)]
    start_daemon(state, LOGIN, ["unshare", "--uts", "--mount", *script])

    def is_ready() -> bool:
        must_live(state, LOGIN)
        return ready.exists()

    wait_for("the login node", is_ready, timeout=20)


def login_argv(state: State, argv: Sequence[str]) -> list[str]:
    """`argv` as a command that runs on the login node."""
    return ["nsenter", f"--target={state.pid(LOGIN)}", "--uts", "--mount", "--", *argv]


def start_node(state: State, node: str) -> None:
    """Start a compute node and its slurmd, in its own network, UTS, mount and PID namespaces."""
    (state.folder / f"slurmd-{node}").mkdir(exist_ok=True)
    enter = ["nsenter", f"--net=/run/netns/{state.network.namespace(node)}", "--"]
    separate = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    script = ["bash", "-c", _NODE_SCRIPT, "node", node, str(state.slurm_conf.parent)]
    start_daemon(state, node, [*enter, *separate, *script])


def node_init(state: State, node: str) -> psutil.Process:
    """The node's process 1; raises ClusterError when the node is not running."""
    process = state.running(node)
    children = process.children() if process else []
    if not children:
        raise ClusterError(f"node {node} is not running; start it with: heal {node}")
    return children[0]


def node_argv(state: State, node: str, argv: Sequence[str]) -> list[str]:
    """`argv` as a command that runs as root on the node."""
    target = f"--target={node_init(state, node).pid}"
    return ["nsenter", target, "--net", "--uts", "--mount", "--pid", "--", *argv]


def kill_node(state: State, node: str) -> None:
    """End every process of the node at once; its /tmp and /dev/shm go with the last one."""
    process = state.running(node)
    if process:
        end([process])
    state.forget(node)
