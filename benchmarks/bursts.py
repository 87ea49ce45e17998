"""Requests that come in bursts, of users or of sources: the attribute of each, and its divergence."""

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


def sources(
    rng: np.random.Generator,
    n: int,
    *,
    n_sources: int,
    at_once: int,
    most: int,
    between: float,
    alike: float = 0.0,
) -> tuple[list[str], FloatArray]:
    """Return n requests of sources that come back: their names, and the divergence, log-normal.

    Parameters
    ----------
    at_once, most
        Bursts at the same time, and the most requests of a burst, which has at least 2.
    between
        Standard deviation of the log divergence of sources, where it is 1 within a source.
    alike
        Correlation, in [0, 1], of the log divergence of two requests of one burst, the source given.
    """
    own = between * rng.normal(size=n_sources)
    names: list[str] = []
    log_divergence = np.sqrt(1 - alike) * rng.normal(size=n)
    active = [[0, 0, 0.0] for _ in range(at_once)]  # source, requests that are left, own of the burst
    for place in range(n):
        burst = active[int(rng.integers(at_once))]
        if burst[1] == 0:
            burst[:] = [int(rng.integers(n_sources)), int(rng.integers(2, most + 1)), float(rng.normal())]
        names.append(f"s{int(burst[0])}")
        log_divergence[place] += own[int(burst[0])] + np.sqrt(alike) * burst[2]
        burst[1] -= 1
    return names, np.exp(1.5 * log_divergence - 6.0)
