"""The cost model of mode ``forecast``."""

from __future__ import annotations

from typing import Any, Protocol


class ForecastModel(Protocol):
    """The cost terms of routing mode ``forecast``, whose policy has the formula and passes the parameters.

    Constructor, by name: ``prefill`` and ``decode``, three coefficients each, the highest power first;
    ``default_budget``, ``base``, ``crowd``, ``shortage_ms``, ``room``, ``max_recomputations``, ``output_tokens``,
    ``fit_tokens``. Only the native core has it: without that the policy computes the terms itself.
    """

    def weigh(
        self,
        request: tuple[int, int, float, float],
        loads: bytes,
        free_slots: Any,
        relative_latency: Any,
        reuse_chance: Any,
        columns: tuple[Any, ...],
    ) -> tuple[bytes, int, list[int]]:
        """Returns rows of float64, each with an entry for each candidate, and the cheapest candidates.

        Args:
            request: (prompt tokens, block size, latency calibration, seconds of the clock).
            loads: The load of the candidates, with the request's blocks, packed as in ``LoadColumns``.
            free_slots: A buffer of float64, the free slots of each candidate.
            relative_latency: A buffer of float64, the relative latency of each candidate.
            reuse_chance: A buffer of float64, the mean chance that a block in each candidate's KV cache is used again.
            columns: Four buffers of int64, columns of a scheduling context: overlap blocks, queued blocks, total blocks
                and tokens per step.

        Returns:
            Twelve rows: time to first token, batch, work, output, shortage, eviction, copies and own work, each in
            ms; the factor for the rank's speed in the first; tokens to compute; 1 where the first token may be used
            for latency calibration, else 0; and the cost, the sum of the first seven.

            The number of candidates with a free slot.

            The places of the lowest cost among these, or among all candidates if there are none.

        Raises:
            ValueError: there is no prompt, or the columns differ in length.
        """
