"""Follows the messages of one rank of an engine and applies them to its publisher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import structlog
from kvrouter.engines.events.translation import EventTranslator
from kvrouter.engines.events.vllm_sglang_events import Dialect, UndecodableBatch, decode_batch
from kvrouter.engines.events.zmq_frames import EventMessage, MalformedMessage
from kvrouter.engines.relay.engine_sockets import Disconnected, EngineSockets, Reconnected, ReplayFailed, Settled
from kvrouter.engines.relay.sequence import SequenceTracker, Verdict, check_of, from_position, position_of
from kvrouter.net.budgets import loop_budget

log = structlog.get_logger(component="relay")

_MESSAGE_US = 100
"""CPU time of a small message, microseconds, measured with one event of one block."""
_BYTES_PER_US = 10
"""Bytes of events decoded and applied in a microsecond."""
_LOOP_BYTES = 32 << 10
"""Maximum size of a message applied on the event loop; a thread applies longer ones."""


@dataclass(slots=True)
class RelayCounts:
    """Statistics of one rank since the relay started."""

    messages: int = 0
    """Applied messages."""
    replayed: int = 0
    """Messages applied from a replay."""
    duplicates: int = 0
    """Messages received again."""
    gaps: int = 0
    """Times that messages were missing before a live one."""
    losses: int = 0
    """Times that messages were lost, so that the rank was emptied: a gap or a new connection without a replay, or a
    replay that began too late."""
    restarts: int = 0
    """Restarts of the engine."""
    malformed: int = 0
    """Malformed messages, and those of another rank."""
    restored_blocks: int = 0
    """Blocks of the state from which the rank resumed."""
    dropped_blocks: int = 0
    """Blocks of a state from which the rank could not resume."""
    is_connected: bool = False
    """Whether the engine's publisher is connected."""


class InitialReplay:
    """The engine's kept messages at the start: a replay whose first message was read."""

    def __init__(self, first: EventMessage | None, rest: AsyncGenerator[EventMessage] | None, position: int) -> None:
        """``position`` is that of the state to resume from, below 0 for none."""
        self.first = first
        self.rest = rest
        self.position = position

    @property
    def resumes(self) -> bool:
        """Whether the engine is the one of the state, and can repeat all later messages."""
        if self.position < 0 or self.first is None:
            return False
        return from_position(self.position) == (self.first.sequence, check_of(self.first.payload))


async def begin_replay(sockets: EngineSockets, position: int, *, wait_for_engine: bool) -> InitialReplay:
    """Requests the engine's messages: from a state's position on, or all of them.

    With ``wait_for_engine`` its first answer may take any time.

    Raises:
        ReplayFailed: the engine does not answer, or with something else.
    """
    if not sockets.has_replay:
        return InitialReplay(None, None, position)
    rest = sockets.replay(from_position(position)[0] if position >= 0 else 0, wait_for_engine=wait_for_engine)
    return InitialReplay(await anext(rest, None), rest, position)


