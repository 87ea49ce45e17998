"""The relay's own reader of HTTP/2 header blocks against the library `hpack`, on the same blocks in the same run.

    python -m benchmarks.header_blocks [--quick]

Each block is that of a gRPC request: once the same fields in every request, as a client without tracing sends them, and
once with a request id and a trace id that differ each time. Figures are processor time for each block, the median of
five turns. The relay must follow every block of a connection, sampled or not, or it loses the state of the connection.
"""

import argparse
import statistics
import time
from collections.abc import Callable

from hpack import Decoder, Encoder

from benchmarks.result import Goal, finish
from quantdrift.sidecar.relay.http2.hpack import HeaderBlockDecoder
from quantdrift.sidecar.relay.observing.memory import ObserverMemory

_TURNS = 5
_MOST_BYTES = 64 * 1024
_FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ModelInfer"),
    (":authority", "127.0.0.1:8001"),
    ("content-type", "application/grpc"),
    ("user-agent", "grpc-python/1.85.0 grpc-c/52.0.0 (linux; chttp2)"),
    ("te", "trailers"),
    ("grpc-accept-encoding", "identity, deflate, gzip"),
]


def blocks(n: int, *, traced: bool) -> list[bytes]:
    """Return the header blocks of `n` requests on one connection, with or without ids that differ each time."""
    encoder = Encoder()
    ids = (
        [("x-request-id", f"{i:032x}"), ("traceparent", f"00-{i:032x}-{i:016x}-01")] if traced else []
        for i in range(n)
    )
    return [encoder.encode(_FIELDS + more) for more in ids]


def _us_per_block(make: Callable[[], Callable[[bytes], object]], given: list[bytes]) -> float:
    turns = []
    for _ in range(_TURNS):
        read = make()
        begun_s = time.process_time()
        for block in given:
            read(block)
        turns.append((time.process_time() - begun_s) / len(given) * 1e6)
    return statistics.median(turns)


def main() -> None:
    """Measure both, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks")
    n = 2_000 if parser.parse_args().quick else 20_000
    figures: dict[str, float | int | str | None] = {"blocks": n}
    goals = []
    for name, traced in (("same", False), ("traced", True)):
        given = blocks(n, traced=traced)
        library = _us_per_block(lambda: Decoder().decode, given)
        own = _us_per_block(lambda: HeaderBlockDecoder(_MOST_BYTES, ObserverMemory(1 << 20)).read, given)
        figures |= {f"library_us_{name}": round(library, 2), f"own_us_{name}": round(own, 2)}
        print(f"{name:>7}: hpack {library:6.2f} us, own {own:5.2f} us, {library / own:.1f} times")
        goals.append(
            Goal(name=f"library_over_own_{name}", value=library / own, bound=2.0, unit="", at_most=False)
        )
    finish("header_blocks", figures, goals)


if __name__ == "__main__":
    main()
