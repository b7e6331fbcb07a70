"""A resync policy that a test chooses, and that notes what it was told."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrouter.core import Rank


@dataclass
class Policy:
    """Requests nothing by itself; by default no event waits, and no resync backs off."""

    retains: bool = False
    deferred: frozenset[str] = frozenset()
    requested: list[tuple[Rank, str]] = field(default_factory=list)

    def request(self, rank: Rank, reason: str) -> None:
        self.requested.append((rank, reason))

    def may_retain(self, _rank: Rank) -> bool:
        return self.retains

    def is_deferred(self, _rank: Rank, reason: str) -> bool:
        return reason in self.deferred

    @property
    def reasons(self) -> list[str]:
        return [reason for _, reason in self.requested]
