"""Generates workloads of one kind of traffic each. Equal arguments give equal requests.

At load 1, 16 default engines are lightly loaded; ``--load`` multiplies the arrival rate. Lengths are log-normal,
popularity follows Zipf's law, sessions and visitors arrive as a Poisson process.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, islice
from random import Random
from types import MappingProxyType

from kvrouter.simulator.workloads.workload import Request, Workload

PIECE_TOKENS = 64


@dataclass(slots=True)
class Context:
    """A prompt that grows. All of its pieces are full, because the next part begins a new one."""

    fresh: Iterator[int]
    pieces: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return len(self.pieces) * PIECE_TOKENS

    def grow(self, tokens: int) -> None:
        """Adds text that no other prompt has, rounded up to pieces."""
        self.pieces += islice(self.fresh, -(-tokens // PIECE_TOKENS))

    def request(self, at: float, output_tokens: int) -> Request:
        """Returns a request with the whole context as its prompt."""
        return Request(at, self.tokens, output_tokens, tuple(self.pieces))


def _length(rng: Random, median: float, spread: float, least: int, most: int) -> int:
    return round(min(max(median * math.exp(rng.gauss(0, spread)), least), most))


def _zipf(count: int, exponent: float) -> list[float]:
    return list(accumulate((rank + 1) ** -exponent for rank in range(count)))


def shared_prompts(rng: Random, bursts: bool = False) -> Iterator[Request]:
    """Generates applications with a system prompt each, of Zipf popularity, a short question and many visitors."""
    fresh = count(1)
    prompts = []
    for _ in range(400):
        context = Context(fresh)
        context.grow(_length(rng, 3000, 0.7, 500, 16000))
        prompts.append(context.pieces)
    popularity = _zipf(len(prompts), 0.9)
    at = 0.0
    while True:
        # In bursts: five seconds in thirty at four times the rate, the others at two fifths of it.
        rate = 40.0 * ((4.0 if at % 30 < 5 else 0.4) if bursts else 1.0)
        at += rng.expovariate(rate)
        context = Context(fresh, list(rng.choices(prompts, cum_weights=popularity)[0]))
        context.grow(_length(rng, 300, 0.8, 20, 4000))
        yield context.request(at, _length(rng, 200, 0.7, 10, 1500))


def chat(rng: Random) -> Iterator[Request]:
    """Generates conversations: every turn repeats all earlier turns, and all begin with one system prompt."""

    def turns(rng: Random, start: float, context: Context) -> Iterator[Request]:
        at = start
        while True:
            context.grow(_length(rng, 150, 1.0, 10, 4000))
            answer = _length(rng, 250, 0.6, 20, 1500)
            yield context.request(at, answer)
            if rng.random() < 1 / 6:
                return
            context.grow(answer)
            at += 10 + rng.expovariate(1 / 30)

    return _sessions(rng, 12.0, turns, common=1024)


def documents(rng: Random) -> Iterator[Request]:
    """Generates long documents, each with several questions in the minutes after it arrives."""

    def questions(rng: Random, start: float, context: Context) -> Iterator[Request]:
        context.grow(_length(rng, 14000, 0.6, 3000, 60000))
        document, at = list(context.pieces), start
        for _ in range(1 + min(int(rng.expovariate(1 / 3)), 12)):
            booking_context = Context(context.fresh, list(document))
            booking_context.grow(_length(rng, 60, 0.6, 10, 500))
            yield booking_context.request(at, _length(rng, 150, 0.7, 10, 1000))
            at += 3 + rng.expovariate(1 / 25)

    return _sessions(rng, 2.0, questions)


def agents(rng: Random) -> Iterator[Request]:
    """Generates agents: tens of steps in quick succession, each of which adds the output of a tool."""

    def steps(rng: Random, start: float, context: Context) -> Iterator[Request]:
        context.grow(_length(rng, 1500, 0.5, 300, 6000))
        at = start
        for _ in range(5 + min(int(rng.expovariate(1 / 15)), 60)):
            answer = _length(rng, 120, 0.7, 10, 800)
            yield context.request(at, answer)
            context.grow(answer + _length(rng, 600, 1.0, 30, 8000))
            at += 4 + rng.expovariate(1 / 5)

    return _sessions(rng, 1.5, steps, common=2048)


def _sessions(
    rng: Random, per_second: float, session: Callable[[Random, float, Context], Iterator[Request]], common: int = 0
) -> Iterator[Request]:
    """Merges sessions that begin at a rate by time. All begin with ``common`` tokens."""
    fresh = count(1)
    shared = Context(fresh)
    shared.grow(common)
    open_sessions: list[tuple[float, int, Request, Iterator[Request]]] = []
    start = 0.0
    for number in count():
        start += rng.expovariate(per_second)
        while open_sessions and open_sessions[0][0] <= start:
            _, order, request, rest = heapq.heappop(open_sessions)
            yield request
            following = next(rest, None)
            if following is not None:
                heapq.heappush(open_sessions, (following.arrives_s, order, following, rest))
        begun = session(Random(rng.getrandbits(64)), start, Context(fresh, list(shared.pieces)))
        request = next(begun)
        heapq.heappush(open_sessions, (request.arrives_s, number, request, begun))


GENERATORS: Mapping[str, Callable[[Random], Iterator[Request]]] = MappingProxyType(
    {
        "prompts": shared_prompts,
        "chat": chat,
        "documents": documents,
        "agents": agents,
        "bursts": lambda rng: shared_prompts(rng, bursts=True),
    }
)
"""Generators by name."""


def generate(name: str, requests: int, seed: int = 0) -> Workload:
    """Returns the first ``requests`` requests of a generator.

    Raises:
        KeyError: no generator has that name.
    """
    made: Sequence[Request] = list(islice(GENERATORS[name](Random(seed)), requests))
    return Workload(name, made, PIECE_TOKENS)
