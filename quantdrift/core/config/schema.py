"""Every option: its type, default, bounds, unit, and why one would change it.

The sections are the single source: the loader validates with them, `config.toml` and the reference page are generated
from them.
"""

from typing import Annotated

from quantdrift.core.config.copies import CandidateCopy
from quantdrift.core.config.cost import Cost
from quantdrift.core.config.models import (
    Budget,
    Medium,
    Model,
    ModelTensor,
    OutputKind,
    Recheck,
    Reference,
    ReferenceInput,
    Runtime,
    Slice,
)
from quantdrift.core.config.section import GIB, KIB, MIB, Section, about
from quantdrift.core.config.serving import (
    Capture,
    Intake,
    LoadOptions,
    SamplingOptions,
    Sidecar,
    Storage,
    Stream,
)
from quantdrift.core.config.tasks import Generation
from quantdrift.core.config.watching import (
    Monitor,
    Notify,
    Provider,
    Shadow,
    TelemetryOptions,
)
from quantdrift.core.config.web import Web
from quantdrift.core.tasks import MEASURES, Measure, Task

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "Budget",
    "CandidateCopy",
    "Capture",
    "Config",
    "Cost",
    "Generation",
    "Intake",
    "LoadOptions",
    "Medium",
    "Model",
    "ModelTensor",
    "Monitor",
    "Notify",
    "OutputKind",
    "Provider",
    "Recheck",
    "Reference",
    "ReferenceInput",
    "Runtime",
    "SamplingOptions",
    "Shadow",
    "Sidecar",
    "Slice",
    "Storage",
    "Stream",
    "TelemetryOptions",
    "Web",
]


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration."""

    plugins: Annotated[
        tuple[str, ...],
        about(
            "Installed packages that add tasks, signals, runtimes or protocols. Nothing of a package that is not named here is imported."
        ),
    ] = ()
    stream: Stream = Stream()
    storage: Storage = Storage()
    sidecar: Sidecar = Sidecar()
    capture: Capture = Capture()
    intake: Intake = Intake()
    sampling: SamplingOptions = SamplingOptions()
    shadow: Shadow = Shadow()
    monitor: Monitor = Monitor()
    telemetry: TelemetryOptions = TelemetryOptions()
    notify: Notify = Notify()
    web: Web = Web()
    cost: Cost = Cost()
    load: LoadOptions = LoadOptions()
    models: tuple[Model, ...] = ()
    slices: tuple[Slice, ...] = ()

    def model(self, name: str) -> Model | None:
        """Return the model called `name`, or None."""
        return next((model for model in self.models if model.name == name), None)

    def budget(self, name: str) -> Budget:
        """Return what the owner of the model called `name` accepts; the defaults where the model is not configured."""
        model = self.model(name)
        return model.budget if model else Budget()

    def measure(self, name: str) -> Measure:
        """Return what the divergences of the model called `name` are; those of a classifier where it is not known."""
        model = self.model(name)
        return MEASURES[model.task if model else Task.CLASSIFICATION]
