"""Exchanges of text whose tensors do not fit together."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Exchange, Tensor
from quantdrift.models.language.from_exchange import scoring_inputs
from tests.support.shadow.openai_exchanges import chat, exchange

pytestmark = pytest.mark.property

LOGPROBS = [{"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "b", "logprob": -1.0}]}]
CALL = {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}


def _whole() -> Exchange:
    answered = {
        **chat("a", token_ids=[8], message={**CALL, "reasoning": "hm"}, logprobs={"content": LOGPROBS}),
        "prompt_token_ids": [1, 2],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1},
    }
    asked = {
        "model": "m",
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "temperature": 0,
    }
    return exchange("/v1/chat/completions", asked, answered)


WHOLE = _whole()
N_TENSORS = len(WHOLE.inputs) + len(WHOLE.outputs)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


def _spoilt(tensor: Tensor, how: str, value: Any) -> Tensor:
    text = msgspec.json.encode(value)
    changes: dict[str, dict[str, Any]] = {
        "document": {"datatype": "BYTES", "shape": (1,), "data": len(text).to_bytes(4, "little") + text},
        "none": {"shape": (0,), "data": b""},
        "scalar": {"shape": ()},
        "number": {"datatype": "INT64", "shape": (1,), "data": bytes(8)},
        "matrix": {"datatype": "FP64", "shape": (2, 2), "data": bytes(32)},
        "name": {"name": "else"},
        "short": {"data": tensor.data[:-1]},
    }
    return msgspec.structs.replace(tensor, **changes[how])


@given(
    place=st.integers(0, N_TENSORS - 1),
    how=st.sampled_from(["document", "none", "scalar", "number", "matrix", "name", "short"]),
    value=JSON,
)
def test_any_tensor_may_be_spoilt(place: int, how: str, value: Any) -> None:
    """The exchange is set aside, or what is left of it makes sense; no other error comes of it."""
    tensors = [*WHOLE.inputs, *WHOLE.outputs]
    tensors[place] = _spoilt(tensors[place], how, value)
    n_inputs = len(WHOLE.inputs)
    spoilt = msgspec.structs.replace(
        WHOLE, inputs=tuple(tensors[:n_inputs]), outputs=tuple(tensors[n_inputs:])
    )
    try:
        inputs, candidate = scoring_inputs(spoilt)
    except QuarantineError:
        return
    assert len({len(array) for array in (*inputs.values(), *candidate.values())}) == 1
