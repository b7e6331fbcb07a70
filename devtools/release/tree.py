"""The commit that is released, as a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Tree:
    """A copy of a commit's files, without anything else that lies in the repository."""

    folder: Path
    committed: int
    """Time of the commit, in seconds: the time that every artefact names."""

    @property
    def version(self) -> str:
        """Version of all distributions."""
        return (self.folder / "VERSION").read_text(encoding="utf-8").strip()

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that let builds leave no trace of when and where they ran."""
        home = os.environ.get("CARGO_HOME", str(Path.home() / ".cargo"))
        remapped = {str(self.folder): "/kvrouter", home: "/cargo"}
        return {
            **os.environ,
            "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
            "SOURCE_DATE_EPOCH": str(self.committed),
            "PYTHONHASHSEED": "0",
            "RUSTFLAGS": " ".join(f"--remap-path-prefix={place}={name}" for place, name in remapped.items()),
            "CARGO_INCREMENTAL": "0",
        }

    def run(self, *command: str | Path, **options: Any) -> None:
        """Runs a command in the tree.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        subprocess.run(command, check=True, **{"cwd": self.folder, "env": self.environment, **options})


@contextmanager
def checked_out(folder: Path) -> Iterator[Tree]:
    """Yields the tree of the commit that is checked out, and removes it in the end.

    Raises:
        SystemExit: files differ from the commit.
    """
    changed = git("status", "--porcelain")
    if changed:
        raise SystemExit(f"make release: expected a clean tree, commit or remove these files first:\n{changed}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "--no-same-permissions", "-C", str(folder)], input=archive.stdout, check=True)
    # Programs that builds run are those of the repository's environment.
    (folder / ".venv").symlink_to(ROOT / ".venv")
    yield Tree(folder, int(git("log", "-1", "--format=%ct")))
    shutil.rmtree(folder)


def git(*arguments: str) -> str:
    """Returns what git prints, without white space around it."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()  # fmt: skip
