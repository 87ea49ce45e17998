"""The manifests and the image: sound by Kubernetes' own schemas, and in agreement with what they mount."""

import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import kubernetes_validate
import pytest
import yaml

from deploy.images.build import IMAGES, version
from quantdrift.cli.config_summary import memory_bytes
from quantdrift.core.config import Config, load
from quantdrift.core.config.schema import MIB
from quantdrift.core.process.run import GRACE_S
from quantdrift.sidecar.state.config import FileWatch
from tests.support.image_root import stages as image_stages
from tests.support.kustomize import Resource, render

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy" / "kubernetes"
VARIANTS = ("central", "istio", "kserve", "relay", "tap")
# preStop.sleep came with the first; the second is the newest that the schemas know.
VERSIONS = ("1.30", "1.37")
_ROLES = {"sidecar": "sidecar", "shadow": "shadow", "monitor": "monitor"}
# Members of an InferenceService's predictor that are no pod's.
_OF_KSERVE = {"labels", "logger", "minReplicas"}


class Pod(NamedTuple):
    """A pod that a manifest asks for."""

    variant: str
    owner: Resource
    metadata: dict[str, Any]
    spec: dict[str, Any]
    config: dict[str, dict[str, str]]

    def containers(self) -> Iterator[dict[str, Any]]:
        """Return every container."""
        yield from self.spec.get("initContainers", [])
        yield from self.spec["containers"]

    def roles(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return our containers that go on running, by what they are."""
        for container in self.containers():
            if container["image"].startswith("quantdrift") and container["args"][0] in _ROLES:
                yield container["args"][0], container


def pods(variant: str) -> Iterator[Pod]:
    """Return the pods of a variant."""
    resources = render(DEPLOY / variant)
    config = {one["metadata"]["name"]: one["data"] for one in resources if one["kind"] == "ConfigMap"}
    for resource in resources:
        if resource["kind"] == "Deployment":
            template = resource["spec"]["template"]
            yield Pod(variant, resource, template["metadata"], template["spec"], config)
        elif resource["kind"] == "InferenceService":
            predictor = resource["spec"]["predictor"]
            spec = {name: value for name, value in predictor.items() if name not in _OF_KSERVE}
            yield Pod(variant, resource, {"labels": predictor.get("labels", {})}, spec, config)


PODS = [pod for variant in VARIANTS for pod in pods(variant)]
OURS = [(pod, role, container) for pod in PODS for role, container in pod.roles()]
every_pod = pytest.mark.parametrize(
    "pod", PODS, ids=lambda pod: f"{pod.variant}-{pod.owner['metadata']['name']}"
)
every_role = pytest.mark.parametrize(
    ("pod", "role", "container"),
    OURS,
    ids=[f"{pod.variant}-{pod.owner['metadata']['name']}-{role}" for pod, role, _ in OURS],
)


def mounted(pod: Pod, container: dict[str, Any], directory: Path) -> Path:
    """Lay the configuration out as the image and the mounts do; return the main file."""
    for name, place in (("quantdrift", "main"), ("quantdrift-models", "models.d")):
        kubelet(directory / place, pod.config[name])
        (mount,) = [
            one for one in container["volumeMounts"] if one["mountPath"] == f"/etc/quantdrift/{place}"
        ]
        (volume,) = [one for one in pod.spec["volumes"] if one["name"] == mount["name"]]
        assert volume["configMap"]["name"] == name
        assert "subPath" not in mount, "a file that is mounted by itself is never updated"
    (directory / "config.toml").symlink_to("main/config.toml")
    return directory / "config.toml"


def kubelet(directory: Path, data: dict[str, str]) -> None:
    """Write a ConfigMap as the kubelet does: a new directory, and one link that is swapped."""
    directory.mkdir(exist_ok=True)
    version = directory / f"..{sum(1 for _ in directory.iterdir())}"
    version.mkdir()
    for name, text in data.items():
        (version / name).write_text(text, encoding="utf-8")
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    new = directory / "..data_tmp"
    new.symlink_to(version.name)
    new.replace(directory / "..data")


def configured(pod: Pod, container: dict[str, Any], directory: Path) -> Config:
    """Return the configuration that a container has, as the product loads it."""
    environment = {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
    return load(mounted(pod, container, directory), environment)


def port_of(address: str) -> int:
    """Return the port of HOST:PORT."""
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_manifest_is_what_kubernetes_takes(variant: str, version: str) -> None:
    """By the published schemas, unknown members refused; of an InferenceService the pod that it makes."""
    for resource in render(DEPLOY / variant):
        if resource["kind"] != "InferenceService":
            kubernetes_validate.validate(resource, version, strict=True)
    for pod in pods(variant):
        if pod.owner["kind"] == "InferenceService":
            made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any", **pod.metadata}}
            kubernetes_validate.validate({**made, "spec": pod.spec}, version, strict=True)


def test_the_schemas_refuse_what_is_wrong() -> None:
    """A misspelt member of a container is found: the check above can fail."""
    (pod,) = pods("relay")
    pod.spec["initContainers"][0]["restartPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolice"):
        kubernetes_validate.validate(pod.owner, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_kustomize_builds_what_is_checked_here(variant: str) -> None:
    """What kubectl makes of a directory is what these tests look at."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    command = [kubectl, "kustomize", str(DEPLOY / variant)]
    built = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def key(resource: Resource) -> tuple[str, str]:
        return resource["kind"], resource["metadata"]["name"]

    assert sorted(yaml.safe_load_all(built), key=key) == sorted(render(DEPLOY / variant), key=key)


@every_role
def test_ports_and_probes_are_those_of_the_configuration(
    pod: Pod, role: str, container: dict[str, Any], tmp_path: Path
) -> None:
    """Probes ask a port that serves their paths, the sidecar's has no other; what the configuration opens is declared."""
    config = configured(pod, container, tmp_path)
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports["quantdrift"] == port_of(getattr(config, role).admin)
    assert getattr(config, role).admin.startswith("0.0.0.0:"), "Prometheus scrapes from outside the pod"
    asked = "quantdrift"
    if role == "sidecar":
        asked = "probes"
        assert ports[asked] == port_of(config.sidecar.probes)
        assert config.sidecar.probes.startswith("0.0.0.0:"), "the kubelet asks from outside the pod"
    for name, path in (("startup", "/readyz"), ("readiness", "/readyz"), ("liveness", "/livez")):
        if name == "startup" and role != "sidecar":
            continue
        assert container[f"{name}Probe"]["httpGet"] == {"path": path, "port": asked}
    if role == "sidecar":
        relay, intake = config.sidecar.listen, config.intake.listen
        declared = {one["containerPort"] for one in pod.spec["containers"][0]["ports"]} | set(ports.values())
        assert not relay or port_of(relay) in declared
        assert ports.get("intake", 0) == (port_of(intake) if intake else 0)


@every_role
def test_memory_is_what_config_check_computes(
    pod: Pod, role: str, container: dict[str, Any], tmp_path: Path
) -> None:
    """Of a sidecar exactly; no role has a CPU limit, which would throttle it."""
    resources = container["resources"]
    assert "cpu" not in resources["limits"]
    if role == "sidecar":
        needed = f"{math.ceil(memory_bytes(configured(pod, container, tmp_path)) / MIB)}Mi"
        assert resources["limits"]["memory"] == resources["requests"]["memory"] == needed


@every_role
def test_there_is_time_to_end(pod: Pod, role: str, container: dict[str, Any], tmp_path: Path) -> None:
    """The pod waits for what ends one after the other: preStop, the server, and then the native sidecar."""
    config = configured(pod, container, tmp_path)
    needed = config.sidecar.grace_s if role == "sidecar" else GRACE_S
    if container.get("restartPolicy") == "Always":
        (server,) = pod.spec["containers"]
        needed += server.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed += 20  # the server's own
    assert pod.spec["terminationGracePeriodSeconds"] >= needed + 5


@every_pod
def test_nothing_runs_with_more_rights_than_it_needs(pod: Pod) -> None:
    """No root, no capability, no escalation, the runtime's system calls; our own file systems cannot be written."""
    shared = pod.spec.get("securityContext", {})
    for container in pod.containers():
        context = {**shared, **container["securityContext"]}
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        if container["image"].startswith("quantdrift"):
            assert (context["runAsNonRoot"], context["readOnlyRootFilesystem"]) == (True, True)
            assert {"name", "mountPath"} <= next(
                mount.keys() for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp"
            )


@every_role
def test_files_that_the_configuration_names_are_mounted(
    pod: Pod, role: str, container: dict[str, Any], tmp_path: Path
) -> None:
    """Each secret that the role reads comes from a volume; the database's address never reaches a sidecar."""
    config = configured(pod, container, tmp_path)
    places = {mount["mountPath"] for mount in container["volumeMounts"]}
    read = [config.stream.credentials_file]
    if role == "sidecar":
        read += [config.capture.hmac_key_file] + [config.intake.token_file] * bool(config.intake.listen)
        read += [config.intake.tap] * bool(config.intake.tap)
        assert "/etc/quantdrift/database" not in places
    else:
        read += [config.storage.dsn_file]
    for path in read:
        assert str(Path(path).parent) in places, path
    secrets = [volume["secret"] for volume in pod.spec["volumes"] if "secret" in volume]
    given = {item["key"] for secret in secrets for item in secret.get("items", [])}
    given |= {one["valueFrom"]["secretKeyRef"]["key"] for one in container.get("env", []) if _is_secret(one)}
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text(encoding="utf-8")
    for key in given | {Path(path).name for path in read if path.startswith("/etc/quantdrift/secrets/")}:
        assert re.search(rf"--from-(literal|file)={re.escape(key)}=", page), f"nobody is told to make {key}"


def _is_secret(variable: dict[str, Any]) -> bool:
    return "secretKeyRef" in variable.get("valueFrom", {})


def test_the_swap_sends_the_service_to_the_relay(tmp_path: Path) -> None:
    """From the server's port to the relay's; afterwards the policy lets nobody round it."""
    (pod,) = pods("relay")
    ((_, container),) = pod.roles()
    config = configured(pod, container, tmp_path)
    relay, backend = port_of(config.sidecar.listen), port_of(config.sidecar.backend)
    before = yaml.safe_load((DEPLOY / "relay" / "service.yaml").read_text())
    (after,) = [one for one in render(DEPLOY / "relay") if one["kind"] == "Service"]
    assert before["spec"]["ports"][0]["targetPort"] == backend
    assert after["spec"]["ports"][0]["targetPort"] == relay
    assert after["spec"]["selector"].items() <= pod.metadata["labels"].items()
    assert [one["containerPort"] for one in pod.spec["containers"][0]["ports"]] == [backend]
    (policy,) = [one for one in render(DEPLOY / "relay") if one["kind"] == "NetworkPolicy"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod.metadata["labels"].items()
    let_in = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert let_in == {relay, port_of(config.sidecar.admin)}


def test_the_central_policies_open_what_is_listened_on() -> None:
    """Each port that a pod of ours declares is reachable for somebody, and no other; the kubelet needs no rule."""
    ports = [one for pod in pods("central") for _, container in pod.roles() for one in container["ports"]]
    declared = {one["containerPort"] for one in ports if one["name"] != "probes"}
    policies = [one for one in render(DEPLOY / "central") if one["kind"] == "NetworkPolicy"]
    rules = [rule for policy in policies for rule in policy["spec"].get("ingress", [])]
    assert {port["port"] for rule in rules for port in rule["ports"]} == declared


def test_the_sidecar_of_a_kserve_pod_is_the_same() -> None:
    """KServe's Service follows the first container's port: there the relay's stands, and nothing else differs."""
    (plain,) = pods("relay")
    ((_, container),) = plain.roles()
    in_kserve, logged = sorted(pods("kserve"), key=lambda pod: pod.owner["metadata"]["name"])
    ((_, copy),) = in_kserve.roles()
    ports = copy.pop("ports")
    assert ports == [port for port in container.pop("ports") if port["name"] != "relay"]
    assert copy == container
    assert in_kserve.spec["volumes"] == plain.spec["volumes"]
    assert in_kserve.spec["containers"][0]["ports"][0]["containerPort"] == 9000
    assert list(logged.roles()) == []


def test_the_logger_sends_both_halves_to_the_intake(tmp_path: Path) -> None:
    """To the Service and the port that the central manifests make, with a token; one client's events go to one pod."""
    (logged,) = [one for one in render(DEPLOY / "kserve") if one["metadata"]["name"] == "digits-logged"]
    logger = logged["spec"]["predictor"]["logger"]
    (service,) = [one for one in render(DEPLOY / "central") if one["kind"] == "Service"]
    name = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert logger["url"] == f"http://{name}:{service['spec']['ports'][0]['port']}/kserve/TOKEN"
    assert logger["mode"] == "all"
    assert service["spec"]["sessionAffinity"] == "ClientIP"
    (intake,) = [pod for pod in pods("central") if pod.owner["metadata"]["name"] == "quantdrift-intake"]
    ((_, container),) = intake.roles()
    config = configured(intake, container, tmp_path)
    assert config.intake.kserve_logger
    assert config.intake.token_file


def test_server_and_sidecar_meet_at_the_taps_socket(tmp_path: Path) -> None:
    """One volume, one path, and a group that both are in."""
    (pod,) = pods("tap")
    ((_, container),) = pod.roles()
    config = configured(pod, container, tmp_path)
    (server,) = pod.spec["containers"]
    assert {"name": "QUANTDRIFT_TAP", "value": config.intake.tap} in server["env"]
    shared = [{"name": "quantdrift-tap", "mountPath": str(Path(config.intake.tap).parent)}]
    for one in (server, container):
        assert [mount for mount in one["volumeMounts"] if mount["name"] == "quantdrift-tap"] == shared
    assert pod.spec["securityContext"]["fsGroup"] == container["securityContext"]["runAsGroup"]
    assert config.sidecar.listen == ""


def test_istio_leaves_metrics_and_nats_alone(tmp_path: Path) -> None:
    """The ports in the annotations are the configuration's."""
    (pod,) = pods("istio")
    ((_, container),) = pod.roles()
    config = configured(pod, container, tmp_path)
    told = pod.metadata["annotations"]
    inbound, outbound = (f"traffic.sidecar.istio.io/exclude{way}Ports" for way in ("Inbound", "Outbound"))
    assert told == {
        inbound: f"{port_of(config.sidecar.probes)},{port_of(config.sidecar.admin)}",
        outbound: str(port_of(config.stream.address)),
    }


def test_an_updated_configmap_is_seen_through_the_images_links(tmp_path: Path) -> None:
    """The main file, a changed model and a new one, each swapped as the kubelet does, without a restart."""
    (pod,) = pods("relay")
    ((_, container),) = pod.roles()
    path = mounted(pod, container, tmp_path)
    watch = FileWatch(path)
    models = pod.config["quantdrift-models"]

    def seen() -> Config:
        assert watch.poll() is None, "files must rest for one look"
        found = watch.poll()
        assert found is not None
        return found

    changed = pod.config["quantdrift"]["config.toml"].replace("\nrate = 0.05\n", "\nrate = 0.25\n")
    kubelet(tmp_path / "main", {"config.toml": changed})
    assert seen().sampling.rate == 0.25
    kubelet(tmp_path / "models.d", {**models, "text.toml": '[[models]]\nname = "text"\n'})
    assert [model.name for model in seen().models] == ["digits", "text"]
    assert watch.poll() is None


def test_the_images_hold_what_the_manifests_ask_for() -> None:
    """Every image that a manifest names is built, its tag is the version, and each mount point is there."""
    stages = image_stages()
    built = {f"{image.name}:{version()}": target for target, image in IMAGES.items()}
    for pod in PODS:
        for container in pod.containers():
            image = container["image"]
            if image.startswith("quantdrift"):
                lines = stages[built[image]]
                (made,) = [line for line in stages["root"] if "mkdir -p" in line]
                assert 'ENTRYPOINT ["quantdrift"]' in lines
                for mount in container["volumeMounts"]:
                    assert mount["mountPath"] == "/tmp" or f"{mount['mountPath']} " in made, (
                        pod.variant,
                        mount,
                    )
    for pod, role, container in OURS:
        name = container["image"].partition(":")[0]
        # Envoy's external processing needs gRPC, which the image of the sidecar has not.
        assert name == f"quantdrift-{role}" or (role, name) == ("sidecar", "quantdrift-monitor"), pod.variant
