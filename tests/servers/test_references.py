"""References that real servers hold: Triton and KServe, over HTTP and gRPC."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from quantdrift.core.config.schema import Model, ModelTensor, Provider, Reference, Runtime
from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference
from quantdrift.models.runtimes.self_test import SelfTestedRuntime
from tests.contract import test_reference_runtime as suite
from tests.servers.server import Server, kserve_at
from tests.servers.wiretap import wiretap
from tests.support.shadow.onnx_models import inputs_of, linear_model, saved
from tests.support.sidecar.relay_process import DEADLINE_S, free_port, wait

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

Made = Callable[..., RuntimeRequest]
SUITE = [
    suite.of_suite("test_results_do_not_depend_on_the_batch"),
    suite.of_suite("test_inputs_that_cannot_be_computed_are_refused_as_replay_errors"),
    suite.of_suite("test_inputs_may_be_views_and_read_only"),
    suite.of_suite("test_a_closed_runtime_may_be_closed_again"),
    suite.of_suite("test_without_an_embedding_there_is_none"),
    suite.test_results_are_what_the_model_says,
    suite.test_inputs_of_another_shape_are_refused,
    suite.test_a_candidate_is_as_far_off_as_it_was_moved,
]


@pytest.fixture(params=["triton", pytest.param("kserve", marks=pytest.mark.release)])
def server(request: pytest.FixtureRequest) -> Server:
    """Return a server that runs."""
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=[Runtime.OIP_HTTP, Runtime.OIP_GRPC])
def opening(request: pytest.FixtureRequest, server: Server) -> RuntimeRequest:
    """Return what is configured for the model `reference` of that server."""
    return opening_at(server, request.param)


@pytest.fixture
def runtime(opening: RuntimeRequest) -> Iterator[ReferenceRuntime]:
    """Return the reference, closed at the end."""
    runtime = open_reference(opening)
    yield runtime
    runtime.close()


def opening_at(
    server: Server, runtime: Runtime, model: str = "reference", **options: object
) -> RuntimeRequest:
    """Return what is configured for a model of a server."""
    url = (
        f"http://127.0.0.1:{server.http_port}"
        if runtime is Runtime.OIP_HTTP
        else f"grpc://127.0.0.1:{server.grpc_port}"
    )
    reference = msgspec.convert({"runtime": runtime, "url": url, "model": model, **options}, Reference)
    return RuntimeRequest(model=Model(name="digits"), reference=reference)


@pytest.mark.parametrize("behaviour", SUITE, ids=lambda one: one.__name__)
def test_it_does_what_every_runtime_does(
    opening: RuntimeRequest, behaviour: Callable[..., None], tmp_path: Path
) -> None:
    """The conformance suite, except for what a server cannot prove."""
    made: list[ReferenceRuntime] = []

    def make(_: Path) -> ReferenceRuntime:
        made.append(open_reference(opening))
        return made[-1]

    try:
        behaviour(make, tmp_path)
    finally:
        for one in made:
            one.close()


def test_it_gives_what_onnx_runtime_gives(runtime: ReferenceRuntime, tmp_path: Path) -> None:
    """The same model in another place."""
    local = OnnxRuntime(saved(linear_model(), tmp_path / "linear.onnx"), provider=Provider.CPU, threads=1)
    x = inputs_of(40)
    np.testing.assert_allclose(
        runtime.run({"x": x})["logits"], local.run({"x": x})["logits"], rtol=1e-5, atol=1e-6
    )


def test_it_says_that_nothing_was_verified(runtime: ReferenceRuntime, opening: RuntimeRequest) -> None:
    """Its tensors and its name are the server's; its digest is of what the server says, or as configured."""
    with closing(open_reference(opening)) as again:
        assert again.artefact == runtime.artefact
    assert [str(spec) for spec in runtime.inputs] == ["x: float32[?, 4]"]
    assert [str(spec) for spec in runtime.outputs] == ["logits: float32[?, 3]"]
    assert runtime.artefact.precision == runtime.provenance.device == "unverified"
    assert len(runtime.artefact.digest) == 64
    assert runtime.artefact.path.endswith("/reference")
    told = runtime.provenance
    assert (told.runtime, told.provider) == (opening.reference.runtime, "remote")
    assert told.version
    pinned = msgspec.structs.replace(opening.reference, digest=f"sha256:{'a' * 64}")
    with closing(open_reference(msgspec.structs.replace(opening, reference=pinned))) as named:
        assert named.artefact.digest == "a" * 64


