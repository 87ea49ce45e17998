"""What real servers say of themselves when `quantdrift init` asks them."""

import pytest

from quantdrift.core.records import Protocol
from quantdrift.init.references import served_reference
from quantdrift.init.server import ask_server
from tests.servers.server import Server

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]


def test_triton_names_its_models_and_their_outputs(triton: Server) -> None:
    """By its repository index, and the metadata of each; a model of it is a reference by its address."""
    asked = ask_server(f"127.0.0.1:{triton.http_port}")
    assert asked is not None
    assert (asked.name.split()[0], asked.protocols) == ("triton", (Protocol.OIP_REST,))
    outputs = {model.name: model.outputs for model in asked.models}
    assert {"linear", "words"} <= outputs.keys()
    opened = served_reference(f"http://127.0.0.1:{triton.http_port}/v2/models/linear", "")
    assert opened.file is not None
    assert tuple(spec.name for spec in opened.file.outputs) == outputs["linear"]


def test_litserve_answers_as_openai_does(litserve: Server) -> None:
    """It lists what it calls its models."""
    asked = ask_server(f"127.0.0.1:{litserve.http_port}")
    assert asked is not None
    assert Protocol.OPENAI_CHAT in asked.protocols


@pytest.mark.release
def test_kserve_speaks_the_protocol_of_open_inference_first(kserve: Server) -> None:
    """Beside its own older one."""
    asked = ask_server(f"127.0.0.1:{kserve.http_port}")
    assert asked is not None
    assert asked.protocols == (Protocol.OIP_REST,)
    assert asked.models
