"""A real multi-node Slurm on one machine, for tests and for people (`python -m tests.cluster --help`)."""

from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError

__all__ = ["Cluster", "ClusterError"]
