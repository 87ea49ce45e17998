"""The diagnosis of a language model's candidate in a folder, on recorded prompts or exemplars of a slice."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import CandidateCopy, Model, Reference, Runtime
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.core.records import Exemplar, ExemplarKind
from quantdrift.facts.diagnosis import FEWEST_ITEMS, DiagnosisVerdict, NamedTensor, WeightsOrigin
from quantdrift.facts.language_diagnosis import BlamedLayer, DifferingMatrix, LanguageDiagnosis, NamedMatrix
from quantdrift.models.comparators.protocol import Flags, Values
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.language.answer import Answer
from quantdrift.models.language.from_exchange import prompt_text, scoring_inputs
from quantdrift.models.language.scoring import (
    ANSWER,
    PROMPT,
    REQUEST,
    SCORES,
    Scores,
    ScoringRequest,
    TokenRow,
    objects,
)
from quantdrift.models.runtimes.registry import runtime_request
from quantdrift.models.runtimes.text.candidate_replica import by_id
from quantdrift.models.runtimes.text.scoring_runtime import ScoringRuntime
from quantdrift.models.runtimes.text.transformers import TransformersLanguage
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.diagnose.damaged import Damaged
from quantdrift.release.diagnose.language.search import FoundLayer, Rows, searched
from quantdrift.release.diagnose.language.weights import Differing, SwitchedNetwork, differing
from quantdrift.release.diagnose.samples import within
from quantdrift.release.gate.offline import capped
from quantdrift.release.gate.prompts import SUFFIXES, RecordedPrompts, read_prompts, with_answers
from quantdrift.release.origin import Origins, origins_of
from quantdrift.release.recording import RecordedItems, layout_of, parts_of

_MOST_INSIDE: Final = 1_024
_MOST_ELSEWHERE: Final = 256
_AGREES: Final = 0.1
"""Share of the divergence by which copy and candidate may differ: what a candidate computes with in BF16 does less."""
_SMALL: Final = 0.1  # of the budget: differences below it are none
_ALIKE: Final = 2.0
_CLIENT: Final = "quantdrift diagnose"


class Texts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Answers with their prompts.

    Parameters
    ----------
    requests, answers
        What is scored, and the answer as it was given.
    is_inside
        Whether each belongs to the slice : (items,).
    """

    requests: tuple[ScoringRequest, ...]
    answers: tuple[Answer, ...]
    is_inside: Flags


class LanguagePair:
    """The reference and the candidate of a language model, each in a folder.

    Parameters
    ----------
    case
        The model, its reference and the configuration.
    candidate
        The folder of the candidate.

    Raises
    ------
    OperatorError
        A folder cannot be loaded, or the reference is not in one.
    """

    def __init__(self, case: Damaged, candidate: Path) -> None:
        if case.reference.runtime is not Runtime.TRANSFORMERS:
            raise OperatorError(
                f"the reference of model `{case.model.name}` is no folder (runtime `transformers`), so no layer of the candidate can get its weights"
            )
        if not candidate.is_dir():
            raise OperatorError(
                f"--candidate {candidate} is no folder: of a language model give the folder that save_pretrained wrote. A GGUF file or a model at a"
                " server shows no weights here: convert it to a folder of safetensors"
            )
        generation = msgspec.structs.replace(case.model.generation, prefix_bytes=0)
        self.model = msgspec.structs.replace(case.model, generation=generation)
        reference = msgspec.structs.replace(case.reference, copy=CandidateCopy())
        request = runtime_request(case.config, self.model, reference)
        self.language = TransformersLanguage(request)
        self.reference = ScoringRuntime(request, self.language)
        other = Reference(runtime=Runtime.TRANSFORMERS, path=str(candidate))
        request = msgspec.structs.replace(request, reference=other, is_copy=True)
        try:
            self.candidate_language = TransformersLanguage(request)
        except OperatorError as error:
            raise OperatorError(
                f"the candidate {candidate}: {str(error).replace('the reference', 'the folder')}"
            ) from error
        self.candidate = ScoringRuntime(request, self.candidate_language)

    @property
    def digest(self) -> str:
        """The digest of the candidate: `sha256:...`."""
        return f"sha256:{self.candidate.artefact.digest}"

    def close(self) -> None:
        """Free both."""
        self.reference.close()
        self.candidate.close()


