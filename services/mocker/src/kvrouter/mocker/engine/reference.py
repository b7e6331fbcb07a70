"""A simulated engine that behaves like vLLM: paged KV cache, prefix caching, chunked prefill, continuous batching.

It is a pure model: no I/O, no clock of its own, no randomness but what its seeds say. A driver, real-time or
virtual-time, runs it:

    engine.submit(request, now)                # any time; raises RequestRefused
    step = engine.begin_step(now)              # None: nothing to do, begin again after the next submit
    ...publish step.events, let step.duration seconds pass...
    outputs = engine.end_step(now)             # every output of the step, all at once, at its end
    final = engine.abort(request_id)           # any time, also within a step

Requests that arrive at the instant at which a step begins are submitted before `begin_step`, to be part of it. Every
request that was submitted ends once: in an output with a finish reason, or in what `abort` returns.

How a step is put together:

1. Every decoding sequence takes one token of the budget, and a new block where its last one is full.
2. The prefill under way continues with what the budget has left. There is at most one, and it is the newest sequence:
   prefills take the whole budget until they are done.
3. Waiting requests are admitted in the order of arrival while budget is left. The head is admitted if the free blocks
   suffice for all that is known of it, less the cached blocks that others have in use; else it and all behind it wait.
   It then takes blocks chunk by chunk, and not all at once.
4. If 1 or 2 finds no free block, the newest sequence goes back to the head of the queue, to be computed again; it
   keeps its output, and its blocks stay cached until evicted. Nothing is admitted in that step.

Blocks are cached, and their events true, when the step that computes them is scheduled; requests admitted later in the
same step find them. Of a prompt of n tokens at most (n - 1) div block_size blocks are reused, since the last token
must be computed to get an output; a prompt that is wholly cached thus computes its last block again, into a second
physical copy. The first token comes out of the step that ends the prefill, and decoding begins with the next.
"""

from collections import deque

from kvrouter.mocker.engine.block_pool import Block, BlockPool
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.sequence import Sequence
from kvrouter.mocker.engine.types import (
    CachedBlock,
    CacheEvent,
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

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._pool = BlockPool(config.num_blocks)
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._decoding: list[Sequence] = []  # in the order of admission
        self._prefilling: Sequence | None = None  # admitted after all that decode or complete
        self._completing: list[Sequence] = []  # their prefill ends with the step under way
        self._in_step = False
        self._clear = False

    def check(self, request: EngineRequest, waiting: int = 0) -> None:
        """Raise what `submit` would: PromptTooLong, DuplicateRequest or QueueFull.

        `waiting`: requests that the driver itself keeps for this engine, as the queue's.
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
        """Put a request into the queue. Raises PromptTooLong, DuplicateRequest or QueueFull."""
        self.check(request)
        sequence = Sequence(request, self.config, now)
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def begin_step(self, now: float) -> Step | None:
        """Schedule a step; None if there is nothing to do.

        Raises RuntimeError if a step is under way.
        """
        if self._in_step:
            raise RuntimeError("a step is under way")
        events: list[CacheEvent] = []
        if self._clear:
            self._forget(events)
        if not self._sequences and not events:
            return None
        queued = len(self._waiting)
        budget = self.config.max_batched_tokens
        budget -= self._schedule_decodes(events)
        decoding = len(self._decoding)
        prefill_tokens = self._continue_prefill(budget, events)
        preempted = len(self._waiting) - queued
        reused = 0
        if not preempted:
            admitted, reused = self._admit(budget - prefill_tokens, now, events)
            prefill_tokens += admitted
        seconds = self.config.time_model.step_seconds(
            prefill_tokens, sum([s.length for s in self._decoding]), self.config.capacity_tokens
        )
        self._in_step = True
        return Step(now, seconds / self.config.speed, tuple(events), prefill_tokens, reused, decoding, preempted)

    def end_step(self, now: float) -> list[Output]:  # noqa: ARG002 - symmetric with begin_step
        """End the step under way; returns what it gave each request, oldest first.

        Raises RuntimeError if no step is under way.
        """
        if not self._in_step:
            raise RuntimeError("no step is under way")
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
            if token in request.stop_token_ids:
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
                )
            )
        if ended:
            for sequence in ended:
                del self._sequences[sequence.request.request_id]
                self._release(sequence)
            self._decoding = [s for s in self._decoding if s.request.request_id in self._sequences]
        return outputs

    def abort(self, request_id: str) -> Output | None:
        """End a request at once; its computed blocks stay cached. Returns its last output; None: it is not here."""
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
        )

    def clear_cache(self) -> None:
        """Empty the cache with the next step: running requests go back to the queue's head and are computed again.

        If the engine is idle, that step takes no time and only carries the event.
        """
        self._clear = True

    def load(self) -> Load:
        """How busy the engine is, counting the step under way as done."""
        to_prefill = sum(s.length for s in self._waiting)
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
        """Engine hash → block, for all that is cached: the truth that the events so far must add up to."""
        return self._pool.table()

    def _schedule_decodes(self, events: list[CacheEvent]) -> int:
        """Make room for one token of each decoding sequence; returns how many decode."""
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
        """Schedule the next chunk of the prefill under way; returns its tokens."""
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

    def _admit(self, budget: int, now: float, events: list[CacheEvent]) -> tuple[int, int]:
        """Admit waiting requests, schedule their first chunks; returns the tokens of those and the tokens reused."""
        pool, config = self._pool, self.config
        scheduled = reused = 0
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
            reused += sequence.computed
            if not sequence.scheduled:
                sequence.scheduled = True
                sequence.scheduled_at = now
                sequence.cached_tokens = sequence.computed
            chunk = min(budget - scheduled, sequence.length - sequence.computed)
            self._compute(sequence, chunk, events)
            scheduled += chunk
        return scheduled, reused

    def _compute(self, sequence: Sequence, chunk: int, events: list[CacheEvent]) -> None:
        """Schedule `chunk` more tokens of a prefill, for which there are blocks."""
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
            events.append(Removed(tuple(removed)))
        sequence.held += count
        sequence.room += count * self.config.block_size

    def _store(self, sequence: Sequence, computed: int, events: list[CacheEvent]) -> None:
        """Cache what blocks are full once `computed` tokens are."""
        start, stop = len(sequence.blocks), computed // self.config.block_size
        if start == stop:
            return
        chain, pieces, scope = sequence.chain, sequence.pieces, sequence.request.scope
        sequence.blocks += self._pool.store(chain, pieces, start, stop, scope)
        events.append(
            Stored(
                chain[start] if start else None, tuple(chain[start + 1 : stop + 1]), tuple(pieces[start:stop]), scope
            )
        )

    def _preempt_newest(self) -> Sequence:
        """Send the sequence that was admitted last back to the head of the queue."""
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
        self._clear = False
        events.append(Cleared())

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)
