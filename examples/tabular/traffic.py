"""`python -m examples.tabular.traffic`: customers who ask for a loan, one request each, until Ctrl-C or for `--seconds`."""

import argparse
import asyncio
import contextlib
import itertools
import json
import random

import aiohttp

from examples.tabular.customers import CHANNELS, COLUMNS, SHARES, draw

_BLOCK = 4096  # customers drawn at a time
_CLIENTS = 8


async def send(url: str, per_s: float, seconds: float, seed: int) -> int:
    """Send requests at a Poisson rate to `url`, and return how many were answered."""
    chance = random.Random(seed)
    customers = (row for block in itertools.count(seed) for row in draw(_BLOCK, block + 1_000)[0])
    loop = asyncio.get_running_loop()
    begun = due = loop.time()
    n_answered = 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal due, n_answered
        while not seconds or due < begun + seconds:
            due += chance.expovariate(per_s)
            await asyncio.sleep(max(due - loop.time(), 0))
            row = next(customers)
            # Savings that are not known are NaN, which JSON does not have: numbers go as bytes.
            head = {
                "name": "features",
                "datatype": "FP32",
                "shape": [1, len(COLUMNS)],
                "parameters": {"binary_data_size": row.nbytes},
            }
            text = json.dumps({"inputs": [head]}).encode()
            headers = {
                "Inference-Header-Content-Length": str(len(text)),
                "x-channel": chance.choices(CHANNELS, SHARES)[0],
            }
            async with session.post(url, data=text + row.tobytes(), headers=headers) as response:
                response.raise_for_status()
                n_answered += 1

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as clients:
        for _ in range(_CLIENTS):
            clients.create_task(client(session))
    return n_answered


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Send customers to a model of loans.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--per-s", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=0.0, help="0: until Ctrl-C")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        url = f"{arguments.url}/v2/models/credit/infer"
        print(f"{asyncio.run(send(url, arguments.per_s, arguments.seconds, 7)):,} requests were answered")
