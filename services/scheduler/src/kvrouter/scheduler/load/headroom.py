"""Room kept free by a tenant with its share of the ranks, for the next requests of other tenants.

    kept    = max(0, need - sum of min(n, share))                              [requests]
    need    = min(min(sum of p, ceil(sum of m + DEVIATIONS * sqrt(sum of m * (p - m)))) + SPARE, MOST * places)

Sums are over the other tenants with a request in flight in the last minute:

    n       = requests in flight                                              [requests]
    p       = peak of n in the last RECENT_S, at most the tenant's share
    m       = mean of n over about MEAN_S, at most p
    share   = max(1, places * weight / weights of all those tenants)           [requests]
    places  = requests that fit on all ranks together, those running included  [requests]

A number between 0 and p with mean m has a variance of m * (p - m) at most (Bhatia and Davis, 2000), and variances of
independent tenants add up. So the peak of one tenant is kept for it, but not those of many tenants with rare requests.
SPARE gives its next request a choice: the slot left by its last one is often on a rank where prompts of others have
just begun.

A tenant has its share if it uses as large a part of all slots, or of the KV cache, as its weight is of all weights. One
below it may use the kept room. A tenant with more use than another one piles up few prompts on a rank
(``delays``). A single tenant is not limited.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from kvrouter.scheduler.policies.forecast.policy import step_ms
from kvrouter.scheduler.policies.interface import Amounts, Column, Mask
from kvrouter.scheduler.request.options import Tenant

RECENT_S = 60.0
"""Time for which a tenant counts after its last request, and its peak after it was reached, seconds."""

MEAN_S = 30.0
"""Time constant of the mean number of requests in flight, seconds."""

DEVIATIONS = 2.0
"""Standard deviations above the mean for which there is room: enough in 95% of the time, and mostly more, because the
variance is an upper bound."""

SLOWER = 1.5
"""Factor by which prompts of a limited tenant may delay the first token of a prompt of others."""

SPARE = 1
"""Places kept beyond the likely need of other tenants."""

MOST = 0.5
"""Largest part of all places to keep free."""

PROMPTS = 16.0
"""Requests over which the mean prompt length of a tenant is taken."""

MAX_TENANTS = 256
"""Tenants to remember. Of more, those with the most recent requests count."""


@dataclass(slots=True)
class _Recent:
    """A tenant with a recent request in flight."""

    weight: float
    seen: float
    """When a request of it began or ended last."""
    changed: float
    window_from: float
    requests: int = 0
    prompt_tokens: float = 0.0
    """Mean length of its prompts."""
    mean: float = 0.0
    peaks: tuple[int, int] = 0, 0
    """Peak of the last window of half of RECENT_S, and of the one under way."""

    def follow(self, now: float) -> None:
        """Brings mean and peaks up to date, before the number of requests changes."""
        if now > self.changed:
            self.mean += (self.requests - self.mean) * -math.expm1((self.changed - now) / MEAN_S)
        self.changed = now
        if (passed := now - self.window_from) >= RECENT_S / 2:
            self.peaks = self.peaks[1] if passed < RECENT_S else self.requests, self.requests
            self.window_from = now


class Headroom:
    """The tenants of one component and their requests in flight. Every event is passed in with its time in seconds."""

    def __init__(self) -> None:
        """Starts empty."""
        self._recent: OrderedDict[str, _Recent] = OrderedDict()
        """By name; the last one began a request most recently."""
        self._running: dict[Hashable, tuple[str, int]] = {}
        """Tenant and tokens of each request in flight."""
        self._used: dict[str, int] = {}
        """Tokens of each tenant's requests in flight."""
        self._weights = 0.0
        """Sum over all tenants."""
        self._forgot = -math.inf
        """When it last looked for tenants to forget."""
        self._kept: dict[str, int] = {}
        """Places to keep free by tenant, computed since a request last began or ended."""

    def __len__(self) -> int:
        """Returns the number of remembered tenants."""
        return len(self._recent)

    def used(self, tenant: str) -> int:
        """Returns the tokens of KV cache of a tenant's requests in flight."""
        return self._used.get(tenant, 0)

    def began(self, request: Hashable, tenant: Tenant, tokens: int, prompt_tokens: int, now: float) -> None:
        """Records a dispatch, which counts ``tokens`` of KV cache as in ``Choice.use_tokens``."""
        if request in self._running:
            return
        self._kept.clear()
        name = tenant.name
        self._running[request] = name, tokens
        self._used[name] = self._used.get(name, 0) + tokens
        recent = self._recent.get(name)
        if recent is None:
            recent = self._recent[name] = _Recent(0.0, now, now, now, prompt_tokens=prompt_tokens)
            if len(self._recent) > MAX_TENANTS:
                self._weights -= self._recent.popitem(last=False)[1].weight
        recent.follow(now)
        self._weights += tenant.weight - recent.weight
        recent.weight, recent.seen = tenant.weight, now
        recent.requests += 1
        recent.prompt_tokens += (prompt_tokens - recent.prompt_tokens) / PROMPTS
        if recent.requests > recent.peaks[1]:
            recent.peaks = recent.peaks[0], recent.requests
        self._recent.move_to_end(name)

    def ended(self, request: Hashable, now: float) -> None:
        """Records the end of a request."""
        if (running := self._running.pop(request, None)) is None:
            return
        self._kept.clear()
        tenant, tokens = running
        self._used[tenant] -= tokens
        if not self._used[tenant]:
            del self._used[tenant]
        if (recent := self._recent.get(tenant)) is not None:
            recent.follow(now)
            recent.seen = now
            recent.requests = max(0, recent.requests - 1)  # the tenant may have been forgotten in between

    def uses_more(self, tenant: str, now: float) -> bool:
        """Returns whether any other tenant uses less KV cache than this one, by weight."""
        if len(self._recent) < 2:
            return False
        self._forget(now)
        own = self._recent.get(tenant)
        if own is None:
            return False
        use = self.used(tenant) / own.weight
        return any(self.used(name) < use * each.weight for name, each in self._recent.items())

    def has_share(self, tenant: str, tokens: float, slots: float) -> bool:
        """Returns whether a tenant uses as large a part of the ranks as its weight is of all weights.

        Args:
            tenant: Name of the tenant.
            tokens: KV cache of all ranks in tokens; infinite if it is unknown.
            slots: Slots of all ranks; infinite if they are unknown.
        """
        own = self._recent[tenant]
        share = own.weight / self._weights
        return self.used(tenant) >= tokens * share or own.requests >= slots * share

    def typical_tokens(self, tenant: str) -> float:
        """Returns the mean prompt tokens of the other tenants' requests; 1 if there are none."""
        others = [each for name, each in self._recent.items() if name != tenant]
        likely = sum(each.mean for each in others)
        return max(1.0, sum(each.mean * each.prompt_tokens for each in others) / likely if likely else 1.0)

    def kept(self, tenant: str, places: float, now: float) -> int:
        """Returns the further requests of other tenants for which a tenant leaves room.

        ``places``: requests that fit on all ranks together, those running included.
        """
        kept = self._kept.get(tenant)
        if kept is None:
            kept = self._kept[tenant] = self._to_keep(tenant, places, now)
        return kept

    def _to_keep(self, tenant: str, places: float, now: float) -> int:
        peaks = means = variances = in_flight = 0.0
        for name, each in self._recent.items():
            if name == tenant:
                continue
            each.follow(now)
            share = max(1.0, places * each.weight / self._weights)
            peak = min(max(each.peaks), share)
            mean = min(each.mean, peak)
            peaks, means, variances = peaks + peak, means + mean, variances + mean * (peak - mean)
            in_flight += min(each.requests, share)
        likely = min(math.ceil(peaks), math.ceil(means + DEVIATIONS * math.sqrt(variances)))
        return max(0, math.ceil(min(likely + SPARE, math.floor(MOST * places)) - in_flight))

    def _forget(self, now: float) -> None:
        """Forgets tenants, looking at all of them once a second."""
        if now - self._forgot < 1.0:
            return
        self._forgot = now
        self._kept.clear()
        before = now - RECENT_S
        for name in [name for name, each in self._recent.items() if each.seen < before and not each.requests]:
            del self._recent[name]
        self._weights = sum(each.weight for each in self._recent.values())


