"""The client of Kubernetes is an extra, and is imported for pods only."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kvrouter.runtime.process.lifecycle import StartRefused
from kvrouter.runtime.telemetry.health import HealthBoard
from kvrouter.sidecar.app import running
from kvrouter.sidecar.settings import SidecarSettings
from prometheus_client import CollectorRegistry


async def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio.client", None)
    for name in [each for each in sys.modules if each.startswith("kvrouter.sidecar.kubernetes.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ExceptionGroup) as caught:
        async with running(SidecarSettings(engine_pods="app=vllm"), CollectorRegistry(), HealthBoard()):
            pass
    (refused,) = caught.value.exceptions
    assert isinstance(refused, StartRefused)
    assert (
        str(refused)
        == "--engine-pods and --inference-pool need kubernetes_asyncio.client: install kvrouter[kubernetes]"
    )


@pytest.mark.parametrize("module", ["kvrouter.cli.serve", "kvrouter.sidecar.app"])
def test_nothing_else_imports_it(module: str) -> None:
    program = f"import sys, {module}; sys.exit('kubernetes_asyncio' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
