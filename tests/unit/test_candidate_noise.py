"""Repeated requests to a candidate: marked, at a bounded rate, to the served version, and in the background."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import numpy as np
import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.check import problems
from quantdrift.core.config.schema import Config, Model, Recheck
from quantdrift.core.recheck_mark import HEADER, RecheckMarks
from quantdrift.core.records import Side, Tensor, Way
from quantdrift.core.slices import everything
from quantdrift.core.tasks import Task
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.tensors.codec import decode, fit_inputs
from quantdrift.shadow.replay.candidate_noise import (
    EVERY_S,
    TIMEOUT_S,
    RecheckRequest,
    RecheckResult,
    Rechecks,
)
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from tests.support.shadow.onnx_models import BIAS, WEIGHT, exchange_of, inputs_of, logits_of, tensor
from tests.support.sidecar.grpc_backend import Doubling, running_grpc
from tests.support.sidecar.relay_process import wait


class _Replica(BaseHTTPRequestHandler):
    """Answers logits of 0, 1 and 2 for each item, in JSON, and notes what it was asked."""

    asked: list[tuple[str, dict[str, str]]]

    def do_POST(self) -> None:
        """Answer one request."""
        length = int(self.headers["Inference-Header-Content-Length"])
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = msgspec.json.decode(body[:length])
        self.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        n_items = request["inputs"][0]["shape"][0]
        output = {"name": "logits", "datatype": "FP32", "shape": [n_items, 3], "data": [0, 1, 2] * n_items}
        answer = msgspec.json.encode({"outputs": [output]})
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def replica() -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """Run a replica; yield its address and what it was asked."""
    asked: list[tuple[str, dict[str, str]]] = []
    handler = type("Handler", (_Replica,), {"asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


SALT = b"0123456789abcdef"


def model_at(url: str, **more: Any) -> Model:
    """Return a model whose candidate may be asked there."""
    return Model(name="digits", top_k=2, recheck=Recheck(url=url, versions=("int8*",), **more))


def exchange(
    model: Model, *, n_items: int = 2, output: Tensor | None = None, version: str = "int8"
) -> RecheckRequest:
    """Return an exchange whose candidate answered 0, 1 and 2 for each item, or `output`."""
    runtime = LinearRuntime(WEIGHT, BIAS)
    given = np.tile(np.arange(3, dtype=np.float32), (n_items, 1))
    captured = exchange_of(inputs_of(n_items), given, version=version)
    if output is not None:
        captured = msgspec.structs.replace(captured, outputs=(output,))
    entry = PreparedExchange(
        stream_sequence=1,
        payload=b"",
        exchange=captured,
        version_reference=VersionReference(model=model, runtime=runtime, comparator=comparator_of(model)),
        inputs=fit_inputs(captured.inputs, runtime.inputs, batched=True),
    )
    first = {one.name: decode(one) for one in captured.outputs}
    slices = ((everything("digits"),),) * n_items
    return RecheckRequest(entry=entry, first=first, rows=tuple(range(n_items)), slices=slices)


class Asking:
    """A clock and those who ask by it."""

    def __init__(self, model: Model, timeout_s: float = TIMEOUT_S) -> None:
        self.clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
        self.clock.advance(100)
        self.rechecks = Rechecks((model,), self.clock, SALT, timeout_s=timeout_s)
        self.found: list[RecheckResult] = []

    def until(self, n: int) -> list[RecheckResult]:
        """Wait for so many answers."""

        def there() -> bool:
            self.found += self.rechecks.take()
            return len(self.found) >= n

        wait(there, "the answers")
        return self.found


@pytest.mark.integration
def test_the_same_answer_is_no_noise_and_the_request_is_marked() -> None:
    """Whoever stands before the replica sees the mark and lets the request pass."""
    with replica() as (url, asked):
        model = model_at(url, model_version="7")
        asking = Asking(model)
        asking.rechecks.offer(exchange(model))
        (answered,) = asking.until(1)
        asking.rechecks.close()
    ((path, headers),) = asked
    assert path == "/v2/models/digits/versions/7/infer"
    asked_for = exchange(model).entry.exchange.inputs
    assert RecheckMarks(SALT).is_valid(headers[HEADER], asked_for, asking.clock.now().timestamp())
    assert (answered.outcome, answered.n_items) == ("measured", 2)
    assert {(item.side, item.flip, item.divergence) for item in answered.items} == {
        (Side.CANDIDATE, False, 0.0)
    }


@pytest.mark.integration
def test_another_answer_is_noise() -> None:
    """By the model's own comparator: the first answer is what the second is held against."""
    with replica() as (url, _):
        model = model_at(url)
        asking = Asking(model)
        given = np.array([[2, 1, 0], [0, 1, 2]], dtype=np.float32)
        asking.rechecks.offer(exchange(model, output=tensor("logits", given)))
        (answered,) = asking.until(1)
        asking.rechecks.close()
    assert [item.flip for item in answered.items] == [True, False]
    assert [(item.divergence or 0.0) > 0 for item in answered.items] == [True, False]


