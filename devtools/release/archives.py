"""Archives that depend on the content of files only."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
from collections.abc import Mapping
from pathlib import Path

EXECUTABLE = 0o111


def write_tar(archive: Path, files: Mapping[str, Path], committed: int) -> None:
    """Writes a tar archive of files, by their names in it; one that ends in ``gz`` is compressed."""
    with archive.open("wb") as out:
        if archive.suffix not in {".gz", ".tgz"}:
            _write(out, files, committed)
            return
        with gzip.GzipFile(filename="", mode="wb", fileobj=out, mtime=committed) as packed:
            _write(packed, files, committed)


def _write(out: object, files: Mapping[str, Path], committed: int) -> None:
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        for name, path in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = path.stat().st_size
            entry.mtime = committed
            entry.mode = 0o755 if path.stat().st_mode & EXECUTABLE else 0o644
            with path.open("rb") as content:
                tar.addfile(entry, content)


def files_below(folder: Path, prefix: str) -> dict[str, Path]:
    """Returns all files below a folder, by their names in an archive."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {f"{prefix}/{path.relative_to(folder)}": path for path in found}


def write_checksums(folder: Path) -> None:
    """Writes ``SHA256SUMS`` with a line for each file of a folder, as ``sha256sum --check`` reads it."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
