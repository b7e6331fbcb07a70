"""Base images with the names that the deployment files use, made of Debian packages and of what is installed here.

They stay in podman's store between runs: making them takes minutes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from .engine import image_exists, podman, run

DEPLOY = Path(__file__).parents[3] / "deploy"
PLAIN = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
TRUST = [f"ENV {name}=/machine.crt" for name in ("PIP_CERT", "SSL_CERT_FILE", "CARGO_HTTP_CAINFO")]


def argument(name: str) -> str:
    """Returns the default of an argument of the Dockerfile."""
    (default,) = re.findall(rf"^ARG {name}=(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    return str(default)


def make_all(folder: Path) -> None:
    """Makes the base images that are not there yet."""
    made = {
        argument("PYTHON"): python_base,
        argument("RUST"): rust_base,
        PLAIN["nats"]["image"]: nats_server,
        PLAIN["etcd"]["image"]: etcd_server,
    }
    for number, (name, make) in enumerate(made.items()):
        if not image_exists(name):
            root = folder / f"base-{number}"
            root.mkdir()
            changes = make(root)
            import_root(root, name, changes)
            shutil.rmtree(root)


def python_base(root: Path) -> list[str]:
    """Debian's Python of the same minor version, with pip, and free to install packages as the official image is."""
    debian(root, "ca-certificates", "python3", "python3-pip")
    (root / "usr/bin/python").symlink_to("python3")
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()
    shutil.copy(CERTIFICATES, root / "machine.crt")
    return [*TRUST, "CMD python"]


def rust_base(root: Path) -> list[str]:
    """This machine's Rust toolchain with Debian's compiler."""
    debian(root, "ca-certificates", "gcc", "libc6-dev")
    toolchain = Path(run("rustc", "--print", "sysroot").strip())
    for name in ("bin/cargo", "bin/rustc"):
        shutil.copy(toolchain / name, root / "usr/local/bin")
    shutil.copytree(toolchain / "lib", root / "usr/local/lib", symlinks=True, dirs_exist_ok=True)
    shutil.copy(CERTIFICATES, root / "machine.crt")
    return [*TRUST, "CMD bash"]


def nats_server(root: Path) -> list[str]:
    """The server of the tests, with wget as the official image has it."""
    debian(root, "wget")
    install(root, "nats-server")
    return ['ENTRYPOINT ["nats-server"]']


def etcd_server(root: Path) -> list[str]:
    debian(root)
    install(root, "etcd", "etcdctl")
    return ["CMD etcd"]


def debian(root: Path, *packages: str) -> None:
    included = [f"--include={','.join(packages)}"] if packages else []
    run("mmdebstrap", "--quiet", "--variant=minbase", *included, "bookworm", str(root))


def install(root: Path, *programs: str) -> None:
    """Copies programs that Python packages bring."""
    for name in programs:
        shutil.copy(program(name), root / "usr/local/bin" / name)


def program(name: str) -> Path:
    """Returns the file of a server that is installed as a Python package."""
    places = (f"bin/{name}", f"lib/python3*/site-packages/**/{name}")
    return next(path for place in places for path in Path(sys.prefix).glob(place) if is_program(path))


def is_program(path: Path) -> bool:
    return path.is_file() and path.read_bytes()[:4] == b"\x7fELF"


def import_root(root: Path, name: str, changes: Sequence[str]) -> None:
    options = [word for change in changes for word in ("--change", change)]
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as archive:
        subprocess.run(["podman", "import", "--quiet", *options, "-", name], stdin=archive.stdout, check=True)
    assert archive.returncode == 0
    podman("image", "exists", name)
