"""Which engines a pod has, and which pods an option or an InferencePool names."""

from __future__ import annotations

from typing import Any

import pytest
from kvrouter.sidecar.kubernetes.pods import FoundEngine, engines_of
from kvrouter.sidecar.kubernetes.selection import (
    PodSelection,
    PoolName,
    read_pool_name,
    read_selection,
    selection_of_pool,
)

from ....kube_api_server import pod, pool


def test_a_pod_has_an_engine_at_each_port() -> None:
    first, second = engines_of(pod("a", "10.0.0.1", restarts=3), (8000, 8001))
    assert first == FoundEngine("http://10.0.0.1:8000", "uid-of-a/3", is_ready=True)
    assert second.url == "http://10.0.0.1:8001"
    (six,) = engines_of(pod("a", "fd00::1", ready=False), (8000,))
    assert (six.url, six.is_ready) == ("http://[fd00::1]:8000", False)


def ended(**changes: Any) -> Any:
    found = pod("a", "10.0.0.1")
    return found | {key: found[key] | value for key, value in changes.items()}


@pytest.mark.parametrize(
    "found",
    [
        pod("a"),
        {"metadata": {"name": "a", "uid": "u"}},
        ended(metadata={"deletionTimestamp": "2026-11-24T10:00:00Z"}),
        ended(status={"phase": "Failed"}),
        ended(status={"phase": "Succeeded"}),
    ],
    ids=["no address", "new", "terminating", "failed", "succeeded"],
)
def test_a_pod_that_cannot_serve_has_none(found: Any) -> None:
    assert engines_of(found, (8000,)) == ()


def test_only_restarts_of_the_engines_container_count() -> None:
    found = pod("a", "10.0.0.1", restarts=1)
    found["spec"]["containers"].append({"name": "proxy", "ports": [{"containerPort": 15_090}]})
    found["status"]["containerStatuses"].append({"name": "proxy", "restartCount": 7})
    assert [each.incarnation for each in engines_of(found, (8000, 9000))] == ["uid-of-a/1", "uid-of-a/8"]


@pytest.mark.parametrize(
    ("text", "selection"),
    [
        ("app=vllm", PodSelection("app=vllm")),
        ("app=vllm:30000", PodSelection("app=vllm", (30_000,))),
        ("inference:app=vllm", PodSelection("app=vllm", namespace="inference")),
        ("inference:app.kubernetes.io/name=vllm,gpu in (a, b):1", None),
    ],
)
def test_an_option_names_labels_and_perhaps_namespace_and_port(text: str, selection: PodSelection | None) -> None:
    expected = selection or PodSelection("app.kubernetes.io/name=vllm,gpu in (a, b)", (1,), "inference")
    assert read_selection(text) == expected


@pytest.mark.parametrize(
    "text", ["", ":", "a:b:c:1", "app=vllm:0", "app=vllm:65536", "Bad_Name:app=vllm", ":8000", "a::1"]
)
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected"):
        read_selection(text)


def test_a_pool_may_be_in_another_namespace() -> None:
    assert read_pool_name("qwen") == PoolName("qwen")
    assert read_pool_name("inference/qwen-3.1") == PoolName("qwen-3.1", "inference")
    for wrong in ("", "/qwen", "a/b/c", "Qwen", "qwen "):
        with pytest.raises(ValueError, match="expected a name of Kubernetes"):
            read_pool_name(wrong)


def specified(**spec: Any) -> Any:
    found = pool("qwen", 8000, app="vllm", tier="gpu")
    return {"metadata": {"name": "qwen", "namespace": "ns"}, "spec": found["spec"] | spec}


def test_a_pool_selects_pods_of_its_namespace() -> None:
    ports = [{"number": 8000}, {"number": 8001}]
    found = selection_of_pool(specified(targetPorts=ports, appProtocol="http"))
    assert found == PodSelection("app=vllm,tier=gpu", (8000, 8001), "ns")


@pytest.mark.parametrize(
    "spec",
    [
        {"selector": None},
        {"selector": {"matchLabels": {}}},
        {"targetPorts": []},
        {"targetPorts": [{}]},
        {"targetPorts": [{"number": 0}]},
        {"targetPorts": [{"number": "http"}]},
        {"appProtocol": "kubernetes.io/h2c"},
    ],
)
def test_a_pool_that_cannot_be_served_is_refused(spec: Any) -> None:
    with pytest.raises(ValueError):
        selection_of_pool(specified(**spec))
    with pytest.raises(ValueError, match="expected selector"):
        selection_of_pool({"metadata": {"namespace": "ns"}})
