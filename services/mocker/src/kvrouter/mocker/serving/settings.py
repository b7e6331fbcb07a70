"""Options of the mocker as an HTTP server of an engine."""

from __future__ import annotations

from functools import cached_property

from kvrouter.mocker.serving.kv_events import KvEventsConfig
from kvrouter.runtime.config.settings import ServiceSettings
from pydantic import Field, SecretStr, model_validator


class EngineServerSettings(ServiceSettings):
    """Options that say which server the mocker is, and how that behaves."""

    openai: bool = False
    """Behave like a vLLM server, on --bind, instead of a worker; without etcd and NATS."""
    sglang: bool = False
    """Behave like an SGLang server, on --bind, instead of a worker; without etcd and NATS."""
    kv_events_config: str = ""
    """Sockets of the KV events of a vLLM or SGLang server, as JSON with that engine's keys; none publishes nothing."""
    lora_modules: dict[str, str] = Field(default_factory=dict)
    """LoRA adapters that a vLLM or SGLang server has, and their paths."""
    model_path: str = ""
    """Path that a vLLM or SGLang server names for the model; empty for its name."""
    enable_prompt_tokens_details: bool = False
    """Whether a vLLM or SGLang server reports cached tokens in the usage of the OpenAI API."""
    priority_scheduling: bool = False
    """Whether a vLLM server accepts priorities; they do not change the order of the simulation."""
    incremental_streaming_output: bool = False
    """Whether chunks of an SGLang server have the new tokens only, instead of all."""
    load_publish_endpoint: str = ""
    """Endpoint on which rank 0 of an SGLang server publishes its load, auto for the ports after those of the KV
    events; none publishes none."""
    disaggregation_bootstrap_port: int = Field(default=8998, ge=0, le=65_535)
    """Port on which an SGLang server with the role prefill meets decode servers; 0 takes a free one."""
    api_key: SecretStr = SecretStr("")
    """Key that a vLLM or SGLang server demands, at the paths at which it does."""
    loading_seconds: float = Field(default=0.0, ge=0)
    """Time in which a vLLM or SGLang server answers 503 after its start, in seconds."""

    @model_validator(mode="after")
    def _is_one_engine(self) -> EngineServerSettings:
        if self.openai and self.sglang:
            raise ValueError("--openai and --sglang are different servers: start one process for each")
        return self

    @model_validator(mode="after")
    def _reads_kv_events_config(self) -> EngineServerSettings:
        _ = self.kv_events
        return self

    @cached_property
    def kv_events(self) -> KvEventsConfig | None:
        """Sockets of the KV events; None for none.

        Raises:
            ValueError: the option is not JSON, or has unknown keys.
        """
        if not self.kv_events_config:
            return None
        config = KvEventsConfig.model_validate_json(self.kv_events_config)
        return config if config.publishes else None
