from __future__ import annotations

import os
from pathlib import Path

import pytest

from .vllm.routed import Where

INSTALLED = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


def _python(engine: str) -> str:
    variable = f"KVROUTER_{engine.upper()}_PYTHON"
    python = os.environ.get(variable) or str(INSTALLED)
    if not Path(python).exists():
        pytest.skip(f"no {engine}: `make vllm` installs it (6 GB), or {variable} names a Python that has it")
    return python


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """A Python with vLLM: the one of `make vllm`, unless KVROUTER_VLLM_PYTHON names another."""
    return _python("vllm")


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """A Python with SGLang's radix cache, found likewise."""
    return _python("sglang")


@pytest.fixture
def where(namespace: str, nats_url: str, etcd_endpoint: str) -> Where:
    """The brokers, and a namespace of the test's own."""
    return Where(namespace, nats_url, etcd_endpoint)
