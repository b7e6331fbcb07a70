"""The default bound on the memory of the indexes, from what the process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvrouter.indexer import settings
from kvrouter.indexer.settings import cgroup_limits, default_max_index_bytes


def groups(folder: Path, own: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """Writes the files that name a process's control groups and their limits."""
    (folder / "own").write_text(own)
    for name, limit in limits.items():
        path = folder / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(limit)
    return folder / "own", folder / "mount"


def test_limits_of_the_group_and_of_those_above_it_count(tmp_path: Path) -> None:
    limits = {"pods/one/memory.max": "max\n", "pods/memory.max": "4000\n", "memory.max": "9000\n"}
    assert list(cgroup_limits(*groups(tmp_path, "0::/pods/one\n", limits))) == [4000, 9000]


def test_a_container_that_sees_its_group_as_the_root_is_bounded_by_it(tmp_path: Path) -> None:
    assert list(cgroup_limits(*groups(tmp_path, "0::/\n", {"memory.max": "5000\n"}))) == [5000]


def test_control_groups_of_version_1_are_read(tmp_path: Path) -> None:
    own = "5:cpu,cpuacct:/other\n4:memory:/docker/abc\n"
    limits = {"memory/docker/abc/memory.limit_in_bytes": "7000\n", "cpu/other/memory.limit_in_bytes": "1\n"}
    assert list(cgroup_limits(*groups(tmp_path, own, limits))) == [7000]


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert list(cgroup_limits(tmp_path / "none", tmp_path)) == []
    assert list(cgroup_limits(*groups(tmp_path, "0::/gone\n", {}))) == []


def test_the_default_is_half_of_the_lowest_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limits, expected in (([], physical // 2), ([1 << 62], physical // 2), ([1 << 62, 8000], 4000)):
        monkeypatch.setattr(settings, "cgroup_limits", lambda limits=limits: iter(limits))
        assert default_max_index_bytes() == expected
