"""`python -m examples.tensor.make`: write the reference that `config.toml` names, beside it."""

from pathlib import Path

from examples.tiny import write


def make(directory: Path) -> None:
    """Write `reference.onnx` to `directory`."""
    write(directory, {"latent": 6, "aside": 2})


if __name__ == "__main__":
    make(Path(__file__).parent)
