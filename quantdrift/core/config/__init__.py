"""The configuration: typed sections, loaded from one TOML file, the environment and secret files."""

from quantdrift.core.config.load import Role, Secrets, load, load_secrets
from quantdrift.core.config.schema import (
    Budget,
    Capture,
    Config,
    Model,
    Monitor,
    OutputKind,
    Provider,
    Reference,
    SamplingOptions,
    Shadow,
    Sidecar,
    Slice,
    Storage,
    Stream,
    TelemetryOptions,
)

__all__ = [
    "Budget",
    "Capture",
    "Config",
    "Model",
    "Monitor",
    "OutputKind",
    "Provider",
    "Reference",
    "Role",
    "SamplingOptions",
    "Secrets",
    "Shadow",
    "Sidecar",
    "Slice",
    "Storage",
    "Stream",
    "TelemetryOptions",
    "load",
    "load_secrets",
]
