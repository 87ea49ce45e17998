"""What a way in needs beside a base install."""

from importlib.util import find_spec

from quantdrift.core.config.schema import Config


def lacking(config: Config) -> list[str]:
    """Return what is not installed here and the configuration asks for, each as a sentence that says how to mend it."""
    if config.intake.ext_proc and find_spec("grpc") is None:
        return ["intake.ext_proc needs grpcio, which is not installed: pip install 'quantdrift[ext-proc]'"]
    return []
