"""Job states, by the table of squeue(1) "JOB STATE CODES"."""

from __future__ import annotations

PENDING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
RUNNING = frozenset({"RUNNING", "CONFIGURING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"})
WAITING = frozenset({"SUSPENDED"})
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)


def base_state(text: str) -> str:
    """``CANCELLED by 1000`` and ``COMPLETED+`` without what follows the state's name."""
    return text.split()[0].rstrip("+") if text.split() else ""


def has_ended(state: str) -> bool:
    """Only for states that are known to be an end: an unknown state is not one."""
    return base_state(state) in ENDED
