"""Strict models of the custom resources in our manifests: the members that these use, by the operators' definitions.

Written by hand from the CustomResourceDefinitions of KEDA (`keda.sh/v1alpha1`, with the metadata that its `nats-jetstream`
scaler reads), the Prometheus operator (`monitoring.coreos.com/v1`, release 0.91), Istio (`networking.istio.io/v1alpha3`) and
KServe (`serving.kserve.io/v1beta1`). An unknown member is an error, as it is for an API server with strict field validation.
Of an InferenceService the members of a pod are checked by Kubernetes' own schemas.
"""

from typing import Annotated, Any, Final, Literal

import msgspec

from deploy.kustomize import Resource

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Duration = Annotated[str, msgspec.Meta(pattern=r"^([0-9]+(ms|s|m|h|d))+$")]
_WholeNumber = Annotated[str, msgspec.Meta(pattern=r"^[0-9]+$")]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    pass


class _Metadata(_Strict, frozen=True):
    name: _Name
    namespace: _Name
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Selector(_Strict, frozen=True):
    match_labels: dict[str, str]


class _ScaleTarget(_Strict, frozen=True):
    name: _Name
    kind: str = "Deployment"
    api_version: str = "apps/v1"


class _ScalingRules(_Strict, frozen=True):
    stabilization_window_seconds: Annotated[int, msgspec.Meta(ge=0, le=3600)]


class _Behavior(_Strict, frozen=True):
    scale_down: _ScalingRules


class _Autoscaler(_Strict, frozen=True):
    behavior: _Behavior


class _Advanced(_Strict, frozen=True):
    horizontal_pod_autoscaler_config: _Autoscaler


class _JetStream(_Strict, frozen=True):
    """Strings alone: the API server refuses numbers and booleans in a trigger's metadata."""

    nats_server_monitoring_endpoint: Annotated[str, msgspec.Meta(pattern=r"^[^:/]+:[0-9]+$")]
    account: str
    stream: str
    consumer: str
    lag_threshold: _WholeNumber
    activation_lag_threshold: _WholeNumber = "0"
    use_https: Literal["true", "false"] = "false"


class Trigger(_Strict, frozen=True):
    """A trigger of KEDA's `nats-jetstream` scaler."""

    type: Literal["nats-jetstream"]
    metadata: _JetStream


class _ScaledObjectSpec(_Strict, frozen=True):
    scale_target_ref: _ScaleTarget
    triggers: Annotated[list[Trigger], msgspec.Meta(min_length=1)]
    min_replica_count: Annotated[int, msgspec.Meta(ge=0)]
    max_replica_count: _Positive
    polling_interval: _Positive = 30
    cooldown_period: _Positive = 300
    advanced: _Advanced | None = None


class ScaledObject(_Strict, frozen=True):
    """A workload that KEDA scales."""

    api_version: Literal["keda.sh/v1alpha1"]
    kind: Literal["ScaledObject"]
    metadata: _Metadata
    spec: _ScaledObjectSpec


class _Endpoint(_Strict, frozen=True):
    port: str
    path: str = "/metrics"
    interval: _Duration | None = None
    scheme: Literal["http", "https"] = "http"


class _Namespaces(_Strict, frozen=True):
    any: bool = False
    match_names: list[str] = []


class _PodMonitorSpec(_Strict, frozen=True):
    selector: _Selector
    pod_metrics_endpoints: Annotated[list[_Endpoint], msgspec.Meta(min_length=1)]
    namespace_selector: _Namespaces = _Namespaces()


class PodMonitor(_Strict, frozen=True):
    """Pods that Prometheus scrapes."""

    api_version: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: _Metadata
    spec: _PodMonitorSpec


class _Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    alert: str
    expr: str
    duration: _Duration | None = msgspec.field(default=None, name="for")
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _RuleGroup(_Strict, frozen=True):
    name: str
    rules: list[_Rule]


class _RuleSpec(_Strict, frozen=True):
    groups: list[_RuleGroup]


class PrometheusRule(_Strict, frozen=True):
    """Alerts that Prometheus computes."""

    api_version: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: _Metadata
    spec: _RuleSpec


class _Logger(_Strict, frozen=True):
    mode: Literal["all", "request", "response"]
    url: str
    metadata_headers: list[str] = []


class _Predictor(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Its other members are a pod's."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    logger: _Logger | None = None
    min_replicas: _Positive = 1
    max_replicas: _Positive = 10


class _InferenceServiceSpec(_Strict, frozen=True):
    predictor: _Predictor


class InferenceService(_Strict, frozen=True):
    """A model that KServe serves."""

    api_version: Literal["serving.kserve.io/v1beta1"]
    kind: Literal["InferenceService"]
    metadata: _Metadata
    spec: _InferenceServiceSpec


class _Patch(_Strict, frozen=True):
    operation: Literal["MERGE", "ADD", "REMOVE", "INSERT_BEFORE", "INSERT_AFTER", "INSERT_FIRST", "REPLACE"]
    value: dict[str, Any]


class _ConfigPatch(_Strict, frozen=True):
    apply_to: Literal["CLUSTER", "HTTP_FILTER", "LISTENER", "HTTP_ROUTE", "NETWORK_FILTER"]
    patch: _Patch
    match: dict[str, Any] = {}


class _WorkloadSelector(_Strict, frozen=True):
    labels: dict[str, str]


class _EnvoyFilterSpec(_Strict, frozen=True):
    config_patches: list[_ConfigPatch]
    workload_selector: _WorkloadSelector


class EnvoyFilter(_Strict, frozen=True):
    """A change of Envoy's configuration in Istio's proxies; Envoy itself checks the values of its patches."""

    api_version: Literal["networking.istio.io/v1alpha3"]
    kind: Literal["EnvoyFilter"]
    metadata: _Metadata
    spec: _EnvoyFilterSpec


Custom = ScaledObject | PodMonitor | PrometheusRule | InferenceService | EnvoyFilter
KINDS: Final[dict[str, type[Custom]]] = {
    "ScaledObject": ScaledObject,
    "PodMonitor": PodMonitor,
    "PrometheusRule": PrometheusRule,
    "InferenceService": InferenceService,
    "EnvoyFilter": EnvoyFilter,
}


def read(resource: Resource) -> Custom:
    """Return a custom resource.

    Raises
    ------
    msgspec.ValidationError
        A member is unknown, missing or of another type.
    """
    return msgspec.convert(resource, KINDS[resource["kind"]])
