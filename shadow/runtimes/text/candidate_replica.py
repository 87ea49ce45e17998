"""A reference with a copy of the candidate beside it, which tells the log-probabilities that were not served.

The copy is the quantised candidate itself, and scores the served tokens as the reference does. It is asked first: both
score the tokens that it made of a text.
"""

from collections.abc import Mapping

import msgspec

from quantdrift.core.config.schema import Reference, Runtime
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.shadow.language.scoring import (
    REQUEST,
    SCORES,
    Scores,
    ScoringRequest,
    objects,
    without_free_answer,
)
from quantdrift.shadow.runtimes.protocol import ReferenceRuntime
from quantdrift.shadow.runtimes.registry import RuntimeRequest, open_reference
from quantdrift.shadow.runtimes.self_test import SelfTestedRuntime
from quantdrift.shadow.tensors.arrays import Array


class CandidateReplica:
    """Asks the copy about each answer that says so, then the reference about all.

    Parameters
    ----------
    reference, copy
        Both score served tokens.
    precision
        What the copy computes in, as its owner tells.
    """

    def __init__(self, reference: ReferenceRuntime, copy: ReferenceRuntime, precision: str) -> None:
        self._reference = reference
        self._copy = copy
        told = copy.provenance
        self.artefact = reference.artefact
        self.provenance = msgspec.structs.replace(
            reference.provenance,
            copy=copy.artefact.digest,
            copy_precision=precision or copy.artefact.precision,
            copy_runtime=f"{told.runtime} {told.version} on {told.device}",
        )
        self.inputs = reference.inputs
        self.outputs = reference.outputs
        self.embedding = reference.embedding

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return the reference's scores, with those of the copy where it was asked; errors as of either.

        Raises
        ------
        RetryError
            Either of them is away. Answers that are compared without the copy are measured otherwise: an outage would be
            read as a change.
        """
        asked = inputs.get(REQUEST, objects([])).tolist()
        rows = [n for n, one in enumerate(asked) if isinstance(one, ScoringRequest) and one.ask_replica]
        if not rows:
            return self._reference.run(inputs)
        of_copy = without_free_answer({name: array[rows] for name, array in inputs.items()})
        found = self._copy.run(of_copy)[SCORES].tolist()
        told: Mapping[int, Scores] = {n: one for n, one in zip(rows, found, strict=True) if one.ids}
        same = [
            msgspec.structs.replace(one, served_ids=told[n].ids) if n in told else one
            for n, one in enumerate(asked)
        ]
        outputs = self._reference.run({**inputs, REQUEST: objects(same)})
        scores = [
            msgspec.structs.replace(one, copy=_by_id(told[n], one)) if n in told else one
            for n, one in enumerate(outputs[SCORES].tolist())
        ]
        return {**outputs, SCORES: objects(scores)}

    def close(self) -> None:
        """Let go of what both hold."""
        self._copy.close()
        self._reference.close()


def replica_request(request: RuntimeRequest) -> RuntimeRequest | None:
    """Return what the runtime is told of the copy beside a reference; None where none is configured."""
    copy = request.reference.copy
    if not copy.is_there:
        return None
    reference = Reference(
        runtime=Runtime.OPENAI if copy.url else Runtime.TRANSFORMERS,
        url=copy.url,
        path=copy.path,
        digest=copy.digest,
        model=copy.model,
        timeout_s=copy.timeout_s,
        token_file=copy.token_file,
    )
    # The token is the reference's.
    return msgspec.structs.replace(request, reference=reference, is_copy=True, token="")


def open_replica(request: RuntimeRequest) -> ReferenceRuntime:
    """Load a copy of a candidate.

    Parameters
    ----------
    opening
        As `copy_opening` returns it.

    Raises
    ------
    OperatorError
        It cannot be loaded.
    RetryError
        The server that holds it is away.
    """
    try:
        return SelfTestedRuntime(open_reference(request), remote=bool(request.reference.url))
    except OperatorError as error:
        raise OperatorError(f"[models.references.copy]: {error}") from error
    except RetryError as error:
        raise RetryError(f"the copy of the candidate: {error}") from error


def open_with_replica(request: RuntimeRequest) -> ReferenceRuntime:
    """Load a reference, and the copy of the candidate that is configured beside it.

    Raises
    ------
    OperatorError
        One of them cannot be loaded.
    RetryError
        The server that holds one of them is away.
    """
    reference = SelfTestedRuntime(open_reference(request), remote=bool(request.reference.url))
    told = replica_request(request)
    if told is None:
        return reference
    try:
        return CandidateReplica(reference, open_replica(told), request.reference.copy.precision)
    except BaseException:
        reference.close()
        raise


def _by_id(copy: Scores, reference: Scores) -> Scores:
    """Return the copy's scores without spellings where both sides tell ids: servers spell parts of characters as they like."""
    if all((one.top_ids >= 0).any() for one in (copy, reference)):
        return msgspec.structs.replace(copy, tokens=(), top_tokens=())
    return copy
