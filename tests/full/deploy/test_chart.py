"""The Helm chart, rendered by helm and validated against the schemas of Kubernetes. No cluster is needed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.indexer.settings import IndexerSettings
from kvrouter.runtime.config.sources import load, read_all
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.sidecar.kubernetes.selection import PodSelection, PoolName
from kvrouter.sidecar.settings import LocalEnginesSettings, SidecarSettings

jsonschema = pytest.importorskip("jsonschema", reason="kubernetes-validate is not installed")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

# A busy machine builds helm for minutes, which counts for the first test that uses it.
pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy/helm/kvrouter"
SCHEMAS = Path(__file__).parent / "schemas"
"""Schemas of kinds that are not part of Kubernetes, cut down to the fields that the chart uses."""
HELM = "helm.sh/helm/v3/cmd/helm@v3.19.2"
VERSIONS = ("1.30", "1.37")
SERVICES = {"frontend": FrontendSettings, "scheduler": SchedulerSettings, "indexer": IndexerSettings}
STORES = ("--set", "nats.url=nats://nats:4222", "--set", "etcd.endpoints=etcd:2379")
POOLS = (*STORES, "-f", str(CHART / "ci/pools.yaml"))

Documents = list[dict[str, Any]]


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of helm; built with Go if it is not installed."""
    installed = shutil.which("helm")
    if installed:
        return installed
    if shutil.which("go") is None:
        pytest.skip("neither helm nor go is installed")
    directory = tmp_path_factory.mktemp("helm")
    built = subprocess.run(["go", "install", HELM], env=os.environ | {"GOBIN": str(directory)}, check=False)
    if built.returncode:
        pytest.skip(f"go could not build {HELM}")
    return str(directory / "helm")


@pytest.fixture(scope="session")
def render(helm: str) -> Callable[..., Documents]:
    def rendered(*arguments: str) -> Documents:
        command = [helm, "template", "--kube-version", VERSIONS[0], "router", str(CHART), *arguments]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [document for document in yaml.safe_load_all(output) if document]

    return rendered


