"""Implementation of the IndexerService: answers calls from the indexes of this replica's components."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable
from contextlib import aclosing, asynccontextmanager
from itertools import groupby

from kvrouter.core import InvalidDump, Rank, Scope, local_hashes
from kvrouter.core.interface import MemoryBudget
from kvrouter.indexer.index.state import RankDump, StaleDump
from kvrouter.indexer.replica.component import ComponentIndex
from kvrouter.indexer.replica.metrics import IndexerMetrics
from kvrouter.indexer.replica.replica import Replica
from kvrouter.indexer.snapshots.coordinator import AWAY, NothingApplied, OthersLive
from kvrouter.indexer.snapshots.lock import LockLost
from kvrouter.net.snapshot_format import InvalidSnapshot
from kvrouter.net.wire_format import encode_field, tag
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.requests import component_name, content_in_blocks, pack_local_hashes
from kvrouter.runtime.rpc import may_wait
from kvrouter.v1 import indexer_pb2 as pb
from kvrouter.v1.common_pb2 import BlockScope, Component, Rank as RankMessage, RankState
from kvrouter.v1.errors import (
    BadRequest,
    BlockSizeMismatch,
    DeadlineExceeded,
    DependencyAway,
    NotReady,
    PromptTooLong,
    UnknownComponent,
)
from kvrouter.v1.names import ComponentName
from kvrouter.v1.pages import page_of

_MAX_SCOPE_BYTES = 1024
_MAX_MULTIMODAL_HASHES = 4096
_STATE_TAG = tag(pb.DumpResponse, "state")


def scope_of(scope: BlockScope) -> Scope:
    """Converts a BlockScope message to the core's Scope.

    Raises:
        BadRequest: a name in it is longer than 1,024 bytes.
    """
    for field in ("lora_name", "cache_salt", "tenant"):
        if len(getattr(scope, field).encode()) > _MAX_SCOPE_BYTES:
            raise BadRequest(
                f"scope.{field} is too long", field=f"scope.{field}", advice=f"Use at most {_MAX_SCOPE_BYTES} bytes."
            )
    return Scope(scope.lora_name, scope.cache_salt, scope.tenant)


def check_prompt(request: pb.FindMatchesRequest, block_size: int, max_prompt_tokens: int) -> None:
    """Checks the prompt of a FindMatches request.

    Raises:
        BadRequest: the request has no prompt, or more than 4,096 multimodal hashes.
        BlockSizeMismatch: the request names another block size than the component's.
        PromptTooLong: the prompt has more than ``max_prompt_tokens`` tokens.
    """
    if "block_size" in request and request.block_size != block_size:
        raise BlockSizeMismatch(request.block_size, block_size)
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise BadRequest("the request has no prompt", field="prompt", advice="Set token_ids or local_hashes.")
    tokens = len(request.token_ids.ids) if kind == "token_ids" else len(request.local_hashes.hashes) * block_size
    if tokens > max_prompt_tokens:
        raise PromptTooLong(tokens, max_prompt_tokens)
    if len(request.multimodal_hashes) > _MAX_MULTIMODAL_HASHES:
        raise BadRequest(
            f"expected at most {_MAX_MULTIMODAL_HASHES} multimodal hashes, received {len(request.multimodal_hashes)}",
            field="multimodal_hashes",
            advice=f"Send at most {_MAX_MULTIMODAL_HASHES}.",
        )


def encoded_dump_response(state: bytes) -> bytes:
    """Returns an encoded DumpResponse with an encoded RankState, which would cost far more to parse."""
    return encode_field(_STATE_TAG, state)


_LONG_PROMPT_TOKENS = 16_384  # longer prompts are hashed in a thread
_DUMP_CHUNK_BLOCKS = 1024  # bounds the work between two awaits
_MAX_LOAD_BYTES = 1 << 30  # per rank: about 20 million blocks


class IndexerService:
    """Implements the contract ``kvrouter.runtime.contracts.Indexer``."""

    def __init__(
        self, replica: Replica, metrics: IndexerMetrics, budget: MemoryBudget, *, max_prompt_tokens: int
    ) -> None:
        self._replica = replica
        self._metrics = metrics
        self._budget = budget
        self._max_prompt_tokens = max_prompt_tokens

    @property
    def ready(self) -> bool:
        """Returns whether the components are known and all of them are restored."""
        return self._replica.ready

    @property
    def compared(self) -> bool:
        """Returns whether every registered rank was compared with its worker, as far as workers answer."""
        return self._replica.compared

    async def find_matches(self, request: pb.FindMatchesRequest, *, deadline: Deadline) -> pb.FindMatchesResponse:
        """Returns the overlap of every rank with a prompt, in blocks.

        Raises:
            UnknownComponent, NotReady, BlockSizeMismatch, PromptTooLong, BadRequest, DeadlineExceeded.
        """
        answer = self.find_matches_encoded(request, deadline=deadline)
        return pb.FindMatchesResponse.FromString(answer if isinstance(answer, bytes) else await answer)

    @may_wait
    def find_matches_encoded(self, request: pb.FindMatchesRequest, *, deadline: Deadline) -> bytes | Awaitable[bytes]:
        """Returns the encoded response of ``find_matches``, at once for hashes unless the index is being changed."""
        began = time.perf_counter()
        if deadline.expired:
            raise DeadlineExceeded
        component = self._ready(component_name(request.component))
        check_prompt(request, component.block_size, self._max_prompt_tokens)
        if request.WhichOneof("prompt") == "token_ids":
            return self._find_tokens(component, request, deadline, began)
        hashes = pack_local_hashes(request.local_hashes)
        answer = component.state.shared.try_find_matches(hashes)
        if answer is None:
            return self._find(component, hashes, deadline, began)
        self._metrics.find_matches_seconds.observe(time.perf_counter() - began)
        return answer

    async def find_matches_of_hashes(
        self, component: ComponentName, local_hashes: bytes, *, block_size: int, deadline: Deadline
    ) -> bytes:
        """Returns the encoded response of ``find_matches`` for packed local hashes, to a caller in this process.

        Raises:
            UnknownComponent, NotReady, BlockSizeMismatch, DeadlineExceeded.
        """
        began = time.perf_counter()
        index = self._ready(component)
        if block_size != index.block_size:
            raise BlockSizeMismatch(block_size, index.block_size)
        return await self._find(index, local_hashes, deadline, began)

    async def _find_tokens(
        self, component: ComponentIndex, request: pb.FindMatchesRequest, deadline: Deadline, began: float
    ) -> bytes:
        hashes = await _hashes_of_tokens(request, component.block_size)
        return await self._find(component, hashes, deadline, began)

    async def _find(self, component: ComponentIndex, local_hashes: bytes, deadline: Deadline, began: float) -> bytes:
        answer = await component.state.shared.find_matches(local_hashes, deadline)
        self._metrics.find_matches_seconds.observe(time.perf_counter() - began)
        return answer

    async def dump(self, request: pb.DumpRequest, *, deadline: Deadline) -> AsyncGenerator[pb.DumpResponse, None]:
        """Yields the state of ranks in chunks, one rank after the other; without ranks in the request, of all.

        Each rank is dumped as it is when its turn comes, so ranks differ in time.

        Raises:
            UnknownComponent, NotReady, BadRequest, DeadlineExceeded.
        """
        async with aclosing(self.dump_encoded(request, deadline=deadline)) as responses:
            async for response in responses:
                yield pb.DumpResponse.FromString(response)

    async def dump_encoded(self, request: pb.DumpRequest, *, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        """Yields the encoded responses of ``dump``."""
        component = self._component(request.component)
        ranks = _chosen(request.ranks)
        if not ranks:
            ranks = [(info.worker_id, info.dp_rank) for info in await component.state.shared.ranks()]
        for rank in ranks:
            async for chunk in component.state.shared.dump_rank(rank, _DUMP_CHUNK_BLOCKS):
                if deadline.expired:
                    raise DeadlineExceeded
                yield encoded_dump_response(chunk)

    async def get_stats(self, request: pb.GetStatsRequest, *, deadline: Deadline) -> pb.GetStatsResponse:
        """Returns a page of statistics of the index, its consumer and its ranks. Works during a restore too.

        Raises:
            UnknownComponent, NotReady, BadRequest, DeadlineExceeded.
        """
        if deadline.expired:
            raise DeadlineExceeded
        chosen = (
            [self._component(request.component)]
            if "component" in request
            else [component for _, component in sorted(self._replica.components.items(), key=lambda item: str(item[0]))]
        )
        entries = [entry for component in chosen for entry in _entries(await component.stats())]
        page, token = page_of(entries, request, _entry_key)
        response = pb.GetStatsResponse(
            replica_id=self._replica.id,
            index_bytes=self._budget.used_bytes,
            max_index_bytes=self._budget.max_bytes or None,
            next_page_token=token,
        )
        for _, of_component in groupby(page, lambda entry: entry[0].component.SerializeToString()):
            part = list(of_component)
            component = response.components.add()
            component.CopyFrom(part[0][0])
            component.ranks.extend(rank for _, rank in part if rank is not None)
        return response

    async def load(self, requests: AsyncIterator[pb.LoadRequest], *, deadline: Deadline) -> pb.LoadResponse:
        """Loads a dump. Each rank replaces its state in the index once all its chunks have arrived.

        Raises:
            UnknownComponent, NotReady, DeadlineExceeded.
            BadRequest: a rank is incomplete, malformed, over 1 GiB, or older than the index. Ranks before it are
                loaded.
        """
        response = pb.LoadResponse()
        chunks: list[bytes] = []
        size = 0
        async for request in requests:
            if deadline.expired:
                raise DeadlineExceeded
            component = self._component(request.component)
            chunks.append(request.state.SerializeToString())
            size += len(chunks[-1])
            if size > _MAX_LOAD_BYTES:
                raise BadRequest(
                    f"expected at most {_MAX_LOAD_BYTES} bytes per rank, received more",
                    field="state",
                    advice="Load fewer blocks.",
                )
            if request.state.last:
                response.blocks += await _load_rank(component, request.state, chunks)
                response.ranks += 1
                chunks, size = [], 0
        if chunks:
            raise BadRequest("the last rank is incomplete", field="state.last", advice="Send all chunks of each rank.")
        return response

    async def resync(self, request: pb.ResyncRequest, *, deadline: Deadline) -> pb.ResyncResponse:
        """Replaces the state of ranks by their workers' own; without ranks in the request, of all.

        Raises:
            UnknownComponent, NotReady, BadRequest, DeadlineExceeded.
        """
        component = self._component(request.component)
        response = pb.ResyncResponse()
        for rank in _chosen(request.ranks) or component.requests.ranks():
            if deadline.expired:
                raise DeadlineExceeded
            if await component.resync.resync_now(rank, "asked"):
                response.ranks += 1
            else:
                response.unreachable += 1
        return response

    async def verify(self, request: pb.VerifyRequest, *, deadline: Deadline) -> AsyncGenerator[pb.VerifyResponse, None]:
        """Yields a comparison of the index with the worker's own state for each rank.

        Raises:
            UnknownComponent, NotReady, BadRequest, DeadlineExceeded.
        """
        component = self._component(request.component)
        ranks = _chosen(request.ranks)
        if not ranks:
            known = {(info.worker_id, info.dp_rank) for info in await component.state.shared.ranks()}
            ranks = sorted(known | set(component.requests.ranks()))
        for rank in ranks:
            if deadline.expired:
                raise DeadlineExceeded
            yield await component.verify(rank)

    async def take_snapshot(self, request: pb.TakeSnapshotRequest, *, deadline: Deadline) -> pb.TakeSnapshotResponse:
        """Takes a snapshot immediately.

        Raises:
            UnknownComponent, BadRequest, DeadlineExceeded.
            NotReady: the index is not restored, or another replica is taking a snapshot.
            DependencyAway: etcd or NATS is unreachable.
        """
        component = self._ready(component_name(request.component))
        if component.snapshots is None:
            raise NotReady("this replica takes no snapshots")
        async with _using_stores(deadline):
            ref, blocks = await component.snapshots.take(component.position)
        return pb.TakeSnapshotResponse(stream_sequence=ref.stream_sequence, object_name=ref.object_name, blocks=blocks)

    async def reset_states(self, request: pb.ResetStatesRequest, *, deadline: Deadline) -> pb.ResetStatesResponse:
        """Deletes a component's stream messages and snapshots, and rebuilds its index from live workers.

        Raises:
            UnknownComponent, DeadlineExceeded.
            BadRequest: another replica is live and ``even_if_others_live`` is not set.
            NotReady: a snapshot is being taken.
            DependencyAway: etcd or NATS is unreachable.
        """
        component = self._component(request.component)
        async with _using_stores(deadline):
            messages, snapshots = await component.reset(even_if_others_live=request.even_if_others_live)
        return pb.ResetStatesResponse(messages=messages, snapshots=snapshots)

    def _component(self, component: Component) -> ComponentIndex:
        return self._named(component_name(component))

    def _named(self, name: ComponentName) -> ComponentIndex:
        index = self._replica.components.get(name)
        if index is None:
            if not self._replica.known:
                raise NotReady("the components are not known yet")
            raise UnknownComponent(name, self._replica.components)
        return index

    def _ready(self, name: ComponentName) -> ComponentIndex:
        index = self._named(name)
        if not index.ready:
            raise NotReady(f"the index of {index.name} is being restored")
        return index


async def _hashes_of_tokens(request: pb.FindMatchesRequest, block_size: int) -> bytes:
    scope = scope_of(request.scope)
    multimodal = content_in_blocks(request.multimodal_hashes, block_size)
    ids = request.token_ids.ids
    if len(ids) > _LONG_PROMPT_TOKENS:
        return await asyncio.to_thread(local_hashes, ids, block_size, scope, multimodal)
    return local_hashes(ids, block_size, scope, multimodal)


@asynccontextmanager
async def _using_stores(deadline: Deadline) -> AsyncIterator[None]:
    """Limits the use of etcd and NATS by a deadline, and converts its errors to those of the contract."""
    try:
        async with asyncio.timeout(deadline.remaining()):
            yield
    except OthersLive as error:
        raise BadRequest(
            str(error), field="even_if_others_live", advice="Stop the others first, or set even_if_others_live."
        ) from None
    except (LockLost, NothingApplied) as error:
        raise NotReady(str(error)) from None
    except (InvalidSnapshot, *AWAY) as error:
        if deadline.expired:
            raise DeadlineExceeded from None
        raise DependencyAway(f"etcd or NATS is away: {error!r}") from None


def _chosen(ranks: Iterable[RankMessage]) -> list[Rank]:
    return [(rank.worker_id, rank.dp_rank) for rank in ranks]


async def _load_rank(component: ComponentIndex, last: RankState, chunks: list[bytes]) -> int:
    rank: Rank = (last.rank.worker_id, last.rank.dp_rank)
    cursor = (last.cursor.incarnation, last.cursor.next_event_id)
    try:
        return await component.state.repair.load_rank(RankDump(rank, cursor, last.partial, chunks))
    except (InvalidDump, StaleDump) as error:
        raise BadRequest(str(error), field="state", advice="Dump the rank again.") from None


def _entries(stats: pb.ComponentStats) -> list[tuple[pb.ComponentStats, pb.RankStats | None]]:
    """Returns a component without its ranks, and each of them."""
    ranks = list(stats.ranks)
    del stats.ranks[:]
    return [(stats, None), *((stats, rank) for rank in ranks)]


def _entry_key(entry: tuple[pb.ComponentStats, pb.RankStats | None]) -> str:
    stats, found = entry
    name = f"{stats.component.namespace}/{stats.component.name}"
    # A space precedes all characters of names, so a component precedes its ranks, and they those of "NAME-2".
    return name if found is None else f"{name} {found.rank.worker_id:020} {found.rank.dp_rank:010}"
