"""Embeddings of an OpenAI-compatible server, compared with those of another one that holds the reference."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Model, Reference, Runtime
from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.core.tasks import Task
from quantdrift.models.language.scoring import objects
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference
from quantdrift.shadow.pipeline.classify import Case, classify
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References
from quantdrift.shadow.replay.replay import Outcome, ReplayResult, compare_batch
from quantdrift.storage.comparisons.rows import Quarantined
from tests.support.shadow.language_models import loaded, quantised
from tests.support.shadow.openai_exchanges import exchange
from tests.support.shadow.vllm_like import VllmLike, serving

pytestmark = pytest.mark.integration

PATH = "/v1/embeddings"
TEXTS = ["what drifts?", "the relay forwards bytes", "größe"]


@pytest.fixture(scope="module")
def server(language_folder: Path) -> VllmLike:
    """Return what holds the reference."""
    return VllmLike(*loaded(language_folder))


@pytest.fixture
def told(server: VllmLike) -> Iterator[RuntimeRequest]:
    """Return what is configured of it."""
    with serving(server) as url:
        reference = Reference(runtime=Runtime.OPENAI, url=url, timeout_s=20.0)
        model = Model(name="small", task=Task.EMBEDDING, references=(reference,))
        yield RuntimeRequest(model=model, reference=reference, embedding="embedding")


@pytest.fixture
def runtime(told: RuntimeRequest) -> Iterator[ReferenceRuntime]:
    """Return the reference, closed at the end."""
    runtime = open_reference(told)
    yield runtime
    runtime.close()


def _case(told: RuntimeRequest, runtime: ReferenceRuntime, candidate: VllmLike, **more: Any) -> Case:
    asked = {"model": "small", "input": TEXTS, **more}
    _, answered = candidate.answer(PATH, asked)
    references = References((told.model,), lambda *_: runtime)
    wire = encode(exchange(PATH, asked, answered))
    return classify(wire, sequence=1, n_delivered=1, max_deliveries=3, references=references)


def _outcome(case: Case) -> Outcome:
    assert isinstance(case, PreparedExchange)
    (outcome,) = compare_batch([case], most_items=2)
    return outcome


def test_texts_are_items_and_an_equal_model_gives_equal_vectors(
    told: RuntimeRequest, runtime: ReferenceRuntime, server: VllmLike
) -> None:
    """In as many requests as it takes; the vectors make learned slices too."""
    found = _outcome(_case(told, runtime, server))
    assert isinstance(found, ReplayResult)
    np.testing.assert_allclose(found.divergences.divergence, 0, atol=1e-6)
    assert found.divergences.flip.tolist() == [0, 0, 0]
    assert found.embedding is not None
    assert found.embedding.shape == (3, 64)


def test_an_int8_copy_is_a_little_off(
    told: RuntimeRequest, runtime: ReferenceRuntime, language_folder: Path
) -> None:
    """By its cosine distance."""
    model, tokenizer = loaded(language_folder)
    found = _outcome(_case(told, runtime, VllmLike(quantised(model), tokenizer)))
    assert isinstance(found, ReplayResult)
    assert (found.divergences.divergence > 1e-6).all()
    assert (found.divergences.divergence < 0.05).all()


def test_vectors_that_were_cut_are_set_aside(
    told: RuntimeRequest, runtime: ReferenceRuntime, server: VllmLike
) -> None:
    """The reference gives them whole."""
    case = _case(told, runtime, server, dimensions=8)
    assert isinstance(case, Quarantined)
    assert "dimensions" in case.detail
    case = _case(told, runtime, server, truncate_prompt_tokens=2)
    assert isinstance(case, Quarantined)
    assert "truncate_prompt_tokens" in case.detail


def test_each_kind_of_failure_has_its_error(runtime: ReferenceRuntime, server: VllmLike) -> None:
    """A server that is away is waited for, a text that it refuses is set aside."""
    server.fails = [503]
    with pytest.raises(RetryError):
        runtime.run({"input": objects(TEXTS)})
    with pytest.raises(QuarantineError, match="HTTP 400"):
        runtime.run({"input": objects([*TEXTS, ""])})
    with pytest.raises(QuarantineError, match="replay"):
        runtime.run({"x": np.zeros((1, 4), dtype=np.float32)})


def test_only_vectors_make_learned_slices(told: RuntimeRequest) -> None:
    """There is no other output."""
    with pytest.raises(OperatorError, match="embedding"):
        open_reference(msgspec.structs.replace(told, embedding="hidden"))
