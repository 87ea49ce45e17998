"""The first sampling phase: the stratum of an inference request, and the draw whether it is taken."""

import os
import random
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from quantdrift.core.config.schema import SamplingOptions
from quantdrift.core.records import HeaderStratum
from quantdrift.core.sampling.rates import epoch_salt, uniform
from quantdrift.sidecar.state.policy import PolicyHistory
from quantdrift.sidecar.state.routes import model_in

_MASK = (1 << 64) - 1
# Attributes are recorded without control characters, so strata are matched without them, too.
_CONTROL = bytes((*range(32), 127))
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplication modulo 2**64 keeps numbers distinct


class Draw(msgspec.Struct, frozen=True, gc=False):
    """The first phase's decision on one request.

    Parameters
    ----------
    stratum
        Row in the table of counts, for its header stratum and, if the path names it, its model.
    taken
        Whether the first phase took it.
    pi1
        Probability with which the first phase takes such a request.
    u1
        The draw, in [0, 1); the request is taken if it is below `pi1`.
    epoch
        The epoch whose rates and salt were used.
    id
        The new identifier of the exchange, 32 hexadecimal digits.
    """

    stratum: int
    taken: bool
    pi1: float
    u1: float
    epoch: str
    id: str


class SamplingKey(msgspec.Struct, frozen=True, gc=False):
    """The part of a request that the draw depends on; requests with equal keys have the same probability.

    Parameters
    ----------
    stratum
        Row in the table of counts, for its header stratum and, if the path names it, its model.
    sticky
        Value of the sticky header, which is hashed for the draw; empty: the identifier of the exchange is
        hashed.
    """

    stratum: int
    sticky: bytes


class ExchangeIds:
    """Generates identifiers of 32 hexadecimal digits, unique over processes and restarts.

    Parameters
    ----------
    entropy
        Returns a number of random bytes: for the half that identifies the process, and for the start of the
        counter in the other half.
    """

    def __init__(self, entropy: Callable[[int], bytes] = os.urandom) -> None:
        self._prefix = entropy(8).hex()
        self._count = int.from_bytes(entropy(8), "big")

    def __call__(self) -> str:
        """Return the next identifier."""
        self._count += 1
        return f"{self._prefix}{self._count * _MULTIPLIER & _MASK:016x}"


class _Rule:
    """A header stratum, prepared for matching."""

    __slots__ = ("_headers", "_index", "_method", "_path_prefix")

    def __init__(self, index: int, stratum: HeaderStratum) -> None:
        self._index = index
        self._method = stratum.method.encode()
        self._path_prefix = stratum.path_prefix.encode()
        self._headers = [(name.encode(), value.encode()) for name, value in stratum.headers.items()]

    def find(self, method: bytes, path: bytes, headers: dict[bytes, bytes]) -> int | None:
        """Return the index of the stratum if the request is in it, else None."""
        if self._method and method != self._method:
            return None
        if not path.startswith(self._path_prefix):
            return None
        for name, value in self._headers:
            if headers.get(name) != value:
                return None
        return self._index


class _HeaderValues:
    """Neighbouring strata that each ask for one value of the same header: a single lookup for all of them."""

    __slots__ = ("_header", "_indices")

    def __init__(self, header: str) -> None:
        self._header = header.encode()
        self._indices: dict[bytes | None, int] = {}

    def add(self, value: str, index: int) -> None:
        """Add a stratum; of two for the same value the first one counts."""
        self._indices.setdefault(value.encode(), index)

    def find(self, method: bytes, path: bytes, headers: dict[bytes, bytes]) -> int | None:
        """Return the index of the stratum that the request is in, or None."""
        return self._indices.get(headers.get(self._header))


def _compile(strata: Sequence[HeaderStratum]) -> list[_Rule | _HeaderValues]:
    rules: list[_Rule | _HeaderValues] = []
    header = ""
    for index, stratum in enumerate(strata):
        if len(stratum.headers) == 1 and not stratum.method and not stratum.path_prefix:
            ((name, value),) = stratum.headers.items()
            if name != header:
                rules.append(_HeaderValues(name))
                header = name
            values = rules[-1]
            assert isinstance(values, _HeaderValues)
            values.add(value, index)
        else:
            rules.append(_Rule(index, stratum))
            header = ""
    return rules


