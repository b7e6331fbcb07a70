"""Builds a release of the commit that is checked out: ``python -m release FOLDER [--no-images]``."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from .archives import write_checksums
from .distributions import build_distributions
from .files import build_c_library, build_chart, build_contract
from .images import build_images
from .notes import notes
from .sbom import write_sbom
from .tree import ROOT, Tree, checked_out


def main() -> None:
    """Writes all artefacts into a folder, which it empties first."""
    parser = argparse.ArgumentParser(prog="release", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-images", action="store_true", help="leaves out the images of the containers")
    chosen = parser.parse_args()
    out = chosen.folder.resolve()
    os.umask(0o022)  # Wheels contain the permissions of their files.
    with checked_out(ROOT / "build/release") as tree:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        build(tree, out, images=not chosen.no_images)
    print(f"{out}: {sum(1 for _ in out.iterdir())} files")


def build(tree: Tree, out: Path, images: bool) -> None:
    """Builds each artefact. Images come after the wheels, which they contain."""
    build_distributions(tree, out)
    build_c_library(tree, out)
    build_contract(tree, out)
    build_chart(tree, out)
    write_sbom(tree, out)
    if not images:
        print("images: left out")
    elif shutil.which("buildah") is None:
        print("images: left out, they need buildah")
    else:
        build_images(tree, out)
    changelog = (tree.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    (out / "RELEASE_NOTES.md").write_text(notes(changelog, tree.version), encoding="utf-8")
    write_checksums(out)


if __name__ == "__main__":
    main()
