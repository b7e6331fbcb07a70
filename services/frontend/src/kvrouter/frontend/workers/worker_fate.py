"""The fate of a worker requests lost or left: it dies, recovers, or nobody knows yet.

A worker *dies* when its process, connection or lease is lost while it was not draining. A request that left a worker
because it stopped answering learns of its death only when its lease ends.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_WATCHERS = 4096
"""Maximum number of requests that learn of the death of a worker which they left; further ones do not."""


class WorkerFate:
    """The fate of one worker process."""

    __slots__ = ("_on_death", "died", "is_known", "since", "worker")

    def __init__(self, worker: str, since: float, *, died: bool = False) -> None:
        """Creates a fate known if the worker has died.

        Args:
            worker: Identifies the process: its address, and its mark among those at that address.
            since: Time at which requests began to leave it, seconds.
            died: Whether it has died.
        """
        self.worker = worker
        self.since = since
        self.is_known = died
        """Whether it has died or recovered."""
        self.died = died
        self._on_death: list[Callable[[str], None]] = []

    @property
    def watchers(self) -> int:
        """Number of requests waiting for it to become known."""
        return len(self._on_death)

    def on_death(self, tell: Callable[[str], None]) -> None:
        """Calls a function with the worker if it dies, at once if it has died."""
        if self.died:
            tell(self.worker)
        elif not self.is_known and len(self._on_death) < MAX_WATCHERS:
            self._on_death.append(tell)

    def resolve(self, *, died: bool) -> None:
        """Records that the worker has died or recovered. Has no effect once that is known."""
        if self.is_known:
            return
        self.is_known, self.died = True, died
        watchers, self._on_death = self._on_death, []
        if died:
            for tell in watchers:
                tell(self.worker)
