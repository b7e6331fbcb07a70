"""The cost model of mode ``forecast``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

ForecastChoice: TypeAlias = tuple[int, int, int, float, float, bool, bool, int, bool, bytes]
"""The chosen candidate, and the costs of all; see ``ForecastModel.choose``."""


class ForecastModel(Protocol):
    """The cost terms of routing mode ``forecast``, whose policy has the formula and passes the parameters.

    Constructor, by name: ``prefill`` and ``decode``, three coefficients each, the highest power first;
    ``default_budget``, ``base``, ``crowd``, ``shortage_ms``, ``room``, ``max_recomputations``, ``output_tokens``,
    ``fit_tokens``. Only the native core has it: without that the policy computes the terms itself.
    """

    def choose(
        self,
        request: tuple[int, int, float, float],
        loads: bytes,
        columns: tuple[bytes, ...],
        draw: Callable[[list[int]], int],
    ) -> ForecastChoice:
        """Chooses among the candidates of the lowest cost with a free slot, or among all if none has a free slot.

        Args:
            request: (prompt tokens, block size, latency calibration, seconds of the clock).
            loads: The load of the candidates, with the request's blocks, packed as in ``LoadColumns``.
            columns: Further packed columns of a scheduling context. Four of int64: overlap blocks, queued blocks, total
                blocks and tokens per step; and three of float64: the bookings that the candidate may have, its relative
                latency, and the chance that a block in its KV cache is used again.
            draw: Chooses among several places of equal cost.

        Returns:
            The place of the candidate.

            The number of candidates with a free slot.

            Of the chosen candidate: the tokens to compute; the time for these and the time to first token, both in ms
            at the component's speed; whether the first token may be used for latency calibration; whether the rank
            computes no prompt; its leading active blocks; and whether it has fewer KV blocks than would be active.

            The costs of all candidates, packed as float64.

        Raises:
            ValueError: there is no prompt, or the columns differ in length.
        """