def refusal(helm: str, *arguments: str) -> str:
    command = [helm, "template", "--kube-version", VERSIONS[0], "router", str(CHART), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr


def of_kind(documents: Documents, kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


def pods(documents: Documents) -> dict[str, dict[str, Any]]:
    """The pod template of every workload."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in documents
        if each["kind"] in {"Deployment", "StatefulSet"}
    }


def validate(document: dict[str, Any], version: str) -> None:
    schema = SCHEMAS / f"{document['kind']}.json"
    if schema.exists():
        jsonschema.validate(document, json.loads(schema.read_text()))
    else:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "values", [STORES, ("-f", str(CHART / "ci/all.yaml")), POOLS], ids=["defaults", "everything", "pools"]
)
def test_what_it_renders_is_valid(render: Callable[..., Documents], values: tuple[str, ...], version: str) -> None:
    documents = render(*values)
    assert {"Deployment", "Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget"} <= {
        each["kind"] for each in documents
    }
    for document in documents:
        validate(document, version)


def test_an_unknown_kind_or_field_would_fail() -> None:
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        validate({"apiVersion": "example.com/v1", "kind": "Strange", "metadata": {"name": "x"}}, VERSIONS[0])
    with pytest.raises(kubernetes_validate.ValidationError):
        validate({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "dataa": {}}, VERSIONS[0])
    monitor = {"apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor", "metadata": {"name": "x"}}
    with pytest.raises(jsonschema.ValidationError):
        validate(monitor | {"spec": {"selector": {}, "endpoint": []}}, VERSIONS[0])


def test_the_configuration_has_known_options(render: Callable[..., Documents]) -> None:
    config = of_kind(render("-f", str(CHART / "ci/all.yaml")), "ConfigMap")["router-config"]
    tables = tomllib.loads(config["data"]["kvrouter.toml"])
    assert tables["scheduler"] == {
        "bind": "0.0.0.0:7000",
        "http_bind": "0.0.0.0:9090",
        "overlap_score_weight": 2.0,
        "router_mode": "kv",
    }
    assert (tables["tls_client_auth"], tables["frontend"]["tls_client_auth"]) == ("required", "none")
    for table, kind in SERVICES.items():
        assert {key for key, value in tables.items() if not isinstance(value, dict)} <= set(kind.model_fields)
        assert set(tables[table]) <= set(kind.model_fields)


def test_the_services_start_with_the_defaults(render: Callable[..., Documents], tmp_path: Path) -> None:
    config = of_kind(render(*STORES), "ConfigMap")["router-config"]
    path = tmp_path / "kvrouter.toml"
    path.write_text(config["data"]["kvrouter.toml"])
    for kind in SERVICES.values():
        assert load(kind, ["--config", str(path)]).http_bind == "0.0.0.0:9090"


def test_every_selector_finds_its_pods(render: Callable[..., Documents]) -> None:
    documents = render("-f", str(CHART / "ci/all.yaml"))
    labels = [pod["metadata"]["labels"] for pod in pods(documents).values()]
    for document in documents:
        spec = document.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if document["kind"] in {"Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment", "StatefulSet"}:
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= each.items() for each in labels), document["metadata"]["name"]


def test_pods_run_without_privileges(render: Callable[..., Documents]) -> None:
    for name, template in pods(render("-f", str(CHART / "ci/all.yaml"))).items():
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is (name == "router-sidecar"), name
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            if container["name"] == "vllm":
                continue  # The engine's own image needs its GPU.
            security = pod.get("securityContext", {}) | container["securityContext"]
            assert security["runAsNonRoot"] is True
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}


def test_a_rolling_upgrade_keeps_every_replica(render: Callable[..., Documents]) -> None:
    for name, deployment in of_kind(render(*STORES), "Deployment").items():
        assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}, name
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        (drain,) = (each["value"] for each in container["env"] if each["name"] == "KVROUTER_DRAIN_SECONDS")
        assert pod["terminationGracePeriodSeconds"] > int(drain) + 5  # 5 s of preStop


def test_probes_ask_what_the_services_answer(render: Callable[..., Documents]) -> None:
    for deployment in of_kind(render(*STORES), "Deployment").values():
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": "metrics", "scheme": "HTTP"}
        assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "metrics", "scheme": "HTTP"}
        assert {"name": "metrics", "containerPort": 9090} in container["ports"]


def test_files_that_the_configuration_names_are_mounted(render: Callable[..., Documents]) -> None:
    templates = pods(render("-f", str(CHART / "ci/all.yaml")))
    for service in ("frontend", "scheduler", "indexer"):
        pod = templates[f"router-{service}"]["spec"]
        (container,) = pod["containers"]
        mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        secrets = {each["name"]: each["secret"] for each in pod["volumes"] if "secret" in each}
        tls = secrets[mounted["/etc/kvrouter/tls"]]
        assert (tls["secretName"], tls["defaultMode"]) == (f"kvrouter-{service}-tls", 0o440)
        assert ("/etc/kvrouter/keys" in mounted) == (service == "frontend")


def engine_pod(render: Callable[..., Documents]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """An engine's pod, its sidecar and its engine."""
    templates = pods(render("-f", str(CHART / "ci/all.yaml")))
    template = next(pod for name, pod in templates.items() if "-engine-" in name)
    pod = template["spec"]
    (sidecar,), (engine,) = pod["initContainers"], pod["containers"]
    return pod, sidecar, engine


def test_a_sidecar_has_known_options_and_may_read_its_secrets(render: Callable[..., Documents]) -> None:
    pod, sidecar, _ = engine_pod(render)
    options = {f"KVROUTER_{name}".upper() for name in SidecarSettings.model_fields}
    assert {each["name"] for each in sidecar["env"] if each["name"].startswith("KVROUTER_")} <= options
    secrets = [each["secret"] for each in pod["volumes"] if "secret" in each]
    assert secrets
    assert {each["defaultMode"] for each in secrets} == {0o440}
    assert pod["securityContext"]["fsGroup"] == 10001


def test_an_engine_serves_until_its_sidecar_has_drained(render: Callable[..., Documents]) -> None:
    pod, sidecar, engine = engine_pod(render)
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["lifecycle"]["preStop"]["exec"]["command"] == ["sh", "-c", "kill -TERM 1"]
    python, flag, program = engine["lifecycle"]["preStop"]["exec"]["command"]
    (drain,) = (int(each["value"]) for each in sidecar["env"] if each["name"] == "KVROUTER_DRAIN_SECONDS")
    assert f"time.monotonic() + {drain + 5}" in program
    assert pod["terminationGracePeriodSeconds"] > drain + 5
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        waiting = subprocess.Popen([python, flag, program.replace("9090", port)])
        listening.settimeout(30)
        for _ in range(3):  # It asks again and again, and does not end while the sidecar listens.
            listening.accept()[0].close()
        assert waiting.poll() is None
    assert waiting.wait(30) == 0


def test_the_sidecar_of_all_pods_reads_them_and_nothing_else(render: Callable[..., Documents]) -> None:
    documents = render(*STORES, "--set", "enginePods.labels=app=vllm", "--set", "enginePods.namespace=inference")
    role, binding = (of_kind(documents, kind)["router-sidecar"] for kind in ("Role", "RoleBinding"))
    assert {each["metadata"]["namespace"] for each in (role, binding)} == {"inference"}
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    (subject,) = binding["subjects"]
    deployment = of_kind(documents, "Deployment")["router-sidecar"]
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})
    pod = deployment["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == subject["name"] == role["metadata"]["name"]
    (container,) = pod["containers"]
    known = {each["name"]: each.get("value", "10.0.0.7") for each in container["env"]}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in known.items():
            patched.setenv(name, value)
        settings = load(SidecarSettings, [])
    assert settings.pods == PodSelection("app=vllm", (8000,), "inference")
    with_pool = of_kind(render("-f", str(CHART / "ci/all.yaml")), "Role")["router-sidecar"]
    assert [each["resources"] for each in with_pool["rules"]] == [["pods"], ["inferencepools"]]
    assert {verb for each in with_pool["rules"] for verb in each["verbs"]} == {"list", "watch"}


def manifests() -> Documents:
    return list(yaml.safe_load_all((ROOT / "deploy/kubernetes/inference-pool.yaml").read_text()))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_sample_of_an_inference_pool_is_valid(version: str) -> None:
    for document in manifests():
        validate(document, version)


def test_the_sample_of_an_inference_pool_fits_together(render: Callable[..., Documents]) -> None:
    documents = manifests()
    (pool,), services = of_kind(documents, "InferencePool").values(), of_kind(documents, "Service")
    picker, routed = (pods(documents)[name] for name in ("kvrouter", "qwen"))
    assert pool["spec"]["selector"]["matchLabels"].items() <= routed["metadata"]["labels"].items()
    served = {each["containerPort"] for each in routed["spec"]["containers"][0]["ports"]}
    assert {each["number"] for each in pool["spec"]["targetPorts"]} <= served
    reference = pool["spec"]["endpointPickerRef"]
    service = services[reference["name"]]["spec"]
    assert service["selector"].items() <= picker["metadata"]["labels"].items()
    (container,) = picker["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    (named,) = (each["targetPort"] for each in service["ports"] if each["port"] == reference["port"]["number"])
    (backend,) = of_kind(documents, "HTTPRoute")["qwen"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    kinds = [FrontendSettings, SchedulerSettings, IndexerSettings, LocalEnginesSettings]
    front, _, _, engines = read_all(kinds, container["args"], {})
    assert isinstance(front, FrontendSettings)
    assert isinstance(engines, LocalEnginesSettings)
    assert engines.pods == PoolName(pool["metadata"]["name"])
    assert front.endpoint_picker_bind == f"0.0.0.0:{ports[named]}"
    (replicas,) = of_kind(documents, "StatefulSet").values()
    peers = replicas["spec"]["serviceName"]
    assert services[peers]["spec"]["selector"].items() <= picker["metadata"]["labels"].items()
    names = [f"kvrouter-{number}.{peers}:{ports['peers']}" for number in range(replicas["spec"]["replicas"])]
    assert list(engines.peer) == names
    assert front.bind == f"0.0.0.0:{ports['peers']}"
    assert (front.http_bind, front.port) == (f"0.0.0.0:{ports['metrics']}", ports["http"])
    role = of_kind(render("-f", str(CHART / "ci/all.yaml")), "Role")["router-sidecar"]
    assert of_kind(documents, "Role")["kvrouter"]["rules"] == role["rules"]


def test_engines_of_pools_can_fetch_blocks_from_each_other(render: Callable[..., Documents]) -> None:
    templates = pods(render(*POOLS))
    roles = {}
    for name in ("router-engine-prefill", "router-engine-decode"):
        (engine,) = templates[name]["spec"]["containers"]
        assert [arg for arg in engine["args"] if arg.startswith("--kv-transfer-config")]
        address = {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        assert address in engine["env"]
        (sidecar,) = templates[name]["spec"]["initContainers"]
        known = {each["name"]: each.get("value") for each in sidecar["env"]}
        roles[known["KVROUTER_ROLE"]] = known["KVROUTER_COMPONENT"]
    assert roles == {"prefill": "prefill", "decode": "decode"}


def test_a_connector_of_the_values_is_the_only_one(render: Callable[..., Documents]) -> None:
    own = '--kv-transfer-config={"kv_connector": "LMCacheConnectorV1"}'
    engines = [{"name": "prefill", "image": "an/engine:1", "role": "prefill", "args": [own]}]
    (engine,) = pods(render(*STORES, "--set-json", f"engines={json.dumps(engines)}"))["router-engine-prefill"]["spec"][
        "containers"
    ]
    assert [arg for arg in engine["args"] if arg.startswith("--kv-transfer-config")] == [own]


def test_missing_stores_are_named(helm: str) -> None:
    assert "nats.url is required" in refusal(helm, "--set", "etcd.endpoints=etcd:2379")
    assert "etcd.endpoints is required" in refusal(helm, "--set", "nats.url=nats://nats:4222")


@pytest.mark.parametrize(
    ("setting", "named"),
    [("frontend.replicas=0", "replicas"), ("fronted.replicas=2", "fronted"), ("frontend.service.type=Strange", "type")],
)
def test_wrong_values_are_refused(helm: str, setting: str, named: str) -> None:
    assert named in refusal(helm, *STORES, "--set", setting)
