"""Workers that are listed by hand, for routers without etcd: what the list says, read and checked at start."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvrouter.runtime.config.addresses import Address, Name
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_E = TypeVar("_E", bound=_Entry)


class StaticWorker(_Entry):
    """A worker. What is not given is what it says of itself."""

    endpoint: Address
    """Address of its WorkerService, host:port."""
    worker_id: int | None = Field(default=None, ge=0, lt=1 << 64)
    """Identity; for a worker that does not say, its place in the list, from 1."""
    ranks: int | None = Field(default=None, ge=1, le=1024)
    """Data parallel ranks; 1 for a worker that does not say."""
    total_blocks: int = Field(default=0, ge=0)
    """KV blocks of each rank, with ``ranks``; 0 if unknown."""
    max_batched_tokens: int = Field(default=0, ge=0, lt=1 << 32)
    """Most prompt tokens that it computes in one step; 0 if unknown."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels for routing constraints."""
    lora_names: tuple[str, ...] = ()
    """Adapters that it serves."""


class StaticComponent(_Entry):
    """A pool of like workers."""

    name: Name = "workers"
    """Name of the component in the namespace."""
    model: str = Field(min_length=1)
    """Model that its workers serve, as clients ask for it."""
    block_size: int = Field(default=16, ge=1, le=1 << 20)
    """Tokens per block."""
    max_model_len: int = Field(default=0, ge=0, lt=1 << 32)
    """Most tokens in prompt and output together; 0 for no limit."""
    role: Literal["both", "prefill", "decode"] = "both"
    """What its workers do."""
    workers: tuple[StaticWorker, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _differ(self) -> StaticComponent:
        _check_unique("endpoint", [worker.endpoint for worker in self.workers])
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
    """All that is listed."""

    components: Sequence[StaticComponent]
    schedulers: Sequence[str] = ()
    """Addresses of Schedulers, host:port; none where the Scheduler is in the same process."""
    probe_seconds: float = 1.0
    """Time between two looks at who is there."""


def read_static_file(path: Path) -> tuple[StaticComponent, ...]:
    """Reads a list of workers.

    Raises:
        ValueError: it cannot be read, or says something that cannot be; in one line.
    """
    try:
        return _checked(_File, tomllib.loads(path.read_text()), str(path)).components
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def static_component(addresses: Sequence[str], *, name: str, model: str, block_size: int) -> StaticComponent:
    """One component, of workers that are given by their addresses.

    Raises:
        ValueError: an address is none, or is there twice; in one line.
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
        raise ValueError(f"{what} {twice[0]} is there twice")
