"""The engines of a simulation, in virtual time.

    fleet.submit(engine, number, prompt, max_tokens)      # now
    notices = fleet.advance(until)                        # to `until`, or to the first notable moment before it
    fleet.take_events()                                   # blocks that were cached or evicted since the last call

Each engine runs one step after another while it has work. ``advance`` stops at the first moment at which a request gets
its first token or ends. All steps that end then have ended, and none has begun, so that requests submitted at that
moment are part of the next steps.

The Rust implementation behaves the same and simulates a whole trace in seconds.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvrouter.mocker.engine.block_pool import root_hash
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.implementation import IMPLEMENTATION
from kvrouter.mocker.engine.offloading import Parts
from kvrouter.mocker.engine.reference import Engine
from kvrouter.mocker.engine.sequence import output_stream
from kvrouter.mocker.engine.types import UNSCOPED, CacheEvent, EngineRequest, Removed, Stored


class Notice(NamedTuple):
    """Progress of a request: its first token, the first token of each output block, its end."""

    at: float
    engine: int
    number: int
    generated: int
    """Output tokens so far."""
    cached_tokens: int
    """Prompt tokens found in the cache, in any tier."""
    finished: bool
    host_tokens: int = 0
    """Those of them that were loaded from host memory."""
    shared_tokens: int = 0
    """Those of them that were loaded from shared storage."""


RawEvent = tuple[bytes, int | None, bytes, int, int] | tuple[bytes, int] | tuple[()]
"""(engine hashes, parent, tokens, root, tier) of a store, (engine hashes, tier) of a removal, () of a clear. Hashes are
packed little-endian u64, tokens u32."""


class EngineLoad(NamedTuple):
    """Load of an engine."""

    running: int
    waiting: int
    active_blocks: int
    cached_blocks: int
    prefill_tokens: int


class Totals(NamedTuple):
    """Totals over a whole run."""

    steps: int
    preemptions: int
    reused_tokens: int
    """Tokens found in caches at admission, also at admissions after a preemption."""
    busy_seconds: list[float]
    """Computing time by engine, seconds."""


class Fleet(Protocol):
    """Engines in virtual time. Requests are identified by numbers."""

    @property
    def now(self) -> float:
        """Virtual time, seconds."""

    def submit(self, engine: int, number: int, prompt: bytes, max_tokens: int, *, received: bool = False) -> None:
        """Submits a request to an engine now.

        Args:
            engine: The engine.
            number: Number of the request; no engine that has it still may get it.
            prompt: Token ids as little-endian u32.
            max_tokens: Output tokens.
            received: Whether the blocks of the prompt have arrived from a prefill worker.
        """

    def restart(self, engine: int) -> None:
        """Restarts an engine: its cache and its requests are lost."""

    def advance(self, until: float) -> list[Notice]:
        """Advances to ``until``, or to the first moment before it at which a request gets its first token or ends."""

    def take_events(self) -> list[tuple[float, int, RawEvent]]:
        """Returns the cache events (time, engine, event) since the last call; empty if they are not recorded."""

    def load(self, engine: int) -> EngineLoad:
        """Returns the load of an engine, as if the current step were done."""

    def sorted_gaps(self) -> array[float]:
        """Returns the seconds between tokens over all requests, sorted, as packed 32-bit floats."""

    def totals(self) -> Totals:
        """Returns the totals of the run so far."""


class ReferenceFleet:
    """The plain Python implementation, on the reference engine model."""

    def __init__(self, configs: Sequence[EngineConfig], *, record_events: bool) -> None:
        self._configs = configs
        self._shared: Parts = []
        self._engines = [Engine(config, self._shared) for config in configs]
        self._ends: list[float | None] = [None] * len(configs)
        self._ready = [False] * len(configs)
        self._record = record_events
        self._events: list[tuple[float, int, RawEvent]] = []
        self._gaps = array("f")
        self._generated: dict[str, tuple[int, float]] = {}
        self._prompt_tokens: dict[str, int] = {}
        self._steps = self._preemptions = self._reused = 0
        self._busy = [0.0] * len(configs)
        self.now = 0.0

    def submit(self, engine: int, number: int, prompt: bytes, max_tokens: int, *, received: bool = False) -> None:
        """Submits a request to an engine now."""
        request = EngineRequest(str(number), prompt, max_tokens, received=received)
        self._prompt_tokens[str(number)] = request.prompt_tokens
        self._engines[engine].submit(request, self.now)
        self._ready[engine] = self._ends[engine] is None

    def restart(self, engine: int) -> None:
        """Restarts an engine."""
        self._engines[engine].leave()
        self._engines[engine] = Engine(self._configs[engine], self._shared)
        self._ends[engine], self._ready[engine] = None, False

    def advance(self, until: float) -> list[Notice]:
        """Advances the time."""
        notices: list[Notice] = []
        while self.now < until:
            self._begin_steps()
            following = min((end for end in self._ends if end is not None), default=float("inf"))
            if following > until:
                self.now = until
                break
            self.now = following
            if self._end_steps(notices):
                break
        return notices

    def take_events(self) -> list[tuple[float, int, RawEvent]]:
        """Returns the cache events since the last call."""
        taken, self._events = self._events, []
        return taken

    def load(self, engine: int) -> EngineLoad:
        """Returns the load of an engine."""
        load = self._engines[engine].load()
        return EngineLoad(load.running, load.waiting, load.active_blocks, load.cached_blocks, load.prefill_tokens)

    def sorted_gaps(self) -> array[float]:
        """Returns the seconds between tokens, sorted."""
        return array("f", sorted(self._gaps))

    def totals(self) -> Totals:
        """Returns the totals of the run so far."""
        return Totals(self._steps, self._preemptions, self._reused, list(self._busy))

    def _begin_steps(self) -> None:
        for number, ready in enumerate(self._ready):
            if not ready:
                continue
            self._ready[number] = False
            step = self._engines[number].begin_step(self.now)
            if step is None:
                continue
            self._ends[number] = step.ends_at
            self._busy[number] += step.duration
            self._steps += 1
            self._preemptions += step.preempted
            self._reused += step.reused_tokens
            if self._record:
                seed = self._configs[number].hash_seed
                self._events += [(self.now, number, _raw(event, seed)) for event in step.events]

    def _end_steps(self, notices: list[Notice]) -> bool:
        notable = False
        for number, engine in enumerate(self._engines):
            if self._ends[number] != self.now:
                continue
            self._ends[number], self._ready[number] = None, True
            width = self._configs[number].block_size
            for output in engine.end_step(self.now):
                request_id, finished = output.request_id, output.finish_reason is not None
                generated, last = self._generated.get(request_id, (0, 0.0))
                generated += 1
                if not output.first_token:
                    self._gaps.append(self.now - last)
                self._generated[request_id] = (generated, self.now)
                acts = output.first_token or finished
                notable = notable or acts
                if acts or (self._prompt_tokens[request_id] + generated) % width == 1 or width == 1:
                    found = (output.cached_tokens, finished, output.host_tokens, output.shared_tokens)
                    notices.append(Notice(self.now, number, int(request_id), generated, *found))
                if finished:
                    del self._generated[request_id], self._prompt_tokens[request_id]
        return notable


def _raw(event: CacheEvent, seed: int) -> RawEvent:
    match event:
        case Stored(parent, hashes, tokens, scope, tier):
            return (struct.pack(f"<{len(hashes)}Q", *hashes), parent, tokens, root_hash(seed, scope), tier)
        case Removed(hashes, tier):
            return (struct.pack(f"<{len(hashes)}Q", *hashes), tier)
        case _:
            return ()


class NativeFleet:
    """The Rust implementation."""

    def __init__(self, configs: Sequence[EngineConfig], *, record_events: bool) -> None:
        from kvrouter.mocker.engine import _native
        from kvrouter.mocker.engine.native import native_settings

        self._native = _native.Fleet([native_settings(config) for config in configs], record_events)
        self._configs = configs
        self._roots = [root_hash(config.hash_seed, UNSCOPED) for config in configs]

    @property
    def now(self) -> float:
        """Virtual time, seconds."""
        return self._native.now

    def submit(self, engine: int, number: int, prompt: bytes, max_tokens: int, *, received: bool = False) -> None:
        """Submits a request to an engine now."""
        stream = output_stream(EngineRequest(str(number), prompt, max_tokens))
        self._native.submit(engine, number, prompt, max_tokens, self._roots[engine], stream, received)

    def restart(self, engine: int) -> None:
        """Restarts an engine."""
        self._native.restart(engine)

    def advance(self, until: float) -> list[Notice]:
        """Advances the time."""
        return [Notice._make(row) for row in self._native.advance(until)]

    def take_events(self) -> list[tuple[float, int, RawEvent]]:
        """Returns the cache events since the last call."""
        return self._native.take_events()

    def load(self, engine: int) -> EngineLoad:
        """Returns the load of an engine."""
        return EngineLoad._make(self._native.load(engine))

    def sorted_gaps(self) -> array[float]:
        """Returns the seconds between tokens, sorted."""
        return array("f", self._native.sorted_gaps())

    def totals(self) -> Totals:
        """Returns the totals of the run so far."""
        return Totals._make(self._native.totals())


def make_fleet(configs: Sequence[EngineConfig], *, record_events: bool) -> Fleet:
    """Returns engines of the implementation that the mocker uses."""
    if IMPLEMENTATION == "native":
        return NativeFleet(configs, record_events=record_events)
    return ReferenceFleet(configs, record_events=record_events)
