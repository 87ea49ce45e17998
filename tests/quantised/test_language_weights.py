"""The weights of a language model's candidate: their layers, their values, and the steps that they were rounded by."""

from datetime import UTC, datetime

import pytest
import torch

from quantdrift.core.config.schema import Model
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Exemplar, ExemplarItem, ExemplarKind
from quantdrift.core.tasks import Task
from quantdrift.facts.diagnosis import WeightsOrigin
from quantdrift.release.diagnose.language.diagnose import texts_of
from quantdrift.release.diagnose.language.weights import differing, layer_of, values_of
from quantdrift.release.origin import Origins, origins_of
from tests.support.shadow.language_models import rounded_in_blocks
from tests.support.shadow.openai_exchanges import chat, exchange

pytestmark = pytest.mark.integration


Form = int | torch.dtype


def _network(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.Linear(128, 128), torch.nn.Linear(128, 64))


def _origins(candidate: torch.nn.Module, reference: torch.nn.Module) -> Origins:
    return origins_of(
        [weight.compared(n) for n, weight in enumerate(differing(candidate, reference).weights)]
    )


def _with(change: Form, seed: int = 1) -> torch.nn.Sequential:
    """Return a network with weights in so many bits, or in another type."""
    network = _network(seed)
    if isinstance(change, torch.dtype):
        return network.to(change)
    with torch.no_grad():
        for layer in network:
            layer.weight.copy_(rounded_in_blocks(layer.weight, bits=change))  # type: ignore[operator, arg-type]
    return network


@pytest.mark.parametrize("form", [2, 3, 4, 8, torch.bfloat16, torch.float16])
def test_rounding_is_told_from_another_checkpoint(form: Form) -> None:
    """By the values alone, whatever bits they have: no file says what the steps are."""
    assert _origins(_with(form), _network(1)).origin is WeightsOrigin.ROUNDED
    if form not in {2, 3, 4}:  # there the answers must judge
        assert _origins(_with(form, seed=2), _network(1)).refusal


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_tensors_of_torchao_tell_their_values_and_steps(kind: str) -> None:
    """They are the reference's, rounded; those of another checkpoint are refused at 8 bits."""
    import torchao.quantization as ao

    config = {
        "int8": ao.Int8WeightOnlyConfig(),
        "int4": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]
            granularity=ao.PerGroup(32),
        ),
        "fp8": ao.Float8WeightOnlyConfig(),
    }[kind]
    sound, other = _network(1), _network(2)
    for network in (sound, other):
        ao.quantize_(network, config)
    assert _origins(sound, _network(1)).origin is WeightsOrigin.ROUNDED
    assert len(differing(sound, _network(1)).weights) == 3
    assert _origins(other, _network(1)).refusal


def test_a_matrix_with_other_values_is_a_fault() -> None:
    """One of three, by its name."""
    network = _with(4)
    with torch.no_grad():
        network[1].weight.add_(0.05 * torch.randn(128, 128))  # type: ignore[operator]
    found = differing(network, _network(1))
    origins = _origins(network, _network(1))
    assert origins.origin is WeightsOrigin.FAULTS
    assert [found.weights[off.site].name for off in origins.off] == ["1.weight"]


def test_layers_are_blocks_and_what_is_outside_of_them() -> None:
    """Experts belong to their block."""
    names = {
        "model.layers.3.mlp.experts.7.up_proj.weight": "model.layers.3",
        "transformer.h.11.attn.c_attn.weight": "transformer.h.11",
        "model.embed_tokens.weight": "model.embed_tokens",
        "lm_head.weight": "lm_head",
    }
    assert {name: layer_of(name) for name in names} == names


def test_integers_without_a_scale_are_refused() -> None:
    """What they stand for is not known."""
    packed = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)
    with pytest.raises(OperatorError, match="its scale is not known here"):
        values_of(packed, "qweight")


def test_exemplars_give_what_was_answered() -> None:
    """Those that were drawn at random, with their own prompts and answers; damaged ones are chosen, and count in no mean."""
    random = exchange(
        "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a"}]}, chat()
    )
    kept = [
        Exemplar(
            kind=kind,
            slice="language=de",
            exchange=random,
            items=(ExemplarItem(index=0, flip=True, divergence=0.4),),
            reference=(),
            reference_digest="",
            probability=0.5 if kind is ExemplarKind.RANDOM else None,
            compared_at=datetime.now(UTC),
        )
        for kind in ExemplarKind
    ]
    texts = texts_of(kept, kept[:1], Model(name="m", task=Task.GENERATION))
    n_random = sum(each.kind is ExemplarKind.RANDOM for each in kept)
    assert int(texts.is_inside.sum()) == n_random
    assert texts.requests[0].messages[0]["content"] == "a"
    assert texts.answers[0].text
