"""The manifests and the image: sound by Kubernetes' own schemas, and in agreement with what they mount."""

import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml

from deploy.images.build import IMAGES, version
from deploy.kustomize import Resource, documents, render
from quantdrift.cli.config_summary import memory_bytes
from quantdrift.core.config import Config, load
from quantdrift.core.config.schema import MIB
from quantdrift.core.config.web import ANYBODY, is_open, web_problems
from quantdrift.core.process.run import GRACE_S
from quantdrift.sidecar.state.config import FileWatch
from tests.support import custom_resources
from tests.support.image_root import stages as image_stages

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy" / "kubernetes"
VARIANTS = ("central", "envoy", "everything", "istio", "kserve", "migrate", "relay", "tap")
# preStop.sleep came with the first; the second is the newest that the schemas know.
VERSIONS = ("1.30", "1.37")
_ROLES = {"sidecar": "sidecar", "shadow": "shadow", "monitor": "monitor"}
# Members of an InferenceService's predictor that are no pod's.
_OF_KSERVE = {"labels", "logger", "minReplicas"}
_TEMPLATES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "Deployment": lambda spec: spec["template"],
    "Job": lambda spec: spec["template"],
    "CronJob": lambda spec: spec["jobTemplate"]["spec"]["template"],
    "InferenceService": lambda spec: {
        "metadata": {"labels": spec["predictor"].get("labels", {})},
        "spec": {name: value for name, value in spec["predictor"].items() if name not in _OF_KSERVE},
    },
}


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
        if resource["kind"] in _TEMPLATES:
            template = _TEMPLATES[resource["kind"]](resource["spec"])
            metadata = template["metadata"]
            if resource["kind"] == "InferenceService":
                labels = {"serving.kserve.io/inferenceservice": resource["metadata"]["name"]}
                metadata = {"labels": {**labels, **metadata["labels"]}}
            yield Pod(variant, resource, metadata, template["spec"], config)


PODS = [pod for variant in VARIANTS for pod in pods(variant)]
SERVING = [
    pod
    for pod in PODS
    if len(list(pod.containers())) > 1 and any(role == "sidecar" for role, _ in pod.roles())
]
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


def of_kind(variant: str, kind: str) -> list[Resource]:
    """Return the resources of one kind of a variant."""
    return [one for one in render(DEPLOY / variant) if one["kind"] == kind]


def port_of(address: str) -> int:
    """Return the port of HOST:PORT."""
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize(
    "version",
    [*(pytest.param(version, marks=pytest.mark.release) for version in VERSIONS[:-1]), VERSIONS[-1]],
)
def test_every_manifest_is_what_kubernetes_takes(version: str) -> None:
    """By the published schemas, or our models of custom resources, unknown members refused; and an InferenceService's pod."""
    import kubernetes_validate  # 3 s of processor time

    resources = [one for variant in VARIANTS for one in render(DEPLOY / variant)]
    for pod in PODS:
        if pod.owner["kind"] == "InferenceService":
            made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any", **pod.metadata}}
            resources.append({**made, "spec": pod.spec})
    # Variants share many: a schema is slow.
    for resource in {msgspec.json.encode(one): one for one in resources}.values():
        if resource["kind"] in custom_resources.KINDS:
            custom_resources.read(resource)
        else:
            kubernetes_validate.validate(resource, version, strict=True)


def test_the_schemas_refuse_what_is_wrong() -> None:
    """A misspelt member of a container is found: the check above can fail."""
    import kubernetes_validate

    (pod,) = pods("relay")
    pod.spec["initContainers"][0]["restartPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolice"):
        kubernetes_validate.validate(pod.owner, VERSIONS[-1], strict=True)
    (scaled,) = of_kind("everything", "ScaledObject")
    scaled["spec"]["triggers"][0]["metadata"]["lagTreshold"] = "1"
    with pytest.raises(msgspec.ValidationError, match="lagTreshold"):
        custom_resources.read(scaled)


