"""Fixtures for all tests, and the promise that CI skips no test on a real Slurm.

With HPCRUN_REQUIRE_SLURM=1 the session fails when a test marked ``slurm`` was
skipped, or when none ran at all.
"""

from __future__ import annotations

import os

import pytest

pytest_plugins = ["tests.cluster.fixture", "tests.installed"]

REQUIRED = os.environ.get("HPCRUN_REQUIRE_SLURM") == "1"
_ran: set[str] = set()
_skipped: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "slurm" not in report.keywords:
        return
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped[report.nodeid] = _reason(report)
    elif report.when == "call":
        _ran.add(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped[report.nodeid] = _reason(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _broken_promise(session.config) and session.exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    for line in _broken_promise(config):
        terminalreporter.write_line(line, red=True)


def _broken_promise(config: pytest.Config) -> list[str]:
    """Why the session fails under HPCRUN_REQUIRE_SLURM=1; empty when it does not."""
    if not REQUIRED or config.option.collectonly:
        return []
    lines = [f"HPCRUN_REQUIRE_SLURM=1, but skipped: {test}: {reason}" for test, reason in _skipped.items()]
    return lines if _ran or lines else ["HPCRUN_REQUIRE_SLURM=1, but no test marked slurm ran"]


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