def test_a_model_that_is_not_there_is_said(opening: RuntimeRequest) -> None:
    """To the person who configured it."""
    gone = msgspec.structs.replace(opening.reference, model="gone")
    with pytest.raises((OperatorError, RetryError), match="gone"):
        open_reference(msgspec.structs.replace(opening, reference=gone))


@pytest.mark.parametrize("kind", [Runtime.OIP_HTTP, Runtime.OIP_GRPC])
@pytest.mark.release
def test_tensors_that_the_server_does_not_tell_are_configured(kserve: Server, kind: Runtime) -> None:
    """KServe's models tell theirs only where their author wrote it down."""
    opening = opening_at(kserve, kind, "linear")
    with pytest.raises(OperatorError, match=r"does not describe its inputs.*\[\[models.inputs\]\]"):
        open_reference(opening)
    model = Model(
        name="digits",
        inputs=(ModelTensor(name="x", datatype="FP32", shape=(-1, 4)),),
        outputs=(ModelTensor(name="scores", datatype="FP32"),),
    )
    with closing(open_reference(msgspec.structs.replace(opening, model=model))) as runtime:
        assert runtime.run({"x": inputs_of(2)})["scores"].shape == (2, 3)


@pytest.mark.parametrize("kind", [Runtime.OIP_HTTP, Runtime.OIP_GRPC])
def test_an_input_the_model_fails_on_is_told_from_a_server_that_fails(triton: Server, kind: Runtime) -> None:
    """The exchange pays, and the next one is computed on the same connection."""
    with closing(SelfTestedRuntime(open_reference(opening_at(triton, kind)))) as runtime:
        with pytest.raises(QuarantineError, match=r"INTERNAL|HTTP 500") as failed:
            runtime.run({"x": np.full((1, 4), np.inf, np.float32)})
        with pytest.raises(QuarantineError, match=r"FP32\[65, 4\]"):
            runtime.run({"x": inputs_of(65)})  # more than max_batch_size
        assert "infinite" not in failed.value.detail  # the server's words may quote the input
        assert runtime.run({"x": inputs_of(3)})["logits"].shape == (3, 3)


@pytest.mark.parametrize("kind", [Runtime.OIP_HTTP, Runtime.OIP_GRPC])
def test_an_answer_that_takes_too_long_concerns_that_input(triton: Server, kind: Runtime) -> None:
    """Smaller batches are tried next; what the server could compute before shows that it still does."""
    slow = np.full((1, 4), np.nan, np.float32)
    with (
        closing(open_reference(opening_at(triton, kind, timeout_s=0.5))) as runtime,
        pytest.raises(QuarantineError, match=r"no answer within 0\.5 s"),
    ):
        runtime.run({"x": slow})
    with closing(open_reference(opening_at(triton, kind))) as patient:
        assert patient.run({"x": slow})["logits"].shape == (1, 3)


@pytest.mark.parametrize("kind", [Runtime.OIP_HTTP, Runtime.OIP_GRPC])
def test_an_unknown_embedding_is_named(triton: Server, kind: Runtime) -> None:
    """A server shows its outputs, and no layers."""
    with pytest.raises(OperatorError, match=r"did you mean `logits`.*outputs alone"):
        open_reference(msgspec.structs.replace(opening_at(triton, kind), embedding="logit"))
    with closing(
        open_reference(msgspec.structs.replace(opening_at(triton, kind), embedding="logits"))
    ) as runtime:
        assert runtime.embedding == "logits"


