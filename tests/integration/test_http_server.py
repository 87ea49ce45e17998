"""A server that is asked over HTTP, and what becomes of its connection."""

import errno
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quantdrift.core.config.schema import Model, Reference, Runtime
from quantdrift.core.errors import RetryError
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.runtimes.remote.http_client import HttpServer

pytestmark = pytest.mark.integration


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer, and keep the connection."""
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class _NoRoute(socket.socket):
    """What a connection becomes when the network behind it is gone."""

    def sendall(self, *_: Any) -> None:
        """Fail as the system does."""
        raise OSError(errno.EHOSTUNREACH, "No route to host")


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """Return a server that answers everything."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_network_that_goes_is_a_server_that_is_away(server: ThreadingHTTPServer) -> None:
    """Not every such error is a `ConnectionError`; none of them is the exchange's fault."""
    reference = Reference(runtime=Runtime.OIP_HTTP, url=f"http://127.0.0.1:{server.server_port}")
    client = HttpServer(RuntimeRequest(model=Model(name="digits"), reference=reference))
    assert client.ask("GET", "/")[0] == 200
    connection = client._connection
    connection.sock.close()
    connection.sock = _NoRoute()
    assert client.ask("GET", "/")[0] == 200  # it was kept: a new one is opened
    connection.sock.close()
    connection.sock = _NoRoute()
    server.shutdown()
    server.server_close()
    with pytest.raises(RetryError, match="is away"):
        client.ask("GET", "/")
    client.close()
