"""The lease kills in time, by itself."""

from __future__ import annotations

import threading
import time

from hpcrun.node.lease import Lease


def test_kills_when_it_runs_out_counted_from_the_sending() -> None:
    killed = threading.Event()
    lease = Lease(0.3, killed.set)
    sent = time.monotonic() - 0.2
    lease.renew(sent)
    assert killed.wait(5)
    assert time.monotonic() - sent < 2
    assert lease.expired


def test_an_old_answer_does_not_bring_an_expired_lease_back() -> None:
    killed = threading.Event()
    lease = Lease(0.05, killed.set)
    lease.renew(time.monotonic())
    assert killed.wait(5)
    killed.clear()
    lease.renew(time.monotonic())
    assert lease.expired and not killed.wait(0.3)
    lease.reset()
    lease.renew(time.monotonic())
    assert killed.wait(5)


def test_renewing_keeps_the_ranks_alive() -> None:
    killed = threading.Event()
    lease = Lease(1.0, killed.set)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        lease.renew(time.monotonic())
        assert not killed.wait(0.1)