def recorded_texts(case: Damaged, pair: LanguagePair, inputs: Path) -> Texts:
    """Return the recorded prompts of a slice and of others, answered by the candidate where the recording has no answer.

    Raises
    ------
    OperatorError
        They cannot be read, do not tell which belong to the slice, or the candidate does not answer.
    """
    layout = layout_of(case.config, case.rules, [PROMPT])
    recorded = [read_prompts(part, layout) for part in parts_of(inputs, suffixes=SUFFIXES)]
    if n_own := sum(sum(each.own) for each in recorded):
        progress = case.watch.counted("the candidate answers prompts without an answer", n_own)
        recorded = [with_answers(each, pair.candidate, pair.model, progress) for each in recorded]
    requests, answers, inside = list[ScoringRequest](), list[Answer](), list[bool]()
    seen = set[bytes]()
    for each in recorded:
        flags = within(_with_texts(each), case.rules, case.slice)
        asked = each.items.inputs[PROMPT].tolist()
        for request, prompt, is_own, is_inside in zip(
            each.requests, asked, each.own, flags.tolist(), strict=True
        ):
            key = prompt.encode()
            if key in seen:  # a copy is one observation
                continue
            seen.add(key)
            requests.append(request)
            answers.append(Answer(text=request.served or "", is_greedy=is_own, is_repeatable=is_own))
            inside.append(is_inside)
    return Texts(requests=tuple(requests), answers=tuple(answers), is_inside=np.array(inside, dtype=bool))


def exemplar_texts(case: Damaged) -> Texts:
    """Return the answers of exemplars of the slice and of other values of its rule that were drawn at random.

    Raises
    ------
    OperatorError
        None was drawn at random.
    """
    rule = case.slice.name.partition("=")[0]
    case.watch.step(f"reading exemplars of {case.slice.name}")
    inside, elsewhere, _ = case.exemplars(
        client_name=_CLIENT, is_wanted=lambda name: name.startswith(f"{rule}=")
    )
    case.note_unreadable()
    texts = texts_of(inside, elsewhere, case.model)
    if not texts.is_inside.any():
        raise OperatorError(
            f"no exemplar of {case.slice.name} was drawn at random: record prompts with their answers, and give them with --inputs"
        )
    return texts


def texts_of(inside: Sequence[Exemplar], elsewhere: Sequence[Exemplar], model: Model) -> Texts:
    """Return the answers of those exemplars that were drawn at random, of a slice and of others."""
    requests, answers, flags = list[ScoringRequest](), list[Answer](), list[bool]()
    for exemplars, is_inside in ((inside, True), (elsewhere, False)):
        for exemplar in exemplars:
            for request, answer in _answers_of(exemplar, model):
                requests.append(request)
                answers.append(answer)
                flags.append(is_inside)
    return Texts(requests=tuple(requests), answers=tuple(answers), is_inside=np.array(flags, dtype=bool))


def _answers_of(exemplar: Exemplar, model: Model) -> list[tuple[ScoringRequest, Answer]]:
    if exemplar.kind is not ExemplarKind.RANDOM:
        return []
    try:
        inputs, served = scoring_inputs(exemplar.exchange, model.generation, has_replica=True)
    except QuarantineError:
        return []
    places = [item.index for item in exemplar.items]
    requests, answers = inputs[REQUEST].tolist(), served[ANSWER].tolist()
    return [(msgspec.structs.replace(requests[place], free_answer=None), answers[place]) for place in places]


