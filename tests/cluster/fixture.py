"""The pytest fixture `cluster`."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, down
from tests.cluster.requirements import unavailable_reason


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A fresh four-node cluster for the whole test run; skips, saying why, where none can start."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    down()
    started = Cluster.up(nodes=4)
    yield started
    started.down()
