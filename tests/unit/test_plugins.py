"""Plug-ins: which packages add what, and when their code is imported."""

import logging
import pickle
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from quantdrift.core import plugins
from quantdrift.core.clock import ManualClock
from quantdrift.core.config.load import Secrets, load
from quantdrift.core.config.models import Model, ModelTensor, Runtime
from quantdrift.core.config.schema import Capture, Config
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Loss, Protocol
from quantdrift.core.tasks import MEASURES, Measure, Task, TaskRecord
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.sidecar.capture.pipeline import CapturePipeline
from quantdrift.sidecar.capture.process import identity_of
from quantdrift.sidecar.capture.publisher import Publisher
from quantdrift.sidecar.capture.recorder import Recorder
from quantdrift.sidecar.protocols import decoder_of
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Counters, Gauge, Row
from quantdrift.sidecar.state.routes import Routes, known_requests, pattern_of, plugin_paths
from tests.support.plugin_packages import install_toy
from tests.support.sidecar.raw_exchanges import raw_exchange, recorded_by

pytestmark = pytest.mark.unit

WORDS = """
from quantdrift.core.tasks import Measure, TaskRecord
TOY = TaskRecord(measure=Measure(flip="the toy says so", name="toy loss", unit="nat"))
"""
TASKS = {"quantdrift.tasks": {"toy": "toy_words:TOY"}}


@pytest.fixture(autouse=True)
def _no_plugins_afterwards() -> Iterator[None]:
    yield
    plugins.use(())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory from which packages are imported."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    return directory


def _toy(
    site: Path,
    name: str = "toy",
    entry_points: Mapping[str, Mapping[str, str]] = TASKS,
    text: str = WORDS,
) -> None:
    module = next(iter(next(iter(entry_points.values())).values())).partition(":")[0]
    sys.modules.pop(module, None)
    install_toy(site, name, entry_points, {module: text})


def _config(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load(path, {})


def test_the_words_of_a_task_come_from_its_record_when_they_are_needed(site: Path, tmp_path: Path) -> None:
    """Loading the configuration reads names and imports nothing."""
    _toy(site)
    config = _config(tmp_path, 'plugins = ["toy"]\n[[models]]\nname = "m"\ntask = "toy"\n')
    assert "toy_words" not in sys.modules
    assert config.measure("m") == Measure(flip="the toy says so", name="toy loss", unit="nat")
    assert "toy_words" in sys.modules


def test_a_task_of_a_package_that_nobody_names_is_unknown(site: Path, tmp_path: Path) -> None:
    """Though it is installed."""
    _toy(site)
    with pytest.raises(OperatorError, match=r"models\[m\].task = \"toy\": it must be one of"):
        _config(tmp_path, '[[models]]\nname = "m"\ntask = "toy"\n')
    assert "toy_words" not in sys.modules


def test_what_is_not_installed_or_adds_nothing_is_an_error(site: Path, tmp_path: Path) -> None:
    """It names the package, and says what to do."""
    _toy(site, entry_points={"console_scripts": {"toy": "toy_words:main"}})
    with pytest.raises(OperatorError, match="`absent` is not installed here: install it where"):
        _config(tmp_path, 'plugins = ["absent"]\n')
    with pytest.raises(
        OperatorError, match="`toy` adds nothing to quantdrift: it has no entry points in `quantdrift"
    ):
        _config(tmp_path, 'plugins = ["toy"]\n')


def test_names_are_added_once(site: Path, tmp_path: Path) -> None:
    """Neither a built-in one nor that of another package, and only such as fit into metrics and addresses."""
    _toy(site)
    _toy(site, "second")
    _toy(site, "rival", {"quantdrift.tasks": {"ranking": "toy_words:TOY"}})
    _toy(site, "shouting", {"quantdrift.tasks": {"TOY": "toy_words:TOY"}})
    for names, error in (
        ('"toy", "second"', "`second` adds `toy` to quantdrift.tasks, and that name is taken"),
        ('"rival"', "`rival` adds `ranking` to quantdrift.tasks, and that name is taken"),
        ('"shouting"', "`shouting` adds `TOY`: a name has small letters"),
    ):
        with pytest.raises(OperatorError, match=error):
            _config(tmp_path, f"plugins = [{names}]\n")


def test_a_wrong_configuration_leaves_the_plugins_as_they_were(site: Path, tmp_path: Path) -> None:
    """A running process goes on with the last one that was right."""
    _toy(site)
    _config(tmp_path, 'plugins = ["toy"]\n')
    with pytest.raises(OperatorError, match=r"unknown option `shadow\.thread`"):
        _config(tmp_path, "[shadow]\nthread = 1\n")
    assert MEASURES[Task("toy")].name == "toy loss"


def test_code_that_cannot_be_imported_or_is_no_record_is_an_operator_error(
    site: Path, tmp_path: Path
) -> None:
    """With the entry point and the reason, at the first use."""
    _toy(site, text="raise RuntimeError('no licence')")
    _toy(site, "other", {"quantdrift.tasks": {"number": "other_words:TOY"}}, "TOY = 7")
    _config(tmp_path, 'plugins = ["toy", "other"]\n')
    with pytest.raises(
        OperatorError, match=r"plug-in `toy` \(toy_words:TOY\) cannot be imported: RuntimeError: no licence"
    ):
        plugins.record_of(Task("toy"), TaskRecord)
    with pytest.raises(OperatorError, match=r"other_words:TOY is a int; .* must be a TaskRecord"):
        plugins.record_of(Task("number"), TaskRecord)


def test_a_stored_record_is_read_without_its_plug_in() -> None:
    """A database has events of a task that this process does not know; its words are general."""
    task = msgspec.json.decode(b'"elsewhere"', type=Task)
    assert task is Task("elsewhere")
    assert pickle.loads(pickle.dumps(task)) is task
    assert not task.is_built_in
    assert Task.RANKING.is_built_in
    assert MEASURES[task].name == "divergence"
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'"No Name"', type=Task)
    with pytest.raises(
        OperatorError, match=r"no package that `plugins` names adds `elsewhere` to quantdrift.tasks"
    ):
        comparator_of(Model(name="m", task=task))


