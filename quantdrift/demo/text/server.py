"""llama.cpp's own server, from the wheel xllamacpp, with one GGUF file: `python -m quantdrift.demo.text.server`."""

import argparse
import signal
import threading
from pathlib import Path

from quantdrift.demo.text.model import NAME

_CONTEXT = 256  # tokens of a request
_SLOTS = 4  # requests at a time


def main(arguments: list[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT."""
    from xllamacpp import CommonParams, Server  # noqa: PLC0415 - 100 MB, for this process alone

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(arguments)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    params = CommonParams()
    params.model.path = str(options.file)
    params.model_alias = {NAME}
    params.hostnames, params.port = ["127.0.0.1"], options.port
    params.n_parallel, params.n_ctx = _SLOTS, _SLOTS * _CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.fit_params = False
    server = Server(params)
    print(f"{options.file.name} is served at {server.listening_address}", flush=True)
    ended.wait()
    del server


if __name__ == "__main__":
    main()
