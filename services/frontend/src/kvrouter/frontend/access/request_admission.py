"""Admits requests, of the APIs and of gateways alike, within the limits of their callers and of this Frontend.

A request takes its part of its caller's limits as soon as its headers are known (``Access``), with an estimate of its
tokens. Here it is admitted once its prompt is known: its tokens replace the estimate, and the bounds of this Frontend
count it.

Admits requests by their number, the size of their bodies and prompts, and their work for their model's workers.

    work of a request = prompt tokens + min(maximum output tokens, mean output tokens of the model)
    bounds of a model = max_work * KV cache of its workers, tokens of work
                        max_work * slots of its ranks, requests

The mean is that of the last requests that ended (EWMA), so a high ``max_tokens`` does not count in full. Prefixes
that requests share are counted in each: with long shared prefixes the bound must be higher. Slots are the requests
that ranks run at once (``max_sequences``), without those of prefill workers, which a request leaves after its prompt. A
bound does not apply while the size of the KV cache of a worker, or the slots of a rank, are unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.body_room import MAX_WAITING, BodyRoom, BodyRooms, current_room
from kvrouter.frontend.access.caller import current_caller, current_grant
from kvrouter.frontend.access.quotas import TOKEN_BYTES, Grant
from kvrouter.runtime.bounds import FairBound, bounds_of
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.requests import serves
from kvrouter.v1.errors import Overloaded
from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter

_FIRST_OUTPUT_TOKENS = 256.0
"""Mean output before any request has ended."""
_SMOOTHING = 0.05
_RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class OverloadLimits:
    """Bounds of one process; 0 for none."""

    requests: int
    input_bytes: int
    work: float
    """Work of a model in multiples of the KV cache, and of the slots, of its workers."""


class AdmittedRequest(Struct, eq=False):
    """A request counting until it is ended. End it once."""

    bounds: OverloadBounds
    tenant: str
    size: int
    """Bytes of its prompt beyond those of its body."""
    prompt_tokens: int
    max_output_tokens: int
    model: _Model | None = None
    """Has its work; None if that is not bounded."""
    work: float = 0.0
    """Tokens of KV cache it takes."""
    grant: Grant | None = None
    """What it takes of its caller's limits."""

    def end(self, output_tokens: int | None, *, sent: bool, prompt_tokens: int | None = None) -> None:
        """Ends the request.

        Args:
            output_tokens: Tokens of its output; None if their number is not known, and the maximum counts.
            sent: Whether a worker had its prompt, which is then charged whether there was output or not.
            prompt_tokens: Tokens of its prompt as its engine counted them, instead of an estimate; None to keep that.
        """
        if self.grant is not None:
            charged = 0
            if sent or output_tokens:
                charged = self.prompt_tokens if prompt_tokens is None else max(0, prompt_tokens)
            unused_output = 0 if output_tokens is None else self.max_output_tokens - output_tokens
            self.grant.end_sequence(self.prompt_tokens - charged + unused_output)
        self.bounds.end(self.tenant, self.size)
        if (model := self.model) is not None:
            model.work.remove(self.tenant, self.work)
            model.slots.remove(self.tenant, 1)
            if output_tokens:
                model.mean_output += _SMOOTHING * (output_tokens - model.mean_output)


@dataclass(slots=True)
class _Model:
    work: FairBound = field(default_factory=lambda: FairBound(0.0))
    """Tokens of KV cache."""
    slots: FairBound = field(default_factory=lambda: FairBound(0.0))
    """Requests."""
    mean_output: float = _FIRST_OUTPUT_TOKENS