def test_options_belong_to_what_a_plug_in_adds(tmp_path: Path) -> None:
    """A built-in task or runtime has its own tables."""
    text = '[[models]]\nname = "m"\noptions = {a = 1}\n[[models.references]]\npath = "p"\noptions = {a = 1}\n'
    with pytest.raises(OperatorError) as caught:
        _config(tmp_path, text)
    assert "options belong to the task of a plug-in, and this model's task is `classification`" in str(
        caught.value
    )
    assert "`options` belong to the runtime of a plug-in, and the runtime here is `onnx`" in str(caught.value)


def test_a_protocol_that_cannot_be_imported_costs_only_its_requests(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay counts and forwards the others; the capture process refuses to start with it."""
    _toy(site, entry_points={"quantdrift.protocols": {"score": "toy_score:SCORE"}}, text="import absent")
    plugins.use(["toy"])
    score = Protocol("score")
    with caplog.at_level(logging.ERROR):
        paths = plugin_paths([score, Protocol.KSERVE_V1])
    assert paths == {}
    assert "requests of the protocol score are relayed and not captured" in caplog.text
    routes = Routes([score, Protocol.KSERVE_V1], paths)
    assert routes.find(b"POST", b"/v1/score") is None
    assert routes.find(b"POST", b"/v1/models/m:predict") == b"/v1/models/m:predict"
    with pytest.raises(OperatorError, match="No module named 'absent'"):
        decoder_of(score)


def test_a_path_with_places_for_names_is_a_route(site: Path) -> None:
    """Whatever else the path has stands for itself; processes that serve import nothing for it."""
    text = "from quantdrift.sidecar.state.routes import ProtocolRoute\nSCORE = ProtocolRoute(path='/v1.0/{model}/{version}/score')"
    _toy(site, entry_points={"quantdrift.protocols": {"score": "toy_score:SCORE"}}, text=text)
    plugins.use(["toy"])
    score = Protocol("score")
    paths = LiveConfig.of(Config(capture=Capture(protocols=(score,)))).paths
    del sys.modules["toy_score"]
    routes = Routes([score], paths)
    assert "toy_score" not in sys.modules, "the supervisor has imported it for them"
    assert routes.find(b"POST", b"http://host/v1.0/a%20b/7/score?x=1") == b"/v1.0/a%20b/7/score"
    route = routes.route("POST", "/v1.0/a%20b/7/score")
    assert route
    assert (route.protocol, route.model, route.version) == (score, "a%20b", "7")
    for other in (b"/v1x0/a/7/score", b"/v1.0/a/b/7/score", b"/v1.0/a/7/score/"):
        assert routes.find(b"POST", other) is None
    assert routes.find(b"PUT", b"/v1.0/a/7/score") is None
    assert known_requests([score], paths) == ["/v1.0/{model}/{version}/score"]
    assert pattern_of("/a+b") == r"/a\+b"


def test_a_runtime_of_a_plug_in_goes_with_any_task_but_generation(site: Path, tmp_path: Path) -> None:
    """It says itself what it needs: neither path nor url is asked for."""
    _toy(site, entry_points={"quantdrift.runtimes": {"mine": "toy_runtime:MINE"}})
    model = 'plugins = ["toy"]\n[[models]]\nname = "m"\ntask = "{}"\n[[models.references]]\nruntime = "mine"\noptions = {{a = 1}}\n'
    (loaded,) = _config(tmp_path, model.format("tensor")).models
    assert loaded.references[0].runtime is Runtime("mine")
    assert loaded.references[0].options == {"a": 1}
    with pytest.raises(OperatorError, match="runtime `mine` and task `generation` do not go together"):
        _config(tmp_path, model.format("generation"))


SCORE = """
from quantdrift.plugins.protocols import DecodedRequest, DecodedResponse, ProtocolPlugin, untyped_tensor

class Decoder:
    def request(self, head, body, wire):
        if body == b"boom":
            raise RuntimeError("a fault of the plug-in")
        (x,) = wire.model_named(body.decode()).inputs
        return DecodedRequest(inputs=(untyped_tensor("x", [1, 2], x),), model=body.decode())

    def response(self, head, body, query, wire):
        (y,) = wire.model.outputs
        return DecodedResponse(version="7", outputs=(untyped_tensor("y", [3], y),))

SCORE = ProtocolPlugin(path="/v1/score", decoder=Decoder())
"""


def test_a_body_that_names_the_model_has_the_types_of_that_model(site: Path) -> None:
    """The decoder looks it up; a model that is not configured, and a decoder that raises, cost their exchange by reason."""
    _toy(site, entry_points={"quantdrift.protocols": {"score": "toy_score:SCORE"}}, text=SCORE)
    plugins.use(["toy"])
    demand = Model(
        name="demand",
        inputs=(ModelTensor(name="x", datatype="FP16"),),
        outputs=(ModelTensor(name="y", datatype="FP32"),),
    )
    config = Config(
        plugins=("toy",),
        capture=Capture(protocols=(Protocol("score"),)),
        models=(Model(name="other"), demand),
    )
    counters = Counters.create(2, 1)
    slot = counters.slot(1)
    recorder = Recorder(LiveConfig.of(config), identity_of(Secrets(), "b" * 32, {}))
    meta, request, response = raw_exchange(path="/v1/score", request=b"demand", response=b"3")
    exchange = recorded_by(recorder, meta, request, response)
    assert exchange
    assert (exchange.model, exchange.version, exchange.protocol) == ("demand", "7", "score")
    assert [tensor.datatype for tensor in (*exchange.inputs, *exchange.outputs)] == ["FP16", "FP32"]
    publisher = Publisher(config, slot, ManualClock(datetime(2026, 1, 1, tzinfo=UTC)))
    pipeline = CapturePipeline(recorder, publisher, slot, (Row("default"),))
    for body in (b"boom", b"absent", b"demand"):
        meta, request, response = raw_exchange(path="/v1/score", request=body, response=b"3")
        pipeline.handle(meta, memoryview(request), memoryview(response))
    assert slot.lost_count(0, Loss.CAPTURE_ERROR) == 1
    assert slot.lost_count(0, Loss.UNKNOWN_MODEL) == 1
    assert slot.gauge(Gauge.QUEUE_BYTES) > 0, "the exchange after both is handled"
