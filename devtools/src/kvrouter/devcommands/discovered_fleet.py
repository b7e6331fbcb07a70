"""Describes the fleet of a running system by its registrations in etcd, and the busy thresholds set at run time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from google.protobuf.message import DecodeError
from kvrouter.cli.connections import command_etcd
from kvrouter.cli.errors import CommandFailed, WrongUsage
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.net.etcd import AWAY, connect
from kvrouter.scheduler.request.options import Thresholds
from kvrouter.v1.common_pb2 import Role
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.names import InvalidName, components_prefix, threshold_key, worker_id_of_key
from kvrouter.v1.registry_pb2 import BusyThresholdsRecord, WorkerRegistration

_DEFAULT = EngineConfig()


class DiscoveredFleet(NamedTuple):
    """Ranks of one model."""

    model: str
    prefill: int
    """Ranks that compute prompts for others."""
    others: int
    """Ranks that decode, or serve whole requests."""
    blocks: int
    """KV blocks of the smallest rank."""
    block_size: int
    batched_tokens: int
    sequences: int
    thresholds: Thresholds = Thresholds()
    """Busy thresholds that were set at run time."""


async def discover_fleet(etcd: str, namespace: str, model: str | None) -> DiscoveredFleet:
    """Reads the registrations of a namespace.

    Raises:
        WrongUsage: the name is malformed, or the workers do not make one fleet.
        CommandFailed: etcd does not answer.
    """
    try:
        prefix = components_prefix(namespace)
    except InvalidName as error:
        raise WrongUsage(str(error)) from None
    try:
        async with connect(command_etcd(etcd)) as client:
            entries = await client.get_prefix(prefix.encode())
            fleet = fleet_of(_workers_in(((entry.key, entry.value) for entry in entries), namespace), model)
            thresholds = await client.get(threshold_key(namespace, fleet.model).encode())
    except AWAY as error:
        raise CommandFailed(f"etcd at {etcd} does not answer: {error!r}") from None
    if thresholds is None:
        return fleet
    try:
        record = BusyThresholdsRecord.FromString(thresholds.value)
        return fleet._replace(thresholds=Thresholds.of(record.thresholds))
    except (DecodeError, BadRequest) as error:
        cause = error.message if isinstance(error, BadRequest) else error
        raise CommandFailed(f"the busy thresholds of {fleet.model} in etcd cannot be read: {cause}") from None


def _workers_in(entries: Iterable[tuple[bytes, bytes]], namespace: str) -> list[WorkerRegistration]:
    """Decodes the registrations among keys and values.

    Raises:
        CommandFailed: one is undecodable.
    """
    try:
        return [
            WorkerRegistration.FromString(value)
            for key, value in entries
            if worker_id_of_key(key.decode(errors="replace")) is not None
        ]
    except DecodeError:
        raise CommandFailed(f"a registration in namespace {namespace} cannot be decoded") from None


def fleet_of(workers: Iterable[WorkerRegistration], model: str | None) -> DiscoveredFleet:
    """Returns the fleet of a model; without ``model``, of the only one. What workers do not report is the default.

    Raises:
        WrongUsage: there is no such worker, there are several models or block sizes, or only prefill workers.
    """
    found = [worker for worker in workers if model is None or worker.model == model]
    if not found:
        raise WrongUsage(f"no worker {f'of {model} ' if model else ''}is registered: check --etcd and --namespace")
    models, sizes = {worker.model for worker in found}, {worker.block_size for worker in found}
    if len(models) > 1:
        raise WrongUsage(f"workers of several models are registered, {', '.join(sorted(models))}: choose by --of-model")
    if len(sizes) > 1:
        raise WrongUsage(f"the workers have blocks of {sorted(sizes)} tokens: expected one size")
    prefill = sum(len(worker.ranks) for worker in found if worker.role == Role.ROLE_PREFILL)
    others = sum(len(worker.ranks) for worker in found) - prefill
    if not others:
        raise WrongUsage(f"{prefill} prefill ranks are registered, and none that decodes")
    blocks = [rank.total_blocks for worker in found for rank in worker.ranks if rank.total_blocks]
    return DiscoveredFleet(
        models.pop(),
        prefill,
        others,
        min(blocks, default=_DEFAULT.num_blocks),
        sizes.pop() or _DEFAULT.block_size,
        min((w.max_batched_tokens for w in found if w.max_batched_tokens), default=_DEFAULT.max_batched_tokens),
        min((w.max_sequences for w in found if w.max_sequences), default=_DEFAULT.max_sequences),
    )
