"""Both images as OCI archives, with the wheels of the release."""

from __future__ import annotations

import shutil
from pathlib import Path

from .archives import files_below, write_tar
from .tree import Tree

IMAGES = {"services": "kvrouter", "devstack": "kvrouter-devstack"}
"""Names by stage of the Dockerfile."""


def build_images(tree: Tree, out: Path) -> None:
    """Writes an archive of each image. Layers and archives name the time of the commit only."""
    # What the stage "build" of the Dockerfile leaves behind, as far as later stages use it.
    built = tree.folder / "built"
    (built / "src/dist").mkdir(parents=True)
    for wheel in out.glob("*.whl"):
        shutil.copy(wheel, built / "src/dist")
    shutil.copy(tree.folder / "constraints.txt", built / "src")
    for stage, name in IMAGES.items():
        tag = f"{name}:{tree.version}"
        tree.run(
            *("buildah", "bud", "-q", "--no-cache", "--isolation", "chroot", "--network", "host"),
            *("--timestamp", str(tree.committed), "--build-arg", f"SOURCE_DATE_EPOCH={tree.committed}"),
            *("--build-context", f"build={built}", "--ignorefile", "deploy/Dockerfile.dockerignore"),
            *("--target", stage, "-f", "deploy/Dockerfile", "-t", tag, "."),
        )
        layout = tree.folder / f"{name}-layout"
        tree.run("buildah", "push", "-q", tag, f"oci:{layout}:{tree.version}")
        write_tar(out / f"{name}-{tree.version}-linux-amd64.oci.tar", files_below(layout, "."), tree.committed)
    shutil.rmtree(built)
