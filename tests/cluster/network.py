"""One bridge for the controller, one network namespace with one address per node."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.commands import call
from tests.cluster.errors import ClusterError

CONTROLLER_NAME = "ctl"
MOST_CLUSTERS = 8


@dataclass(frozen=True)
class Network:
    """The names and addresses of a cluster's network; clusters of different numbers live side by side."""

    number: int

    @property
    def bridge(self) -> str:
        return f"hpcrunbr{self.number}"

    @property
    def controller_address(self) -> str:
        return f"10.231.{77 + self.number}.1"

    def address(self, node: str) -> str:
        """The address of node cN."""
        return f"10.231.{77 + self.number}.{10 + int(node[1:])}"

    def namespace(self, node: str) -> str:
        """The name of the node's network namespace, which is also that of its end at the bridge."""
        return f"hpcrun{self.number or ''}-{node}"

    def exists(self) -> bool:
        """Whether the bridge is there, so that the number is taken."""
        return Path(f"/sys/class/net/{self.bridge}").exists()

    def hosts_file(self, nodes: Sequence[str]) -> str:
        """Text of /etc/hosts for every machine of the cluster."""
        lines = ["127.0.0.1 localhost", f"{self.controller_address} {CONTROLLER_NAME}"]
        return "\n".join(lines + [f"{self.address(node)} {node}" for node in nodes]) + "\n"

    def make(self, nodes: Sequence[str]) -> None:
        """Make bridge, namespaces and addresses."""
        call(["ip", "link", "add", self.bridge, "type", "bridge"])
        call(["ip", "address", "add", f"{self.controller_address}/24", "dev", self.bridge])
        call(["ip", "link", "set", self.bridge, "up"])
        for node in nodes:
            name = self.namespace(node)
            call(["ip", "netns", "add", name])
            call(["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name])
            call(["ip", "link", "set", name, "master", self.bridge, "up"])
            call(["ip", "-n", name, "address", "add", f"{self.address(node)}/24", "dev", "eth0"])
            call(["ip", "-n", name, "link", "set", "lo", "up"])
            call(["ip", "-n", name, "link", "set", "eth0", "up"])

    def remove(self, nodes: Sequence[str]) -> None:
        """Remove what `make` made, as far as it is there."""
        for link in [*map(self.namespace, nodes), self.bridge]:
            if Path(f"/sys/class/net/{link}").exists():
                call(["ip", "link", "delete", link])
        for name in map(self.namespace, nodes):
            if Path(f"/run/netns/{name}").exists():
                call(["ip", "netns", "delete", name])

    def set_link(self, node: str, up: bool) -> None:
        """Plug or unplug the node's only network cable."""
        call(["ip", "-n", self.namespace(node), "link", "set", "eth0", "up" if up else "down"])

    def link_is_up(self, node: str) -> bool:
        """Whether the node's network cable is plugged in."""
        flags = call(["ip", "-n", self.namespace(node), "link", "show", "eth0"]).stdout.split(">")[0]
        return ",UP" in flags


def free_number() -> int:
    """The lowest number that no cluster on this machine has; ClusterError when all are taken."""
    for number in range(MOST_CLUSTERS):
        if not Network(number).exists():
            return number
    raise ClusterError(f"{MOST_CLUSTERS} clusters are up: take one down, or remove bridges hpcrunbr*")


def others_exist() -> bool:
    """Whether any cluster's bridge is left on this machine."""
    return any(Network(number).exists() for number in range(MOST_CLUSTERS))
