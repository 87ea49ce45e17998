"""The budget detector again, in plain loops straight from the formulas: what the shipped one is compared with."""

from collections.abc import Sequence

K = 14
DAY = 1 / 30  # mass of the whole fleet in a day
RESOLVE = (0.15, 0.3, 0.5, 0.7, 0.9)


class Signal:
    """One signal: the bets of both copies and the mirror image, one observation at a time."""

    def __init__(self, m: float, smallest: float, mass: float) -> None:
        largest = 0.95 / m
        self.m = m
        low, high = smallest**-0.3, largest**-0.3
        self.rates = [(low + (high - low) * k / (K - 1)) ** (-1 / 0.3) for k in range(K)]
        self.last = mass
        self.arm()

    def arm(self) -> None:
        """Begin anew."""
        self.page, self.ticket = [0.0] * K, [0.0] * K
        self.mirror = [0.0] * len(RESOLVE)
        self.paging = self.ticketing = True
        self.alerting = False
        self.page_mass = self.ticket_mass = 0.0

    def alarmed(self, *, page: bool) -> None:
        """Reset what alarmed, and look for recovery."""
        self.ticket, self.ticketing, self.ticket_mass = [0.0] * K, False, 0.0
        if page:
            self.page, self.paging, self.page_mass = [0.0] * K, False, 0.0
        self.mirror = [0.0] * len(RESOLVE)
        self.alerting = True

    def see(self, vx: float, v: float, mass: float) -> None:
        """`R_k <- (R_k + gamma) * (1 + lambda_k (vx - v m))`, and the mirror image while alerting."""
        gamma, self.last = max(mass - self.last, 0.0), max(mass, self.last)
        z = vx - v * self.m
        for k in range(K):
            e = 1.0 + self.rates[k] * z
            self.page[k] = (self.page[k] + (gamma if self.paging else 0.0)) * e
            self.ticket[k] = (self.ticket[k] + (gamma if self.ticketing else 0.0)) * e
        self.page_mass += gamma if self.paging else 0.0
        self.ticket_mass += gamma if self.ticketing else 0.0
        if self.alerting:
            for k, c in enumerate(RESOLVE):
                self.mirror[k] = (self.mirror[k] + 1.0) * (1.0 - c / (1.0 - self.m) * z)


class Slice:
    """Signals whose evidence is summed: watching, warning, firing."""

    def __init__(self, signals: Sequence[Signal], page: float, ticket: float) -> None:
        self.signals = signals
        self.thresholds = page, ticket
        self.phase = "watching"

    def settle(self, mass: float) -> str:
        """Change the phase if the evidence says so; return the new one, or nothing."""
        page = sum(sum(one.page) / K for one in self.signals)
        ticket = sum(sum(one.ticket) / K for one in self.signals)
        pages = page >= self.thresholds[0] and page >= 1000 * min(
            sum(one.page_mass for one in self.signals), DAY
        )
        tickets = ticket >= self.thresholds[1] and ticket >= 1000 * min(
            sum(one.ticket_mass for one in self.signals), DAY
        )
        over = all(sum(one.mirror) / len(RESOLVE) >= 1e4 for one in self.signals)
        after = ""
        if self.phase != "firing" and pages:
            after = "firing"
        elif self.phase == "watching" and tickets:
            after = "warning"
        elif self.phase != "watching" and over:
            after = "watching"
        if after:
            self.phase = after
            for one in self.signals:
                if after == "watching":
                    one.arm()
                    one.last = mass
                else:
                    one.alarmed(page=after == "firing")
        return after
