"""A reference together with a replica of the candidate, which computes the log-probabilities that were not served.

The replica is the same quantised model as the candidate, and scores the served tokens like the reference. It runs first,
because both score the tokens that it makes of a text.
"""

from collections.abc import Callable, Mapping

import msgspec

from quantdrift.core.config.schema import Reference, Runtime
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.models.language.scoring import (
    REQUEST,
    SCORES,
    Scores,
    ScoringRequest,
    objects,
    without_free_answer,
)
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference
from quantdrift.models.runtimes.self_test import SelfTestedRuntime
from quantdrift.models.tensors.arrays import Array


class CandidateReplica:
    """Scores answers with the replica where `ask_replica` is set, then all answers with the reference.

    Parameters
    ----------
    reference, copy
        The reference and the replica; both score served tokens.
    precision
        The replica's precision as configured; empty: as its runtime reports it.
    """

    def __init__(self, reference: ReferenceRuntime, copy: ReferenceRuntime, precision: str) -> None:
        self._reference = reference
        self._copy = copy
        provenance = copy.provenance
        self.artefact = reference.artefact
        self.provenance = msgspec.structs.replace(
            reference.provenance,
            copy=copy.artefact.digest,
            copy_precision=precision or copy.artefact.precision,
            copy_runtime=f"{provenance.runtime} {provenance.version} on {provenance.device}",
        )
        self.inputs = reference.inputs
        self.outputs = reference.outputs
        self.embedding = reference.embedding

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return the reference's scores, with those of the replica where it was asked; errors as of either.

        Raises
        ------
        RetryError
            Either of them is unreachable. Without the replica another measure would apply, and an outage would look like a
            drift.
        """
        requests = inputs.get(REQUEST, objects([])).tolist()
        rows = [
            n
            for n, request in enumerate(requests)
            if isinstance(request, ScoringRequest) and request.ask_replica
        ]
        if not rows:
            return self._reference.run(inputs)
        of_copy = without_free_answer({name: array[rows] for name, array in inputs.items()})
        replica_scores = self._copy.run(of_copy)[SCORES].tolist()
        by_row: Mapping[int, Scores] = {
            n: scores for n, scores in zip(rows, replica_scores, strict=True) if scores.ids
        }
        same_tokens = [
            msgspec.structs.replace(request, served_ids=by_row[n].ids) if n in by_row else request
            for n, request in enumerate(requests)
        ]
        outputs = self._reference.run({**inputs, REQUEST: objects(same_tokens)})
        scores = [
            msgspec.structs.replace(scores, copy=by_id(by_row[n], scores)) if n in by_row else scores
            for n, scores in enumerate(outputs[SCORES].tolist())
        ]
        return {**outputs, SCORES: objects(scores)}

    def close(self) -> None:
        """Close both."""
        self._copy.close()
        self._reference.close()


def replica_request(request: RuntimeRequest) -> RuntimeRequest | None:
    """Return the request for the replica configured with a reference; None if there is none."""
    copy = request.reference.copy
    if not copy.is_configured:
        return None
    reference = Reference(
        runtime=Runtime.OPENAI if copy.url else Runtime.TRANSFORMERS,
        url=copy.url,
        path=copy.path,
        digest=copy.digest,
        model=copy.model,
        timeout_s=request.reference.timeout_s,
        token_file=copy.token_file,
        media=request.reference.media,
    )
    # The token is the reference's.
    return msgspec.structs.replace(request, reference=reference, is_copy=True, token="")


def open_replica(request: RuntimeRequest) -> ReferenceRuntime:
    """Load a replica of the candidate.

    Parameters
    ----------
    request
        From `replica_request`.

    Raises
    ------
    OperatorError
        It cannot be loaded.
    RetryError
        Its server is unreachable.
    """
    try:
        return SelfTestedRuntime(open_reference(request), remote=bool(request.reference.url))
    except OperatorError as error:
        raise OperatorError(f"[models.references.copy]: {error}") from error
    except RetryError as error:
        raise RetryError(f"the candidate's replica ([models.references.copy]): {error}") from error


def open_with_replica(
    request: RuntimeRequest, look: Callable[[ReferenceRuntime], None] = lambda _: None
) -> ReferenceRuntime:
    """Load a reference, with the replica of the candidate if one is configured.

    Parameters
    ----------
    look
        Called with the reference itself, as soon as it is open.

    Raises
    ------
    OperatorError
        One of them cannot be loaded.
    RetryError
        The server of one of them is unreachable.
    """
    opened = open_reference(request)
    try:
        look(opened)
        reference = SelfTestedRuntime(opened, remote=bool(request.reference.url))
    except BaseException:
        opened.close()
        raise
    replica = replica_request(request)
    if replica is None:
        return reference
    try:
        return CandidateReplica(reference, open_replica(replica), request.reference.copy.precision)
    except BaseException:
        reference.close()
        raise


def by_id(copy: Scores, reference: Scores) -> Scores:
    """Return the replica's scores, without spellings if both sides have ids: servers spell parts of characters differently."""
    if all((scores.top_ids >= 0).any() for scores in (copy, reference)):
        return msgspec.structs.replace(copy, tokens=(), top_tokens=())
    return copy
