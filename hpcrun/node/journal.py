"""What an agent writes into the run directory: its events and, as coordinator, claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcrun.node.placement import Placement
from hpcrun.records import STOP, JsonLines, RunDir, claim_attempt, read_claim, write_event


class RunJournal:
    """The events of one agent; a new file with each attempt, written by nobody else."""

    def __init__(
        self, run: RunDir, place: Placement, held_elsewhere: Callable[[dict[str, Any]], bool]
    ) -> None:
        self._run = run
        self._place = place
        self._held_elsewhere = held_elsewhere
        self._claimed: tuple[int, str] | None = None
        self._log: JsonLines | None = None
        self.attempt = run.last_attempt()

    def event(self, event: str, **fields: Any) -> None:
        if self._log is None:
            self._log = JsonLines(self._run.events(self.attempt, f"{self._place.host}-{self._writer}"))
        write_event(self._log, event, attempt=self.attempt, host=self._place.host, **fields)

    @property
    def _writer(self) -> str:
        return f"{self._place.job_id}-{self._place.restart}"

    def enter(self, attempt: int) -> None:
        """From here on events belong to ``attempt``."""
        if attempt != self.attempt and self._log is not None:
            self._log.close()
            self._log = None
        self.attempt = attempt

    def claim(self, **facts: Any) -> tuple[int, str] | None:
        last = self._run.last_attempt()
        holder = read_claim(self._run, last)
        if holder and self._is_other(holder) and self._held_elsewhere(holder):
            self.event("run_is_held", job_id=holder["job_id"])
            return None
        if self.superseded():
            return None
        claimed = claim_attempt(self._run, job_id=self._place.job_id, restart=self._place.restart, **facts)
        if claimed:
            self._claimed = claimed
            self.enter(claimed[0])
        return claimed

    def superseded(self) -> bool:
        return self._claimed is not None and self._run.last_attempt() > self._claimed[0]

    def stop_wanted(self) -> bool:
        return (self._run.control / STOP).exists()

    def _is_other(self, holder: dict[str, Any]) -> bool:
        return (holder.get("job_id"), holder.get("restart")) != (self._place.job_id, self._place.restart)
