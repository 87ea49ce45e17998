"""The NetworkPolicies of the manifests: exactly the connections that the roles need, whoever else tries."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.integration.test_deploy import Pod, of_kind, pods
from tests.support.network_policy import Cluster, Peer

pytestmark = pytest.mark.integration

# The labels that people give to their namespaces: nothing else of a namespace counts.
_NAMESPACES: Final[Mapping[str, Mapping[str, str]]] = {
    "quantdrift": {},
    "models": {"quantdrift.io/tells": "true", "quantdrift.io/replayed": "true"},
    "references": {"quantdrift.io/replayed": "true"},
    "nats": {},
    "postgres": {},
    "observability": {},
    "hooks": {"quantdrift.io/notified": "true"},
    "login": {"quantdrift.io/provider": "true"},
    "ingress": {"quantdrift.io/proxy": "true"},
    "argo-rollouts": {},
    "flagger-system": {},
    "kube-system": {},
    "istio-system": {},
    "keda": {},
    "default": {},
}
# Pods that are not ours. None of them has a policy, so only our policies decide.
_OTHERS: Final = {
    "nats": Peer("nats", {"app.kubernetes.io/name": "nats"}),
    "postgres": Peer("postgres", {"app": "postgres"}),
    "prometheus": Peer("observability", {"app.kubernetes.io/name": "prometheus"}),
    "resolver": Peer("kube-system", {"k8s-app": "kube-dns"}),
    "kube-apiserver": Peer("kube-system", {"component": "kube-apiserver"}),
    "istiod": Peer("istio-system", {"app": "istiod"}),
    "reference": Peer("references", {"quantdrift.io/replayed": "true"}),
    "neighbour": Peer("references", {"app": "other"}),
    "webhook": Peer("hooks", {"quantdrift.io/notified": "true"}),
    "near-webhook": Peer("hooks", {"app": "other"}),
    "provider": Peer("login", {"quantdrift.io/provider": "true"}),
    "near-provider": Peer("login", {"app": "other"}),
    "proxy": Peer("ingress", {"quantdrift.io/proxy": "true"}),
    "rollouts": Peer("argo-rollouts", {"app.kubernetes.io/name": "argo-rollouts"}),
    "flagger": Peer("flagger-system", {"app.kubernetes.io/name": "flagger"}),
    "near-proxy": Peer("ingress", {"app": "other"}),
    "stranger": Peer("default", {"app": "stranger"}),
    "stranger-here": Peer("quantdrift", {"app": "stranger"}),
    "client": Peer("models", {"app": "client"}),
    "internet": Peer(address="203.0.113.7"),
    "metadata": Peer(address="169.254.169.254"),
}
# fmt: off
_PORTS: Final = (
    53, 80, 443, 4222, 4317, 5432, 6443, 8000, 8001, 8080, 8222, 8443, 9000, 9001, 9002, 9003, 9081, 9093, 9463, 9464, 9465,
    9466, 9468, 15012, 15020,
)
# fmt: on
Flow = tuple[str, str, int]


def _peer(pod: Pod) -> Peer:
    return Peer(pod.owner["metadata"]["namespace"], pod.metadata["labels"])


def _cluster(*variants: str) -> tuple[Cluster, dict[str, Peer]]:
    """Return the policies of some variants, applied together, and their pods by the names of their owners."""
    policies = {
        (policy["metadata"]["namespace"], policy["metadata"]["name"]): policy
        for variant in variants
        for policy in of_kind(variant, "NetworkPolicy")
    }
    ours = {
        pod.owner["metadata"]["name"].removeprefix("quantdrift-"): _peer(pod)
        for variant in variants
        for pod in pods(variant)
    }
    return Cluster(_NAMESPACES, list(policies.values())), ours


def _flows(cluster: Cluster, ours: Mapping[str, Peer]) -> Iterator[Flow]:
    """Return every connection to or from one of our pods that is possible."""
    everybody = {**ours, **_OTHERS}
    for source_name, source in everybody.items():
        for name, destination in everybody.items():
            if source_name != name and (source_name in ours or name in ours):
                yield from (
                    (source_name, name, port) for port in _PORTS if cluster.allows(source, destination, port)
                )


def _resolving(*names: str) -> set[Flow]:
    return {(name, "resolver", 53) for name in names}


def test_the_central_roles_reach_what_they_need_and_nothing_else() -> None:
    """Neither each other, nor the cluster's API, nor the cloud's metadata; and Prometheus alone reaches them."""
    cluster, ours = _cluster("everything", "migrate")
    # Prometheus, Alertmanager and the collector share a namespace here: a policy names the namespace.
    assert set(_flows(cluster, ours)) == {
        *_resolving(*ours),
        ("shadow", "nats", 4222),
        ("shadow", "postgres", 5432),
        ("shadow", "prometheus", 4317),
        *(("shadow", "reference", port) for port in (8000, 8001, 9000)),
        ("monitor", "nats", 4222),
        ("monitor", "postgres", 5432),
        ("monitor", "prometheus", 4317),
        ("monitor", "prometheus", 9093),
        ("monitor", "webhook", 8443),
        ("report", "postgres", 5432),
        ("web", "postgres", 5432),
        ("web", "provider", 8443),
        ("proxy", "web", 9468),
        ("migrate", "postgres", 5432),
        ("migrate", "nats", 4222),
        ("intake", "nats", 4222),
        ("client", "intake", 9001),
        ("client", "intake", 9003),
        ("prometheus", "shadow", 9465),
        ("prometheus", "monitor", 9466),
        ("rollouts", "monitor", 9466),
        ("flagger", "monitor", 9466),
        ("prometheus", "intake", 9464),
    }


def test_the_monitor_sends_no_notifications_without_their_component() -> None:
    """Alertmanager and the webhook are reached by `notify` alone, and by no pod but the monitor."""
    cluster, ours = _cluster("central")
    flows = set(_flows(cluster, ours))
    assert not {(source, port) for source, _, port in flows if port in {8443, 9093}}
    assert "web" not in ours


def test_no_pod_in_our_namespace_is_open_by_an_oversight() -> None:
    """A pod without a role can resolve names and nothing else; no pod can reach it."""
    cluster, _ = _cluster("everything", "migrate")
    oversight = Peer("quantdrift", {"app": "debug"})
    for direction in ("Ingress", "Egress"):
        assert cluster.isolates(oversight, direction)
    for name, other in _OTHERS.items():
        allowed = [port for port in _PORTS if cluster.allows(oversight, other, port)]
        assert allowed == ([53] if name == "resolver" else []), name
        assert not any(cluster.allows(other, oversight, port) for port in _PORTS)


_REACHING_NATS: Final = {
    "envoy": {"digits-copied": 8000},
    "relay": {"digits": 9000},
    "tap": {"digits-tapped": 8000},
    "istio": {"digits": 9000},
}


@pytest.mark.parametrize("variant", sorted(_REACHING_NATS))
def test_a_pod_with_the_sidecar_reaches_nats_alone_and_only_prometheus_its_metrics(variant: str) -> None:
    """Clients reach the relay, or with a tap the server; nobody the server behind the relay."""
    cluster, ours = _cluster(variant)
    expected = set(_resolving(*ours))
    for name, port in _REACHING_NATS[variant].items():
        expected |= {(name, "nats", 4222), ("prometheus", name, 9464)}
        expected |= {(other, name, port) for other, peer in _OTHERS.items() if not peer.address}
        # An address outside the cluster is no pod of any namespace: it comes in through your ingress controller.
        if variant in {"istio", "envoy"}:
            expected |= {(name, "istiod", 15012), ("prometheus", name, 15020)}
    assert set(_flows(cluster, ours)) == expected


def test_the_loggers_pod_reaches_the_intake_alone() -> None:
    """And the relay's predictor NATS alone; their servers' ports are closed."""
    cluster, ours = _cluster("kserve", "everything")
    inside = {name for name, peer in {**ours, **_OTHERS}.items() if not peer.address}
    flows = {flow for flow in _flows(cluster, ours) if {"digits", "digits-logged"} & set(flow[:2])}
    assert {flow for flow in flows if flow[0] in {"digits", "digits-logged"}} == {
        *_resolving("digits", "digits-logged"),
        ("digits", "nats", 4222),
        ("digits-logged", "intake", 9003),
    }
    opened = {flow for flow in flows if flow[1] in {"digits", "digits-logged"}}
    can_leave = {name for name in inside if not cluster.isolates({**ours, **_OTHERS}[name], "Egress")}
    assert opened == {
        ("prometheus", "digits", 9464),
        *((name, "digits", 9000) for name in can_leave),
        *((name, "digits-logged", 9081) for name in can_leave),
    }


def test_the_policies_of_two_ways_in_one_namespace_open_nothing_of_each_other() -> None:
    """Policies add up: that of the tap, which opens the server's port, does not select a pod with the relay."""
    cluster, ours = _cluster("relay", "tap", "kserve", "envoy")
    for name in ("digits", "digits-logged"):
        assert not cluster.allows(_OTHERS["client"], ours[name], 8000)
    assert not cluster.allows(ours["digits-tapped"], ours["digits-logged"], 9003)


