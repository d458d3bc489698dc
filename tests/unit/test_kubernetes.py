"""The Kubernetes manifests fit the schemas, each other, and the settings and metrics of the program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes_validate
import pytest
import yaml

from command_line import ROLES
from kvrelay.core.settings import load
from repo import ROOT

FOLDER = ROOT / "kubernetes"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
VERSIONS = ("1.29", "1.33")
WORKLOADS = {"Deployment", "StatefulSet"}
Manifest = Mapping[str, Any]


def manifests() -> list[Manifest]:
    return [one for path in FILES for one in yaml.safe_load_all(path.read_text())]


ALL = manifests()
NAMED = {(one["kind"], one["metadata"]["name"]): one for one in ALL}
KEYS = [f"{kind}/{name}" for kind, name in NAMED]


def of(*kinds: str) -> Iterator[Manifest]:
    return (one for one in ALL if one["kind"] in kinds)


def pod_of(workload: Manifest) -> Manifest:
    template: Manifest = workload["spec"]["template"]
    return template


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", ALL, ids=KEYS)
def test_every_manifest_fits_the_schema(manifest: Manifest, version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_a_manifest_that_is_wrong_does_not_fit_the_schema() -> None:
    wrong = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_kustomization_names_every_file() -> None:
    told = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert sorted(told["resources"]) == [path.name for path in FILES]


def test_prefill_and_decode_scale_apart() -> None:
    targets = {
        one["spec"]["scaleTargetRef"]["name"]: one["spec"]["scaleTargetRef"] for one in of("HorizontalPodAutoscaler")
    }
    assert set(targets) == {"kvrelay-prefill", "kvrelay-decode"}
    for name, target in targets.items():
        # A fixed number of replicas would undo the autoscaler's at each apply.
        assert "replicas" not in NAMED[target["kind"], name]["spec"]


def test_autoscalers_use_metrics_that_exist() -> None:
    documented = (ROOT / "docs" / "operations.md").read_text()
    for one in of("HorizontalPodAutoscaler"):
        for metric in one["spec"]["metrics"]:
            name = metric[metric["type"].lower()]["metric"]["name"]
            assert f"`{name}" in documented, name


@pytest.mark.parametrize("selector", [(one, "selector") for one in of("PodDisruptionBudget", "Service")])
def test_selectors_choose_the_pods_of_one_workload(selector: tuple[Manifest, str]) -> None:
    spec = selector[0]["spec"]["selector"]
    labels = spec.get("matchLabels", spec)
    chosen = [one for one in of(*WORKLOADS) if labels.items() <= pod_of(one)["metadata"]["labels"].items()]
    assert [one["metadata"]["name"] for one in chosen] == [selector[0]["metadata"]["name"]]


def test_every_role_has_a_disruption_budget() -> None:
    assert {name for kind, name in NAMED if kind == "PodDisruptionBudget"} == {f"kvrelay-{role}" for role in ROLES}


@pytest.mark.parametrize("role", ROLES)
def test_settings_are_ones_that_exist_and_ports_agree(role: str) -> None:
    workload = next(one for one in of(*WORKLOADS) if one["metadata"]["name"] == f"kvrelay-{role}")
    (container,) = pod_of(workload)["spec"]["containers"]
    environ = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert container["args"] == [role]
    words = [
        word for name, value in environ.items()
        for word in ("--" + name.removeprefix(f"KVRELAY_{role.upper()}_").lower().replace("_", "-"), value)
    ]  # fmt: skip
    settings = load(ROLES[role], words, prog=role, environ=environ)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert settings.listen == f"0.0.0.0:{ports['grpc']}"
    assert settings.metrics_listen == f"0.0.0.0:{ports['metrics']}"
    assert container["readinessProbe"]["grpc"]["port"] == ports["grpc"]
    service = NAMED["Service", f"kvrelay-{role}"]
    assert [port["port"] for port in service["spec"]["ports"]] == [ports["grpc"]]


@pytest.mark.parametrize("workload", list(of(*WORKLOADS)), ids=lambda one: one["metadata"]["name"])
def test_pods_run_without_rights(workload: Manifest) -> None:
    spec = pod_of(workload)["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    for container in spec["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]


def test_pods_may_finish_what_they_stream() -> None:
    for role in ROLES:
        workload = next(one for one in of(*WORKLOADS) if one["metadata"]["name"] == f"kvrelay-{role}")
        grace_s = pod_of(workload)["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > ROLES[role].model_fields["max_request_s"].default
