"""The FP32 model of this example. The shadow imports it where `factory.toml` is used: a factory is code that runs there."""

from typing import Final

import torch

SIDE: Final = 8
N_CLASSES: Final = 10
_N_SCANNERS: Final = 5
_WIDTH: Final = 16


class Digits(torch.nn.Module):
    """Reads a digit from a picture and the number of the scanner that took it. A few kB."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(SIDE * SIDE, _WIDTH)
        self.scanner = torch.nn.Embedding(_N_SCANNERS, _WIDTH)
        self.last = torch.nn.Linear(_WIDTH, N_CLASSES)

    def forward(self, pixels: torch.Tensor, scanner: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `logits` : (items, classes).

        Parameters
        ----------
        pixels
            (items, 1, side, side), float32, 0 to 1.
        scanner
            (items,), int32, from 0.
        """
        features = torch.relu(self.hidden(pixels.flatten(1)) + self.scanner(scanner))
        return {"logits": self.last(features)}


def fp32() -> Digits:
    """Return the module; what the safetensors file holds replaces its weights."""
    return Digits()