@pytest.mark.parametrize("variant", VARIANTS)
def test_kustomize_builds_what_is_checked_here(variant: str) -> None:
    """What kubectl makes of a directory is what these tests look at."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    command = [kubectl, "kustomize", str(DEPLOY / variant)]
    built = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def key(resource: Resource) -> tuple[str, str, str]:
        metadata = resource["metadata"]
        return resource["kind"], metadata.get("namespace", ""), metadata["name"]

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
    """The limit of a sidecar exactly, which asks for what it uses; a shadow has twice the bound of its references. No role has a CPU limit, which would throttle it."""
    resources = container["resources"]
    config = configured(pod, container, tmp_path)
    assert "cpu" not in resources["limits"]
    if role == "sidecar":
        assert resources["requests"]["memory"] == "160Mi"
        assert resources["limits"]["memory"] == f"{math.ceil(memory_bytes(config) / MIB)}Mi"
    else:
        assert resources["limits"]["memory"] == resources["requests"]["memory"]
    if role == "shadow":
        bound = config.shadow.reference_memory_bytes
        assert resources["limits"]["memory"] == f"{2 * bound // (1024 * MIB)}Gi"


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
def test_every_pod_meets_the_restricted_standard(pod: Pod) -> None:
    """No root, capability, escalation, host, token or unusual volume; our own file systems cannot be written."""
    shared = pod.spec.get("securityContext", {})
    assert pod.spec["automountServiceAccountToken"] is False
    assert not pod.spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
    for volume in pod.spec.get("volumes", []):
        (kind,) = volume.keys() - {"name"}
        assert kind in {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    for container in pod.containers():
        context = {**shared, **container["securityContext"]}
        assert context["runAsNonRoot"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context.get("runAsUser", 65532) != 0
        assert not context.keys() & {"privileged", "procMount", "seLinuxOptions"}
        assert not any("hostPort" in port for port in container.get("ports", []))
        if container["image"].startswith("quantdrift"):
            assert context["readOnlyRootFilesystem"] is True
            assert {"name", "mountPath"} <= next(
                mount.keys() for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp"
            )


@every_pod
def test_every_container_is_bounded_and_every_server_is_probed(pod: Pod) -> None:
    """A request and a limit of memory, a request of processor time, and for what goes on running a readiness probe."""
    for container in pod.containers():
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert "memory" in resources["limits"]
    if pod.owner["kind"] not in {"Job", "CronJob"}:
        running = [*pod.spec["containers"], *pod.spec.get("initContainers", [])]
        assert all("readinessProbe" in one for one in running)


@every_pod
def test_every_pod_is_evicted_one_at_a_time(pod: Pod) -> None:
    """A PodDisruptionBudget selects it, and does not stop the drain of a node for ever."""
    if pod.owner["kind"] in {"Job", "CronJob"}:
        return
    (budget,) = [
        one
        for one in of_kind(pod.variant, "PodDisruptionBudget")
        if one["spec"]["selector"]["matchLabels"].items() <= pod.metadata["labels"].items()
    ]
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["metadata"]["namespace"] == pod.owner["metadata"]["namespace"]


@pytest.mark.parametrize("variant", ["central", "everything", "migrate"])
def test_labels_and_accounts_are_consistent(variant: str) -> None:
    """Every object in `quantdrift` has the recommended labels, and every pod an account of its own without a token."""
    accounts = {one["metadata"]["name"]: one for one in of_kind(variant, "ServiceAccount")}
    for resource in render(DEPLOY / variant):
        if resource["kind"] == "ConfigMap":
            continue
        labels = resource["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "quantdrift"
        if "app.kubernetes.io/component" in labels:
            assert resource["metadata"]["name"] == f"quantdrift-{labels['app.kubernetes.io/component']}"
    for pod in pods(variant):
        name = pod.owner["metadata"]["name"]
        assert pod.metadata["labels"] == pod.owner["metadata"]["labels"]
        assert pod.spec["serviceAccountName"] == name
        assert accounts[name]["automountServiceAccountToken"] is False
        if "selector" in pod.owner["spec"]:
            assert pod.owner["spec"]["selector"]["matchLabels"].items() <= pod.metadata["labels"].items()


@every_role
def test_every_connection_to_another_host_requires_tls(
    pod: Pod, role: str, container: dict[str, Any], tmp_path: Path
) -> None:
    """NATS by the authority that is mounted, and the collector; the addresses of Postgres are in files: see the page."""
    config = configured(pod, container, tmp_path)
    assert config.stream.url.startswith("tls://"), (pod.variant, role)
    assert config.stream.ca_file == "/etc/quantdrift/secrets/ca.crt"
    assert config.telemetry.otlp_endpoint.startswith("https://")
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text(encoding="utf-8")
    assert f"?sslmode=verify-full&sslrootcert={config.stream.ca_file}`" in page


def test_the_standby_is_on_another_node() -> None:
    """Of the two monitors, if there are two nodes; and in another zone."""
    (monitor,) = [pod for pod in pods("central") if pod.owner["metadata"]["name"] == "quantdrift-monitor"]
    assert monitor.owner["spec"]["replicas"] == 2
    spread = monitor.spec["topologySpreadConstraints"]
    assert [one["topologyKey"] for one in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    for one in spread:
        assert one["labelSelector"]["matchLabels"].items() <= monitor.metadata["labels"].items()


@every_role
def test_files_that_the_configuration_names_are_mounted(
    pod: Pod, role: str, container: dict[str, Any], tmp_path: Path
) -> None:
    """Each file that the role reads is in the volume of its secrets."""
    config = configured(pod, container, tmp_path)
    read = [config.stream.credentials_file, config.stream.ca_file]
    if role == "sidecar":
        intake = config.intake
        others = (intake.kserve_logger or intake.ext_proc or intake.tap) and intake.token_file
        read += [file for file in (intake.certificate_file, intake.key_file) if file]
        read += [config.capture.hmac_key_file] + [intake.token_file] * bool(intake.listen or others)
    if role in {"sidecar", "shadow"}:
        read += [config.stream.payload_key_file]
    if role == "monitor":
        read += [config.monitor.gate_token_file]
    if role != "sidecar":
        read += [config.storage.dsn_file]
    assert set(read) <= {f"/etc/quantdrift/secrets/{path}" for _, _, path in given_files(pod)}
    if config.intake.tap:
        places = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert str(Path(config.intake.tap).parent) in places


def given_files(pod: Pod) -> Iterator[tuple[str, str, str]]:
    """Return secret or ConfigMap, key, and path of each file in the volume of a pod's secrets."""
    for volume in pod.spec.get("volumes", []):
        assert "secret" not in volume, "secrets are projected, by name"
        for source in volume.get("projected", {}).get("sources", []):
            ((kind, given),) = source.items()
            assert kind in {"secret", "configMap"}
            assert bool(given.get("optional")) is (pod in SERVING), (
                "a missing file may stop all but a pod that serves"
            )
            yield from ((given["name"], item["key"], item["path"]) for item in given["items"])


