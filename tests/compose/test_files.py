"""The compose files as docker-compose reads them; needs no Docker engine."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from compose.containers import FILE, compose
from repo import ROOT

pytestmark = pytest.mark.skipif(shutil.which("docker-compose") is None, reason="no docker-compose here")
RDMA = ROOT / "compose" / "rdma.yml"
SECURE = ROOT / "compose" / "secure.yml"
ENVIRON = {"KVRELAY_MODEL": "/models/m"}


@cache  # each takes the command a second or more
def config(*words: str, files: tuple[Path, ...] = (FILE,), **environ: str) -> dict[str, Any]:
    found = yaml.safe_load(compose({**ENVIRON, **environ}, *words, "config", files=files))
    services: dict[str, Any] = found["services"]
    return services


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_profile_holds_every_role(profile: str) -> None:
    names = {name for name, service in config().items() if profile in service["profiles"]}
    suffix = "-gpu" if profile == "gpu" else ""

    assert names == {"redis", "router", f"prefill{suffix}", f"decode{suffix}", "prometheus", "grafana"}


def test_every_gpu_service_is_given_devices() -> None:
    for name in ("prefill-gpu", "decode-gpu"):
        service = config("--profile", "gpu")[name]
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        own = service["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
        assert set(own) <= set(devices["device_ids"]), name


def test_nodes_of_a_host_see_each_others_memory() -> None:
    for name in ("prefill", "decode", "prefill-gpu", "decode-gpu"):
        service = config()[name]
        assert (service["pid"], service["ipc"], service["ulimits"]["memlock"]) == ("host", "host", -1)


def test_nodes_of_both_roles_keep_their_latents_in_one_format() -> None:
    for services, wanted in ((config(), "model"), (config(KVRELAY_LATENT_FORMAT="fp8"), "fp8")):
        for role in ("prefill", "decode", "prefill-gpu", "decode-gpu"):
            name = role.removesuffix("-gpu").upper()
            assert services[role]["environment"][f"KVRELAY_{name}_LATENT_FORMAT"] == wanted


def test_every_role_speaks_tls_in_secure_mode() -> None:
    services = config(files=(FILE, SECURE), KVRELAY_CERTS="/certs")
    for role in ("router", "prefill", "decode", "prefill-gpu", "decode-gpu"):
        name = role.removesuffix("-gpu").upper()
        assert services[role]["environment"][f"KVRELAY_{name}_TLS_CA"] == "/certs/ca.pem"
        assert "--tls-ca=/certs/ca.pem" in services[role]["healthcheck"]["test"]


def test_rdma_devices_are_added_by_a_file_of_their_own() -> None:
    for name in ("prefill-gpu", "decode-gpu"):
        assert "devices" not in config()[name]
        assert "/dev/infiniband" in json.dumps(config(files=(FILE, RDMA))[name]["devices"])


def test_nothing_keeps_a_service_from_being_scaled() -> None:
    for name, service in config().items():
        assert "container_name" not in service, name


def test_containers_run_without_privileges() -> None:
    for name, service in config().items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
