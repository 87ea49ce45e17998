"""The layer of a PyTorch module whose output is the embedding."""

from collections.abc import Sequence
from typing import Any, Final

import torch

from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.embedding import unknown_embedding

_TAP: Final = "quantdrift_layer"


class Layer:
    """A layer with the output of its last call."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._taken: torch.Tensor | None = None
        module.register_forward_hook(self._take)

    def taken(self) -> torch.Tensor:
        """Return the output of the last call, and forget it.

        Raises
        ------
        OperatorError
            The layer was not called, or returned no tensor.
        """
        taken, self._taken = self._taken, None
        if taken is None:
            raise OperatorError(
                "the layer that `models.embedding` names returns no tensor in a replay: name another layer"
            )
        return taken

    def _take(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, list | tuple) and output else output
        self._taken = first if isinstance(first, torch.Tensor) else None


def layer_of(module: torch.nn.Module, wanted: str, outputs: Sequence[str]) -> Layer:
    """Return the layer `wanted`: a submodule by its path; in an exported program also a node of its graph.

    Raises
    ------
    OperatorError
        There is no such layer, or the module is TorchScript, which gives access only to its outputs.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise OperatorError(
            f"{unknown_embedding(wanted, list(outputs))}. TorchScript shows no layers: export the model"
        )
    if isinstance(module, torch.fx.GraphModule):
        return Layer(_tapped(module, wanted, outputs))
    layers = {name: layer for name, layer in module.named_modules() if name}
    if wanted not in layers:
        raise OperatorError(unknown_embedding(wanted, [*outputs, *layers]))
    return Layer(layers[wanted])


def _tapped(module: torch.fx.GraphModule, wanted: str, outputs: Sequence[str]) -> torch.nn.Module:
    """Insert a module into the graph that is called with the layer's output, and return it."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    # The last node of a submodule gives its output.
    layers = {
        path: node for node in nodes for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path
    }
    layers |= {node.name: node for node in nodes}
    if wanted not in layers:
        raise OperatorError(unknown_embedding(wanted, [*outputs, *layers]))
    tap = torch.nn.Identity()
    module.add_submodule(_TAP, tap)
    with module.graph.inserting_after(layers[wanted]):
        module.graph.call_module(_TAP, (layers[wanted],))
    module.recompile()
    return tap
