"""A request within the Frontend, whichever of its APIs it came by.

Its structs have the fields of the contract's messages, which take many times as long to make and read.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from kvrouter.v1.common_pb2 import BlockScope, MultimodalHash, RoutingConstraints, RoutingOverrides
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.worker_pb2 import SamplingOptions, StopConditions, StructuredOutput
from msgspec.structs import replace


class StopRules(msgspec.Struct, frozen=True):
    """When an output ends: the fields of ``StopConditions``."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    """Stop strings, which the Frontend finds in the output as text."""

    @classmethod
    def of(cls, message: StopConditions) -> StopRules:
        """Returns the rules of a message."""
        rules = message.max_tokens, message.min_tokens, message.ignore_eos
        return cls(*rules, stop_token_ids=message.stop_token_ids[:], stop=message.stop[:])

    def after(self, output_tokens: int) -> StopRules:
        """Returns the rules for the rest of an output, of which so many tokens are there."""
        max_tokens, min_tokens = max(0, self.max_tokens - output_tokens), max(0, self.min_tokens - output_tokens)
        return replace(self, max_tokens=max_tokens, min_tokens=min_tokens)

    def write(self, message: StopConditions) -> None:
        """Writes the rules into an empty message, except stop strings."""
        message.max_tokens = self.max_tokens
        if self.min_tokens:
            message.min_tokens = self.min_tokens
        if self.ignore_eos:
            message.ignore_eos = True
        if self.stop_token_ids:
            message.stop_token_ids.extend(self.stop_token_ids)


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled: the fields of ``SamplingOptions``. None stands for the engine's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    logprobs: int | None = None
    engine_options_json: str | None = None
    structured_output: StructuredOutput | None = None

    @classmethod
    def of(cls, message: SamplingOptions) -> Sampling:
        """Returns the options of a message, whose submessages are shared."""
        return cls(**{field.name: value for field, value in message.ListFields()})

    def write(self, message: SamplingOptions) -> None:
        """Writes the options into an empty message. A loop over the fields takes three times as long."""
        if self.temperature is not None:
            message.temperature = self.temperature
        if self.top_p is not None:
            message.top_p = self.top_p
        if self.top_k is not None:
            message.top_k = self.top_k
        if self.min_p is not None:
            message.min_p = self.min_p
        if self.frequency_penalty is not None:
            message.frequency_penalty = self.frequency_penalty
        if self.presence_penalty is not None:
            message.presence_penalty = self.presence_penalty
        if self.repetition_penalty is not None:
            message.repetition_penalty = self.repetition_penalty
        if self.seed is not None:
            message.seed = self.seed
        if self.n is not None:
            message.n = self.n
        if self.logprobs is not None:
            message.logprobs = self.logprobs
        if self.engine_options_json is not None:
            message.engine_options_json = self.engine_options_json
        if self.structured_output is not None:
            message.structured_output.CopyFrom(self.structured_output)


DEFAULT_SAMPLING = Sampling()


class GenerateRequest(msgspec.Struct, kw_only=True):
    """A request without its prompt: the fields of ``FrontendServiceGenerateRequest``."""

    model: str
    stop: StopRules
    request_id: str = ""
    priority: int = 0
    conversation_id: str = ""
    sampling: Sampling = DEFAULT_SAMPLING
    overrides: RoutingOverrides | None = None
    constraints: RoutingConstraints | None = None
    scope: BlockScope | None = None
    multimodal_hashes: Sequence[MultimodalHash] = ()
    migration_limit: int | None = None
    expected_output_tokens: int | None = None

    @classmethod
    def of(cls, message: FrontendServiceGenerateRequest) -> GenerateRequest:
        """Returns the request of a message, whose submessages are shared."""
        return cls(
            model=message.model,
            stop=StopRules.of(message.stop_conditions),
            request_id=message.request_id,
            priority=message.priority,
            conversation_id=message.conversation_id,
            sampling=Sampling.of(message.sampling_options),
            overrides=message.overrides if "overrides" in message else None,
            constraints=message.constraints if "constraints" in message else None,
            scope=message.scope if "scope" in message else None,
            multimodal_hashes=message.multimodal_hashes,
            migration_limit=message.migration_limit if "migration_limit" in message else None,
            expected_output_tokens=message.expected_output_tokens if "expected_output_tokens" in message else None,
        )

    @property
    def tenant(self) -> str:
        """The tenant it claims; empty for none."""
        return "" if self.scope is None else self.scope.tenant

    @property
    def lora_name(self) -> str:
        """Name of its LoRA adapter; empty for a base model."""
        return "" if self.scope is None else self.scope.lora_name

    def use_adapter(self, model: str, lora_name: str) -> None:
        """Sets the base model and the LoRA adapter; an empty name of an adapter stands for the base model itself."""
        self.model, self.scope = model, self.scope or BlockScope()
        self.scope.lora_name = lora_name
