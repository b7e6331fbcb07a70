"""Archives for those who do not use Python: the C library, the contract and the chart."""

from __future__ import annotations

from pathlib import Path

from .archives import files_below, write_tar
from .tree import Tree

LIBRARIES = ("libkvrouter_publisher.so", "libkvrouter_publisher.a")


def build_c_library(tree: Tree, out: Path) -> None:
    """Writes the publisher for C: header, shared and static library."""
    crate = tree.folder / "services/publisher_c"
    tree.run("cargo", "build", "-q", "--release", cwd=crate)
    name = f"kvrouter-publisher-c-{tree.version}-linux-x86_64"
    files = files_below(crate / "include", f"{name}/include")
    files |= {f"{name}/lib/{library}": crate / "target/release" / library for library in LIBRARIES}
    files |= {f"{name}/LICENSE": tree.folder / "LICENSE", f"{name}/README.md": crate / "README.md"}
    write_tar(out / f"{name}.tar.gz", files, tree.committed)


def build_contract(tree: Tree, out: Path) -> None:
    """Writes the contract: its files and their descriptor set."""
    protos = tree.folder / "protos"
    descriptors = protos / "kvrouter.binpb"
    tree.run(tree.folder / ".venv/bin/buf", "build", "-o", descriptors, cwd=protos)
    name = f"kvrouter-contract-{tree.version}"
    files = files_below(protos / "kvrouter", f"{name}/kvrouter")
    for path in (protos / "buf.yaml", descriptors, tree.folder / "LICENSE"):
        files[f"{name}/{path.name}"] = path
    write_tar(out / f"{name}.tar.gz", files, tree.committed)


def build_chart(tree: Tree, out: Path) -> None:
    """Writes the chart as ``helm install`` takes it."""
    files = files_below(tree.folder / "deploy/helm/kvrouter", "kvrouter")
    write_tar(out / f"kvrouter-{tree.version}.tgz", files, tree.committed)