@pytest.mark.unit
def test_over_grpc_the_request_is_marked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its metadata."""
    seen: list[dict[str, str]] = []
    infer = Doubling.ModelInfer

    def noted(self: Doubling, request: Any, context: Any) -> Any:
        seen.append(dict(context.invocation_metadata()))
        return infer(self, request, context)

    monkeypatch.setattr(Doubling, "ModelInfer", noted)
    with running_grpc() as (_, port):
        model = model_at(f"grpc://127.0.0.1:{port}")
        asking = Asking(model)
        x = inputs_of(2)
        asking.rechecks.offer(exchange(model, output=tensor("y_x", np.concatenate([x, x], axis=1))))
        (answered,) = asking.until(1)
        asking.rechecks.close()
    asked_for = exchange(model).entry.exchange.inputs
    assert RecheckMarks(SALT).is_valid(seen[0][HEADER], asked_for, asking.clock.now().timestamp())
    assert [item.divergence for item in answered.items] == [0.0, 0.0]


@pytest.mark.integration
def test_what_unverified_senders_report_is_sent_to_no_replica() -> None:
    """Nobody knows who wrote it, and it would take the turn of an exchange that is known."""
    with replica() as (url, asked):
        model = model_at(url)
        asking = Asking(model)
        request = exchange(model)
        entry = msgspec.structs.replace(
            request.entry, exchange=msgspec.structs.replace(request.entry.exchange, way=Way.EXT_PROC)
        )
        asking.rechecks.offer(msgspec.structs.replace(request, entry=entry))
        asking.rechecks.offer(request)
        asking.until(1)
        asking.rechecks.close()
    assert len(asked) == 1


@pytest.mark.integration
def test_the_rate_is_kept_and_other_versions_are_not_asked() -> None:
    """Between two requests lies `EVERY_S`; a version that is not served there is let be."""
    with replica() as (url, asked):
        model = model_at(url)
        asking = Asking(model)
        asking.rechecks.offer(exchange(model, version="fp16"))
        for seconds in (0.0, EVERY_S - 0.1, 0.2, 0.0):
            asking.clock.advance(seconds)
            asking.rechecks.offer(exchange(model))
        asking.until(2)
        asking.rechecks.close()
    assert len(asked) == 2


@pytest.mark.integration
def test_a_replica_that_hangs_or_is_away_holds_nobody_up() -> None:
    """What does not fit into the queue is left out, and what fails is counted."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        model = model_at(f"http://127.0.0.1:{silent.getsockname()[1]}")
        asking = Asking(model, timeout_s=0.2)
        began_s = time.monotonic()
        for _ in range(12):
            asking.clock.advance(EVERY_S)
            asking.rechecks.offer(exchange(model))
        assert time.monotonic() - began_s < 0.2
        outcomes = [one.outcome for one in asking.until(12)]
        asking.rechecks.close()
    assert set(outcomes) == {"failed", "left_out"}
    assert outcomes.count("failed") <= 6


@pytest.mark.integration
def test_an_answer_that_cannot_be_compared_is_counted_as_failed() -> None:
    """The candidate gave another output than the replica has."""
    with replica() as (url, _):
        model = model_at(url)
        asking = Asking(model)
        asking.rechecks.offer(exchange(model, output=tensor("other", logits_of(inputs_of(2)))))
        (answered,) = asking.until(1)
        asking.rechecks.close()
    assert (answered.outcome, answered.n_items, answered.items) == ("failed", 2, ())


@pytest.mark.unit
def test_a_replica_must_say_which_versions_it_serves() -> None:
    """Another version's answers would be taken for noise, and hide a bad release."""
    config = Config(models=(Model(name="digits", recheck=Recheck(url="http://h:1")),))
    assert "recheck.versions is empty" in "\n".join(problems(config))
    assert not problems(Config(models=(model_at("https://h:1"),)))


@pytest.mark.unit
def test_generated_text_is_not_asked_for_again() -> None:
    """The protocol tells no scores: every request would fail."""
    model = msgspec.structs.replace(model_at("https://h:1"), task=Task.GENERATION)
    assert "scores of generated text" in "\n".join(problems(Config(models=(model,))))
