"""The input of a request's attempts: the prompt with the output so far, to the Scheduler as hashes; and the routing."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvrouter.frontend.generate_request import GenerateRequest
from kvrouter.frontend.packed_prompt import TOKEN_BYTES, hash_prompt
from kvrouter.frontend.request.attempt_budget import is_inexact
from kvrouter.frontend.request.current_choice import choice_text
from kvrouter.frontend.request.prefill_stage import PrefillStage
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.schedulers.booking_updates import LiveBooking
from kvrouter.frontend.workers.worker_request import WorkerRequest
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.requests import content_in_blocks, set_local_hashes
from kvrouter.v1.common_pb2 import AvoidedWorker, KvSource, Rank, RoutingRequest, Stage
from kvrouter.v1.frontend_pb2 import RoutedOn
from kvrouter.v1.scheduler_pb2 import SelectWorkerRequest, SelectWorkerResponse
from kvrouter.v1.worker_pb2 import TransferParams

# Reading one from its enum takes over a microsecond.
_WHOLE, _DECODE = Stage.STAGE_WHOLE, Stage.STAGE_DECODE
_ON_LOAD, _ON_TOKENS = RoutedOn.ROUTED_ON_LOAD, RoutedOn.ROUTED_ON_TOKENS


def set_routing(
    routing: RoutingRequest,
    request: GenerateRequest,
    view: ComponentView,
    local_hashes: bytes,
    prompt_tokens: int,
    *,
    is_estimated: bool = False,
) -> None:
    """Sets an empty message to a request for a Scheduler: hashes, lengths and options, no tokens.

    ``is_estimated``: whether the number of prompt tokens is an estimate.
    """
    routing.CopyFrom(view.routing_base)
    routing.model = request.model
    routing.prompt_tokens, routing.max_output_tokens = prompt_tokens, request.stop.max_tokens
    # To set a field costs more than to leave it at its default.
    if is_estimated:
        routing.length_is_estimated = True
    if request.conversation_id:
        routing.conversation_id = request.conversation_id
    if request.priority:
        routing.priority = request.priority
    if choice := choice_text():
        routing.model_choice = choice
    if request.expected_output_tokens is not None:
        routing.expected_output_tokens = request.expected_output_tokens
    set_local_hashes(routing.local_hashes, local_hashes)
    media = request.multimodal_hashes
    if media and (unindexed := [item for item in media if item.unindexed]):
        routing.indexed_blocks = min(block for block, _ in content_in_blocks(unindexed, view.block_size))
    if request.scope is not None:
        routing.scope.CopyFrom(request.scope)
    if request.overrides is not None:
        routing.overrides.CopyFrom(request.overrides)
    if request.constraints is not None:
        routing.constraints.CopyFrom(request.constraints)
    if request.sampling.n is not None and request.sampling.n > 1:
        routing.sequences = request.sampling.n
    if request.sampling.structured_output is not None:
        unable = (worker.worker_id for worker in view.workers.values() if not worker.serves_structured_output)
        routing.constraints.excluded_worker_ids.extend(unable)


class AttemptInput:
    """The input of the next attempt of one request. It changes when the request migrates or turns to another pool."""

    def __init__(
        self, request: GenerateRequest, prompt: bytes, view: ComponentView, *, is_estimated: bool = False
    ) -> None:
        """Begins with the prompt the client sent, a packed buffer, in the pool of ``view``.

        ``is_estimated``: whether its length is an estimate.
        """
        self._request = request
        self._is_estimated = is_estimated
        self.client_prompt_tokens = len(prompt) // TOKEN_BYTES
        """Tokens of the prompt the client sent."""
        self.prompt = prompt
        """The prompt the client sent, and the output of earlier attempts."""
        self.component = view.name
        """The pool."""
        self.block_size = view.block_size
        self.client_hashes = hash_prompt(prompt, request, self.block_size)
        """Hashes of the prompt the client sent."""
        self.hashes = self.client_hashes
        """Hashes of the prompt."""
        self.selection = SelectWorkerRequest()
        """The call of the Scheduler, in which each attempt names its booking."""
        self.routing = self.selection.request
        """The Scheduler's request."""
        tokens = self.client_prompt_tokens
        set_routing(self.routing, request, view, self.hashes, tokens, is_estimated=is_estimated)
        self._failed_workers = 0
        """Number of workers excluded because they failed, which are the last excluded ones."""
        self._stop = request.stop
        self._earlier_ranks: list[Rank] = []
        """Ranks of the attempts so far."""
        self.since_ns = time.perf_counter_ns()
        """Arrival of the request, or after a migration, the failure of the worker before."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt) // TOKEN_BYTES

    def move_to(self, view: ComponentView) -> None:
        """Turns to another pool, which may have blocks of another size, and none of the workers that failed."""
        self.component, self.block_size = view.name, view.block_size
        client_prompt = self.prompt[: self.client_prompt_tokens * TOKEN_BYTES]
        self.client_hashes = hash_prompt(client_prompt, self._request, self.block_size)
        self.hashes = hash_prompt(self.prompt, self._request, self.block_size, known=self.client_hashes)
        self.routing.Clear()
        tokens = self.prompt_tokens
        set_routing(self.routing, self._request, view, self.hashes, tokens, is_estimated=self._is_estimated)
        self.routing.max_output_tokens = self._stop.max_tokens
        self._failed_workers = 0

    def append_output(self, output: bytes) -> None:
        """Puts all output so far, a packed buffer, at the end of the prompt the client sent."""
        self.since_ns = time.perf_counter_ns()
        self.prompt = self.prompt[: self.client_prompt_tokens * TOKEN_BYTES] + output
        self.hashes = hash_prompt(self.prompt, self._request, self.block_size, known=self.hashes)
        self._stop = self._request.stop.after(len(output) // TOKEN_BYTES)
        set_local_hashes(self.routing.local_hashes, self.hashes)
        self.routing.prompt_tokens = self.prompt_tokens
        self.routing.max_output_tokens = self._stop.max_tokens
        self.readmit()

    def exclude(self, worker_id: int) -> None:
        """Excludes a worker that failed, until the request has further output or turns to another pool."""
        self.routing.constraints.excluded_worker_ids.append(worker_id)
        self._failed_workers += 1

    def readmit(self) -> None:
        """Takes back all exclusions of workers that failed."""
        excluded = self.routing.constraints.excluded_worker_ids
        del excluded[len(excluded) - self._failed_workers :]
        self._failed_workers = 0

    def avoid(self, unhealthy: Sequence[AvoidedWorker], others: Sequence[int]) -> None:
        """Avoids workers where possible.

        Args:
            unhealthy: Unhealthy workers, with reasons.
            others: Ids of further workers.
        """
        avoided = self.routing.constraints.avoided_workers
        del avoided[:]
        avoided.extend(unhealthy)
        if self._request.constraints is not None:
            avoided.extend(self._request.constraints.avoided_workers)
        avoided.extend(AvoidedWorker(worker_id=worker_id) for worker_id in others)

    def for_worker(
        self, booking: LiveBooking, transfer_params: TransferParams | None, kv_source: KvSource | None = None
    ) -> WorkerRequest:
        """Returns the worker's request.

        Args:
            booking: The booking of the attempt.
            transfer_params: Where the worker fetches the prompt's KV cache; None if it computes the prompt.
            kv_source: Another rank that holds more of the prompt; None if none does.
        """
        request, key, media = self._request, booking.key, self._request.multimodal_hashes
        return WorkerRequest(
            request_id=key.request_id,
            attempt=key.attempt,
            stage=_WHOLE if transfer_params is None else _DECODE,
            dp_rank=booking.rank.dp_rank,
            priority=request.priority,
            conversation_id=request.conversation_id,
            stop=self._stop,
            sampling=request.sampling,
            scope=request.scope,
            content=content_in_blocks(media, self.block_size) if media else (),
            transfer_params=transfer_params,
            kv_source=kv_source if transfer_params is None else None,
        )

    def note_routing(
        self,
        request_id: str,
        booking: LiveBooking,
        selection: SelectWorkerResponse,
        migrations: int,
        prefill: PrefillStage | None,
    ) -> Routed:
        """Returns how an attempt was routed, and notes its rank for the attempts after it.

        Args:
            request_id: The client's id of the request.
            booking: The booking of the attempt.
            selection: The decision.
            migrations: Migrations before.
            prefill: The prefill stage; None if the pool is not disaggregated.
        """
        load_only = selection.load_only
        routing = Routed(  # some by position: more than 15 by name take a dictionary, and several times as long
            request_id,
            booking.rank,
            booking.key.attempt,
            predicted_overlap_blocks=selection.overlap_blocks,
            prompt_blocks=selection.prompt_blocks,
            decision_id=selection.decision_id,
            load_only=load_only,
            routed_on=_ON_LOAD if load_only else _ON_TOKENS,
            router_us=(time.perf_counter_ns() - self.since_ns) // 1000,
            queued_us=selection.queued_us,
            mode=selection.mode,
            model_choice=choice_text(),
            component=booking.component,
            predicted_lower_blocks=selection.lower_blocks if "lower_blocks" in selection else None,
            kv_source=selection.kv_source if "kv_source" in selection else None,
            ignored_overrides=selection.ignored_overrides,
        )
        if self._earlier_ranks:
            routing.earlier_ranks = self._earlier_ranks.copy()
            routing.migrations = migrations
            routing.inexact_continuation = migrations > 0 and is_inexact(self._request.sampling)
        if prefill is not None:
            routing.prefill_reason = prefill.reason
            routing.prefill_us = prefill.spent_ns // 1000
            routing.prefill_rank = prefill.rank
        self._earlier_ranks.append(booking.rank)
        return routing
