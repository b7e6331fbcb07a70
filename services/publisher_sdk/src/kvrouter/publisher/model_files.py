"""The files of a worker's tokenizer and chat template, which it serves to Frontends without a shared disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvrouter.net.logs import get_logger
from kvrouter.net.model_files import PIECE_BYTES, InvalidModelFiles, describe_files, model_directory, read_model_files
from kvrouter.publisher.config import WorkerConfig
from kvrouter.v1.registry_pb2 import ModelFile

log = get_logger(__name__)


class ModelFiles:
    """Files of one model. They are read again for each Frontend, and never kept in memory."""

    def __init__(self, directory: Path = Path(), described: Sequence[ModelFile] = ()) -> None:
        """Serves the described files of a directory; by default none."""
        self.described = described
        """The files as registered."""
        self._paths = {file.sha256: directory / file.name for file in described}

    @classmethod
    async def of(cls, config: WorkerConfig) -> ModelFiles:
        """Returns the files of ``config.tokenizer``; none if this machine has no usable ones."""
        if not config.tokenizer:
            return cls()
        directory = await asyncio.to_thread(model_directory, config.tokenizer)
        if directory is None:
            log.warning(
                "model_files.missing",
                tokenizer=config.tokenizer,
                consequence="prompts of text are routed on their length only, and their caches are not found",
                advice=f"give a Frontend --tokenizers {config.model}=DIRECTORY, or download the model's files here",
            )
            return cls()
        try:
            described = await asyncio.to_thread(lambda: describe_files(read_model_files(directory)))
        except InvalidModelFiles as error:
            log.warning("model_files.invalid", error=str(error), consequence="Frontends take no text for this model")
            return cls()
        log.info("model_files.served", component=str(config.component), files=[file.name for file in described])
        return cls(directory, described)

    def pieces(self, sha256: bytes) -> Iterator[bytes]:
        """Yields the content of a file. Blocks.

        Raises:
            KeyError: the worker has no such file.
            OSError: the file cannot be read any more.
        """
        with self._paths[sha256].open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
