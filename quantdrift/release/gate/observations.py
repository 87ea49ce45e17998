"""Which recorded rows are evidence of their own: copies are one observation, and so are rows next to each other that are alike.

The gate's bounds are for observations that say something new each. What breaks that is looked for:

| in the recording | what is done |
|---|---|
| rows whose inputs are equal to the bit | in each slice they count once |
| rows that the candidate was calibrated on, by their digests | they do not count |
| neighbours that are alike, as of a session that nobody declared | so many rows in a row are one observation |
| rows with one value of an attribute that comes in bursts are alike | each burst of a value is one observation |

Assumption of the last two (H0)
    Rows of the same slices are exchangeable in the order of the file.
Evidence
    Normal scores of the ranks of five numbers of each row: the divergence, and four random projections of the inputs. The sum of the
    products of all pairs at most 8, 32 or 128 rows apart: where several users send at the same time, neighbours are of different ones.
Bound
    Under H0 it is a quadratic form of normal variables, nearly: a Pearson law of the third type by its variance, the number of pairs,
    and its third cumulant, that of triples. It exceeds its quantile in any of the fifteen with a probability of at most 0.5 % (Bonferroni).
Length
    The first lag, doubled from half of the window that showed it, from half of which on the autocorrelation is at most a standard error or 0.02. A block is then as long as the bursts that it stands for, so means of blocks are nearly independent: what is left at their ends is not
    in the bound.
Not seen
    Bursts whose rows differ in inputs and divergence as much as any others. A session key tells them.
Source
    Wald, Wolfowitz, An exact test for randomness in the non-parametric case based on serial correlation, Annals of Mathematical
    Statistics 14, 1943.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.special import gammainccinv, ndtri

from quantdrift.core.errors import OperatorError
from quantdrift.drift.dependence import APART, MOST_KEYS, burst_gap, come_near
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.recording import RecordingLayout, parts_of, read

LEAST_ROWS: Final = 100
"""With fewer rows of the same slices nothing is said of neighbours."""
FALSE_SHARE: Final = 0.005
"""Share of sets of independent rows, at most, that are said to have bursts."""
_PROJECTIONS: Final = 4
_WINDOWS: Final = (8, 32, 128)  # rows apart
_ROWS_OF_WINDOW: Final = 4  # in a stratum, times the window
_STANDARD_ERRORS: Final = 1.0
_LEAST_ALIKE: Final = 0.02  # autocorrelation: what is below it hardly changes the spread of a mean
_LEAST_SKEW: Final = 1e-3  # with less it is a normal law
_LEAST_VALUES: Final = (
    10  # of an attribute, that come at least twice: with fewer it names groups of users, not users
)
_LARGEST_SHARE: Final = 0.1  # of one value
_NEAR: Final = 16  # exchanges apart
_LEAST_PAIRS: Final = 20  # more than that
_LAGS_OF_VALUE: Final = 8  # exchanges of one burst apart
_DIGEST_BYTES: Final = 16
RECORD: Final = "repairs.json"
"""What `quantdrift repair` writes beside its models."""
QUANTISED: Final = "quantised.json"
"""What `quantdrift quantise` writes beside its model."""


def digests_of(inputs: Mapping[str, Array]) -> list[str]:
    """Return the digest of each row of inputs, in hex: equal for rows that are equal to the bit, whatever file they are in."""
    names = sorted(inputs)
    digests = []
    for row in range(len(inputs[names[0]])):
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for name in names:
            value = np.asarray(inputs[name][row])
            is_text = value.dtype.kind in "OUS"
            content = (
                "\0".join(map(_text, value.reshape(-1).tolist())).encode() if is_text else value.tobytes()
            )
            digest.update(f"{name}\0{value.shape}\0{'text' if is_text else value.dtype.str}\0".encode())
            digest.update(content)
        digests.append(digest.hexdigest())
    return digests


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def numbered(names: Sequence[str]) -> IntArray:
    """Return the number of each name, equal for equal ones : (rows,)."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.intp)


def n_copies(copy: IntArray) -> int:
    """Return how many rows are copies of an earlier one."""
    return len(copy) - len(np.unique(copy))


