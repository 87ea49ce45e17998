"""The Helm chart, rendered by Helm's own library: the same resources as the kustomizations, and what a user chooses in them."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.helm.chart import CHART, OPTIONAL, ROOT
from deploy.kustomize import Resource, render
from quantdrift.core.stream.connection import durable_name
from quantdrift.core.stream.subjects import subject_token
from quantdrift.init.deployment import helm_values
from tests.servers.environment import Environment, environment

pytestmark = pytest.mark.servers

KUBERNETES = ROOT / "deploy/kubernetes"
EVERYTHING = {name: {"enabled": True} for name in OPTIONAL}


@pytest.fixture(scope="module")
def helm() -> Environment:
    """Return an environment with Helm's library."""
    return environment("helm")


def _rendered(helm: Environment, chart: Path, *values: dict[str, Any]) -> list[list[Resource]]:
    """Return the resources for each of some values; none may be refused."""
    answers = _answers(helm, chart, *values)["answers"]
    assert not [answer["refused"] for answer in answers if answer["refused"]]
    return [
        [
            resource
            for text in answer["rendered"].values()
            for resource in yaml.safe_load_all(text)
            if resource is not None
        ]
        for answer in answers
    ]


def _answers(helm: Environment, chart: Path, *values: dict[str, Any]) -> Any:
    return helm.run(helm.script("render.py"), str(chart), *map(json.dumps, values))


def _by_identity(resources: list[Resource]) -> dict[tuple[str, str], Resource]:
    found = {(resource["kind"], resource["metadata"]["name"]): resource for resource in resources}
    assert len(found) == len(resources)
    return found


def _of_kustomize(*variants: str) -> dict[tuple[str, str], Resource]:
    resources = [resource for variant in variants for resource in render(KUBERNETES / variant)]
    return {
        (resource["kind"], resource["metadata"]["name"]): resource
        for resource in resources
        if resource["kind"] != "Namespace"  # Helm makes it with --create-namespace
    }


def _without_additions(resources: dict[tuple[str, str], Resource]) -> dict[tuple[str, str], Resource]:
    """Return them without what only a chart has: the number of the revision, and what rolls pods when the configuration changes."""
    plain = copy.deepcopy(resources)
    job = plain.pop(("Job", "quantdrift-migrate-3"))
    job["metadata"]["name"] = "quantdrift-migrate"
    plain["Job", "quantdrift-migrate"] = job
    for name in ("quantdrift-monitor", "quantdrift-shadow"):
        metadata = plain["Deployment", name]["spec"]["template"]["metadata"]
        assert set(metadata.pop("annotations")) == {"checksum/config"}
    return plain


def test_the_chart_is_what_the_kustomizations_render(helm: Environment) -> None:
    """By default `central` with the migration, and with every part on `everything`; Helm finds nothing wrong with it."""
    chart = ROOT / CHART
    assert _answers(helm, chart)["lint"] == ["icon is recommended"]
    plain, everything = _rendered(helm, chart, {}, EVERYTHING)
    assert _without_additions(_by_identity(plain)) == _of_kustomize("central", "migrate")
    assert _without_additions(_by_identity(everything)) == _of_kustomize("everything", "migrate")


