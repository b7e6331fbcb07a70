"""The cost model of mode ``forecast``."""

from __future__ import annotations

from typing import Any, Protocol


class ForecastModel(Protocol):
    """The cost terms of routing mode ``forecast``, whose policy has the formula and passes the parameters.

    Constructor, by name: ``prefill`` and ``decode``, three coefficients each, the highest power first;
    ``default_budget``, ``base``, ``crowd``, ``shortage_ms``, ``room``, ``max_recomputations``, ``output_tokens``,
    ``fit_tokens``. Only the native core has it: without that the policy computes the terms itself.
    """

    def terms(
        self,
        request: tuple[int, int, float, float],
        head_since: Any,
        relative_latency: Any,
        reuse_chance: Any,
        columns: tuple[Any, ...],
    ) -> bytes:
        """Returns rows of float64, each with an entry for each candidate.

        Args:
            request: (prompt tokens, block size, latency calibration, seconds of the clock).
            head_since: A buffer of float64, the seconds at which each candidate began to compute a prompt.
            relative_latency: A buffer of float64, the relative latency of each candidate.
            reuse_chance: A buffer of float64, the mean chance that a block in each candidate's KV cache is used again.
            columns: Ten buffers of int64, columns of a scheduling context: overlap blocks, leading active blocks,
                active blocks, queued blocks, active requests, total blocks, tokens per step, prefill tokens, prefill
                requests, and tokens of the prompt being computed.

        Returns:
            Eleven rows: time to first token, batch, work, output, shortage, eviction, copies and own work, each in
            ms; the factor for the rank's speed in the first; tokens to compute; and 1 where the first token may be used
            for latency calibration, else 0.

        Raises:
            ValueError: there is no prompt, or the columns differ in length.
        """
