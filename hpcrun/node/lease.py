"""The right of this node's ranks to live.

Each answered heartbeat renews the lease from the moment the heartbeat was *sent*.
When it runs out, the ranks are killed by a thread of its own, so that neither a
hung file system nor a busy agent can delay it. The coordinator declares a node
lost only after twice this time: by then its ranks are gone (Gray and Cheriton,
1989, "Leases").
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Lease:
    """Calls ``kill`` once when ``seconds`` pass without a renewal while held."""

    def __init__(self, seconds: float, kill: Callable[[], None]) -> None:
        self._seconds = seconds
        self._kill = kill
        self._deadline: float | None = None
        self._changed = threading.Condition()
        self.expired = False
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def renew(self, sent: float) -> None:
        """A heartbeat sent at monotonic time ``sent`` was answered."""
        with self._changed:
            if not self.expired:
                self._deadline = sent + self._seconds
                self._changed.notify()

    def reset(self) -> None:
        """Forget the expiry: this agent begins a new incarnation without ranks."""
        with self._changed:
            self.expired = False
            self._deadline = None
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while True:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    self.expired = True
                    self._deadline = None
                    self._kill()
                else:
                    self._changed.wait(left)
