"""The sequences that one HTTP request generates: one for each prompt and choice."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrouter.mocker.constrained.constraint import Constraint
from kvrouter.mocker.driver import Tokens
from kvrouter.mocker.engine.types import UNSCOPED, EngineRequest, FinishReason, Scope, pack_tokens
from kvrouter.mocker.serving.output_text import OutputText
from kvrouter.mocker.serving.service import EngineService, Receive
from kvrouter.mocker.serving.tokenizer import encode


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a request asks of its output."""

    max_tokens: int
    stop: Sequence[str] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    """Whether the text contains the stop string or token that ended it."""
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    greedy: bool = False
    """Whether the output is a function of the prompt."""
    constraint: Constraint | None = None
    """What the output must be; None to draw its tokens."""


@dataclass(frozen=True, slots=True)
class Sequenced:
    """A sequence to generate."""

    request_id: str
    prompt: Sequence[int]
    sampling: Sampling
    scope: Scope = UNSCOPED
    choice: int = 0
    """Number of the sequence among those of the same prompt."""

    def to_engine(self) -> EngineRequest:
        """Returns the request to the engine.

        Raises:
            Unsupported: the output cannot be constrained so.
            ValueError: the prompt is empty or a token does not fit into 32 bits.
        """
        prompt, sampling = pack_tokens(self.prompt), self.sampling
        seed = zlib.crc32(prompt) if sampling.greedy else sampling.seed
        if seed is not None and not sampling.greedy:
            seed += self.choice
        constraint = sampling.constraint
        output = "" if constraint is None else constraint.draw(self.request_id if seed is None else str(seed))
        return EngineRequest(
            request_id=self.request_id,
            prompt=prompt,
            max_tokens=sampling.max_tokens,
            scope=self.scope,
            stop_token_ids=sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            output=tuple(encode(output)),
            seed=seed,
        )


@dataclass(slots=True)
class Piece:
    """Output of a sequence since the previous piece."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    cached_tokens: int | None = None
    """Prompt tokens found in the cache; None except in the first piece."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or token that ended the sequence."""


class Generations:
    """Sequences that run from ``start`` to their end, or to ``close``."""

    def __init__(self, service: EngineService, sequences: Sequence[Sequenced], dp_rank: int | None = None) -> None:
        self.dp_rank = -1
        """Rank of the first sequence, once started."""
        self._service = service
        self._sequences = sequences
        self._requested_rank = dp_rank
        self._texts = [OutputText(each.sampling.stop, include_stop=each.sampling.include_stop) for each in sequences]
        self._arrived: asyncio.Queue[tuple[int, Tokens]] = asyncio.Queue()
        self._running: dict[int, Receive] = {}

    def start(self) -> None:
        """Starts all sequences.

        Raises:
            NoSuchRank: the rank does not exist.
            RequestRefused: the engine refuses one of them.
            ValueError: a prompt is no prompt.
        """
        for index, sequence in enumerate(self._sequences):
            receive = partial(self._receive, index)
            rank = self._service.start(sequence.to_engine(), self._requested_rank, receive)
            self._running[index] = receive
            if index == 0:
                self.dp_rank = rank

    def close(self) -> None:
        """Aborts the sequences that have not ended."""
        for index, receive in self._running.items():
            self._service.cancel(self._sequences[index].request_id, receive)
        self._running.clear()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields index and piece of whichever sequence has output, until all have ended."""
        while self._running:
            index, tokens = await self._arrived.get()
            if index not in self._running:
                continue  # A stop string ended the sequence while the engine had further tokens.
            piece = self._piece(index, tokens)
            if piece.finish_reason is not None:
                self._service.cancel(self._sequences[index].request_id, self._running.pop(index))
            yield index, piece

    def _piece(self, index: int, tokens: Tokens) -> Piece:
        text, sampling = self._texts[index], self._sequences[index].sampling
        token_ids, finish_reason = tokens.token_ids, tokens.finish_reason
        piece = Piece(token_ids, cached_tokens=None if tokens.first is None else tokens.first.cached_tokens)
        if finish_reason is not None:
            piece.finish_reason = finish_reason.value
        by_stop_token = finish_reason is FinishReason.STOP and token_ids[-1] in sampling.stop_token_ids
        if by_stop_token:
            piece.stop_reason = token_ids[-1]
        hides_last = by_stop_token and not sampling.include_stop
        for number, token_id in enumerate(token_ids[:-1] if hides_last else token_ids, start=1):
            if text.push(token_id):
                piece.token_ids = token_ids[:number]
                piece.finish_reason, piece.stop_reason = "stop", text.stopped_by
                break
        piece.text = text.take(ended=piece.finish_reason is not None)
        return piece

    def _receive(self, index: int, tokens: Tokens) -> None:
        self._arrived.put_nowait((index, tokens))
