"""The IndexerService: answers from the indexes of the components that this replica follows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing

from kvrouter.core import InvalidDump, Rank, local_hashes
from kvrouter.core.interface import MemoryBudget
from kvrouter.indexer.api.encoding import encoded_dump_response
from kvrouter.indexer.api.requests import check_prompt, scope_of
from kvrouter.indexer.index.rank_dump import RankDump, StaleDump
from kvrouter.indexer.replica.component import ComponentIndex
from kvrouter.indexer.replica.metrics import IndexerMetrics
from kvrouter.indexer.replica.replica import Replica
from kvrouter.indexer.snapshots.coordinator import AWAY, NothingApplied, OthersLive
from kvrouter.indexer.snapshots.format import InvalidSnapshot
from kvrouter.indexer.snapshots.lock import LockLost
from kvrouter.runtime.component_field import component_name
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import BadRequest, DeadlineExceeded, DependencyAway, NotReady, UnknownComponent
from kvrouter.runtime.packed_hashes import pack_local_hashes
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.common_pb2 import Rank as RankMessage
from kvrouter.v1.indexer_pb2 import (
    DumpRequest,
    DumpResponse,
    FindMatchesRequest,
    FindMatchesResponse,
    GetStatsRequest,
    GetStatsResponse,
    LoadRequest,
    LoadResponse,
    RankState,
    ResetStatesRequest,
    ResetStatesResponse,
    ResyncRequest,
    ResyncResponse,
    TakeSnapshotRequest,
    TakeSnapshotResponse,
    VerifyRequest,
    VerifyResponse,
)

_LONG_PROMPT_TOKENS = 16_384  # hashing more than these is handed to a thread
_DUMP_CHUNK_BLOCKS = 1024  # what a call on the loop handles at one time
_MAX_LOAD_BYTES = 1 << 30  # of one rank: some 20 million blocks


class IndexerService:
    """The object of the contract ``kvrouter.runtime.contracts.Indexer``."""

    def __init__(
        self, replica: Replica, metrics: IndexerMetrics, budget: MemoryBudget, *, max_prompt_tokens: int
    ) -> None:
        self._replica = replica
        self._metrics = metrics
        self._budget = budget
        self._max_prompt_tokens = max_prompt_tokens

    @property
    def ready(self) -> bool:
        """Whether the components are known and each of them is restored."""
        return self._replica.ready

    async def find_matches(self, request: FindMatchesRequest, *, deadline: Deadline) -> FindMatchesResponse:
        """The leading blocks of a request that each rank holds.

        Raises:
            UnknownComponent, NotReady, BlockSizeMismatch, PromptTooLong, BadRequest, DeadlineExceeded.
        """
        return FindMatchesResponse.FromString(await self.find_matches_encoded(request, deadline=deadline))

    async def find_matches_encoded(self, request: FindMatchesRequest, *, deadline: Deadline) -> bytes:
        """As ``find_matches``, encoded."""
        began = time.perf_counter()
        if deadline.expired:
            raise DeadlineExceeded
        component = self._ready(request.component)
        check_prompt(request, component.block_size, self._max_prompt_tokens)
        hashes = await self._hashes(request, component.block_size)
        answer = await component.state.find_matches(hashes)
        self._metrics.find_matches_seconds.observe(time.perf_counter() - began)
        return answer

    async def dump(self, request: DumpRequest, *, deadline: Deadline) -> AsyncGenerator[DumpResponse, None]:
        """The whole index of a component, rank by rank, in chunks; each rank as of the moment it is reached.

        Raises:
            UnknownComponent, NotReady, BadRequest, DeadlineExceeded.
        """
        async with aclosing(self.dump_encoded(request, deadline=deadline)) as responses:
            async for response in responses:
                yield DumpResponse.FromString(response)

    async def dump_encoded(self, request: DumpRequest, *, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        """As ``dump``, encoded."""
        component = self._component(request.component)
        ranks = _chosen(request.ranks)
        if not ranks:
            ranks = [(info.worker_id, info.dp_rank) for info in await component.state.ranks()]
        for rank in ranks:
            async for chunk in component.state.dump_rank(rank, _DUMP_CHUNK_BLOCKS):
                if deadline.expired:
                    raise DeadlineExceeded
                yield encoded_dump_response(chunk)

    async def get_stats(self, request: GetStatsRequest, *, deadline: Deadline) -> GetStatsResponse:
        """Figures of the index, its consumer and its ranks, while it is being restored too.

        Raises:
            UnknownComponent, NotReady, BadRequest, DeadlineExceeded.
        """
        if deadline.expired:
            raise DeadlineExceeded
        chosen = (
            [self._component(request.component)]
            if request.HasField("component")
            else [component for _, component in sorted(self._replica.components.items(), key=lambda item: str(item[0]))]
        )
        stats = [await component.stats() for component in chosen]
        return GetStatsResponse(
            components=stats,
            replica_id=self._replica.id,
            index_bytes=self._budget.used_bytes,
            max_index_bytes=self._budget.max_bytes,
        )

    async def load(self, requests: AsyncIterator[LoadRequest], *, deadline: Deadline) -> LoadResponse:
        """Loads a dump: ranks that come whole replace those of the index, one after the other.

        Raises:
            UnknownComponent, NotReady, DeadlineExceeded.
            BadRequest: a rank does not come whole, is malformed, or the index is ahead of it; ranks before it are
                loaded.
        """
        response = LoadResponse()
        chunks: list[bytes] = []
        size = 0
        async for request in requests:
            if deadline.expired:
                raise DeadlineExceeded
            component = self._component(request.component)
            chunks.append(request.state.SerializeToString())
            size += len(chunks[-1])
            if size > _MAX_LOAD_BYTES:
                raise BadRequest(f"a rank of over {_MAX_LOAD_BYTES} bytes", field="state", advice="Load fewer blocks.")
            if request.state.last:
                response.blocks += await _load_rank(component, request.state, chunks)
                response.ranks += 1
                chunks, size = [], 0
        if chunks:
            raise BadRequest("the last rank is not whole", field="state.last", advice="Send all parts of each rank.")
        return response

    async def resync(self, request: ResyncRequest, *, deadline: Deadline) -> ResyncResponse:
        """Replaces the state of ranks with what their workers hold.

        Raises:
            UnknownComponent, NotReady, BadRequest, DeadlineExceeded.
        """
        component = self._component(request.component)
        response = ResyncResponse()
        for rank in _chosen(request.ranks) or component.resync.ranks():
            if deadline.expired:
                raise DeadlineExceeded
            if await component.resync.repair_now(rank, "asked"):
                response.ranks += 1
            else:
                response.unreachable += 1
        return response

    async def verify(self, request: VerifyRequest, *, deadline: Deadline) -> AsyncGenerator[VerifyResponse, None]:
        """Compares the index with the workers' own state, rank by rank.

        Raises:
            UnknownComponent, NotReady, BadRequest, DeadlineExceeded.
        """
        component = self._component(request.component)
        ranks = _chosen(request.ranks)
        if not ranks:
            known = {(info.worker_id, info.dp_rank) for info in await component.state.ranks()}
            ranks = sorted(known | set(component.resync.ranks()))
        for rank in ranks:
            if deadline.expired:
                raise DeadlineExceeded
            yield await component.verify(rank)

    async def take_snapshot(self, request: TakeSnapshotRequest, *, deadline: Deadline) -> TakeSnapshotResponse:
        """Takes a snapshot at once.

        Raises:
            UnknownComponent, BadRequest, DeadlineExceeded.
            NotReady: the index is not restored, or another replica takes one.
            DependencyAway: etcd or NATS is away.
        """
        component = self._ready(request.component)
        if component.snapshots is None:
            raise NotReady("this replica takes no snapshots")
        try:
            async with asyncio.timeout(deadline.remaining()):
                ref, blocks = await component.snapshots.take(component.position)
        except (LockLost, NothingApplied) as error:
            raise NotReady(str(error)) from None
        except (InvalidSnapshot, *AWAY) as error:
            if deadline.expired:
                raise DeadlineExceeded from None
            raise DependencyAway(f"etcd or NATS is away: {error!r}") from None
        return TakeSnapshotResponse(stream_sequence=ref.stream_sequence, object_name=ref.object_name, blocks=blocks)

    async def reset_states(self, request: ResetStatesRequest, *, deadline: Deadline) -> ResetStatesResponse:
        """Drops what the transport holds for a component, and refills the index from live workers.

        Raises:
            UnknownComponent, DeadlineExceeded.
            BadRequest: another replica is live, and the request does not say that this is meant.
            NotReady: a snapshot is being taken.
            DependencyAway: etcd or NATS is away.
        """
        component = self._component(request.component)
        try:
            async with asyncio.timeout(deadline.remaining()):
                messages, snapshots = await component.reset(even_if_others_live=request.even_if_others_live)
        except OthersLive as error:
            raise BadRequest(
                str(error), field="even_if_others_live", advice="Stop the others first, or set even_if_others_live."
            ) from None
        except LockLost as error:
            raise NotReady(str(error)) from None
        except AWAY as error:
            if deadline.expired:
                raise DeadlineExceeded from None
            raise DependencyAway(f"etcd or NATS is away: {error!r}") from None
        return ResetStatesResponse(messages=messages, snapshots=snapshots)

    def _component(self, component: Component) -> ComponentIndex:
        name = component_name(component)
        found = self._replica.components.get(name)
        if found is None:
            if not self._replica.known:
                raise NotReady("the components are not known yet")
            raise UnknownComponent(name, self._replica.components)
        return found

    def _ready(self, component: Component) -> ComponentIndex:
        found = self._component(component)
        if not found.ready:
            raise NotReady(f"the index of {found.name} is being restored")
        return found

    async def _hashes(self, request: FindMatchesRequest, block_size: int) -> bytes:
        if request.WhichOneof("prompt") == "local_hashes":
            return pack_local_hashes(request.local_hashes)
        scope = scope_of(request.scope)
        multimodal = [(item.block_index, item.hash) for item in request.multimodal_hashes]
        ids = request.token_ids.ids
        if len(ids) > _LONG_PROMPT_TOKENS:
            return await asyncio.to_thread(local_hashes, ids, block_size, scope, multimodal)
        return local_hashes(ids, block_size, scope, multimodal)


def _chosen(ranks: Iterable[RankMessage]) -> list[Rank]:
    return [(rank.worker_id, rank.dp_rank) for rank in ranks]


async def _load_rank(component: ComponentIndex, last: RankState, chunks: list[bytes]) -> int:
    rank: Rank = (last.rank.worker_id, last.rank.dp_rank)
    cursor = (last.cursor.incarnation, last.cursor.next_event_id)
    try:
        return await component.state.load_rank(RankDump(rank, cursor, last.partial, chunks))
    except (InvalidDump, StaleDump) as error:
        raise BadRequest(str(error), field="state", advice="Dump the rank again.") from None