def test_the_evaluator_knows_what_an_open_policy_opens() -> None:
    """Without a policy everything is open; with one, what it leaves out is closed: the tests above can fail."""
    _, ours = _cluster("central")
    unguarded = Cluster(_NAMESPACES, [])
    assert unguarded.allows(ours["monitor"], _OTHERS["internet"], 443)
    assert unguarded.allows(_OTHERS["stranger"], ours["shadow"], 9465)
    policy = {
        "metadata": {"namespace": "quantdrift"},
        "spec": {
            "podSelector": {},
            "policyTypes": ["Egress"],
            "egress": [
                {
                    "to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}],
                    "ports": [{"port": 400, "endPort": 500}],
                }
            ],
        },
    }
    outside = Cluster(_NAMESPACES, [policy])
    assert outside.allows(ours["monitor"], _OTHERS["internet"], 443)
    assert not outside.allows(ours["monitor"], _OTHERS["internet"], 501)
    assert not outside.allows(ours["monitor"], _OTHERS["metadata"], 443)
    assert not outside.allows(ours["monitor"], _OTHERS["nats"], 443), "an address range selects no pods"
    assert outside.allows(_OTHERS["stranger"], ours["monitor"], 9466), "only egress is limited"


def test_prometheus_scrapes_every_pod_that_serves_metrics() -> None:
    """A PodMonitor selects it and names its port, and the policy opens that port."""
    monitors = of_kind("everything", "PodMonitor")
    for variant in ("everything", "relay", "istio", "envoy", "tap", "kserve"):
        cluster, _ = _cluster(variant)
        for pod in pods(variant):
            for _, container in pod.roles():
                (chosen,) = [
                    one["spec"]
                    for one in monitors
                    if one["spec"]["selector"]["matchLabels"].items() <= pod.metadata["labels"].items()
                ]
                in_namespace = pod.owner["metadata"]["namespace"] == "quantdrift"
                assert in_namespace or chosen["namespaceSelector"] == {"any": True}
                (endpoint,) = chosen["podMetricsEndpoints"]
                ports = {one["name"]: one["containerPort"] for one in container["ports"]}
                assert cluster.allows(_OTHERS["prometheus"], _peer(pod), ports[endpoint["port"]])


def test_the_rules_are_those_of_prometheus_itself() -> None:
    """The manifest and deploy/prometheus/rules.yaml have the same alerts."""
    import yaml

    path = Path(__file__).resolve().parents[2] / "deploy/prometheus/rules.yaml"
    (rules,) = of_kind("everything", "PrometheusRule")
    assert rules["spec"] == yaml.safe_load(path.read_text(encoding="utf-8"))
