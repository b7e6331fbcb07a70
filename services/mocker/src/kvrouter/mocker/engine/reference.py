"""A simulated engine that behaves like vLLM: paged KV cache, prefix caching, chunked prefill, continuous batching.

It is a pure model: no I/O, no clock of its own, no randomness except from its seeds. A driver runs it in real or in
virtual time:

    engine.submit(request, now)                # any time; raises RequestRefused
    step = engine.begin_step(now)              # None: nothing to do, begin again after the next submit
    ...publish step.events, let step.duration seconds pass...
    outputs = engine.end_step(now)             # every output of the step, all at once, at its end
    final = engine.abort(request_id)           # any time, also within a step

Requests that arrive at the instant at which a step begins are submitted before `begin_step`, so that they are part of
it. Every submitted request ends exactly once: in an output with a finish reason, or in what `abort` returns.

A step is scheduled as follows:

1. Every decoding sequence takes one token of the budget, and a further block if its last one is full.
2. The unfinished prefill continues with the rest of the budget. There is at most one, that of the newest sequence,
   because a prefill takes the whole budget until it is done.
3. Waiting requests are admitted in order of arrival while there is budget. The first one is admitted if the free blocks
   suffice for all its known tokens, less the cached blocks that others use; otherwise it and all behind it wait. It
   then takes blocks chunk by chunk, not all at once.
4. If 1 or 2 finds no free block, the newest sequence is preempted: it returns to the head of the queue to be computed
   again. It keeps its output, and its blocks stay cached until evicted. Nothing is admitted in that step.

Blocks become cached, and their events valid, when the step that computes them is scheduled; requests admitted later in
the same step find them. Of a prompt of n tokens at most (n - 1) div block_size blocks are reused, since the last token
must be computed to get an output. A completely cached prompt therefore computes its last block again, into a second
physical copy. The step that ends the prefill gives the first token; decoding begins with the next step.

A block that only a lower tier has is loaded into a free block of the device when its request is admitted. Layers are
loaded while others are computed, so the step takes as long as its computation or its loads, whichever is longer.

A request whose blocks were received from a prefill worker is admitted like any other, with blocks for its whole prompt.
Only its last token is computed, at the cost of decoding one. After a preemption its whole prompt is computed again.
"""

from __future__ import annotations

from array import array
from collections import deque

from kvrouter.mocker.engine.block_pool import Block, BlockPool
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.offloading import OffloadTier, Parts
from kvrouter.mocker.engine.sequence import Sequence
from kvrouter.mocker.engine.types import (
    CachedBlock,
    CacheEvent,
    CacheTier,
    Cleared,
    DuplicateRequest,
    EngineRequest,
    FinishReason,
    Load,
    Output,
    PromptTooLong,
    QueueFull,
    Removed,
    Step,
    Stored,
)


