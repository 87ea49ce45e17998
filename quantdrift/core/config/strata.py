"""Header strata that follow from the slices: what the monitor's policy can boost on the relay already.

Tallies are counted per header stratum by its index, so the set of strata is the configuration's, the same in every
role that reads it; a policy changes their rates alone. So that nobody writes a stratum per value by hand, each
declared value of a slice rule by header gets one, after those written by hand.
"""

import re
from collections.abc import Iterator

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.records import HeaderStratum

MOST_STRATA = 63
MAX_VALUE_BYTES = 256
"""Values of headers, parameters and JSON paths are cut to this length: longer ones are texts, not groups."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")


class Strata(msgspec.Struct, frozen=True, kw_only=True):
    """The header strata of a configuration, without the last, `default`.

    Parameters
    ----------
    strata
        Those written by hand, then those of slices. The latter take what would fall to `default`, at its rate.
    left_out
        Declared values, as `HEADER=VALUE`, that no stratum could be made for because there are 63 already.
    """

    strata: tuple[HeaderStratum, ...]
    left_out: tuple[str, ...]


def header_strata(config: Config) -> Strata:
    """Return the header strata of `config`, in order.

    Slices add to them where the monitor makes policies (`sampling.replays_per_s` above 0). A
    value adds none where a stratum written by hand takes it whole, where `capture.hmac` hashes the header, or where
    the relay and the decoder could read it differently: not in ASCII, or so long that it is cut. The result is the
    same for a configuration that has been through `with_strata`.
    """
    sampling = config.sampling
    strata = list(sampling.header_strata)
    left_out: list[str] = []
    if sampling.replays_per_s > 0:
        for header, value in _declared(config):
            if any(_takes_whole(stratum, header, value) for stratum in strata):
                continue
            if len(strata) >= MOST_STRATA:
                left_out.append(f"{header}={value}")
                continue
            name = f"{header}={value}"
            while any(stratum.name == name for stratum in strata):
                name += "'"
            strata.append(HeaderStratum(name=name, headers={header: value}, rate=sampling.rate))
    return Strata(strata=tuple(strata), left_out=tuple(dict.fromkeys(left_out)))


def with_strata(config: Config) -> Config:
    """Return `config` with the strata of its slices among its header strata."""
    sampling = msgspec.structs.replace(config.sampling, header_strata=header_strata(config).strata)
    return msgspec.structs.replace(config, sampling=sampling)


def _declared(config: Config) -> Iterator[tuple[str, str]]:
    for rule in config.slices:
        if rule.header and f"header.{rule.header}" not in config.capture.hmac:
            for value in rule.values:
                if not why_unmatchable(rule.header, value):
                    yield rule.header, value


def why_unmatchable(header: str, value: str) -> str:
    """Return why relay and decoder may read a header's value differently; empty if they cannot.

    The relay compares bytes as they are on the wire, without surrounding white space and control characters; the
    decoder records text that is cut. Both must put a request into the same stratum, or its items are
    weighted with the wrong probability.

    Parameters
    ----------
    header, value
        As written.
    """
    if not _TOKEN.fullmatch(header):
        return "write a header's name in lower case, without spaces and colons"
    if not value:
        return "some clients and proxies drop an empty value"
    if not value.isascii() or not value.isprintable():
        return "a value must have printable ASCII characters only: the encoding of others is not defined"
    if value != value.strip():
        return "remove the white space around the value"
    if len(value) >= MAX_VALUE_BYTES:
        return f"a value must be shorter than {MAX_VALUE_BYTES} bytes, the length at which values are cut"
    return ""


def _takes_whole(stratum: HeaderStratum, header: str, value: str) -> bool:
    unconditional = not stratum.method and not stratum.path_prefix
    return unconditional and stratum.headers.items() <= {header: value}.items()


MARGIN = "feature.candidate_margin"
MODEL = "model"
