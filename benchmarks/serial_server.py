"""A server that answers one request at a time, each in the same known time: `python -m benchmarks.serial_server SERVICE_S`.

Requests wait for a lock. Each is served for exactly the service time from when it came, or from when the one before was done: what the handing over of the
lock takes, and by how much a sleep is longer than it should be, does not add up. So with requests at random times it is the queue M/D/1.
"""

import sys
import threading
import time
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class SerialServer(ThreadingHTTPServer):
    """The server, at a free port of this host; 503 where more than `most_waiting` requests wait."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, service_s: float, most_waiting: int = sys.maxsize) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.service_s, self.most_waiting = service_s, most_waiting
        self.n_waiting = 0
        self.lock, self.counting = threading.Lock(), threading.Lock()
        self._free_at = 0.0

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_port}"

    def takes(self, headers: Message) -> bool:
        """Return whether a request with these headers is served: each is."""
        return True

    def serve(self) -> int:
        """Wait for the turn of a request, serve it, and return the status of the answer."""
        came = time.perf_counter()
        with self.counting:
            if self.n_waiting >= self.most_waiting:
                return 503
            self.n_waiting += 1
        with self.lock:
            self._free_at = max(came, self._free_at) + self.service_s
            time.sleep(max(0.0, self._free_at - time.perf_counter()))
        with self.counting:
            self.n_waiting -= 1
        return 200


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: SerialServer

    def do_POST(self) -> None:
        """Answer a request in its turn."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(self.server.serve() if self.server.takes(self.headers) else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class calls it
        """Write no line for each request."""


def main() -> None:
    """Serve until standard input is closed; print the address."""
    server = SerialServer(float(sys.argv[1]))
    print(server.url, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
