"""Decides which ranks are busy: those with a load strictly above a threshold.

The load of a rank is the greater of the booked and the reported one. A rank whose number of blocks is unknown is not
judged by blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kvrouter.scheduler.load.reported_load import Reported
from kvrouter.scheduler.policies.interface import Amounts, Column, Mask
from kvrouter.scheduler.request.options import Thresholds
from kvrouter.scheduler.workers.candidates import Candidate
from kvrouter.v1.events_pb2 import LoadReport


@dataclass(frozen=True, slots=True)
class Load:
    """The load that thresholds are compared with, as columns of shape (candidates,)."""

    shares: Amounts
    """Share of the blocks that is active."""
    prefill_tokens: Column

    @classmethod
    def of(cls, active_blocks: Column, prefill_tokens: Column, total_blocks: Column, reported: Reported) -> Load:
        """Returns the greater of booked load, without the request to place, and reported load."""
        booked = np.where(total_blocks > 0, active_blocks / np.maximum(total_blocks, 1), 0.0)
        return cls(np.maximum(booked, reported.shares), np.maximum(prefill_tokens, reported.prefill_tokens))

    def above(self, thresholds: Thresholds) -> Mask:
        """Returns which candidates are busy."""
        busy = np.zeros(len(self.shares), np.bool_)
        if thresholds.decode_blocks is not None:
            busy |= self.shares > thresholds.decode_blocks
        if thresholds.prefill_tokens is not None:
            busy |= self.prefill_tokens > thresholds.prefill_tokens
        return busy

    def why(self, thresholds: Thresholds, place: int) -> str:
        """Returns why the candidate at an index is busy; empty if it is not."""
        return _why(thresholds, float(self.shares[place]), int(self.prefill_tokens[place]))


def why_busy(
    candidate: Candidate,
    thresholds: Thresholds,
    *,
    active_blocks: int,
    prefill_tokens: int,
    report: LoadReport | None,
) -> str:
    """Returns why a rank is busy; empty if it is not.

    Args:
        candidate: The rank.
        thresholds: Thresholds in force.
        active_blocks: Distinct blocks of booked requests, without the request to place.
        prefill_tokens: Prefill tokens booked and not computed.
        report: Newest load report of the rank; None if there is no recent one.
    """
    shares = [active_blocks / candidate.total_blocks] if candidate.total_blocks else []
    if report is not None and report.total_blocks:
        shares.append(report.active_blocks / report.total_blocks)
    tokens = max(prefill_tokens, 0 if report is None else report.prefill_tokens)
    return _why(thresholds, max(shares, default=0.0), tokens)


def _why(thresholds: Thresholds, share: float, tokens: int) -> str:
    if thresholds.decode_blocks is not None and share > thresholds.decode_blocks:
        return f"busy: {share:.3f} of its blocks are active, above {thresholds.decode_blocks:g}"
    if thresholds.prefill_tokens is not None and tokens > thresholds.prefill_tokens:
        return f"busy: {tokens} prefill tokens, above {thresholds.prefill_tokens}"
    return ""