class Engine:
    """One rank: its scheduler and its KV cache."""

    def __init__(self, config: EngineConfig, shared: Parts | None = None) -> None:
        """`shared`: the shared storage; None for one of its own."""
        self.config = config
        self._pool = BlockPool(config.num_blocks)
        self._tiers: list[OffloadTier] = []
        """Host memory and shared storage, if it has any."""
        self._loads: list[tuple[float, float]] = []
        """Seconds of a load and of each of its blocks, by tier."""
        if config.host.num_blocks or config.shared.num_blocks:
            parts: Parts = [] if shared is None else shared
            self._tiers = [
                OffloadTier(CacheTier.HOST, config.host.num_blocks, []),
                OffloadTier(CacheTier.SHARED, config.shared.num_blocks, parts),
            ]
            self._loads = [
                (tier.latency_ms / 1e3, config.block_load_seconds(tier)) for tier in (config.host, config.shared)
            ]
        self._loading = 0.0
        """Seconds of the loads of the step."""
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._decoding: list[Sequence] = []  # in order of admission
        self._prefilling: Sequence | None = None  # admitted after all that decode or complete
        self._completing: list[Sequence] = []  # their prefill ends with the running step
        self._in_step = False
        self._clear = False

    def check(self, request: EngineRequest, waiting: int = 0) -> None:
        """Raises what `submit` would raise: PromptTooLong, DuplicateRequest or QueueFull.

        `waiting`: requests that the driver itself queues for this engine; they count as waiting.
        """
        if request.request_id in self._sequences:
            raise DuplicateRequest(request.request_id)
        limit = self.config.length_limit
        if request.prompt_tokens >= limit:
            raise PromptTooLong(request.prompt_tokens, limit)
        waiting += len(self._waiting)
        if waiting >= self.config.max_waiting:
            raise QueueFull(waiting)

    def submit(self, request: EngineRequest, now: float) -> None:
        """Puts a request into the queue. Raises PromptTooLong, DuplicateRequest or QueueFull."""
        self.check(request)
        sequence = Sequence(request, self.config, now)
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def begin_step(self, now: float) -> Step | None:
        """Schedules a step; returns None if there is nothing to do.

        Raises RuntimeError if a step is running.
        """
        if self._in_step:
            raise RuntimeError("a step is already running: call end_step first")
        events: list[CacheEvent] = []
        if self._clear:
            self._forget(events)
        if not self._sequences and not events:
            return None
        self._loading = 0.0
        queued = len(self._waiting)
        budget = self.config.max_batched_tokens
        budget -= self._schedule_decodes(events)
        decoding = len(self._decoding)
        prefill_tokens = self._continue_prefill(budget, events)
        preempted = len(self._waiting) - queued
        reused = received = 0
        if not preempted:
            admitted, reused, received = self._admit(budget - prefill_tokens, now, events)
            prefill_tokens += admitted
        seconds = self.config.time_model.step_seconds(
            prefill_tokens, received + sum([s.length for s in self._decoding]), self.config.capacity_tokens
        )
        self._in_step = True
        seconds = max(seconds / self.config.speed, self._loading)
        return Step(now, seconds, tuple(events), prefill_tokens, reused, decoding, preempted)

    def end_step(self, now: float) -> list[Output]:  # noqa: ARG002 - symmetric with begin_step
        """Ends the running step; returns its output for each request, oldest request first.

        Raises RuntimeError if no step is running.
        """
        if not self._in_step:
            raise RuntimeError("no step is running: call begin_step first")
        self._in_step = False
        outputs: list[Output] = []
        ended: list[Sequence] = []
        vocabulary_size = self.config.vocabulary_size
        self._decoding += self._completing
        self._completing = []
        for sequence in self._decoding:
            token = (sequence.upcoming or sequence.plan_output(vocabulary_size)).pop()
            length = sequence.length = sequence.length + 1
            request = sequence.request
            reason: FinishReason | None = None
            if length >= sequence.ends_at or (length >= sequence.stops_from and token in request.stop_token_ids):
                reason = FinishReason.STOP
            elif length >= sequence.limit:
                reason = FinishReason.LENGTH
            if reason is not None:
                ended.append(sequence)
            outputs.append(
                Output(
                    request.request_id,
                    (token,),
                    reason,
                    length == sequence.prompt_tokens + 1,
                    sequence.cached_tokens,
                    sequence.submitted_at,
                    sequence.scheduled_at,
                    *sequence.loaded_tokens,
                )
            )
        if ended:
            for sequence in ended:
                del self._sequences[sequence.request.request_id]
                self._release(sequence)
            self._decoding = [s for s in self._decoding if s.request.request_id in self._sequences]
        return outputs

    def abort(self, request_id: str) -> Output | None:
        """Ends a request at once; its computed blocks stay cached. Returns its last output; None if it is unknown."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        if sequence is self._prefilling:
            self._prefilling = None
        elif sequence in self._decoding:
            self._decoding.remove(sequence)
        elif sequence in self._completing:
            self._completing.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._release(sequence)
        return Output(
            request_id,
            (),
            FinishReason.ABORT,
            False,
            sequence.cached_tokens,
            sequence.submitted_at,
            sequence.scheduled_at,
            *sequence.loaded_tokens,
        )

    def clear_cache(self) -> None:
        """Empties the cache in the next step: running requests return to the head of the queue and are computed again.

        If the engine is idle, that step takes no time and only has the event.
        """
        self._clear = True

    def load(self) -> Load:
        """Returns the load, with the running step counted as done."""
        to_prefill = sum(s.length for s in self._waiting if not s.received)
        if self._prefilling is not None:
            to_prefill += self._prefilling.length - self._prefilling.computed
        return Load(
            running=len(self._sequences) - len(self._waiting),
            waiting=len(self._waiting),
            active_blocks=self._pool.active,
            cached_blocks=self._pool.idle,
            total_blocks=self.config.num_blocks,
            prefill_tokens=to_prefill,
        )

    def cached_blocks(self) -> dict[int, CachedBlock]:
        """Returns engine hash → block, for all blocks cached on the device: what their events so far must lead to."""
        return self._pool.table()

    def leave(self) -> None:
        """Removes the engine's part from the shared storage."""
        for tier in self._tiers:
            tier.leave()

    def _schedule_decodes(self, events: list[CacheEvent]) -> int:
        """Makes room for one token of each decoding sequence; returns how many decode."""
        pool, caching = self._pool, self.config.prefix_caching
        for sequence in self._decoding:  # preemption takes from its end
            length = sequence.length
            if length >= sequence.room:
                if length > sequence.room:
                    while not pool.free:
                        if self._preempt_newest() is sequence:
                            return len(self._decoding)
                    self._take(sequence, 1, events)
                if caching and length == sequence.room:
                    self._store(sequence, length, events)
            sequence.computed = length
        return len(self._decoding)

    def _continue_prefill(self, budget: int, events: list[CacheEvent]) -> int:
        """Schedules the next chunk of the unfinished prefill; returns its tokens."""
        sequence = self._prefilling
        if sequence is None or not budget:
            return 0
        chunk = min(budget, sequence.length - sequence.computed)
        if self._blocks_for(sequence.computed + chunk) - sequence.held > self._pool.free:
            self._preempt_newest()
            return 0
        self._prefilling = None
        self._compute(sequence, chunk, events)
        return chunk

    def _admit(self, budget: int, now: float, events: list[CacheEvent]) -> tuple[int, int, int]:
        """Admits waiting requests and schedules their first chunks.

        Returns tokens scheduled, tokens reused, and tokens of prompts whose blocks were received.
        """
        pool, config = self._pool, self.config
        scheduled = reused = received = 0
        running = len(self._sequences) - len(self._waiting)
        while self._waiting and scheduled < budget and running < config.max_sequences:
            sequence = self._waiting[0]
            sequence.cut()
            hits: list[Block] = []
            if config.prefix_caching:
                hits = pool.find(sequence.chain, sequence.pieces, (sequence.length - 1) // config.block_size)
            in_use = sum([1 for block in hits if block.uses])
            if self._blocks_for(sequence.length) - in_use > pool.free:
                break
            self._waiting.popleft()
            running += 1
            pool.hold(hits)
            sequence.blocks = hits
            sequence.held = len(hits)
            sequence.computed = sequence.room = len(hits) * config.block_size
            loaded = self._load(sequence, events) if self._tiers else (0, 0)
            reused += sequence.computed
            if not sequence.scheduled:
                sequence.scheduled = True
                sequence.scheduled_at = now
                sequence.cached_tokens = sequence.computed
                sequence.loaded_tokens = loaded
            missing = sequence.length - sequence.computed
            if sequence.received:
                sequence.received = False
                budget -= 1
                received += sequence.length
                self._compute(sequence, missing, events)
                continue
            chunk = min(budget - scheduled, missing)
            self._compute(sequence, chunk, events)
            scheduled += chunk
        return scheduled, reused, received

    def _load(self, sequence: Sequence, events: list[CacheEvent]) -> tuple[int, int]:
        """Loads the blocks that follow those on the device; returns their tokens by tier."""
        chain, pieces, held = sequence.chain, sequence.pieces, len(sequence.blocks)
        scope, size = sequence.request.scope, self.config.block_size
        counts = [0, 0]
        if not sequence.received and self.config.prefix_caching:
            for i in range(held, (sequence.length - 1) // size):
                place = next((n for n, tier in enumerate(self._tiers) if tier.has(chain[i], pieces[i])), None)
                if place is None:
                    break
                counts[place] += 1
        for tier in self._tiers:
            tier.keep(chain, pieces, 0, held, scope, events)
        if loaded := sum(counts):
            self._take(sequence, loaded, events)
            self._store(sequence, (held + loaded) * size, events)
            sequence.computed = sequence.room
        for count, (latency, seconds) in zip(counts, self._loads, strict=True):
            if count:
                self._loading += latency + count * seconds
        return counts[0] * size, counts[1] * size

    def _compute(self, sequence: Sequence, chunk: int, events: list[CacheEvent]) -> None:
        """Schedules `chunk` more tokens of a prefill, for which there are enough blocks."""
        computed = sequence.computed + chunk
        self._take(sequence, self._blocks_for(computed) - sequence.held, events)
        if self.config.prefix_caching:
            self._store(sequence, computed, events)
        sequence.computed = computed
        if computed == sequence.length:
            self._completing.append(sequence)
        else:
            self._prefilling = sequence

    def _take(self, sequence: Sequence, count: int, events: list[CacheEvent]) -> None:
        removed = self._pool.take(count)
        if removed:
            events.append(Removed(array("Q", removed)))
        sequence.held += count
        sequence.room += count * self.config.block_size

    def _store(self, sequence: Sequence, computed: int, events: list[CacheEvent]) -> None:
        """Makes the blocks cached that are full once `computed` tokens are computed."""
        start, stop = len(sequence.blocks), computed // self.config.block_size
        if start == stop:
            return
        chain, pieces, scope = sequence.chain, sequence.pieces, sequence.request.scope
        sequence.blocks += self._pool.store(chain, pieces, start, stop, scope)
        events.append(
            Stored(
                chain[start] if start else None,
                array("Q", chain[start + 1 : stop + 1]),
                b"".join(pieces[start:stop]),
                scope,
            )
        )
        for tier in self._tiers:
            tier.keep(chain, pieces, start, stop, scope, events)

    def _preempt_newest(self) -> Sequence:
        """Returns the sequence that was admitted last to the head of the queue."""
        sequence = self._prefilling
        if sequence is None:
            sequence = self._decoding.pop()
        self._prefilling = None
        self._release(sequence)
        self._waiting.appendleft(sequence)
        return sequence

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks, sequence.held - len(sequence.blocks))
        sequence.blocks = []
        sequence.held = sequence.room = sequence.computed = 0

    def _forget(self, events: list[CacheEvent]) -> None:
        while self._decoding or self._prefilling:
            self._preempt_newest()
        self._pool.clear()
        for tier in self._tiers:
            tier.clear()
        self._clear = False
        events.append(Cleared())

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)