def places(free_slots: Amounts, free_blocks: Amounts, blocks: int) -> Amounts:
    """Returns how many requests of so many blocks each rank has room for; infinite where both limits are unknown."""
    counts: Amounts = np.floor(np.maximum(np.minimum(free_slots, free_blocks / blocks), 0.0))
    return counts


def delays(booked: Column, added: Column, typical: float) -> Mask:
    """Returns on which ranks a prompt would delay the next ones of others.

    A rank with prompts to compute takes another one if all of them together with a typical one of others take no
    more than SLOWER times as long as the typical one alone. A rank without a prompt to compute takes any.

    Args:
        booked: Booked prompt tokens of each rank, not yet computed.
        added: Prompt tokens to compute there for the request.
        typical: Prompt tokens of a request of other tenants.
    """
    tokens: Amounts = np.add(booked, added, dtype=np.float64) + typical
    delayed: Mask = (booked > 0) & (step_ms(tokens) > SLOWER * step_ms(np.array([typical])))
    return delayed


def takes_kept_room(before: Amounts, after: Amounts, kept: int) -> Mask:
    """Returns on which ranks a request would leave less room than others need.

    Args:
        before: Places of each rank without the request.
        after: Those left there with it.
        kept: Places to leave free in all.
    """
    taken: Mask = before.sum() - before + after < kept
    return taken
