"""What a network plug-in does with NetworkPolicies, by the rules of `networking.k8s.io/v1`.

A pod that no policy selects for a direction is open in it. A pod that one selects lets through what at least one of the
policies allows, and nothing else. A connection needs both: the egress of its source and the ingress of its destination.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deploy.kustomize import Resource


class Peer(NamedTuple):
    """A pod, or with an `address` and without labels a host outside the cluster."""

    namespace: str = ""
    labels: Mapping[str, str] = {}
    address: str = ""


class Cluster:
    """The policies of a cluster, and the labels of its namespaces.

    Parameters
    ----------
    namespaces
        Labels of each namespace, without `kubernetes.io/metadata.name`, which Kubernetes adds.
    policies
        Each with its `metadata.namespace`.
    """

    def __init__(self, namespaces: Mapping[str, Mapping[str, str]], policies: Sequence[Resource]) -> None:
        self._namespaces = {
            name: {"kubernetes.io/metadata.name": name, **labels} for name, labels in namespaces.items()
        }
        self._policies = policies

    def allows(self, source: Peer, destination: Peer, port: int, protocol: str = "TCP") -> bool:
        """Return whether `source` can connect to `port` of `destination`."""
        return self._passes("Egress", source, destination, port, protocol) and self._passes(
            "Ingress", destination, source, port, protocol
        )

    def isolates(self, pod: Peer, direction: str) -> bool:
        """Return whether a policy selects the pod for `Ingress` or `Egress`."""
        return bool(self._selecting(pod, direction))

    def _selecting(self, pod: Peer, direction: str) -> list[Resource]:
        return [
            policy["spec"]
            for policy in self._policies
            if policy["metadata"]["namespace"] == pod.namespace
            and direction in policy["spec"]["policyTypes"]
            and _matches(policy["spec"]["podSelector"], pod.labels)
        ]

    def _passes(self, direction: str, pod: Peer, other: Peer, port: int, protocol: str) -> bool:
        if pod.address:
            return True
        specs = self._selecting(pod, direction)
        key, side = ("to", "egress") if direction == "Egress" else ("from", "ingress")
        rules = [rule for spec in specs for rule in spec.get(side, [])]
        return not specs or any(
            self._is_peer(rule.get(key), other, pod.namespace)
            and _has_port(rule.get("ports"), port, protocol)
            for rule in rules
        )

    def _is_peer(self, peers: list[dict[str, Any]] | None, other: Peer, own_namespace: str) -> bool:
        return not peers or any(self._is_one(peer, other, own_namespace) for peer in peers)

    def _is_one(self, peer: dict[str, Any], other: Peer, own_namespace: str) -> bool:
        assert peer, "an empty peer is refused by Kubernetes"
        if "ipBlock" in peer:
            block = peer["ipBlock"]
            address = ipaddress.ip_address(other.address or "0.0.0.0")
            outside = [ipaddress.ip_network(one) for one in block.get("except", [])]
            return (
                bool(other.address)
                and address in ipaddress.ip_network(block["cidr"])
                and not any(address in one for one in outside)
            )
        if other.address:
            return False
        if "namespaceSelector" in peer:
            in_namespace = _matches(peer["namespaceSelector"], self._namespaces[other.namespace])
        else:
            in_namespace = other.namespace == own_namespace
        return in_namespace and _matches(peer.get("podSelector", {}), other.labels)


def _has_port(ports: list[dict[str, Any]] | None, port: int, protocol: str) -> bool:
    return not ports or any(
        one.get("protocol", "TCP") == protocol and one["port"] <= port <= one.get("endPort", one["port"])
        for one in ports
    )


def _matches(selector: dict[str, Any], labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "In", "no policy of ours uses another operator"
        if labels.get(one["key"]) not in one["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
