from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from .engine import VllmServer, write_model

Serving = Callable[..., AbstractContextManager[VllmServer]]


@pytest.fixture(scope="session")
def serving_vllm(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Serving:
    """Runs a vLLM server with options; who needs it waits until it is ready."""
    model = write_model(tmp_path_factory.mktemp("model"))

    @contextmanager
    def serving(*options: str) -> Iterator[VllmServer]:
        server = VllmServer(vllm_python, model, tmp_path_factory.mktemp("vllm"), options)
        server.start()
        try:
            yield server
        finally:
            server.kill()

    return serving


@pytest.fixture(scope="module")
def roomy(serving_vllm: Serving) -> Iterator[VllmServer]:
    """A server that evicts nothing, which the tests of a module share."""
    with serving_vllm() as server:
        yield server


@pytest.fixture(scope="module")
def small(serving_vllm: Serving) -> Iterator[VllmServer]:
    """A server whose cache has room for two or three of the longest prompts."""
    with serving_vllm("--num-gpu-blocks-override", "200", "--max-model-len", "6000") as server:
        yield server


@pytest.fixture(scope="module")
def pair(serving_vllm: Serving) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Two servers that the tests of a module kill and start again."""
    with serving_vllm() as one, serving_vllm() as two:
        yield one, two
