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
    Sampling,
    Shadow,
    Sidecar,
    Slice,
    Storage,
    Stream,
    Telemetry,
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
    "Sampling",
    "Secrets",
    "Shadow",
    "Sidecar",
    "Slice",
    "Storage",
    "Stream",
    "Telemetry",
    "load",
    "load_secrets",
]
