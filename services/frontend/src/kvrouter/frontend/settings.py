"""Options of ``kvrouter-frontend``."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from kvrouter.engines.fields import INTERNAL
from kvrouter.engines.keys import EngineKeys
from kvrouter.engines.routes import PASSED_ROUTES, PassedRoute
from kvrouter.frontend.schedulers.scheduler_link import HEARTBEAT_TIMEOUT_SECONDS
from kvrouter.frontend.text.call_reader import ToolFormatName
from kvrouter.frontend.text.model_files import DescribedFile, Files
from kvrouter.frontend.text.output_text import ReasoningFormatName
from kvrouter.net.model_files import NAMES
from kvrouter.runtime.config.fields import EngineKeysFile, can_be_written
from kvrouter.runtime.config.settings import Address, RoutingSettings
from kvrouter.runtime.config.static_workers import StaticEndpoints
from pydantic import AfterValidator, AliasChoices, Field, StringConstraints, model_validator


def _checked_file(text: str) -> str:
    if text and not can_be_written(Path(text)):
        raise ValueError("expected a file that can be written: check that its folder exists and is writable")
    return text


def _not_internal(name: str) -> str:
    if name in INTERNAL:
        raise ValueError(f"{name} is internal to engines: no option permits it to clients")
    return name


EngineField = Annotated[str, AfterValidator(_not_internal)]

JwtAlgorithm = Literal[
    "HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]


def _checked_model_file(name: str) -> str:
    model, _, file = name.rpartition("/")
    if not model or file not in NAMES:
        raise ValueError(f"expected MODEL/FILE with FILE one of {', '.join(NAMES)}, received {name!r}")
    return name


Origin = Annotated[str, StringConstraints(pattern=r"^(\*|https?://[^/\s,]+)$")]

SESSION_HEADERS = ("x-session-id", "x-session-affinity", "session-id", "thread-id", "x-claude-code-session-id")
"""Headers in which agents and gateways name sessions."""

HeaderName = Annotated[str, StringConstraints(pattern="^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")]

Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class FrontendSettings(RoutingSettings):
    """Options of ``kvrouter-frontend``; each is a flag, an environment variable and a key of the configuration file."""

    host: str = Field(default="127.0.0.1", validation_alias=AliasChoices("host", "http-host"))
    """Host that the HTTP API listens on."""
    port: int = Field(default=8000, ge=0, le=65535, validation_alias=AliasChoices("port", "http-port"))
    """Port of the HTTP API; 0 chooses a free one."""
    processes: int = Field(default=1, ge=1, le=256)
    """Processes that share the HTTP and gRPC ports; each has its own connections and sessions."""
    process_silence_seconds: float = Field(default=10.0, ge=2, le=3600)
    """Silence after which one of several processes is killed and replaced, in seconds."""
    http_max_connections: int = Field(default=0, ge=0)
    """Most HTTP connections of each process; 0 is half of the file descriptors, at most 16,384."""
    http_body_seconds: float = Field(default=30.0, gt=0)
    """Longest pause within the body of an HTTP request, in seconds."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins whose web pages may call the HTTP API, such as https://chat.example.org, separated by commas; * for
    all, empty for none."""
    session_headers: tuple[HeaderName, ...] = SESSION_HEADERS
    """Headers with the id of a request's session, separated by commas, those that count first; empty for none."""
    engine_routes: tuple[PassedRoute, ...] = PASSED_ROUTES
    """Further inference routes that are passed on to engines with an OpenAI API, separated by commas; empty for
    none."""
    forward_token_ids: bool = False
    """Whether a completion of one text is forwarded to vLLM and SGLang with its token ids, so they do not tokenize it
    again. The Frontend's tokenizer must be the engine's."""
    models_file: str = ""
    """TOML file with a table `models`: names that stand for models, their fallbacks and canaries. It is followed, and
    may be the configuration file; empty for none."""
    max_output_tokens: int = Field(default=1 << 20, ge=1)
    """Most output tokens that a request may ask for."""
    sharding: bool | None = None
    """Whether to shard requests over several Schedulers; none shards while the Scheduler is overloaded."""
    scheduler_heartbeat_timeout_seconds: float = Field(default=HEARTBEAT_TIMEOUT_SECONDS, gt=0, allow_inf_nan=False)
    """Longest silence of a Scheduler before its requests go to another one, in seconds."""
    max_attempts: int = Field(default=3, ge=1, le=16)
    """Most workers that a request without output is tried on."""
    migration_limit: int = Field(default=2, ge=0, le=16)
    """Most times that a request continues on another worker after it failed with output, of which a death of the
    worker can be one; 0 ends it with its worker."""
    pool_restart_seconds: float = Field(default=15.0, ge=0, le=3600)
    """Longest time for which a request waits, within its deadline, while all workers of its pool are restarting, in
    seconds; 0 refuses it at once."""
    poison_prompt_seconds: float = Field(default=60.0, ge=0, le=86_400)
    """Time for which a tenant's prompt is refused after two workers died while they ran it, in seconds; 0 refuses
    none."""
    request_timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest duration of a request whose client sets no deadline, in seconds."""
    worker_probe_seconds: float = Field(default=1.0, gt=0, le=3600)
    """Interval between liveness probes of a worker, in seconds."""
    worker_probe_failures: int = Field(default=5, ge=1, le=1000)
    """Consecutive unanswered probes after which a worker is suspected."""
    worker_stall_seconds: float = Field(default=5.0, ge=0, le=3600)
    """Least time without progress after which a worker may be stalled, in seconds; 0 detects no stalls."""
    worker_back_off_failures: int = Field(default=3, ge=1, le=1000)
    """Consecutive failed requests after which a worker is backed off."""
    worker_back_off_seconds: float = Field(default=1.0, gt=0, le=3600)
    """First back-off of a failing worker, in seconds; each further one doubles."""
    worker_back_off_max_seconds: float = Field(default=60.0, gt=0, le=86_400)
    """Longest back-off of a failing worker, in seconds."""
    endpoint_picker_bind: str = ""
    """Address of the endpoint picker for gateways such as Envoy, host:port; empty for none."""
    tokenizers: dict[str, str] = Field(default_factory=dict)
    """Directories with tokenizer files by model, instead of the files that its workers serve."""
    pinned_model_files: dict[Annotated[str, AfterValidator(_checked_model_file)], Sha256] = Field(default_factory=dict)
    """SHA-256 of tokenizer files by MODEL/FILE. Of a model that has some, only these files are used, from any
    worker; of other models, the files that most workers agree on."""
    tool_call_parsers: dict[str, ToolFormatName] = Field(default_factory=dict)
    """Formats of tool calls by model: hermes, llama3_json, mistral or none; by default the template's."""
    reasoning_parsers: dict[str, ReasoningFormatName] = Field(default_factory=dict)
    """Formats of reasoning by model: deepseek_r1, qwen3, mistral or none; by default what is published."""
    tokenizer_cache_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Memory of the cache of tokenized prefixes of each model, in bytes; isolated tenants and cache salts have as
    much again."""
    web_page: bool = True
    """Whether the HTTP API has a web page at /ui/ that shows the whole system, read-only."""
    record: Annotated[str, AfterValidator(_checked_file)] = ""
    """File to record requests in, as lengths and block ids; empty records nothing."""
    record_max_bytes: int = Field(default=1 << 30, ge=1 << 12)
    """File size at which recording stops, in bytes; it continues when the file is moved."""
    max_requests_in_flight: int = Field(default=16_384, ge=0)
    """Most running requests of each process; 0 for no limit."""
    max_prompt_bytes_in_flight: int = Field(default=1 << 30, ge=0)
    """Most bytes of the bodies and prompts of requests in each process; 0 for no limit."""
    max_work: float = Field(default=0.0, ge=0)
    """Most work of a model's running requests in each process, in multiples of the KV cache, and of the requests at
    once, of its workers; 0 for no limit."""
    max_bookings_per_caller: int = Field(default=16_384, ge=1)
    """Most bookings that a caller may have made with SelectWorker and not freed, in each process."""
    max_sessions_per_caller: int = Field(default=128, ge=1)
    """Most sessions that a caller with a key may keep open, in each process."""
    max_lease_seconds: float = Field(default=3600.0, ge=1, le=86_400)
    """Longest lease of a booking that a client makes with SelectWorker, in seconds."""
    api_keys: str = ""
    """File of API keys, made with `kvrouter keys`; calls then need a key. Empty for no API keys."""
    cache_salt_key_file: str = ""
    """File with the secret that keys the salts of caches, made with `kvrouter keys create-salt-key`; the same for
    all Frontends. Needed where a tenant is isolated."""
    engine_keys_file: EngineKeysFile = ""
    permitted_engine_fields: tuple[EngineField, ...] = ()
    """Further fields that clients with a key may send to engines, separated by commas; none internal."""
    jwt_keys: str = ""
    """JSON Web Key Set, a file or an https URL, whose tokens are accepted; empty to accept no tokens."""
    jwt_issuer: str = ""
    """Issuer (iss) of accepted tokens; needed with --jwt-keys."""
    jwt_audience: str = ""
    """Audience (aud) of accepted tokens; needed with --jwt-keys."""
    jwt_algorithms: tuple[JwtAlgorithm, ...] = ("RS256", "ES256", "EdDSA")
    """Algorithms of accepted tokens, separated by commas."""
    jwt_leeway_seconds: float = Field(default=10.0, ge=0, le=3600)
    """Difference of clocks allowed for in a token's times, in seconds."""
    jwt_tenant_claim: str = "tenant"
    """Claim of a token that has the caller's tenant."""
    jwt_models_claim: str = "models"
    """Claim of a token that has the caller's models."""
    jwt_role_claim: str = "role"
    """Claim of a token that has the caller's role."""
    static_schedulers: tuple[Address, ...] = ()
    """gRPC addresses of the Schedulers of a system without etcd, host:port, separated by commas."""

    @model_validator(mode="after")
    def _one_endpoint_picker(self) -> Self:
        if self.endpoint_picker_bind and self.processes > 1:
            raise ValueError("endpoint_picker_bind needs a Frontend of one process: set processes to 1")
        return self

    @model_validator(mode="after")
    def _whole_token_rules(self) -> Self:
        if self.jwt_keys and not (self.jwt_issuer and self.jwt_audience and self.jwt_algorithms):
            raise ValueError("--jwt-keys also needs --jwt-issuer, --jwt-audience and --jwt-algorithms")
        return self

    def pinned_files(self) -> dict[str, Files]:
        """Returns the files the operator demands by model."""
        found: dict[str, Files] = {}
        for name, sha256 in sorted(self.pinned_model_files.items()):
            model, _, file = name.rpartition("/")
            found[model] = (*found.get(model, ()), DescribedFile(file, sha256))
        return found

    def static_endpoints(self) -> StaticEndpoints | None:
        """Returns the listed workers, Indexers and Schedulers; None if workers are discovered in etcd."""
        listed = super().static_endpoints()
        return listed and replace(listed, schedulers=self.static_schedulers)

    @cached_property
    def engine_keys(self) -> EngineKeys:
        """The keys of engines."""
        return EngineKeys(self.engine_keys_file)

    def lacks_scheduler(self) -> bool:
        """Returns whether workers are listed but no Scheduler is, so no request could be routed."""
        return bool(self.static_workers) and not self.static_schedulers
