"""The time that requests spend in Triton's queue and in the model, by Triton's own counters.

They are read before and after the requests of a step: from its metrics (`nv_inference_*`), or by the statistics extension of its protocol, which is at the port
of the requests. Another server has none of both.
"""

import re
from typing import Any, Final
from urllib.parse import unquote

import aiohttp
import msgspec

from quantdrift.core.tls import Tls
from quantdrift.facts.load_test import ServerTime

_PATH: Final = re.compile(r"(/v2/models/([^/]+)(?:/versions/[^/]+)?)/infer(?:/|$)")
_LINE: Final = re.compile(
    r'^nv_inference_(\w+)\{[^}]*\bmodel="([^"]*)"[^}]*\} ([0-9.eE+]+)\s*$', re.MULTILINE
)
_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)
_MOST_BYTES: Final = 8 * 2**20


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What Triton has counted of one model since it was started: answered requests, their times, items and executions."""

    n: int
    queue_s: float
    compute_s: float
    items: int
    executions: int

    def since(self, before: "Counters") -> ServerTime | None:
        """Return the times of the requests since then; None: there were none, or Triton was started again."""
        n = self.n - before.n
        if n <= 0:
            return None
        executions = self.executions - before.executions
        return ServerTime(
            n=n,
            queue_s=max(self.queue_s - before.queue_s, 0.0) / n,
            compute_s=max(self.compute_s - before.compute_s, 0.0) / n,
            batch=(self.items - before.items) / executions if executions > 0 else None,
        )


class TritonCounters:
    """Reads the counters of the model that a path names.

    Parameters
    ----------
    base, path
        `http://HOST:PORT` or empty, and the path of the requests.
    metrics
        Address of Triton's metrics; empty: the statistics extension is asked.
    headers
        Of requests to the target itself.
    tls
        Certificates for an address in `https`.
    """

    def __init__(self, base: str, path: str, metrics: str, headers: dict[str, str], tls: Tls) -> None:
        match = _PATH.match(path)
        self._model = unquote(match[2]) if match else ""
        self._url = metrics or (f"{base}{match[1]}/stats" if match and base else "")
        self._is_metrics, self._headers, self._tls = bool(metrics), headers, tls

    async def read(self) -> Counters | None:
        """Return the counters; None: there are none."""
        if not self._url:
            return None
        headers = {} if self._is_metrics else self._headers  # the token is for the target
        try:
            async with (
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(ssl=self._tls.context()), timeout=_TIMEOUT, trust_env=False
                ) as session,
                session.get(self._url, headers=headers, allow_redirects=False) as response,
            ):
                text = await response.content.read(_MOST_BYTES)
                if response.status != 200:
                    return None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        return (
            of_metrics(text.decode(errors="replace"), self._model)
            if self._is_metrics
            else of_statistics(text)
        )


def of_metrics(text: str, model: str) -> Counters | None:
    """Return the counters of Triton's metrics, of all versions of a model; empty: of all models."""
    found: dict[str, float] = {}
    for name, of, value in _LINE.findall(text):
        if model in ("", of):
            found[name] = found.get(name, 0.0) + float(value)
    if "request_success" not in found or "queue_duration_us" not in found:
        return None
    compute = ("compute_input_duration_us", "compute_infer_duration_us", "compute_output_duration_us")
    return Counters(
        n=int(found["request_success"]),
        queue_s=found["queue_duration_us"] / 1e6,
        compute_s=sum(found.get(name, 0.0) for name in compute) / 1e6,
        items=int(found.get("count", 0)),
        executions=int(found.get("exec_count", 0)),
    )


def of_statistics(text: bytes) -> Counters | None:
    """Return the counters of an answer of the statistics extension, of all versions of the model."""
    try:
        models: list[dict[str, Any]] = msgspec.json.decode(text)["model_stats"]
        stats = [model["inference_stats"] for model in models]
        return Counters(
            n=sum(int(each["success"]["count"]) for each in stats),
            queue_s=sum(int(each["queue"]["ns"]) for each in stats) / 1e9,
            compute_s=sum(
                int(each[part]["ns"])
                for each in stats
                for part in ("compute_input", "compute_infer", "compute_output")
            )
            / 1e9,
            items=sum(int(model.get("inference_count", 0)) for model in models),
            executions=sum(int(model.get("execution_count", 0)) for model in models),
        )
    except (msgspec.DecodeError, LookupError, TypeError, ValueError):
        return None
