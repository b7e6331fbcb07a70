"""Publishes the files of a model's tokenizer and chat template, so that Frontends need no shared disk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aetcd
import nats.errors
from kvrouter.net.etcd import AWAY, connect
from kvrouter.net.logs import get_logger
from kvrouter.net.model_files import InvalidModelFiles, describe_files, read_model_files, store_files
from kvrouter.net.registry_entries import read_descriptor
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.publishing.transport import NatsLink, TransportAway
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ModelFile
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

log = get_logger(__name__)

_FAILURES = (*AWAY, TransportAway, nats.errors.Error, TimeoutError, OSError)
_LONGEST_WAIT_SECONDS = 30


async def publish_model_files(config: WorkerConfig, link: NatsLink) -> Sequence[ModelFile]:
    """Stores the files of the worker's tokenizer and names them in its component's descriptor.

    Waits while NATS or etcd is away. Returns what the descriptor names: nothing if ``config.tokenizer`` is no directory
    of this machine, or has no usable files.
    """
    directory = Path(config.tokenizer)
    if not config.tokenizer or not await asyncio.to_thread(directory.is_dir):
        return ()
    try:
        files = await asyncio.to_thread(read_model_files, directory)
    except InvalidModelFiles as error:
        log.warning("model_files.invalid", error=str(error), consequence="Frontends take no text for this model")
        return ()
    described = await asyncio.to_thread(describe_files, files)
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(_FAILURES),
        wait=wait_random_exponential(multiplier=0.2, max=_LONGEST_WAIT_SECONDS),
        reraise=True,
    ):
        with attempt:
            await store_files(link.client.jetstream(), config.component.namespace, files)
            async with connect(config.etcd) as client:
                await name_model_files(client, config.component, described)
    log.info("model_files.published", component=str(config.component), files=sorted(files))
    return described


async def name_model_files(
    client: aetcd.Client, component: ComponentName, described: Sequence[ModelFile], *, replace: bool = True
) -> None:
    """Names files in a component's descriptor; without ``replace`` only if it names none.

    Raises:
        One of ``kvrouter.net.etcd.AWAY``: etcd is away.
        Undecodable: the descriptor is invalid.
    """
    key = component.descriptor_key.encode()
    while (found := await client.get(key)) is not None:
        descriptor = read_descriptor(component, found.value)
        if list(descriptor.model_files) == list(described) or (descriptor.model_files and not replace):
            return
        del descriptor.model_files[:]
        descriptor.model_files.extend(described)
        written, _ = await client.transaction(
            compare=[client.transactions.mod(key) == found.mod_revision],
            success=[client.transactions.put(key, descriptor.SerializeToString())],
            failure=[],
        )
        if written:
            return
