"""How long answers and items took: measurements as they are read, without a judgement."""

import msgspec


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """How long the candidate took for a part of its answers, in seconds, as the relay saw it; estimates of the traffic.

    Parameters
    ----------
    part
        `answer`: from the last byte of the request to the last byte of the answer. `first token`: of streams, to the first
        byte. `further token`: of streams whose tokens are counted, for each token after the first.
    n
        Exchanges, of the newest 20,000.
    median, p99
        What half of the traffic, and 99 % of it, do not exceed.
    slower
        Share of the traffic above the budget that was asked about.
    """

    part: str
    n: int
    median: float
    p99: float
    slower: float


class ItemTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long one item takes with the reference and with the candidate, each as it was measured.

    Parameters
    ----------
    device
        What the reference ran on; empty: the batches do not say it. That of the candidate is not known.
    items
        That were timed on both sides.
    reference
        Seconds of computing for an item, in batches of the shadow.
    candidate
        Seconds for an item of an exchange, as the relay saw it: waiting and network are part of it.
    """

    model: str
    version: str
    device: str
    items: int
    reference: float
    candidate: float
