"""Requests in the words of OpenTelemetry's GenAI semantic conventions: metrics in their Prometheus form, and spans.

The conventions are in development, so their package has these names among those that may change, and the Frontend does
not need that package.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from kvrouter.core import Observations
from kvrouter.engines.fields import CHATS, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from kvrouter.frontend.request.current_choice import named_model
from kvrouter.runtime.telemetry.histogram import LoopHistogram
from kvrouter.runtime.telemetry.metrics import model_label
from kvrouter.runtime.tracing import Attribute
from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from kvrouter.frontend.request.generation import Generation

CHAT: Final = "chat"
TEXT_COMPLETION: Final = "text_completion"
_OPERATIONS = {CHATS: CHAT, MESSAGES: CHAT, RESPONSES: CHAT, COMPLETIONS: TEXT_COMPLETION, EMBEDDINGS: "embeddings"}
_PROVIDER = "kvrouter"

# The bounds that the conventions recommend.
_REQUEST_BUCKETS = tuple(0.01 * 2**power for power in range(14))
_FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_USAGE_BUCKETS = tuple(4**power for power in range(14))

_LABELS = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"]


def operation_of(path: str) -> str:
    """Returns the operation of a route of an engine: the convention's name, or the last part of another path."""
    return _OPERATIONS.get(path) or path.rpartition("/")[2]


def span_attributes(model: str, operation: str, max_tokens: int, prompt_tokens: int) -> dict[str, Attribute]:
    """Returns the attributes of a request.

    Args:
        model: The model that serves it. The client may have sent another name.
        operation: Its operation.
        max_tokens: Maximum number of output tokens; 0 if unknown.
        prompt_tokens: Number of prompt tokens.
    """
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": named_model() or model,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": prompt_tokens,
        **({"gen_ai.request.max_tokens": max_tokens} if max_tokens else {}),
    }


class RequestMetrics:
    """The histograms of the requests with one operation and model."""

    def __init__(self, metrics: GenAiMetrics, *labels: str) -> None:
        self._request = metrics.request
        self._labels = labels
        self._ended: dict[str, Observations] = {}
        self._first_token = metrics.first_token.of(*labels)
        self._token = metrics.token.of(*labels)
        self._input = metrics.usage.of(*labels, "input")
        self._output = metrics.usage.of(*labels, "output")

    def ended(self, error: str, seconds: float, input_tokens: int | None, generation: Generation | None) -> None:
        """Counts a request that has ended.

        Args:
            error: Its gRPC code, empty for a success.
            seconds: Its time.
            input_tokens: Number of its prompt tokens; None if that is not known.
            generation: The request; None if it was refused.
        """
        series = self._ended.get(error)
        if series is None:
            series = self._ended[error] = self._request.of(*self._labels, error)
        series.observe(seconds)
        if generation is None or not (output_tokens := generation.output_tokens):
            return
        if input_tokens is not None:
            self._input.observe(input_tokens)
        self._output.observe(output_tokens)
        if error:
            return
        self._first_token.observe((generation.first_output_ns - generation.arrived_ns) / 1e9)
        further_ns = generation.last_output_ns - generation.first_output_ns
        if further_ns and output_tokens > 1:
            self._token.observe(further_ns / 1e9 / (output_tokens - 1))


class GenAiMetrics:
    """The histograms of the conventions, of at most ``MAX_MODELS`` models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(LoopHistogram, registry=registry)
        self.request = histogram(
            "gen_ai_server_request_duration_seconds",
            "Time from the arrival of a request to its end; error_type is a gRPC code, empty for a success.",
            [*_LABELS, "error_type"],
            buckets=_REQUEST_BUCKETS,
        )
        self.first_token = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time from the arrival of a request to its first token, of requests that succeeded.",
            _LABELS,
            buckets=_FIRST_TOKEN_BUCKETS,
        )
        self.token = histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time for each token after the first, of requests that succeeded with several pieces of output.",
            _LABELS,
            buckets=_TOKEN_BUCKETS,
        )
        self.usage = histogram(
            "gen_ai_client_token_usage",
            "Tokens of requests with output, by gen_ai_token_type: input or output.",
            [*_LABELS, "gen_ai_token_type"],
            buckets=_USAGE_BUCKETS,
        )
        self._models: set[str] = set()
        self._of: dict[tuple[str, str], RequestMetrics] = {}

    def of(self, operation: str, model: str) -> RequestMetrics:
        """Returns the metrics of requests with an operation and a served model."""
        found = self._of.get((operation, model))
        if found is None:
            label = model_label(model, self._models)
            self._models.add(label)
            found = self._of.get((operation, label)) or RequestMetrics(self, operation, _PROVIDER, label)
            self._of[operation, label] = found
        return found