def united(group: IntArray, copy: IntArray) -> IntArray:
    """Return the number of each row's observation, with those of all copies as one : (rows,)."""
    _, first = np.unique(group, return_inverse=True)
    _, second = np.unique(copy, return_inverse=True)
    n_first = int(first.max(initial=-1)) + 1
    n_all = n_first + int(second.max(initial=-1)) + 1
    edges = coo_array((np.ones(len(first)), (first, n_first + second)), shape=(n_all, n_all))
    _, parts = connected_components(edges, directed=False)
    return np.asarray(parts[first], dtype=np.intp)


def measures_of(inputs: Mapping[str, Array], divergence: FloatArray, *, seed: int = 1) -> list[FloatArray]:
    """Return the numbers of each row that rows of one burst may share : (rows,) each.

    Parameters
    ----------
    inputs, divergence
        Of each row, in the order of the recording; a divergence that is NaN everywhere was not computed, and tells nothing.
    """
    projected = _projected(inputs, len(divergence), np.random.default_rng(seed))
    return projected if np.isnan(divergence).all() else [np.nan_to_num(divergence), *projected]


def burst_of_series(
    series: Sequence[FloatArray], stratum: IntArray, *, false_share: float = FALSE_SHARE, seed: int = 1
) -> int:
    """Return how many rows in a row are one observation: 1 where neighbours are not alike.

    Parameters
    ----------
    series
        (rows,) each: numbers that neighbours may share.
    stratum
        (rows,) a number that rows of the same slices share: only these are compared with each other.
    false_share
        As `FALSE_SHARE`.
    """
    strata = rows_of_strata(stratum)
    level = false_share / (len(_WINDOWS) * max(len(series), 1))
    longest = 1
    for values in series:
        scores = [
            # ties are broken otherwise in each, or chance would be the same in strata of one size
            scores_of(values[rows], [seed, number])
            for number, rows in enumerate(strata)
        ]
        for window in _WINDOWS:
            if _is_alike(scores, window, level):
                longest = max(longest, _length(scores, window // 2))
                break
    return longest


def attribute_of_bursts(
    series: Sequence[FloatArray],
    stratum: IntArray,
    attributes: Mapping[str, Sequence[str]],
    *,
    false_share: float = FALSE_SHARE,
) -> tuple[str, bool]:
    """Return the attribute whose bursts are most alike, and whether they are all that is: bursts one after the other are not alike.

    Parameters
    ----------
    series, stratum
        As of `burst_of_series`.
    attributes
        (rows,) the values of each attribute, by its key; empty: it has none. Those that do not come in bursts are not looked at.
    false_share
        Share of sets of independent rows, at most, of which an attribute is returned; else it is empty.
    """
    keys = [key for key, values in attributes.items() if _come_in_bursts(values)][:MOST_KEYS]
    if not keys or not series:
        return "", False
    level = false_share / (len(keys) * len(series))
    scores = np.zeros((len(series), len(stratum)))
    for score, values in zip(scores, series, strict=True):
        for number, rows in enumerate(rows_of_strata(stratum)):
            score[rows] = scores_of(values[rows], [1, number])
    alike: dict[str, float] = {}
    for key in keys:
        group, _ = visits(attributes[key])
        order = np.argsort(group, kind="stable")
        ordered, members = scores[:, order], group[order]
        total, n_pairs = np.zeros(len(series)), 0.0
        for lag in range(1, _LAGS_OF_VALUE + 1):
            together = members[lag:] == members[:-lag]
            total += (ordered[:, lag:] * ordered[:, :-lag] * together).sum(axis=1)
            n_pairs += float(together.sum())
        sizes = np.bincount(group).astype(np.float64)
        triples = np.minimum(
            sizes * (sizes - 1) * (sizes - 2), sizes * 3 * _LAGS_OF_VALUE * (_LAGS_OF_VALUE - 1)
        )
        largest, n_triples = float(total.max()), float(triples.sum())
        if is_above_chance(largest, n_pairs=n_pairs, n_triples=n_triples, level=level):
            alike[key] = largest / n_pairs**0.5
    attribute = max(alike, key=alike.__getitem__, default="")
    if not attribute:
        return "", False
    group, _ = visits(attributes[attribute])
    _, first, counts = np.unique(group, return_index=True, return_counts=True)
    order = np.argsort(first)
    means = [(np.bincount(group, values) / counts)[order] for values in series]
    return attribute, burst_of_series(means, stratum[first[order]], false_share=false_share) == 1


def _come_in_bursts(values: Sequence[str]) -> bool:
    """Return whether an attribute has many values, each of which comes more often near itself than in a random order."""
    sizes = Counter(value for value in values if value)
    if sum(size > 1 for size in sizes.values()) < _LEAST_VALUES or max(sizes.values()) > _LARGEST_SHARE * len(
        values
    ):
        return False
    return come_near(values, _NEAR, least=_LEAST_PAIRS)


def visits(values: Sequence[str]) -> tuple[IntArray, BoolArray]:
    """Return the number of the burst of each exchange, (exchanges,), and which bursts are over, (bursts,).

    A burst of a value is over when the value did not come for long (`burst_gap`). An
    exchange without a value is a burst of its own.
    """
    longest = burst_gap(values, least=1, most=APART)
    group = np.empty(len(values), dtype=np.intp)
    ends: list[int] = []
    open_bursts: dict[str, int] = {}
    for place, value in enumerate(values):
        number = open_bursts.get(value) if value else None
        if number is None or place - ends[number] > longest:
            number = open_bursts[value] = len(ends)
            ends.append(place)
        group[place], ends[number] = number, place
    has_value = np.array([bool(value) for value in values])
    is_over = len(values) - 1 - np.array(ends) > longest
    is_over[group[~has_value]] = True
    return group, is_over


def rows_of_strata(stratum: IntArray) -> list[IntArray]:
    """Return the rows of each stratum, in order."""
    order = np.argsort(stratum, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(stratum[order])) + 1) if len(order) else []


def is_above_chance(total: float, *, n_pairs: float, n_triples: float, level: float) -> bool:
    """Return whether a sum of products of independent normal scores is larger than chance allows.

    Parameters
    ----------
    total
        The sum over pairs.
    n_pairs, n_triples
        Number of the pairs, which is the variance, and of ordered triples of which all three pairs are among them: the third cumulant.
    level
        Probability of a larger one by chance.
    """
    if not n_pairs:
        return False
    shape = 4.0 / max(n_triples / n_pairs**1.5, _LEAST_SKEW) ** 2
    return bool(total / n_pairs**0.5 > (gammainccinv(shape, level) - shape) / shape**0.5)


def _is_alike(scores: Sequence[FloatArray], window: int, level: float) -> bool:
    total = n_pairs = n_triples = n_rows = 0.0
    for score in scores:
        n = len(score)
        if n < _ROWS_OF_WINDOW * window:
            continue
        sums = np.concatenate(([0.0], np.cumsum(score)))
        before = np.maximum(np.arange(n) - window, 0)
        pairs = window * n - window * (window + 1) / 2
        # Ranks without repetition are a little unlike each other: by 1 / (n - 1) in each pair.
        total += float((score * (sums[:-1] - sums[before])).sum()) + pairs / (n - 1)
        n_pairs += pairs
        n_triples += n * 3 * window * (window - 1)
        n_rows += n
    return n_rows >= LEAST_ROWS and is_above_chance(total, n_pairs=n_pairs, n_triples=n_triples, level=level)


def blocks(stratum: IntArray, length: int) -> IntArray:
    """Return the number of the block of each row, of so many rows in a row of the same slices : (rows,)."""
    numbers = np.empty(len(stratum), dtype=np.intp)
    n_blocks = 0
    for number in np.unique(stratum):
        rows = np.flatnonzero(stratum == number)
        numbers[rows] = n_blocks + np.arange(len(rows)) // length
        n_blocks = int(numbers[rows].max()) + 1
    return numbers


def _length(scores: Sequence[FloatArray], lag: int) -> int:
    while lag < max(map(len, scores)) // 4:
        correlations, n_pairs = _correlations(scores, range(max(lag // 2, 1), lag + 1))
        mean = float(correlations.mean())
        if mean <= max(_LEAST_ALIKE, _STANDARD_ERRORS / np.sqrt(max(n_pairs * len(correlations), 1))):
            break
        lag *= 2
    return max(lag, 2)


def _correlations(scores: Sequence[FloatArray], lags: Sequence[int]) -> tuple[FloatArray, int]:
    """Return the autocorrelation at each lag over all strata, and the pairs of one lag, about."""
    sums, n_pairs = np.zeros(len(lags)), np.zeros(len(lags))
    for score in scores:
        for position, lag in enumerate(lags):
            if lag < len(score):
                sums[position] += float((score[:-lag] * score[lag:]).sum())
                n_pairs[position] += len(score) - lag
    return sums / np.maximum(n_pairs, 1), int(n_pairs.min())


def scores_of(values: FloatArray, seed: int | Sequence[int] = 1) -> FloatArray:
    """Return normal scores of the ranks, ties broken at random, with a mean of squares of 1."""
    ties = np.random.default_rng(seed).permutation(len(values))
    ranks = np.empty(len(values))
    ranks[np.lexsort((ties, values))] = np.arange(len(values))
    scores = ndtri((ranks + 0.5) / len(values))
    return np.asarray(scores / max(float(np.sqrt((scores**2).mean())), 1e-12))


def _projected(inputs: Mapping[str, Array], n_rows: int, rng: np.random.Generator) -> list[FloatArray]:
    """Return random projections of the numbers of each row."""
    flat = [
        array.reshape(n_rows, -1).astype(np.float64)
        for _, array in sorted(inputs.items())
        if array.dtype.kind in "fiub" and array.size
    ]
    if not flat:
        return []
    values = np.nan_to_num(np.concatenate(flat, axis=1))
    values = (values - values.mean(axis=0)) / np.maximum(values.std(axis=0), 1e-12)
    return list((values @ rng.normal(size=(values.shape[1], _PROJECTIONS))).T)


class Projections:
    """Random projections of the inputs of one exchange after the other: the mean over its items."""

    def __init__(self, seed: int = 1) -> None:
        self._seed = seed
        self._signs: dict[tuple[str, int], FloatArray] = {}

    def of(self, inputs: Mapping[str, Array]) -> tuple[float, ...]:
        """Return the projections of an exchange; inputs that are no numbers count nothing.

        Parameters
        ----------
        inputs
            By name : (items, ...).
        """
        total = np.zeros(_PROJECTIONS)
        for name, array in sorted(inputs.items()):
            if array.dtype.kind not in "fiub" or not array.size:
                continue
            mean = np.nan_to_num(array.reshape(len(array), -1).astype(np.float64)).mean(axis=0)
            signs = self._signs.get((name, len(mean)))
            if signs is None:
                rng = np.random.default_rng([self._seed, len(mean), *name.encode()])
                signs = self._signs[name, len(mean)] = rng.choice((-1.0, 1.0), (len(mean), _PROJECTIONS))
            total += mean @ signs
        return tuple(total.tolist())


def is_calibrated(digests: Sequence[str], calibration: frozenset[str]) -> BoolArray:
    """Return which rows are among those that a candidate was calibrated on : (rows,)."""
    return np.array([digest in calibration for digest in digests], dtype=np.bool_)


def calibration_of(files: Sequence[Path], models: Iterable[Path], inputs: Iterable[str]) -> frozenset[str]:
    """Return the digests of the rows that candidates were calibrated on.

    Parameters
    ----------
    files
        Recorded inputs, or records of repairs.
    models
        The candidates: what a record of repairs beside one of them says of it counts, too.
    inputs
        The names of the inputs.

    Raises
    ------
    OperatorError
        A file cannot be read.
    """
    digests: set[str] = set()
    for file in files:
        if file.suffix == ".json":
            digests.update(digest for made_from in _made_from(file).values() for digest in made_from)
            continue
        for part in parts_of(file, "--calibration"):
            digests.update(digests_of(read(part, RecordingLayout(inputs=tuple(inputs), keys={})).inputs))
    for model in models:
        records = [record for name in (RECORD, QUANTISED) if (record := model.parent / name).is_file()]
        if records:
            digest = f"sha256:{hashlib.sha256(model.read_bytes()).hexdigest()}"
            for record in records:
                digests.update(_made_from(record).get(digest, ()))
    return frozenset(digests)


def _made_from(path: Path) -> dict[str, list[str]]:
    """Return the digests of the rows that each model of a record was made from, or chosen by, by the digest of the model."""
    made_from: dict[str, list[str]] = {}
    try:
        record: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        if "made_from" in record:
            made_from[record["digest"] or ""] = record["made_from"]
        else:
            for repair in record["repairs"]:
                digest = repair.get("digest") or ""
                made_from.setdefault(digest, []).extend(repair.get("calibration") or [])
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise OperatorError(
            f"{path} cannot be read as a record of `quantdrift repair` or `quantdrift quantise`: {error}"
        ) from error
    return made_from