@dataclass(eq=False)
class RankRelay:
    """Relays one rank."""

    dp_rank: int
    sockets: EngineSockets
    translator: EventTranslator
    dialect: Dialect
    on_connection: Callable[[], None]
    """Called when the engine's publisher connected or disconnected."""

    def __post_init__(self) -> None:
        self.counts = RelayCounts()
        self.caught_up = False
        """Whether the messages that the engine kept at the start are applied, as far as it could repeat them."""
        self._tracker = SequenceTracker()
        self._malformed_kinds: set[str] = set()
        self._log = log.bind(dp_rank=self.dp_rank)

    async def run(self, initial: InitialReplay) -> None:
        """Relays until cancelled, after the engine's kept messages."""
        await self._apply_initial_replay(initial)
        self.caught_up = True
        self._log.info("relay.caught_up", replayed=self.counts.replayed, resumed=initial.resumes)
        connected_before = self.sockets.has_replay
        while True:
            match await self.sockets.next():
                case EventMessage() as message:
                    await self._receive(message)
                case MalformedMessage() as error:
                    if self._count_malformed("frames"):
                        self._log.warning("relay.message_malformed", error=str(error))
                case Reconnected():
                    self._set_connected(True)
                    if connected_before:
                        await self._verify()
                    connected_before = True
                case Settled():
                    await self._catch_up_after_last()
                case Disconnected():
                    self._set_connected(False)

    async def _apply_initial_replay(self, initial: InitialReplay) -> None:
        """Applies the engine's kept messages, or goes on from the first live message."""
        if initial.rest is None:
            return
        first = initial.first
        if initial.resumes and first is not None:
            # Already in the state.
            self._tracker.applied(first.sequence, check_of(first.payload), replayed=True)
        try:
            async with aclosing(initial.rest) as rest:
                await self._apply_replay(first, rest)
        except ReplayFailed as error:
            self._log.warning("relay.replay_failed", error=str(error))

    async def _receive(self, message: EventMessage) -> None:
        check = check_of(message.payload)
        verdict = self._tracker.judge(message.sequence, check)
        if verdict == Verdict.GAP:
            self.counts.gaps += 1
            self._log.info("relay.gap", expected=self._tracker.next_sequence, received=message.sequence)
            await self._catch_up_after_last()
            verdict = self._tracker.judge(message.sequence, check)
            if verdict == Verdict.GAP:
                self._lose(message.sequence, "gap")
                verdict = Verdict.APPLY
        if verdict == Verdict.DUPLICATE:
            self.counts.duplicates += 1
            return
        if verdict == Verdict.RESTART:
            self._restart()
            if message.sequence:
                await self._catch_up_after_last()
                if self._tracker.judge(message.sequence, check) == Verdict.DUPLICATE:
                    return
                if message.sequence != self._tracker.next_sequence:
                    self._lose(message.sequence, "gap")
        await self._apply(message)

    async def _verify(self) -> None:
        """Compares the engine behind a new connection with the one before: it may be another, with an empty cache."""
        if not await self._catch_up_after_last():
            self._lose(self._tracker.next_sequence, "reconnected")

    async def _catch_up_after_last(self) -> bool:
        """Requests the last message again and all after it, and applies new ones.

        Notices by the last message if the engine restarted meanwhile. Returns whether the engine answered.
        """
        if not self.sockets.has_replay:
            return False
        try:
            if not await self._replay_after_last():
                self._restart()
                await self._replay_after_last()
        except ReplayFailed as error:
            self._log.warning("relay.replay_failed", error=str(error))
            return False
        return True

    async def _replay_after_last(self) -> bool:
        """Applies the engine's messages after the last one; returns False if it is not the same engine."""
        last = self._tracker.next_sequence - 1
        async with aclosing(self.sockets.replay(max(last, 0))) as messages:
            first = await anext(messages, None)
            if last >= 0:
                if first is None:
                    return False
                if first.sequence == last and check_of(first.payload) != self._tracker.last_check:
                    return False
                if first.sequence == last + 1:
                    # The engine's buffer has passed the last message, so it cannot be compared.
                    self._lose(first.sequence, "replay_too_short")
            await self._apply_replay(first, messages)
        return True

    async def _apply_replay(self, first: EventMessage | None, rest: AsyncGenerator[EventMessage]) -> None:
        while first is not None:
            await self._apply_replayed(first)
            first = await anext(rest, None)

    async def _apply_replayed(self, message: EventMessage) -> None:
        if message.sequence < self._tracker.next_sequence:
            return
        if message.sequence > self._tracker.next_sequence:
            # The engine keeps its newest messages only, and none whose sending failed.
            self._lose(message.sequence, "replay_too_short")
        self.counts.replayed += 1
        await self._apply(message, replayed=True)

    async def _apply(self, message: EventMessage, *, replayed: bool = False) -> None:
        size = len(message.payload)
        if size > _LOOP_BYTES:
            await asyncio.to_thread(self._apply_payload, message, replayed=replayed)
            return
        await loop_budget().turn(_MESSAGE_US + size // _BYTES_PER_US)
        self._apply_payload(message, replayed=replayed)

    def _apply_payload(self, message: EventMessage, *, replayed: bool) -> None:
        check = check_of(message.payload)
        self._tracker.applied(message.sequence, check, replayed=replayed)
        self.counts.messages += 1
        try:
            batch = decode_batch(message.payload, self.dialect)
        except UndecodableBatch as error:
            self._log.warning("relay.batch_undecodable", sequence=message.sequence, error=str(error))
            self.translator.lost("undecodable_batch")
            return
        if batch.dp_rank not in (None, self.dp_rank):
            if self._count_malformed("other_rank"):
                self._log.warning("relay.other_rank", received=batch.dp_rank)
            return
        self.translator.apply(batch, position_of(message.sequence, check))

    def _count_malformed(self, kind: str) -> bool:
        """Counts a message that cannot be applied. Returns whether it is the first of its kind, which is logged."""
        self.counts.malformed += 1
        is_first = kind not in self._malformed_kinds
        self._malformed_kinds.add(kind)
        return is_first

    def _restart(self) -> None:
        self.counts.restarts += 1
        self._log.info("relay.engine_restarted", next_sequence=self._tracker.next_sequence)
        self._tracker.restart()
        self.translator.restarted()

    def _lose(self, sequence: int, reason: str) -> None:
        """Drops the rank's blocks, because messages before ``sequence`` are gone."""
        self.counts.losses += 1
        self._log.warning("relay.messages_lost", reason=reason, expected=self._tracker.next_sequence, received=sequence)
        self.translator.lost(reason)

    def _set_connected(self, connected: bool) -> None:
        self.counts.is_connected = connected
        self.on_connection()
