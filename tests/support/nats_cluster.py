"""A cluster of real nats-servers, as an installation runs it that must outlive a host."""

import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from quantdrift.core.process.nats_server import MAX_PAYLOAD_BYTES, find_program


class NatsCluster:
    """Three servers, each with a store of its own. Clients connect once they have found each other; until then they are refused.

    Parameters
    ----------
    directory
        Their configurations, logs and stores.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with ExitStack() as stack:  # all at once, or two of them could be the same
            sockets = [stack.enter_context(socket.socket()) for _ in range(6)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            ports = [one.getsockname()[1] for one in sockets]
        self._ports, self._routes = ports[:3], ports[3:]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """The addresses of all servers."""
        return ",".join(f"nats://127.0.0.1:{port}" for port in self._ports)

    def start(self, number: int) -> None:
        """Start the server with this number from 0, with what it had stored."""
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self._routes)
        config = self._directory / f"{number}.conf"
        config.write_text(f"""
server_name: "{number}"
host: "127.0.0.1"
port: {self._ports[number]}
max_payload: {MAX_PAYLOAD_BYTES}
jetstream {{ store_dir: "{self._directory / str(number)}", max_file_store: {1 << 40} }}
cluster {{ name: "tests", host: "127.0.0.1", port: {self._routes[number]}, routes: [{routes}] }}
""")
        with (self._directory / f"{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                [str(find_program()), "-c", str(config)], stdout=log, stderr=log
            )

    def kill(self, number: int) -> None:
        """End a server as a host ends that loses its power."""
        process = self._processes.pop(number)
        process.kill()
        process.wait()

    def __enter__(self) -> Self:
        for number in range(3):
            self.start(number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._processes):
            self.kill(number)
