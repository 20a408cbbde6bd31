"""The Helm chart, rendered by Helm itself, against Kubernetes' schemas and our own settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from kvshuttle.controlplane.settings import Settings
from kvshuttle.gateway import GatewaySettings
from kvshuttle.v1 import types_pb2 as types
from tests.unit.deploy.agents import DEPLOY, checked

CHART = DEPLOY / "helm/kvshuttle"
# The oldest that Chart.yaml takes, and the newest whose schemas are here.
VERSIONS = ("1.29", ".".join(kubernetes_validate.latest_version().split(".")[:2]))
# Of cert-manager and the Prometheus operator: no schemas of theirs are here.
FOREIGN = {"Issuer", "Certificate", "PodMonitor", "PrometheusRule"}


def values(name: str) -> dict[str, Any]:
    if name == "defaults":
        return {}
    loaded: dict[str, Any] = yaml.safe_load((CHART / f"ci/{name}-values.yaml").read_text())
    return loaded


def render(given: dict[str, Any]) -> list[dict[str, Any]]:
    """All objects, as `helm template kvs . --namespace kv` would print them."""
    chart = helm_python.Chart.load(CHART)
    try:
        found = chart.render(given, name="kvs", namespace="kv")
    finally:
        chart.close()
    return [one for text in found.values() for one in yaml.safe_load_all(text) if one]


def named(objects: list[dict[str, Any]], kind: str, tail: str) -> dict[str, Any]:
    (found,) = (
        one
        for one in objects
        if one["kind"] == kind and one["metadata"]["name"] == f"kvs-kvshuttle-{tail}"
    )
    return found


def container(objects: list[dict[str, Any]], kind: str, tail: str) -> dict[str, Any]:
    spec = named(objects, kind, tail)["spec"]["template"]["spec"]
    (found,) = spec["containers"]
    result: dict[str, Any] = found
    return result


@pytest.mark.parametrize("name", ["defaults", "engines"])
def test_helm_finds_nothing_wrong(name: str) -> None:
    found = helm_python.lint(CHART, values(name), strict=True, namespace="kv")
    assert found["errors"] == []
    assert [m for m in found["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["defaults", "engines"])
def test_kubernetes_takes_every_object(name: str, version: str) -> None:
    objects = render(values(name))
    assert len({(one["kind"], one["metadata"]["name"]) for one in objects}) == len(objects)
    for one in objects:
        assert len(one["metadata"]["name"]) <= 63
        if one["kind"] not in FOREIGN:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("name", ["defaults", "engines"])
def test_our_settings_are_taken(name: str) -> None:
    objects = render(values(name))
    data = named(objects, "ConfigMap", "controlplane")["data"]["controlplane.yaml"]
    settings = Settings(**yaml.safe_load(data))
    assert settings.store_file() == Path("/var/lib/kvshuttle/controlplane.db")
    gateway = named(objects, "ConfigMap", "gateway")["data"]["gateway.yaml"]
    loaded = GatewaySettings(**yaml.safe_load(gateway))
    assert loaded.control_plane == "kvs-kvshuttle-controlplane.kv.svc:7400"
    assert loaded.insecure_no_auth == (name == "defaults")


def test_the_agents_configuration_is_taken(tmp_path: Path) -> None:
    objects = render(values("engines"))
    for worker, role, gpus in (
        ("prefill-0", types.WORKER_ROLE_PREFILL, 8),
        ("prefill-1", types.WORKER_ROLE_PREFILL, 8),
        ("decode-0", types.WORKER_ROLE_DECODE, 4),
    ):
        engine = container(objects, "StatefulSet", worker)
        arguments = engine["args"]
        config = checked(arguments[arguments.index("--kv-transfer-config") + 1], tmp_path)
        assert (config.worker_id, config.role) == (worker, role)
        assert config.control_plane == "kvs-kvshuttle-controlplane.kv.svc:7401"
        assert config.url == f"http://kvs-kvshuttle-{worker}.kv.svc:8000"
        assert config.nixl_backend == "LIBFABRIC"
        assert engine["resources"]["limits"]["nvidia.com/gpu"] == gpus
        assert engine["resources"]["limits"]["vpc.amazonaws.com/efa"] == 32
        # Who it is, as its certificate says.
        certificate = named(objects, "Certificate", worker)["spec"]
        assert certificate["uris"] == [f"kvshuttle://worker/{worker}"]
    assert "--max-num-batched-tokens=8192" in container(objects, "StatefulSet", "prefill-1")["args"]


def test_certificates_name_the_control_plane_as_its_callers_do() -> None:
    objects = render(values("engines"))
    names = named(objects, "Certificate", "controlplane")["spec"]["dnsNames"]
    assert "kvs-kvshuttle-controlplane.kv.svc" in names
    secrets = {one["spec"]["secretName"] for one in objects if one["kind"] == "Certificate"} | {
        "kvshuttle-api-keys"
    }
    for one in objects:
        if one["kind"] in ("StatefulSet", "Deployment"):
            for volume in one["spec"]["template"]["spec"]["volumes"]:
                if "secret" in volume:
                    assert volume["secret"]["secretName"] in secrets


def test_an_issuer_of_ones_own_makes_all_certificates() -> None:
    reference = {"name": "company", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    objects = render({"certificates": {"issuerRef": reference}})
    assert [one for one in objects if one["kind"] == "Issuer"] == []
    found = [one["spec"]["issuerRef"] for one in objects if one["kind"] == "Certificate"]
    assert found == [reference] * 3


@pytest.mark.parametrize("name", ["defaults", "engines"])
def test_traces_are_on_everywhere_or_nowhere(name: str, tmp_path: Path) -> None:
    objects = render(values(name))
    on = name == "engines"
    for one in ("controlplane", "gateway"):
        data = named(objects, "ConfigMap", one)["data"][f"{one}.yaml"]
        assert yaml.safe_load(data).get("traces", False) == on
    kinds = {"controlplane": "StatefulSet", "gateway": "Deployment"}
    if on:
        kinds["prefill-0"] = "StatefulSet"
        arguments = container(objects, "StatefulSet", "prefill-0")["args"]
        transfer = arguments[arguments.index("--kv-transfer-config") + 1]
        assert checked(transfer, tmp_path).traces
    for tail, kind in kinds.items():
        env = {one["name"] for one in container(objects, kind, tail).get("env", ())}
        assert ({"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER_ARG"} <= env) == on


def test_there_is_one_control_plane_and_one_process_a_worker() -> None:
    for one in render(values("engines")):
        if one["kind"] == "StatefulSet":
            assert one["spec"]["replicas"] == 1


def test_the_alerts_are_the_ones_of_deploy_prometheus() -> None:
    objects = render(values("engines"))
    (rules,) = (one["spec"] for one in objects if one["kind"] == "PrometheusRule")
    assert rules == yaml.safe_load((DEPLOY / "prometheus/kvshuttle-alerts.yaml").read_text())
    jobs = {
        endpoint["relabelings"][0]["replacement"]
        for one in objects
        if one["kind"] == "PodMonitor"
        for endpoint in one["spec"]["podMetricsEndpoints"]
    }
    assert jobs == {"kvshuttle-controlplane", "kvshuttle-gateway"}


def test_the_dashboards_are_the_ones_of_deploy_grafana() -> None:
    maps = [
        one
        for one in render(values("engines"))
        if one["kind"] == "ConfigMap" and one["metadata"]["labels"].get("grafana_dashboard") == "1"
    ]
    found = {name: json.loads(text) for one in maps for name, text in one["data"].items()}
    shipped = sorted((DEPLOY / "grafana").glob("*.json"))
    assert found == {f"kvshuttle-{path.name}": json.loads(path.read_text()) for path in shipped}
    assert len(maps) == len(shipped) == 4


def test_engines_are_reached_by_gateways_and_by_each_other_alone() -> None:
    objects = render(values("engines"))
    rules = named(objects, "NetworkPolicy", "engines")["spec"]["ingress"]
    among, others = rules
    assert "ports" not in among
    (peer,) = among["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "engine"
    assert others["ports"] == [{"port": "http"}]
    controlplane = named(objects, "NetworkPolicy", "controlplane")["spec"]["ingress"]
    for rule in controlplane:
        assert rule["from"], "open to everybody"


@pytest.mark.parametrize(
    "given",
    [
        {"engines": [{"name": "x", "role": "decoder"}]},
        {"controlPlane": {"settings": {"store": "memory"}}},
        {"gateway": {"settings": {"port": 1}}},
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=r"use prefill|set by the chart"):
        render(given)
