"""Clients that ask questions through the sidecar, as chats of OpenAI's protocol: half of them greedy, half at temperature 0.7."""

import asyncio
import random
from collections import Counter

import aiohttp
from numpy.random import default_rng

from quantdrift.demo.text.model import NAME
from quantdrift.demo.text.sentences import Language, draw

_CLIENTS = 3
_MOST_TOKENS = 48
_TEMPERATURES = (0.0, 0.7)
_BEHIND_S = 0.5  # a client that is later than this lets the rest go instead of sending a burst


class TextTraffic:
    """Asks questions at a Poisson rate until it is cancelled.

    Parameters
    ----------
    url
        Where the sidecar listens.
    seed
        Of everything that is drawn.
    rate_per_s
        Questions per second, all clients together.

    Attributes
    ----------
    german_share
        Share of the questions that are in German; may be changed while running.
    sent, failed
        Questions by language, and how many of them got no proper answer.
    may_send
        Nothing is sent while this is not set.
    """

    def __init__(self, url: str, seed: int, *, rate_per_s: float) -> None:
        self.german_share = 0.0
        self.sent: Counter[Language] = Counter()
        self.failed: Counter[Language] = Counter()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self._url = f"{url}/v1/chat/completions"
        self._rate = rate_per_s
        self._random = random.Random(seed)
        self._rng = default_rng(seed)
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self) -> None:
        """Send until cancelled."""
        # llama.cpp closes connections after its answers without saying so: each request has a connection of its own.
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=30)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(_CLIENTS):
                clients.create_task(self._client(session))

    async def pause(self) -> None:
        """Stop sending, and wait until every answer is there."""
        self.may_send.clear()
        await self._idle.wait()

    async def _client(self, session: aiohttp.ClientSession) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            due += self._random.expovariate(self._rate / _CLIENTS)
            if (wait_s := due - clock()) > 0:
                await asyncio.sleep(wait_s)
            elif wait_s < -_BEHIND_S:
                due = clock()
            await self.may_send.wait()
            self._in_flight += 1
            self._idle.clear()
            try:
                await self._send(session)
            finally:
                self._in_flight -= 1
                if not self._in_flight:
                    self._idle.set()

    async def _send(self, session: aiohttp.ClientSession) -> None:
        is_german = self._random.random() < self.german_share
        language = Language.DE if is_german else self._random.choice((Language.EN, Language.ES, Language.FR))
        said = draw(language, self._rng)
        self.sent[language] += 1
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": said.question}],
            "temperature": self._random.choice(_TEMPERATURES),
            "max_tokens": _MOST_TOKENS,
        }
        try:
            async with session.post(self._url, json=body) as response:
                answer = await response.json()
                if response.status != 200 or not answer.get("choices"):
                    self.failed[language] += 1
        except (aiohttp.ClientError, TimeoutError, ValueError):
            self.failed[language] += 1