class OverloadBounds:
    """Admits the requests of one process within its bounds."""

    def __init__(self, limits: OverloadLimits, registry: CollectorRegistry) -> None:
        self._limits = limits
        self._requests = FairBound(limits.requests)
        self._input_bytes = FairBound(limits.input_bytes)
        self.rooms = BodyRooms(self._input_bytes, lambda message: self._refusal("prompt_bytes", message))
        """Room for the bodies of requests."""
        self._models: defaultdict[str, _Model] = defaultdict(_Model)
        self._refused = Counter(
            "kvrouter_frontend_overload_refusals",
            "Requests refused because there is no room for them, by bound: requests, prompt_bytes or work.",
            ["bound"],
            registry=registry,
        )
        for bound in ("requests", "prompt_bytes", "work"):
            self._refused.labels(bound=bound)
        bounds = bounds_of(registry)
        bounds.add("requests_in_flight", lambda: self._requests.used, limits.requests)
        bounds.add("prompt_bytes_in_flight", lambda: self._input_bytes.used, limits.input_bytes)
        bounds.add("waiting_bodies", lambda: self.rooms.waiting, MAX_WAITING)
        bounds.add("admitted_work_share", self._highest_work_share, float(limits.work > 0))

    def admit(
        self,
        views: Sequence[ComponentView],
        tenant: str,
        weight: float,
        prompt_tokens: int,
        max_output_tokens: int,
        room: BodyRoom | None = None,
    ) -> AdmittedRequest:
        """Admits a request, which then counts until it is ended. Its prompt uses the room of its body first.

        Args:
            views: The components of its model, at least one.
            tenant: Its tenant, empty for none.
            weight: Share of the tenant when there is not enough room for all.
            prompt_tokens: Tokens of its prompt.
            max_output_tokens: Maximum number of output tokens; 0 if unknown.
            room: Room of its body; None if it has none.

        Raises:
            Overloaded: there is no room for it; nothing is counted then.
        """
        size = prompt_tokens * TOKEN_BYTES
        if room is not None:
            size = room.claim(size)
        if not self._requests.try_add(tenant, weight, 1):
            raise self._refusal("requests", "this Frontend runs as many requests as it may")
        if size and not self._input_bytes.try_add(tenant, weight, size):
            self._requests.remove(tenant, 1)
            raise self._refusal("prompt_bytes", "this Frontend has no room for further prompts")
        admitted = AdmittedRequest(self, tenant, size, prompt_tokens, max_output_tokens)
        if self._limits.work and not self._try_work(admitted, views, weight):
            self.end(tenant, size)
            raise self._refusal("work", "the workers of the model have more work than they can finish in time")
        return admitted

    def _try_work(self, admitted: AdmittedRequest, views: Sequence[ComponentView], weight: float) -> bool:
        """Adds the work of a request and its slot. Returns False, and adds nothing, if there is no room for both."""
        model = self._models[views[0].model]
        tenant, mean_output = admitted.tenant, model.mean_output
        work = admitted.prompt_tokens + min(admitted.max_output_tokens or mean_output, mean_output)
        model.work.most = self._limits.work * _cache_tokens(views)
        model.slots.most = self._limits.work * _slots(views)
        if not model.slots.try_add(tenant, weight, 1):
            return False
        if model.work.try_add(tenant, weight, work):
            admitted.model, admitted.work = model, work
            return True
        model.slots.remove(tenant, 1)
        return False

    def end(self, tenant: str, size: int) -> None:
        """Ends a request of a tenant whose prompt takes so many bytes beside the room of its body."""
        self._requests.remove(tenant, 1)
        if size:
            self.rooms.remove_prompt(tenant, size)

    def _highest_work_share(self) -> float:
        """Returns the part of its fuller bound the model with most work has in use, 0 to about 1."""
        bounds = [bound for model in self._models.values() for bound in (model.work, model.slots)]
        return max((bound.used / bound.most for bound in bounds if bound.most), default=0.0)

    def _refusal(self, bound: str, message: str) -> Overloaded:
        self._refused.labels(bound=bound).inc()
        return Overloaded(message, _RETRY_MS)


def _cache_tokens(views: Sequence[ComponentView]) -> int:
    """Returns the size of the KV cache of all workers, tokens; 0 if the size of one of them is not known."""
    caches = [
        rank.total_blocks * view.block_size
        for view in views
        for worker in view.workers.values()
        for rank in worker.ranks
    ]
    return sum(caches) if all(caches) else 0


def _slots(views: Sequence[ComponentView]) -> int:
    """Returns the requests the ranks run at once, without prefill workers; 0 if the number is not known of one."""
    slots = [
        worker.max_sequences
        for view in views
        if serves(view.role)
        for worker in view.workers.values()
        for _ in worker.ranks
    ]
    return sum(slots) if all(slots) else 0


class RequestAdmission:
    """Admits the requests of one process."""

    def __init__(self, access: Access | None, bounds: OverloadBounds) -> None:
        """``access`` has the limits of callers, None for none, and ``bounds`` those of this Frontend."""
        self._access = access
        self._bounds = bounds

    def room(self) -> BodyRoom:
        """Returns room for the body of a request of the current caller, of which nothing is taken yet."""
        if self._access is None:
            return BodyRoom(self._bounds.rooms, *_NOBODY, None)
        return BodyRoom(self._bounds.rooms, *_share_holder(), current_grant())

    def admit(
        self,
        views: Sequence[ComponentView],
        prompt_tokens: int,
        max_output_tokens: int,
        call: str,
        *,
        sequences: int = 1,
    ) -> AdmittedRequest:
        """Admits a request of the current caller. It books nothing and asks no other service.

        Args:
            views: The components of its model.
            prompt_tokens: Tokens of its prompt.
            max_output_tokens: Maximum number of output tokens of a sequence; 0 if unknown.
            call: The call, for logs.
            sequences: Number of sequences, each of which counts as a request of its caller.

        Raises:
            Unauthenticated: access is limited and there is no caller.
            RateLimited: a limit of the caller's key or tenant is reached.
            Overloaded: there is no room for it.
        """
        max_output_tokens *= sequences
        room = current_room.get()
        tenant, weight = _share_holder() if room is None else (room.holder, room.weight)
        if self._access is None:
            return self._bounds.admit(views, tenant, weight, prompt_tokens, max_output_tokens, room)
        tokens = prompt_tokens + max_output_tokens
        grant = self._access.count(tokens, call)
        try:
            for _ in range(1, sequences):
                self._access.count(0, call)
            admitted = self._bounds.admit(views, tenant, weight, prompt_tokens, max_output_tokens, room)
        except BaseException:
            grant.end_sequence(tokens)
            raise
        admitted.grant = grant
        return admitted


# A tenant that a client claims would give a share to whoever claims many.
_NOBODY = "", 1.0


def _share_holder() -> tuple[str, float]:
    """Returns who has a share of the bounds, and its weight."""
    caller = current_caller()
    return _NOBODY if caller is None else (caller.share_holder, caller.weight)
