"""The diagnosis of a slice of a language model: records of the layers and matrices that make its answers diverge.

All divergences are means over answers of the divergence per token, in nats, as the comparator of generated text defines it; an answer
counts at most `models.budget.cap`.
"""

import msgspec

from quantdrift.facts.diagnosis import DiagnosisVerdict, NamedTensor, OffTensor, WeightsOrigin


class OffRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a table of tokens, such as an embedding, that are off by more than the others.

    Parameters
    ----------
    n, n_rows
        Such rows, and all.
    error, usual
        Mean error relative to the reference's row, of these and of the others.
    of_slice, elsewhere
        Share of the tokens of the slice, and of other slices, that have such a row; None: no others were given.
    """

    n: int
    n_rows: int
    error: float
    usual: float
    of_slice: float
    elsewhere: float | None


class NamedMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix of a named layer that does the damage of that layer.

    Parameters
    ----------
    name
        Its name in the folder.
    restores, placebo
        Shares of the divergence that it restores, beside the layers above and the matrices before it, where it was not chosen, and that a placebo restores there at most.
    heals
        Share of the divergence that goes away, on the answers that nothing was chosen by.
    """

    name: str
    restores: float
    placebo: float
    heals: float


class DifferingMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """How a matrix differs from the reference's.

    Parameters
    ----------
    error, usual
        Root mean square of the error relative to the matrix, and the median of all matrices that differ.
    levels, usual_levels
        Distinct values among 32 neighbours, and the median of all matrices that differ.
    rows
        Rows of a table of tokens that are off by more than the others; None: there are none.
    off
        How it differs by more than rounding; None: it does not, or it is not known.
    """

    name: str
    error: float
    usual: float
    levels: int
    usual_levels: int
    rows: OffRows | None = None
    off: OffTensor | None = None


class BlamedLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that was named.

    Parameters
    ----------
    layer
        Its name in the folder, such as `model.layers.3`.
    restores, placebo
        Shares of the divergence that it restores with the layers before it, on the answers on which it was not chosen, and that a placebo restores there at most.
    heals
        Share of the divergence that goes away with its weights of the reference, less what the layers before it heal, on the answers that nothing was chosen by.
    left, elsewhere_left
        The divergence with it and the layers before it in the reference's weights, of these answers, and of other slices; None: none were given.
    share
        Its share of the values of all weights that differ.
    matrices
        The matrices that do its damage; empty: none alone.
    differing
        How its matrices differ from the reference's, the named ones first.
    """

    layer: str
    restores: float
    placebo: float
    heals: float
    left: float
    elsewhere_left: float | None
    share: float
    matrices: tuple[NamedMatrix, ...]
    differing: tuple[DifferingMatrix, ...]


class LanguageDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What was found.

    Parameters
    ----------
    verdict
        Whether a layer is named.
    is_within_budget
        Whether there is no damage to explain.
    divergence, budget
        Of the slice by the candidate's own kernels, and what the budget allows.
    copied
        Of the slice by the reference's network with the candidate's weights.
    elsewhere
        Of other slices, by the candidate's own kernels; None: none were given.
    n_items, n_tokens
        Answers of the slice, and tokens of these that were scored.
    n_examined, n_fresh
        Answers by which layers were chosen and judged, and those that nothing was chosen by.
    fresh
        The divergence of the latter with the candidate's weights; None: there are none.
    n_layers, n_weights
        Layers and weights that differ from the reference's.
    blamed
        The named layers in the order in which they are best left unquantised.
    order
        Layers in the order of the search, named or not.
    one_off, one_on
        By layer: share of the divergence that it restores alone, and that it causes alone.
    origin, off, n_moved, n_tensors
        As of `Diagnosis`.
    unmatched
        Weights that the reference does not have in this shape: they are the reference's in the copy.
    """

    verdict: DiagnosisVerdict
    is_within_budget: bool = False
    divergence: float
    budget: float
    copied: float
    elsewhere: float | None
    n_items: int
    n_tokens: int
    n_examined: int = 0
    n_fresh: int = 0
    fresh: float | None = None
    n_layers: int
    n_weights: int
    blamed: tuple[BlamedLayer, ...] = ()
    order: tuple[str, ...] = ()
    one_off: dict[str, float] = {}
    one_on: dict[str, float] = {}
    origin: WeightsOrigin = WeightsOrigin.ROUNDED
    off: tuple[NamedTensor, ...] = ()
    n_moved: int = 0
    n_tensors: int = 0
    unmatched: tuple[str, ...] = ()

    @property
    def left(self) -> float | None:
        """The divergence with all named layers in the reference's weights; None: none is named."""
        return self.blamed[-1].left if self.blamed else None
