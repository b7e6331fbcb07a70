"""The settings that are tried. Pure.

First policies for an undivided fleet, and ratios of prefill to decode workers; then busy thresholds for the best one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.request.options import RoutingOptions, Thresholds
from kvrouter.simulator.simulation import Setting

WEIGHTS = (0.5, 1.0, 2.0, 4.0, 16.0)
"""Weights of mode kv."""
PREFILL_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2)
"""Shares of the workers that compute prompts."""
MIN_TOKENS = (512, 2048)
"""Least uncached tokens of a prompt that a prefill worker computes."""
BLOCK_SHARES = (0.8, 0.9, 0.95)
"""Busy thresholds: shares of a rank's blocks in use."""
PREFILL_STEPS = (1, 2, 4, 8)
"""Busy thresholds: prompt tokens that wait at a rank, in steps of as many tokens as it computes at once."""
_MODES = ("forecast", "sticky", "product", "power-of-two", "round-robin")
_MODES_OF_POOLS = ("forecast", "kv")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings of a fleet."""

    options: RoutingOptions
    prefill: int = 0
    """Prefill workers; the others decode. 0 for an undivided fleet."""

    @property
    def name(self) -> str:
        """What distinguishes it, for people."""
        mode = self.options.mode
        if "overlap_score_weight" in POLICIES[mode].options:
            mode = f"{mode}:{self.options.overlap_score_weight:g}"
        parts, thresholds = [mode], self.options.thresholds
        if self.prefill:
            parts.append(f"{self.prefill} prefill from {self.options.remote_prefill.min_tokens} tokens")
        if thresholds.decode_blocks is not None:
            parts.append(f"busy above {thresholds.decode_blocks:.0%} blocks")
        if thresholds.prefill_tokens is not None:
            parts.append(f"busy above {thresholds.prefill_tokens:,} tokens")
        return ", ".join(parts)

    def setting(self, engines: Sequence[EngineConfig], seed: int) -> Setting:
        """Returns a run of a fleet with these settings."""
        decode = len(engines) - self.prefill
        return Setting(
            engines[:decode], options=self.options, prefill_engines=engines[decode:], seed=seed, regret=False
        )


def candidates(present: Candidate, workers: int, *, splits: bool) -> list[Candidate]:
    """Returns the settings to try, each once, the present ones first.

    Args:
        present: The settings in force.
        workers: Workers of the fleet, whatever their role.
        splits: Whether the workers may be divided into prefill and decode workers.
    """
    return list(dict.fromkeys([present, *_undivided(present), *(_divided(present, workers) if splits else ())]))


def with_thresholds(best: Candidate, batched_tokens: int) -> list[Candidate]:
    """Returns settings with other busy thresholds, each once: none, and one of either kind.

    Args:
        best: The settings to vary.
        batched_tokens: Prompt tokens that a worker computes in one step.
    """
    tried = [
        Thresholds(),
        *(Thresholds(decode_blocks=share) for share in BLOCK_SHARES),
        *(Thresholds(prefill_tokens=steps * batched_tokens) for steps in PREFILL_STEPS),
    ]
    return [replace_thresholds(best, each) for each in tried if each != best.options.thresholds]


def replace_thresholds(candidate: Candidate, thresholds: Thresholds) -> Candidate:
    """Returns the settings with other busy thresholds."""
    return replace(candidate, options=replace(candidate.options, thresholds=thresholds))


def _undivided(present: Candidate) -> Iterator[Candidate]:
    for mode in _MODES:
        yield Candidate(replace(present.options, mode=mode))
    for weight in WEIGHTS:
        yield Candidate(replace(present.options, mode="kv", overlap_score_weight=weight))


def _divided(present: Candidate, workers: int) -> Iterator[Candidate]:
    for prefill in dict.fromkeys(max(1, round(share * workers)) for share in PREFILL_SHARES):
        for tokens in MIN_TOKENS:
            remote = replace(present.options.remote_prefill, min_tokens=tokens)
            for mode in _MODES_OF_POOLS:
                if prefill < workers:
                    yield Candidate(replace(present.options, mode=mode, remote_prefill=remote), prefill)