@pytest.mark.parametrize("kind", [Runtime.OIP_HTTP, Runtime.OIP_GRPC])
def test_a_server_that_is_away_is_tried_again(triton: Server, kind: Runtime) -> None:
    """At the start and in between: nothing is wrong with any exchange."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
        port = taken.getsockname()[1]
        nobody = msgspec.structs.replace(triton, http_port=port, grpc_port=port)
        with pytest.raises(RetryError, match="is away"):
            open_reference(opening_at(nobody, kind))


@pytest.mark.parametrize("kind", [Runtime.OIP_HTTP, Runtime.OIP_GRPC])
def test_a_server_that_comes_back_computes_on(kserve: Server, kind: Runtime, tmp_path: Path) -> None:
    """The same reference asks it again: whoever has it need not open it anew."""
    server = Server(environment=kserve.environment, http_port=free_port(), grpc_port=free_port())
    x = inputs_of(2)
    with kserve_at(server, tmp_path):
        runtime = SelfTestedRuntime(open_reference(opening_at(server, kind)))
        before = runtime.run({"x": x})["logits"]
    with closing(runtime):
        for _ in range(2):  # on the connection of old, and on none
            with pytest.raises(RetryError, match="is away"):
                runtime.run({"x": x})
        with kserve_at(server, tmp_path):
            np.testing.assert_array_equal(_until_back(runtime, x), before)


def _until_back(runtime: ReferenceRuntime, x: NDArray[np.float32]) -> NDArray[Any]:
    """Try again for as long as it takes a channel to notice that its server is there, as the stages do."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return runtime.run({"x": x})["logits"]
        except RetryError:
            assert time.monotonic() < deadline, "the server is there and not asked"
            time.sleep(0.1)


def test_a_connection_that_the_server_has_closed_is_opened_anew(triton: Server) -> None:
    """As servers do with those that are idle; no exchange notices, and one connection is kept otherwise."""
    with wiretap(triton.http_port) as tap:
        server = msgspec.structs.replace(triton, http_port=tap.port)
        with closing(open_reference(opening_at(server, Runtime.OIP_HTTP))) as runtime:
            for _ in range(3):
                runtime.run({"x": inputs_of(1)})
            assert len(tap.lines) == 1
            runtime._transport._server._connection.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
            runtime.run({"x": inputs_of(1)})
            assert len(tap.lines) == 2


@pytest.mark.parametrize("given", ["file", "environment"])
def test_the_token_goes_with_every_request(triton: Server, given: str, tmp_path: Path) -> None:
    """Read anew for each: a mounted one changes. Without its file there is no asking, and nothing is set aside."""
    file = tmp_path / "token"
    file.write_text("first\n")
    with wiretap(triton.http_port) as tap:
        server = msgspec.structs.replace(triton, http_port=tap.port)
        opening = opening_at(server, Runtime.OIP_HTTP, token_file=str(file) if given == "file" else "")
        opening = msgspec.structs.replace(opening, token="" if given == "file" else "first")
        assert "first" not in repr(opening)
        with closing(open_reference(opening)) as runtime:
            runtime.run({"x": inputs_of(1)})
            file.write_text("second")
            runtime.run({"x": inputs_of(1)})
            if given == "file":
                file.unlink()
                with pytest.raises(RetryError, match="token_file"):
                    runtime.run({"x": inputs_of(1)})
        wait(tap.closed, "the connection is closed")
        ((up, _),) = tap.take()
    tokens = [
        line.split()[-1] for line in up.splitlines() if line.lower().startswith(b"authorization: bearer ")
    ]
    assert tokens == [b"first"] * 4 + ([b"second"] if given == "file" else [b"first"])
