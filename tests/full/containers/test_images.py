"""What is in the images."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .bases import argument
from .engine import inspect, podman, run

MEGABYTE = 1_000_000
LARGEST_LAYERS = 150 * MEGABYTE

pytestmark = pytest.mark.timeout(1800)


def inside(container: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["podman", "exec", container, *command], check=False, capture_output=True, text=True)


def test_a_container_is_an_ordinary_user_without_capabilities(container: str) -> None:
    assert inside(container, "id", "-u").stdout == "10001\n"
    assert "kvrouter" in inside(container, "id", "-un").stdout
    status = inside(container, "cat", "/proc/self/status").stdout
    assert "NoNewPrivs:\t1" in status
    assert {line.split()[1] for line in status.splitlines() if line.startswith("Cap")} == {"0" * 16}


@pytest.mark.parametrize("path", ["/file", "/etc/file", "/usr/local/file"])
def test_the_root_is_read_only(container: str, path: str) -> None:
    assert "Read-only file system" in inside(container, "touch", path).stderr


def test_a_container_can_write_to_tmp(container: str) -> None:
    assert inside(container, "sh", "-c", "touch /tmp/file").returncode == 0


@pytest.mark.parametrize("program", ["gcc", "cc", "c++", "clang", "ld", "cargo", "rustc", "make", "git"])
def test_no_image_has_a_compiler(images: dict[str, str], program: str) -> None:
    for name in images.values():
        found = podman("run", "--rm", "--network", "none", name, "sh", "-c", f"command -v {program} || echo none")
        assert found == "none\n"


def test_the_image_has_the_native_core(container: str) -> None:
    said = inside(container, "python", "-c", "from kvrouter.core import IMPLEMENTATION as i; print(i)")
    assert said.stdout == "native\n", said.stderr


def test_the_services_lack_the_development_stack(container: str) -> None:
    assert inside(container, "kvrouter", "--version").returncode == 0
    assert inside(container, "sh", "-c", "command -v kvrouter-mocker").returncode != 0


def test_the_layers_above_the_base_are_small(images: dict[str, str], tmp_path: Path) -> None:
    layers = inspect(images["services"], "image")["RootFS"]["Layers"]
    base = inspect(argument("PYTHON"), "image")["RootFS"]["Layers"]
    assert layers[: len(base)] == base
    above = sum(compressed_layers(images["services"], tmp_path)[len(base) :])
    assert 0 < above <= LARGEST_LAYERS, f"{above / MEGABYTE:.0f} MB"


def compressed_layers(name: str, folder: Path) -> list[int]:
    """Returns the bytes of each layer as a registry stores and sends it."""
    run("buildah", "push", "-q", name, f"oci:{folder}:image")

    def read(digest: str) -> Any:
        return json.loads((folder / "blobs/sha256" / digest.partition(":")[2]).read_bytes())

    (manifest,) = json.loads((folder / "index.json").read_bytes())["manifests"]
    return [layer["size"] for layer in read(manifest["digest"])["layers"]]


def test_the_health_check_fails_while_nothing_serves(container: str) -> None:
    check = inspect(container)["Config"]["Healthcheck"]["Test"]
    assert check[0] == "CMD", json.dumps(check)
    assert inside(container, *check[1:]).returncode != 0
