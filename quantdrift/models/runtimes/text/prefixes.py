"""What a causal language model has computed of token sequences, kept within bytes: their keys and values in each attention layer.

A row that begins like a kept one, such as the next turn of a conversation or another sample of the same prompt, is computed from where
they part.
"""

import bisect
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any, Final

import msgspec
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

LEAST_SHARED: Final = 16
"""Tokens from which on a shared beginning is worth copying."""

Tokens = tuple[int, ...]
Layers = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a row that need not be computed.

    Parameters
    ----------
    n_tokens
        Its length; 0: there is none.
    layers
        Keys and values of each attention layer : (heads, at least `n_tokens`, size).
    """

    n_tokens: int = 0
    layers: Layers = ()


NO_PREFIX: Final = Prefix()


class KeptPrefixes:
    """The rows whose keys and values are kept, the newest within `most_bytes`.

    Parameters
    ----------
    most_bytes
        Of all keys and values together.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._n_bytes = 0
        self._layers: dict[Tokens, Layers] = {}  # the least recently used first
        self._sorted: list[Tokens] = []

    def find(self, tokens: Tokens, most: int) -> Prefix:
        """Return the longest kept beginning of `tokens`, of at most `most` tokens.

        Of all kept rows those next to it in alphabetical order share most with it.
        """
        place = bisect.bisect(self._sorted, tokens)
        near = self._sorted[max(place - 1, 0) : place + 1]
        n_shared, best = max(((min(n_common(tokens, row), most), row) for row in near), default=(0, ()))
        if n_shared < LEAST_SHARED:
            return NO_PREFIX
        layers = self._layers.pop(best)
        self._layers[best] = layers
        return Prefix(n_tokens=n_shared, layers=layers)

    def fits(self, n_bytes: int) -> bool:
        """Return whether so many bytes may be kept at all."""
        return n_bytes <= self.most_bytes

    def keep(self, tokens: Tokens, layers: Layers) -> None:
        """Keep the keys and values of a row; those of its beginnings and the least recently used are removed."""
        for row in [row for row in self._beginnings(tokens) if row in self._layers]:
            self._remove(row)
        self._layers[tokens] = layers
        bisect.insort(self._sorted, tokens)
        self._n_bytes += _n_bytes(layers)
        while self._n_bytes > self.most_bytes:
            self._remove(next(iter(self._layers)))

    def clear(self) -> None:
        """Keep nothing."""
        self._layers.clear()
        self._sorted.clear()
        self._n_bytes = 0

    def _beginnings(self, tokens: Tokens) -> Iterator[Tokens]:
        """Yield `tokens`, if it is kept, and the kept rows right before it in alphabetical order that it begins with."""
        place = bisect.bisect(self._sorted, tokens)
        before = reversed(self._sorted[:place])
        yield from takewhile(lambda row: tokens[: len(row)] == row, before)

    def _remove(self, tokens: Tokens) -> None:
        self._n_bytes -= _n_bytes(self._layers.pop(tokens))
        del self._sorted[bisect.bisect_left(self._sorted, tokens)]


def waves(rows: Sequence[Tokens]) -> list[list[int]]:
    """Return the rows in the order in which to compute them, as indices: each wave may begin like rows of those before it."""
    order = sorted(range(len(rows)), key=lambda index: rows[index])
    depth = [0] * len(order)
    shared = [0, *(n_common(rows[before], rows[row]) for before, row in pairwise(order))]
    for place in range(1, len(order)):
        if shared[place] >= LEAST_SHARED:
            first = place - 1  # of the rows before it that share as much
            while first and shared[first] >= shared[place]:
                first -= 1
            depth[place] = depth[first] + 1
    found: list[list[int]] = [[] for _ in range(max(depth, default=-1) + 1)]
    for place, index in enumerate(order):
        found[depth[place]].append(index)
    return found


def n_common(one: Tokens, other: Tokens) -> int:
    """Return how many tokens two rows begin with alike."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    low = 0  # they are alike up to here, and no longer at `most`
    while most - low > 1:
        middle = (low + most) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            most = middle
    return low


def joined(prefixes: Sequence[Prefix]) -> DynamicCache:
    """Return the prefixes of a batch as a model takes them, each padded at its beginning to the longest."""
    n_most = max(prefix.n_tokens for prefix in prefixes)
    cache = DynamicCache()
    for layer, pair in enumerate(next(prefix.layers for prefix in prefixes if prefix.n_tokens)):
        for_layer = []
        for side, like in enumerate(pair):
            batch = like.new_zeros((len(prefixes), like.shape[0], n_most, like.shape[2]))
            for row, prefix in enumerate(prefixes):
                if prefix.n_tokens:
                    batch[row, :, n_most - prefix.n_tokens :] = prefix.layers[layer][side][
                        :, : prefix.n_tokens
                    ]
            for_layer.append(batch)
        cache.update(*for_layer, layer)
    return cache


def layers_of(cache: Any, row: int, begin: int, end: int) -> Layers:
    """Return a copy of the keys and values of one row of a batch, from one position to another."""
    return tuple(
        (layer.keys[row, :, begin:end].clone(), layer.values[row, :, begin:end].clone())
        for layer in cache.layers
    )


def bytes_per_token(cache: Any) -> int:
    """Return the bytes of keys and values of a token; 0: the model keeps something else, which cannot be taken apart."""
    if not isinstance(cache, DynamicCache) or not all(type(layer) is DynamicLayer for layer in cache.layers):
        return 0
    sides = [side for layer in cache.layers for side in (layer.keys, layer.values)]
    if any(side is None or side.dim() != 4 for side in sides):
        return 0
    return sum(side.shape[1] * side.shape[3] * side.element_size() for side in sides)


def _n_bytes(layers: Layers) -> int:
    return sum(side.numel() * side.element_size() for pair in layers for side in pair)