def diagnosed_language(
    pair: LanguagePair, texts: Texts, *, seed: int, progress: Callable[[int, int], None]
) -> LanguageDiagnosis:
    """Return which layers and matrices of a candidate make the answers of a slice diverge.

    Raises
    ------
    OperatorError
        The candidate is of another checkpoint, its weights do not explain its divergence, or a model cannot score an answer.
    """
    budget = pair.model.budget.divergence
    found = differing(pair.candidate_language.network, pair.language.network)
    if not found.weights:
        raise OperatorError(
            "no weight of the candidate differs from the reference's: nothing is quantised there that weights show"
        )
    origins = origins_of([weight.compared(number) for number, weight in enumerate(found.weights)])
    if origins.refusal:
        raise OperatorError(origins.refusal)
    scorer = _Scorer(pair, texts)
    n_items = int(scorer.is_inside.sum())
    own = scorer.divergence(scorer.every, scorer.scores(pair.candidate, scorer.every))
    pair.candidate.close()
    network = SwitchedNetwork(pair.language.network, found.weights)

    def loss_of(rows: Rows, restored: Collection[int], factors: Array | None) -> Values:
        network.set(restored, factors)
        return scorer.divergence(rows, scorer.scores(pair.reference, rows))

    inside, elsewhere = np.flatnonzero(scorer.is_inside), np.flatnonzero(~scorer.is_inside)
    copied = loss_of(inside, (), None)
    diagnosis = LanguageDiagnosis(
        verdict=DiagnosisVerdict.TOO_FEW,
        divergence=float(own[inside].mean()) if n_items else 0.0,
        budget=budget,
        copied=float(copied.mean()) if n_items else 0.0,
        elsewhere=float(own[elsewhere].mean()) if len(elsewhere) else None,
        n_items=n_items,
        n_tokens=int(scorer.n_tokens[inside].sum()),
        n_layers=len(found.layers),
        n_weights=len(found.weights),
        origin=origins.origin,
        off=_faults(origins, found),
        n_moved=len(origins.off),
        n_tensors=origins.n_tensors,
        unmatched=found.unmatched,
    )
    if n_items < FEWEST_ITEMS:
        return diagnosis
    _check_copy(diagnosis, own[inside], copied)
    if diagnosis.divergence <= budget:
        return msgspec.structs.replace(diagnosis, verdict=DiagnosisVerdict.NOBODY, is_within_budget=True)
    layers = found.layers
    result = searched(
        lambda rows, restored, factors: loss_of(inside[rows], restored, factors),
        [*layers.values()],
        [weight.raw.numel() for weight in found.weights],
        n_items,
        budget=budget,
        seed=seed,
        progress=progress,
    )
    names = [*layers]
    blamed = []
    restored = list[int]()
    for layer in result.layers:
        restored += layers[names[layer.layer]]
        left = float(loss_of(elsewhere, restored, None).mean()) if len(elsewhere) else None
        blamed.append(
            _blamed(
                layer, names[layer.layer], found=found, origins=origins, scorer=scorer, elsewhere_left=left
            )
        )
    return msgspec.structs.replace(
        diagnosis,
        verdict=DiagnosisVerdict.NAMED if blamed else DiagnosisVerdict.NOBODY,
        n_examined=result.n_examined,
        n_fresh=result.n_fresh,
        fresh=result.fresh,
        blamed=tuple(blamed),
        order=tuple(names[number] for number in result.order),
        one_off=dict(zip(names, (1.0 - result.one_off).tolist(), strict=True)),
        one_on=dict(zip(names, result.one_on.tolist(), strict=True)),
    )


def _check_copy(diagnosis: LanguageDiagnosis, own: Values, copied: Values) -> None:
    """Refuse a candidate whose divergence its weights do not explain."""
    apart = float(np.abs(own - copied).mean())
    if apart <= max(_AGREES * diagnosis.divergence, _SMALL * diagnosis.budget):
        return
    raise OperatorError(
        f"the candidate diverges by {diagnosis.divergence:.3g} nats per token, and the reference's network with its weights by {diagnosis.copied:.3g}: its"
        " weights are not all of it. What it rounds while it computes (activations, the cache, sums in 16 bits) is not told apart here:"
        " compare the same weights without that by `quantdrift gate`"
    )


def _faults(origins: Origins, found: Differing) -> tuple[NamedTensor, ...]:
    if origins.origin is not WeightsOrigin.FAULTS:
        return ()
    return tuple(NamedTensor(site=found.weights[off.site].name, tensor=off) for off in origins.off)


def _blamed(
    layer: FoundLayer,
    name: str,
    *,
    found: Differing,
    origins: Origins,
    scorer: "_Scorer",
    elsewhere_left: float | None,
) -> BlamedLayer:
    """Return a named layer with what its weights say."""
    numbers = found.layers[name]
    named = [matrix.weight for matrix in layer.matrices]
    off = {tensor.site: tensor for tensor in origins.off} if origins.origin is WeightsOrigin.FAULTS else {}
    errors = [weight.error for weight in found.weights]
    levels = [weight.levels() for weight in found.weights if weight.raw.dim() > 1]
    matrices = [number for number in numbers if found.weights[number].raw.dim() > 1] or [*numbers]
    ordered = [*named, *sorted(set(matrices) - set(named), key=lambda number: -errors[number])]
    return BlamedLayer(
        layer=name,
        restores=layer.restores,
        placebo=layer.placebo,
        heals=layer.heals,
        left=layer.left,
        elsewhere_left=elsewhere_left,
        share=sum(found.weights[number].raw.numel() for number in numbers)
        / sum(weight.raw.numel() for weight in found.weights),
        matrices=tuple(
            NamedMatrix(
                name=found.weights[matrix.weight].name,
                restores=matrix.restores,
                placebo=matrix.placebo,
                heals=matrix.heals,
            )
            for matrix in layer.matrices
        ),
        differing=tuple(
            DifferingMatrix(
                name=found.weights[number].name,
                error=errors[number],
                usual=float(np.median(errors)),
                levels=found.weights[number].levels(),
                usual_levels=int(np.median(levels)) if levels else 0,
                rows=found.weights[number].off_rows(scorer.n_vocabulary, *scorer.token_ids()),
                off=off.get(number),
            )
            for number in ordered
        ),
    )


