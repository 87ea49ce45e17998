"""quantdrift: finds the input slice on which a quantised model has silently gone bad."""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from quantdrift import aio
    from quantdrift.core.errors import OperatorError, QuantdriftError, RetryError
    from quantdrift.release.compare import CompareResult, compare
    from quantdrift.release.connect import Connection, FiguresResult, IncidentsResult, connect
    from quantdrift.release.diagnose.diagnose import DiagnoseResult, diagnose
    from quantdrift.release.gate.gate import GateResult, gate
    from quantdrift.release.load_test.load import LoadResult, load
    from quantdrift.release.plan import PlanResult, plan
    from quantdrift.release.progress import Progress
    from quantdrift.release.quantise.quantise import QuantiseResult, quantise
    from quantdrift.release.repair.repair import RepairResult, repair
    from quantdrift.sidecar.tap import Tap

__all__ = [
    "CompareResult",
    "Connection",
    "DiagnoseResult",
    "FiguresResult",
    "GateResult",
    "IncidentsResult",
    "LoadResult",
    "OperatorError",
    "PlanResult",
    "Progress",
    "QuantdriftError",
    "QuantiseResult",
    "RepairResult",
    "RetryError",
    "Tap",
    "aio",
    "compare",
    "connect",
    "diagnose",
    "gate",
    "load",
    "plan",
    "quantise",
    "repair",
]

_MODULES: Final = {
    "CompareResult": "release.compare",
    "Connection": "release.connect",
    "DiagnoseResult": "release.diagnose.diagnose",
    "FiguresResult": "release.connect",
    "GateResult": "release.gate.gate",
    "IncidentsResult": "release.connect",
    "LoadResult": "release.load_test.load",
    "OperatorError": "core.errors",
    "PlanResult": "release.plan",
    "Progress": "release.progress",
    "QuantdriftError": "core.errors",
    "QuantiseResult": "release.quantise.quantise",
    "RepairResult": "release.repair.repair",
    "RetryError": "core.errors",
    "Tap": "sidecar.tap",
    "compare": "release.compare",
    "connect": "release.connect",
    "diagnose": "release.diagnose.diagnose",
    "gate": "release.gate.gate",
    "load": "release.load_test.load",
    "plan": "release.plan",
    "quantise": "release.quantise.quantise",
    "repair": "release.repair.repair",
}


def __getattr__(name: str) -> Any:
    """Return a public name when it is asked for: importing `quantdrift` alone loads nothing else."""
    if name == "aio":
        return importlib.import_module("quantdrift.aio")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"quantdrift.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
