"""The index of one component: its blocks, their events, and the repair of its ranks."""

from __future__ import annotations

from kvrouter.core.interface import PrefixIndex
from kvrouter.indexer.index.event_applier import EventApplier
from kvrouter.indexer.index.known_ranks import KnownRanks
from kvrouter.indexer.index.rank_repair import RankRepair
from kvrouter.indexer.index.repair import RepairPolicy
from kvrouter.indexer.index.shared_index import SharedIndex
from kvrouter.net.decoding import Quarantine


class IndexState:
    """A shared index, the applier of its events, and the repair of its ranks."""

    def __init__(
        self,
        component: str,
        block_size: int,
        index: PrefixIndex,
        policy: RepairPolicy,
        quarantine: Quarantine | None = None,
    ) -> None:
        """Composes the state of an empty index.

        Args:
            component: Name of the component, for logs.
            block_size: Tokens per block of the component.
            index: The prefix index.
            policy: Requests and defers repairs.
            quarantine: Counts and logs undecodable input; None for one of its own.
        """
        self.known = KnownRanks()
        self.shared = SharedIndex(index)
        self.events = EventApplier(
            component, block_size, self.shared, self.known, policy, Quarantine() if quarantine is None else quarantine
        )
        self.repair = RankRepair(component, self.shared, self.events, self.known, policy)