class _Scorer:
    """Scores the answers that can be scored, and compares these scores with the reference's."""

    def __init__(self, pair: LanguagePair, texts: Texts) -> None:
        rows = _thinned(texts.is_inside)
        self._comparator = comparator_of(pair.model)
        self._cap = pair.model.budget.cap
        self.n_vocabulary = int(pair.language.network.get_input_embeddings().num_embeddings)  # type: ignore[operator]
        token_rows: list[TokenRow] = []
        kept = []
        for number in rows.tolist():
            try:
                row = pair.reference.row(texts.requests[number])
            except QuarantineError as error:
                raise OperatorError(f"the reference cannot score an answer: {error.detail}") from error
            if row is not None:
                kept.append(number)
                token_rows.append(row)
        self._rows = token_rows
        self.is_inside = texts.is_inside[kept]
        self.every: Rows = np.arange(len(kept))
        self.n_tokens = np.array([len(row.served) for row in token_rows], dtype=np.intp)
        self._answers = [texts.answers[number] for number in kept]
        self._requests = [
            msgspec.structs.replace(texts.requests[number], prompt_ids=row.prompt, served_ids=row.served)
            for number, row in zip(kept, token_rows, strict=True)
        ]
        self._prompts = [prompt_text(request) for request in self._requests]
        self._expected = self.scores(pair.reference, self.every)

    def scores(self, runtime: ScoringRuntime, rows: Rows) -> list[Scores]:
        """Return the scores of answers by a model."""
        chosen = rows.tolist()
        inputs = {
            PROMPT: objects([self._prompts[row] for row in chosen]),
            ANSWER: objects([self._answers[row].text for row in chosen]),
            REQUEST: objects([self._requests[row] for row in chosen]),
        }
        try:
            found: list[Scores] = runtime.run(inputs)[SCORES].tolist()
        except QuarantineError as error:
            raise OperatorError(f"the answers cannot be scored: {error.detail}") from error
        return found

    def divergence(self, rows: Rows, scores: Sequence[Scores]) -> Values:
        """Return the divergence per token of answers by their scores : (rows,)."""
        expected = [self._expected[row] for row in rows.tolist()]
        both = [
            msgspec.structs.replace(of, copy=by_id(copy, of))
            for of, copy in zip(expected, scores, strict=True)
        ]
        found = self._comparator.compare(
            {
                SCORES: objects([None] * len(both)),
                ANSWER: objects([self._answers[row] for row in rows.tolist()]),
            },
            {SCORES: objects(both)},
        )
        return np.nan_to_num(capped(found, self._cap), nan=self._cap)

    def token_ids(self) -> tuple[Array, Array | None]:
        """Return the token ids of the prompts and answers of the slice, and of others."""
        sides = [
            [
                token
                for row, is_inside in zip(self._rows, self.is_inside.tolist(), strict=True)
                if is_inside == wanted
                for token in (*row.prompt, *row.served)
            ]
            for wanted in (True, False)
        ]
        inside, others = (np.array(side, dtype=np.intp) for side in sides)
        return inside, others if len(others) else None


def _with_texts(recorded: RecordedPrompts) -> RecordedItems:
    """Return the items with the texts of prompts and answers, by which slices of features tell them apart."""
    texts = {
        PROMPT: objects([prompt_text(request) for request in recorded.requests]),
        ANSWER: objects([request.served or "" for request in recorded.requests]),
    }
    return msgspec.structs.replace(recorded.items, inputs=texts)


def _thinned(is_inside: Flags) -> Rows:
    """Return the rows of the slice and of others, evenly thinned."""
    kept = []
    for flags, most in ((is_inside, _MOST_INSIDE), (~is_inside, _MOST_ELSEWHERE)):
        rows = np.flatnonzero(flags)
        kept.append(rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.intp)])
    return np.sort(np.concatenate(kept))
