"""The static list of workers, for services without etcd, parsed and validated at start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvrouter.engines.fields import EngineName
from kvrouter.runtime.config.fields import AddressOrUrl, Name, RoleOption, is_url, read_toml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_E = TypeVar("_E", bound=_Entry)


class StaticWorker(_Entry):
    """A listed worker. Properties not given are fetched from the worker."""

    endpoint: AddressOrUrl
    """Address of its WorkerService, host:port; or URL of a server with only an OpenAI API."""
    worker_id: int | None = Field(default=None, ge=0, lt=1 << 64)
    """Worker id; by default the one the worker reports, otherwise its position in the list, from 1."""
    ranks: int | None = Field(default=None, ge=1, le=1024)
    """Number of data-parallel ranks; by default those the worker reports, otherwise 1."""
    total_blocks: int | None = Field(default=None, ge=1, lt=1 << 63)
    """KV blocks of each rank, used if ``ranks`` is given; None if unknown."""
    max_batched_tokens: int | None = Field(default=None, ge=1, lt=1 << 32)
    """Maximum number of prompt tokens computed in one step; None if unknown."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels for routing constraints."""
    lora_names: tuple[str, ...] = ()
    """Names of the LoRA adapters the worker serves."""
    engine: EngineName | None = None
    """Engine of a server with only an OpenAI API; None if unknown. Isolated tenants use known engines only."""


class StaticComponent(_Entry):
    """A pool of interchangeable workers."""

    name: Name = "workers"
    """Name of the component in the namespace."""
    model: str = Field(min_length=1)
    """Name of the model that clients send in their requests."""
    block_size: int = Field(default=16, ge=1, le=1 << 20)
    """Tokens per KV block."""
    max_model_len: int = Field(default=0, ge=0, lt=1 << 32)
    """Maximum number of prompt and output tokens together; 0 for no limit."""
    role: RoleOption = "both"
    """Role of the workers."""
    workers: tuple[StaticWorker, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _differ(self) -> StaticComponent:
        _check_unique("endpoint", [worker.endpoint for worker in self.workers])
        if len({is_url(worker.endpoint) for worker in self.workers}) > 1:
            raise ValueError("expected addresses or URLs, received both in one component")
        _check_unique("worker_id", [each.worker_id for each in self.workers if each.worker_id is not None])
        return self


class _File(_Entry):
    components: tuple[StaticComponent, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _differ(self) -> _File:
        _check_unique("component", [component.name for component in self.components])
        return self


@dataclass(frozen=True, slots=True)
class StaticEndpoints:
    """All listed workers and Schedulers."""

    components: Sequence[StaticComponent]
    schedulers: Sequence[str] = ()
    """Addresses of Schedulers, host:port; none if the Scheduler runs in the same process."""
    probe_seconds: float = 1.0
    """Interval between liveness probes, seconds."""


def read_static_file(path: Path) -> tuple[StaticComponent, ...]:
    """Parses a TOML list of workers.

    Raises:
        ValueError: the file is unreadable or invalid; the message is one line.
    """
    return _checked(_File, read_toml(path), str(path)).components


def static_component(addresses: Sequence[str], *, name: str, model: str, block_size: int) -> StaticComponent:
    """Returns a component of workers given by address only.

    Raises:
        ValueError: an address is invalid or occurs twice; the message is one line.
    """
    workers = [{"endpoint": address} for address in addresses]
    listed = {"name": name, "model": model, "block_size": block_size, "workers": workers}
    return _checked(StaticComponent, listed, "")


def _checked(kind: type[_E], values: dict[str, Any], source: str) -> _E:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        words = problem["msg"].removeprefix("Value error, ")
        raise ValueError(": ".join(part for part in (source, place, words[:1].lower() + words[1:]) if part)) from None


def _check_unique(what: str, values: Sequence[object]) -> None:
    twice = sorted({str(value) for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"expected each {what} once, received {twice[0]} twice")