# What a pod of each kind may have: files of its secret. Nobody has a file of the operators.
_OWN = {
    "sidecar": {"sidecar.nk", "payload-keys.json", "hmac-key", "sampling-salt"},
    "intake": {"sidecar.nk", "payload-keys.json", "hmac-key", "sampling-salt", "intake-tokens"},
    "shadow": {"shadow.nk", "shadow.dsn", "payload-keys.json"},
    "monitor": {"monitor.nk", "monitor.dsn", "gate-tokens"},
    "report": {"report.dsn"},
    "web": {"reader.dsn"},
    "migrate": {"migrate.dsn", "admin.nk"},
}


_BROUGHT = {("quantdrift-intake-tls", "tls.crt"), ("quantdrift-intake-tls", "tls.key")}
"""What an authority of yours makes: the certificate of the intake."""


def _secrets(pod: Pod) -> set[tuple[str, str]]:
    """Return every secret that the pod has as a file or as a variable, with the key of it."""
    files = {(name, key) for name, key, _ in given_files(pod) if name != "quantdrift-ca"}
    variables = {
        (one["valueFrom"]["secretKeyRef"]["name"], one["valueFrom"]["secretKeyRef"]["key"])
        for container in pod.containers()
        for one in container.get("env", [])
        if "secretKeyRef" in one.get("valueFrom", {})
    }
    assert not any("envFrom" in container for container in pod.containers())
    return files | variables


