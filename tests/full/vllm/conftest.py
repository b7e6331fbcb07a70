from __future__ import annotations

import os
from pathlib import Path

import pytest

INSTALLED = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """A Python with vLLM: the one of `make vllm`, unless KVROUTER_VLLM_PYTHON names another."""
    python = os.environ.get("KVROUTER_VLLM_PYTHON") or str(INSTALLED)
    if not Path(python).exists():
        pytest.skip("no vLLM: `make vllm` installs it (6 GB), or KVROUTER_VLLM_PYTHON names a Python that has it")
    return python
