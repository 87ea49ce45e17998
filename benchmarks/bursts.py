"""Requests of users that come in bursts: the attribute of each, and its divergence."""

import numpy as np

from quantdrift.drift.evidence.observations import FloatArray


def bursts(
    rng: np.random.Generator, n: int, *, alike: float, at_once: int = 1, shift: float = 0.0
) -> tuple[list[str], FloatArray]:
    """Return n requests: the users, and the divergence, log-normal.

    Parameters
    ----------
    alike
        Correlation, in [0, 1], of the log divergence of two requests of one user.
    at_once
        Users that send at the same time; each sends 2 to 40 requests and never comes back.
    shift
        In standard deviations: how much larger the log divergence of all users is in the second half.
    """
    users: list[str] = []
    log_divergence: list[float] = []
    active: list[tuple[str, list[int], float]] = []
    n_users = 0
    while len(users) < n:
        while len(active) < at_once:
            active.append((f"u{n_users}", [int(rng.integers(2, 41))], float(rng.normal())))
            n_users += 1
        place = int(rng.integers(len(active)))
        name, left, own = active[place]
        late = shift if len(users) >= n // 2 else 0.0
        log_divergence.append(np.sqrt(alike) * own + np.sqrt(1 - alike) * rng.normal() + late)
        users.append(name)
        left[0] -= 1
        if left[0] == 0:
            active.pop(place)
    return users, np.exp(2.0 * np.array(log_divergence) - 6.0)
