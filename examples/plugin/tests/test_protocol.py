"""The protocol `score-v1` passes the tests of every decoder."""

from quantdrift.plugins.protocols import Model, ModelTensor
from quantdrift.testing.protocols import Exchange, ProtocolSuite
from quantdrift_forecast.protocol import SCORE

_MODEL = Model(
    name="demand",
    inputs=(ModelTensor(name="x", datatype="FP32", shape=(-1, 2)),),
    outputs=(ModelTensor(name="forecast", datatype="FP32", shape=(-1, 3)),),
)


class TestScore(ProtocolSuite):
    """What quantdrift asks of every decoder. The types are those of the model that the body names."""

    plugin = SCORE
    exchanges = (
        Exchange(
            model=_MODEL,
            path="/v1/score",
            request=b'{"model": "demand", "inputs": {"x": [[1, 2], [3, 4.5]]}}',
            response=b'{"version": "int8-1", "outputs": {"forecast": [[1, 2, 3], [4, 5, 6]]}}',
            inputs={"x": ("FP32", [[1.0, 2.0], [3.0, 4.5]])},
            outputs={"forecast": ("FP32", [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])},
            version="int8-1",
        ),
    )
