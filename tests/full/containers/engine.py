"""Podman, buildah and Docker Compose as a machine without systemd can run them, as root and without a registry."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

TOOLS = ("podman", "buildah", "runc", "netavark", "aardvark-dns", "mmdebstrap")
HELPERS = "/usr/lib/podman"  # where Debian keeps netavark and aardvark-dns
COMPOSE = Path("usr/libexec/docker/cli-plugins/docker-compose")

# Containers may raise no limit above the machine's own.
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
network_backend = "netavark"
compat_api_enforce_docker_hub = false
"""


def missing() -> str:
    """Names what these tests lack on this machine, in one line; an empty text if nothing."""
    found = f"{os.environ.get('PATH', '')}:{HELPERS}"
    lacking = [tool for tool in TOOLS if shutil.which(tool, path=found) is None]
    if os.geteuid() != 0:
        lacking.insert(0, "root")
    return f"containers need {', '.join(lacking)}" if lacking else ""


def run(*command: str, **options: Any) -> str:
    """Runs a command and returns its output; an error shows the end of what it printed."""
    done = subprocess.run(
        command, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)[:300]}: exit status {done.returncode}\n{done.stdout[-4000:]}"
    return done.stdout


def podman(*arguments: str) -> str:
    return run("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs", *arguments)


def inspect(name: str, kind: str = "container") -> dict[str, Any]:
    (found,) = json.loads(podman(kind, "inspect", name))
    return dict(found)


def image_exists(name: str) -> bool:
    return subprocess.run(["podman", "image", "exists", name], check=False).returncode == 0


@cache
def compose(folder: Path) -> str:
    """Returns Docker Compose 2: the installed one, otherwise that of Debian 13's package, put into the folder."""
    installed = shutil.which("docker-compose")
    if installed is not None and re.search(r"\bv?2\.", run(installed, "version")):
        return installed
    run("mmdebstrap", "--variant=extract", "--include=docker-compose", "trixie", str(folder))
    return str(folder / COMPOSE)