def test_what_a_user_chooses_is_in_the_pods(helm: Environment) -> None:
    """Registry, tag and digest, Secrets, namespaces, claim, resources, configuration and models; a changed one rolls the pods."""
    models = {"a.toml": '[[models]]\nname = "digits"\n[[models]]\nname = "v2.int8 of/all"\n'}
    chosen = {
        "images": {"registry": "registry.example.com/ml", "tag": "2", "digests": {"shadow": "sha256:abc"}},
        "imagePullSecrets": [{"name": "pull"}],
        "secrets": {"monitor": "vault-monitor"},
        "ca": "own-ca",
        "namespaces": {"nats": "messaging"},
        "references": {"claim": "files"},
        "shadow": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
        "config": "[sampling]\nrate = 0.5\n",
        "models": models,
        "scaling": {"enabled": True, "maxReplicas": 3},
    }
    plain, other = map(_by_identity, _rendered(helm, ROOT / CHART, {}, chosen))
    monitor, shadow = (
        other["Deployment", f"quantdrift-{role}"]["spec"]["template"] for role in ("monitor", "shadow")
    )
    (container,) = monitor["spec"]["containers"]
    assert container["image"] == "registry.example.com/ml/quantdrift-monitor:2"
    assert monitor["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    sources = next(v for v in monitor["spec"]["volumes"] if v["name"] == "secrets")["projected"]["sources"]
    assert [next(iter(source.values()))["name"] for source in sources] == ["vault-monitor", "own-ca"]
    (container,) = shadow["spec"]["containers"]
    assert container["image"] == "registry.example.com/ml/quantdrift-shadow@sha256:abc"
    assert container["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": 1}
    claim = next(v for v in shadow["spec"]["volumes"] if v["name"] == "references")
    assert claim["persistentVolumeClaim"]["claimName"] == "files"
    assert "messaging" in str(other["NetworkPolicy", "quantdrift-shadow"])
    assert other["ConfigMap", "quantdrift"]["data"] == {"config.toml": "[sampling]\nrate = 0.5\n"}
    assert other["ConfigMap", "quantdrift-models"]["data"] == models
    before = plain["Deployment", "quantdrift-shadow"]["spec"]["template"]["metadata"]["annotations"]
    assert before != shadow["metadata"]["annotations"]
    scaled = other["ScaledObject", "quantdrift-shadow"]["spec"]
    assert scaled["maxReplicaCount"] == 3
    assert [trigger["metadata"]["consumer"] for trigger in scaled["triggers"]] == [
        durable_name(f"quantdrift.exchange.{subject_token(name)}") for name in ("digits", "v2.int8 of/all")
    ]


def test_one_trigger_for_all_models_asks_prometheus(helm: Environment) -> None:
    """A new model then needs no trigger; the query is the one that the tests of the rules ask."""
    scaling = {"enabled": True, "prometheus": "http://prometheus.example:9090", "lagThreshold": "500"}
    (resources,) = map(_by_identity, _rendered(helm, ROOT / CHART, {"scaling": scaling}))
    (trigger,) = resources["ScaledObject", "quantdrift-shadow"]["spec"]["triggers"]
    assert trigger["type"] == "prometheus"
    query = trigger["metadata"].pop("query")
    assert trigger["metadata"] == {"serverAddress": "http://prometheus.example:9090", "threshold": "500"}
    assert query in (ROOT / "deploy/prometheus/tests/rules.yaml").read_text(encoding="utf-8")
    assert query in (ROOT / "docs/how-to/kubernetes.md").read_text(encoding="utf-8")


def test_values_of_init_render_the_pods_of_the_default(helm: Environment) -> None:
    """What `quantdrift init --kubernetes` writes changes the ConfigMaps, and what rolls pods when they change."""
    document = {"sidecar": {"backend": "127.0.0.1:8001"}, "models": [{"name": "digits"}]}
    values = yaml.safe_load(helm_values(document, memory_bytes=256 * 2**20).text)
    plain, other = map(_by_identity, _rendered(helm, ROOT / CHART, {}, values))
    for name, key in (("quantdrift", "config"), ("quantdrift-models", "models")):
        data = other.pop(("ConfigMap", name))["data"]
        assert data == ({"config.toml": values[key]} if key == "config" else values[key])
        del plain["ConfigMap", name]
    assert _without_additions(other) == _without_additions(plain)


def test_an_unknown_value_is_refused(helm: Environment) -> None:
    """A typing error would else be a default."""
    wrong: list[dict[str, Any]] = [
        {"image": {}},
        {"monitor": {"replica": 2}},
        {"shadow": {"replicas": "many"}},
    ]
    answers = _answers(helm, ROOT / CHART, *wrong)["answers"]
    for answer, name in zip(answers, ("image", "replica", "replicas"), strict=True):
        assert name in answer["refused"]


def test_a_chart_of_a_model_server_takes_the_sidecar_from_it(helm: Environment, tmp_path: Path) -> None:
    """As a dependency it gives the ConfigMaps, the container and its volumes, which are those of the kustomization."""
    directory = tmp_path / "digits"
    (directory / "templates").mkdir(parents=True)
    shutil.copytree(ROOT / CHART, directory / "charts/quantdrift")
    (directory / "Chart.yaml").write_text(
        "apiVersion: v2\nname: digits\nversion: 1.0.0\ndependencies:\n  - {name: quantdrift, version: '>=0.0.0-0'}\n"
    )
    (directory / "values.yaml").write_text("quantdrift:\n  central: {enabled: false}\n")
    (directory / "templates/pod.yaml").write_text(
        "kind: Deployment\nmetadata: {name: digits}\nspec:\n"
        '  initContainers: {{- include "quantdrift.sidecar.container" .Subcharts.quantdrift | nindent 4 }}\n'
        '  volumes: {{- include "quantdrift.sidecar.volumes" .Subcharts.quantdrift | nindent 4 }}\n'
    )
    (resources,) = map(_by_identity, _rendered(helm, directory, {}))
    pod = resources.pop(("Deployment", "digits"))["spec"]
    assert set(resources) == {("ConfigMap", "quantdrift"), ("ConfigMap", "quantdrift-models")}
    (patch,) = yaml.safe_load_all((KUBERNETES / "sidecar/sidecar.yaml").read_text(encoding="utf-8"))
    wanted = patch["spec"]["template"]["spec"]
    assert pod == {name: wanted[name] for name in ("initContainers", "volumes")}