@every_pod
def test_a_pod_has_the_secret_of_its_own_role_only(pod: Pod) -> None:
    """The intake has no address of the database, a monitor not the owner's, and no pod what people use."""
    ours = any(container["image"].startswith("quantdrift") for container in pod.containers())
    component = pod.metadata["labels"].get("app.kubernetes.io/component", "sidecar")
    expected = {(f"quantdrift-{component}", key) for key in _OWN[component]} if ours else set()
    if component == "intake":
        expected |= _BROUGHT
    assert _secrets(pod) == expected


@pytest.mark.parametrize("pod", SERVING, ids=lambda pod: f"{pod.variant}-{pod.owner['metadata']['name']}")
def test_a_missing_secret_never_keeps_a_model_server_from_starting(pod: Pod) -> None:
    """In a pod that serves, each secret and authority of ours is optional: the relay serves without them."""
    sources = [
        source[kind]
        for volume in pod.spec["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
        for kind in ("secret", "configMap")
        if kind in source
    ]
    sources += [
        variable["valueFrom"]["secretKeyRef"]
        for container in pod.containers()
        for variable in container.get("env", [])
        if "secretKeyRef" in variable.get("valueFrom", {})
    ]
    assert [source["name"] for source in sources if not source.get("optional")] == []


def test_the_secrets_have_exactly_what_the_pods_read() -> None:
    """Each in the namespace of its pods, from the files that the commands write; Argo Rollouts reads one beside its rollout."""
    told = {
        namespace: documents(DEPLOY / "secrets" / folder / "kustomization.yaml")[0]
        for namespace, folder in (("quantdrift", "."), ("models", "sidecar"))
    }
    made = {
        (namespace, one["name"], Path(file).name)
        for namespace, content in told.items()
        for one in content["secretGenerator"]
        for file in one["files"]
    }
    read = {
        (pod.owner["metadata"]["namespace"], name, key)
        for pod in PODS
        for name, key in _secrets(pod) - _BROUGHT
    }
    (argo,) = documents(DEPLOY.parent / "argo-rollouts" / "gate.yaml")
    of_argo = [one["valueFrom"]["secretKeyRef"] for one in argo["spec"]["args"] if "valueFrom" in one]
    read |= {("models", one["name"], one["key"]) for one in of_argo}
    assert made == read
    for content in told.values():
        assert content["configMapGenerator"] == [{"name": "quantdrift-ca", "files": ["ca.crt"]}]


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
    (policy,) = of_kind("relay", "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod.metadata["labels"].items()
    let_in = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert let_in == {relay, port_of(config.sidecar.admin)}


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
    (logged,) = [
        one for one in of_kind("kserve", "InferenceService") if one["metadata"]["name"] == "digits-logged"
    ]
    logger = logged["spec"]["predictor"]["logger"]
    (service,) = [
        one for one in of_kind("everything", "Service") if one["metadata"]["name"] == "quantdrift-intake"
    ]
    name = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    port = next(one["port"] for one in service["spec"]["ports"] if one["name"] == "kserve")
    assert logger["url"] == f"https://{name}:{port}/kserve/TOKEN"
    assert logger["mode"] == "all"
    assert service["spec"]["sessionAffinity"] == "ClientIP"
    (intake,) = [pod for pod in pods("everything") if pod.owner["metadata"]["name"] == "quantdrift-intake"]
    ((_, container),) = intake.roles()
    config = configured(intake, container, tmp_path)
    assert config.intake.kserve_logger
    assert config.intake.token_file


def test_the_page_lets_in_who_has_logged_in_at_the_provider_alone(tmp_path: Path) -> None:
    """Its Service and its probes meet its port; no address and no header is a login, and no pod writes as an operator."""
    (page,) = [pod for pod in pods("everything") if pod.owner["metadata"]["name"] == "quantdrift-web"]
    (container,) = page.containers()
    config = configured(page, container, tmp_path)
    assert container["args"][0] == "web"
    assert list(web_problems(config.web)) == []
    assert not is_open(config.web, token="")
    assert (config.web.identity_header, config.web.proxies, config.web.token_file) == ("", (), "")
    assert config.web.oidc.issuer.startswith("https://")
    assert ANYBODY not in config.web.oidc.groups
    assert config.web.url.startswith("https://")
    assert not config.web.operator_dsn_file
    (port,) = container["ports"]
    assert port == {"name": "web", "containerPort": port_of(config.web.listen)}
    (service,) = [
        one for one in of_kind("everything", "Service") if one["metadata"]["name"] == "quantdrift-web"
    ]
    assert [one["targetPort"] for one in service["spec"]["ports"]] == ["web"]
    assert service["spec"]["selector"].items() <= page.metadata["labels"].items()
    for name, path in (("readiness", "/readyz"), ("liveness", "/livez")):
        assert container[f"{name}Probe"]["httpGet"] == {"path": path, "port": "web"}
    assert config.storage.dsn_file in {f"/etc/quantdrift/secrets/{path}" for _, _, path in given_files(page)}


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


@pytest.mark.parametrize("variant", ["istio", "envoy"])
def test_istio_leaves_metrics_and_nats_alone(variant: str, tmp_path: Path) -> None:
    """The ports in the annotations are the configuration's."""
    (pod,) = pods(variant)
    ((_, container),) = pod.roles()
    config = configured(pod, container, tmp_path)
    told = pod.metadata["annotations"]
    inbound, outbound = (f"traffic.sidecar.istio.io/exclude{way}Ports" for way in ("Inbound", "Outbound"))
    assert told == {
        inbound: f"{port_of(config.sidecar.probes)},{port_of(config.sidecar.admin)}",
        outbound: str(port_of(config.stream.address)),
    }


def test_envoy_sends_its_copies_to_the_container_beside_it(tmp_path: Path) -> None:
    """The filter selects the pod, and its cluster is the address at which the sidecar listens, inside the pod."""
    (pod,) = pods("envoy")
    ((_, container),) = pod.roles()
    config = configured(pod, container, tmp_path)
    (resource,) = of_kind("envoy", "EnvoyFilter")
    assert resource["metadata"]["namespace"] == pod.owner["metadata"]["namespace"]
    spec = resource["spec"]
    assert spec["workloadSelector"]["labels"].items() <= pod.metadata["labels"].items()
    cluster, sender = (one["patch"]["value"] for one in spec["configPatches"])
    ((endpoint,),) = (group["lb_endpoints"] for group in cluster["load_assignment"]["endpoints"])
    address = endpoint["endpoint"]["address"]["socket_address"]
    assert f"{address['address']}:{address['port_value']}" == config.intake.ext_proc == "127.0.0.1:9002"
    typed = sender["typed_config"]
    assert typed["grpc_service"]["envoy_grpc"]["cluster_name"] == cluster["name"]
    assert typed["observability_mode"] is typed["failure_mode_allow"] is True
    assert config.sidecar.listen == ""


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


def test_the_collector_takes_every_signal_that_processes_export() -> None:
    """Metrics and alert events, and the spans of the shadow: one that it refused would be an error in a log, again and again."""
    (collector,) = documents(DEPLOY.parent / "otel-collector" / "config.yaml")
    pipelines = collector["service"]["pipelines"]
    assert pipelines.keys() == {"metrics", "logs", "traces"}
    assert all(pipeline["receivers"] == ["otlp"] for pipeline in pipelines.values())
    exporters = {exporter for pipeline in pipelines.values() for exporter in pipeline["exporters"]}
    assert exporters == set(collector["exporters"])


def test_what_comes_to_the_intake_comes_by_tls(tmp_path: Path) -> None:
    """Its ports have a certificate, and every example sends to `https://`: tokens and payloads are in what is sent."""
    (pod,) = [pod for pod in pods("everything") if pod.owner["metadata"]["name"] == "quantdrift-intake"]
    ((_, container),) = pod.roles()
    config = configured(pod, container, tmp_path)
    assert config.intake.certificate_file
    assert config.intake.key_file
    texts = "\n".join(path.read_text() for path in DEPLOY.rglob("*.yaml"))
    assert re.findall(r"(\w+)://quantdrift-intake", texts) == ["https"]
