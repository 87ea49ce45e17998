"""The processor time of several models, each beside the others."""

import time
from collections.abc import Callable, Sequence

import numpy as np

ROUNDS = 15


def times_in_turn(runs: Sequence[Callable[[], object]], rounds: int = ROUNDS) -> list[float]:
    """Return the processor time of each call in this thread, in seconds: the median of rounds in which all are called in turn.

    Other programs, and what the machine does meanwhile, slow all of them alike. A first round is not counted.
    """
    spent = np.empty((rounds + 1, len(runs)))
    for turn in range(rounds + 1):
        for number, run in enumerate(runs):
            begun = time.thread_time()
            run()
            spent[turn, number] = time.thread_time() - begun
    return [float(value) for value in np.median(spent[1:], axis=0)]
