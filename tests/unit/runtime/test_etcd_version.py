"""Which versions of etcd hold users to their permissions."""

from __future__ import annotations

import pytest
from kvrouter.runtime.process.context import is_outdated


@pytest.mark.parametrize("version", ["3.4.44", "3.5.1", "3.5.32", "3.6.0", "3.6.13", "3.7.0", "3.6.5-rc.1"])
def test_versions_whose_users_evade_their_permissions(version: str) -> None:
    assert is_outdated(version)


@pytest.mark.parametrize("version", ["3.5.33", "3.5.35", "3.6.14", "3.7.1", "3.8.0", "4.0.0", "unknown"])
def test_versions_that_hold_users_to_their_permissions(version: str) -> None:
    assert not is_outdated(version)