class Sampler:
    """Draws requests by the policy in effect.

    Parameters
    ----------
    sampling
        The configuration's rates.
    secret
        Key of the salts.
    exchange_ids
        Generates the identifiers of exchanges.
    now_s
        Seconds since 1970, UTC.
    policy_history
        The policies received; None: the configuration's rates.
    rows
        By model, the row of each header stratum in the table of counts; None: rows in the order of the
        strata.

    Attributes
    ----------
    names : frozenset of bytes
        Lower-case names of the header fields that a draw needs.
    nameless_rows : frozenset of int
        Rows of requests whose path names no configured model: only the body may name it.
    """

    def __init__(
        self,
        sampling: SamplingOptions,
        secret: bytes,
        exchange_ids: ExchangeIds,
        now_s: float,
        policy_history: PolicyHistory | None = None,
        *,
        rows: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._policy_history = policy_history or PolicyHistory(sampling)
        self._secret = secret
        self._exchange_ids = exchange_ids
        self._sticky = sampling.sticky_header.lower().encode()
        names = {name.encode() for stratum in sampling.header_strata for name in stratum.headers}
        self.names = frozenset(names | {self._sticky} - {b""})
        # No part of it can backtrack, so a hostile head takes linear time.
        self._header_pattern = (
            re.compile(
                rb"\r\n(" + b"|".join(map(re.escape, sorted(self.names))) + rb"):([^\r\n]*)", re.IGNORECASE
            )
            if self.names
            else None
        )
        self._epoch = ""
        self._salt = b""
        strata = self._policy_history.at(now_s).header_strata
        self._rows = {"": tuple(range(len(strata)))} if rows is None else dict(rows)
        self.nameless_rows = frozenset(self._rows[""])
        self._paused = False
        self._rates = [0.0] * (1 + max(max(rows) for rows in self._rows.values()))
        self._rules = _compile(strata)
        self.refresh(now_s)

    def refresh(self, now_s: float, *, paused: bool = False) -> None:
        """Use the epoch of `now_s`, if it is a new one. Called about once a second; the strata never change.

        Parameters
        ----------
        now_s
            Seconds since 1970, UTC.
        paused
            Whether to take no request at all.
        """
        policy = self._policy_history.at(now_s)
        if policy.epoch == self._epoch and paused == self._paused:
            return
        self._paused = paused
        self._epoch = policy.epoch
        self._salt = epoch_salt(self._secret, policy.epoch, 1)
        for rows in self._rows.values():
            for row, stratum in zip(rows, policy.header_strata, strict=True):
                self._rates[row] = 0.0 if paused else stratum.rate

    @property
    def rows_by_stratum(self) -> tuple[tuple[int, ...], ...]:
        """By header stratum in the order of the policy, its rows in the table of counts: first that of no model."""
        named = [rows for model, rows in self._rows.items() if model]
        return tuple(zip(self._rows[""], *named, strict=True))

    def takes_unseen(self, row: int) -> bool:
        """Return whether to take a request of which no more is known than its row; a random draw."""
        return row < len(self._rates) and random.random() < self._rates[row]  # noqa: S311 - no secret

    def draw(self, method: bytes, path: bytes, data: bytes, start: int, stop: int) -> Draw:
        """Return the draw of the request whose head is `data[start:stop]`, taken or not."""
        return self._draw(self.key_for(method, path, data, start, stop))

    def key_for(self, method: bytes, path: bytes, data: bytes, start: int, stop: int) -> SamplingKey:
        """Return the sampling key of the request whose head is `data[start:stop]`.

        It is the same in every epoch.
        """
        return self.key_for_headers(
            method, path, {} if self._header_pattern is None else self._headers(data, start, stop)
        )

    def key_for_headers(self, method: bytes, path: bytes, headers: dict[bytes, bytes]) -> SamplingKey:
        """Return the sampling key of a request with `headers`, the fields in `names` as of `add_header`."""
        index = None
        for rule in self._rules:
            index = rule.find(method, path, headers)
            if index is not None:
                break
        assert index is not None  # the last rule, `default`, matches every request
        rows = self._rows.get(model_in(path)) or self._rows[""]
        return SamplingKey(rows[index], headers.get(self._sticky, b""))

    def take(self, key: SamplingKey) -> Draw | None:
        """Return the draw of a request, or None if it is not taken.

        The draw hashes the value of the sticky header, or the identifier of the exchange if there is none.
        """
        if self._rates[key.stratum] <= 0.0:
            return None
        draw = self._draw(key)
        return draw if draw.taken else None

    def _draw(self, key: SamplingKey) -> Draw:
        rate = self._rates[key.stratum]
        identifier = self._exchange_ids()
        u1 = uniform(key.sticky or identifier.encode(), self._salt) if rate > 0.0 else 1.0
        return Draw(key.stratum, u1 < rate, rate, u1, self._epoch, identifier)

    def _headers(self, data: bytes, start: int, stop: int) -> dict[bytes, bytes]:
        assert self._header_pattern is not None
        headers: dict[bytes, bytes] = {}
        for match in self._header_pattern.finditer(data, start, stop - 2):
            add_header(headers, match[1].lower(), match[2])
        return headers


def add_header(headers: dict[bytes, bytes], name: bytes, value: bytes) -> None:
    """Add a header field to `headers`, cleaned for strata and the sticky draw; its name is in lower case."""
    value = value.strip(b" \t").translate(None, _CONTROL)
    headers[name] = headers[name] + b", " + value if name in headers else value
