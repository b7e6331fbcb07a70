"""Both images, and Docker Compose talking to podman."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from . import bases
from .engine import CONFIGURATION, compose, missing, podman, run

ROOT = Path(__file__).parents[3]
IMAGES = {"services": "kvrouter", "devstack": "kvrouter-devstack"}
"""Names that the compose files use, by stage of the Dockerfile."""


@pytest.fixture(scope="session", autouse=True)
def tools() -> None:
    """Skips all tests with one line that names what is missing."""
    if lacking := missing():
        pytest.skip(lacking)


@pytest.fixture(scope="session")
def podman_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Configures podman for this machine; returns a folder."""
    folder = tmp_path_factory.mktemp("podman")
    (folder / "containers.conf").write_text(CONFIGURATION)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
        # Without systemd nothing runs health checks: System does.
        patched.setenv("DISABLE_HC_SYSTEMD", "true")
        yield folder


@pytest.fixture(scope="session")
def images(podman_here: Path) -> dict[str, str]:
    """Both images of the Dockerfile, by stage; with ``KVROUTER_IMAGES=built`` those that podman has already."""
    bases.make_all(podman_here)
    if os.environ.get("KVROUTER_IMAGES") == "built":
        return IMAGES
    # buildah would take layers from its cache although the wheels that they were made with have changed.
    build("build", "kvrouter-build", "--layers")
    for stage, name in IMAGES.items():
        build(stage, name, "--no-cache", "--build-context", "build=container-image://localhost/kvrouter-build")
    return IMAGES


def build(stage: str, name: str, *options: str) -> None:
    run(
        *("buildah", "bud", "--isolation", "chroot", "--network", "host", "--format", "docker", "--pull=never"),
        *("--ignorefile", "deploy/Dockerfile.dockerignore", "-f", "deploy/Dockerfile", "--target", stage, "-t", name),
        *(*options, "."),
        cwd=ROOT,
    )


@pytest.fixture(scope="session")
def compose_command(podman_here: Path) -> Iterator[str]:
    """Docker Compose, whose engine is podman."""
    address = f"unix://{podman_here}/podman.sock"
    service = subprocess.Popen(["podman", "system", "service", "--time=0", address])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DOCKER_HOST", address)
        yield compose(podman_here / "compose")
    service.terminate()
    with suppress(subprocess.TimeoutExpired):
        service.wait(20)


@pytest.fixture
def container(images: dict[str, str]) -> Iterator[str]:
    """The image of the services, started as the guide says, with nothing that it could connect to."""
    name = f"kvrouter-test-{os.getpid()}"
    hardened = ("--read-only", "--tmpfs=/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    podman("run", "--detach", "--name", name, "--network", "none", *hardened, images["services"], "sleep", "infinity")
    yield name
    podman("rm", "--force", "--time", "0", name)
