"""Files of deploy/ hold what they must, as the tools that read them would see it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"

yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifests")
if not DEPLOY.is_dir():
    pytest.skip("not in the repository", allow_module_level=True)


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    text = (DEPLOY / "kubernetes" / "daemonset.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_the_agent_asks_the_cluster_nothing(manifests: dict[str, Any]) -> None:
    assert set(manifests) == {"Namespace", "ConfigMap", "DaemonSet"}, "no roles"
    pod = manifests["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert not pod.get("hostNetwork") and not pod.get("hostPID")


def test_the_container_has_no_privilege(manifests: dict[str, Any]) -> None:
    pod = manifests["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    (container,) = pod["containers"]
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"]["drop"] == ["ALL"]


def test_probes_ask_what_nobody_can_block(manifests: dict[str, Any]) -> None:
    (container,) = manifests["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = {"path": "/healthz", "port": port["name"], "scheme": "HTTPS"}
        assert container[probe]["httpGet"] == asked, probe


def test_what_is_mounted_is_what_is_configured(manifests: dict[str, Any]) -> None:
    spec = manifests["DaemonSet"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == volumes
    config = tomllib.loads(manifests["ConfigMap"]["data"]["forebay.toml"])
    agent = config["agent"]
    paths = [tier["place"] for tier in config["tier"] if "://" not in tier["place"]]
    paths += [agent[key] for key in agent if key != "listen"] + [config["tiers"]["audit_log"]]
    for path in paths:
        assert any(path.startswith(mount + "/") for mount in mounts), path
    for path in [config["tiers"]["audit_log"], agent["socket"]]:
        mount = next(mount for at, mount in mounts.items() if path.startswith(at + "/"))
        assert not mount.get("readOnly"), path
    (port,) = container["ports"]
    assert agent["listen"].endswith(f":{port['containerPort']}")
    secrets = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert all(secret["defaultMode"] & 0o037 == 0 for secret in secrets)
