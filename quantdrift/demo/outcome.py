"""Whether the run went as it must: decided from what came over OTLP and what the database says."""

import msgspec

from quantdrift.demo.model import Quality
from quantdrift.demo.otlp_receiver import Event
from quantdrift.demo.watch import ALL, ARCHIVE, Moment
from quantdrift.facts.status import said

SLICE = "quantdrift.slice"
VERDICT = "quantdrift.verdict"


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run.

    Parameters
    ----------
    events
        Everything that came over OTLP.
    snapshot
        What quantdrift said last.
    failed
        Requests that got no proper answer.
    """

    events: tuple[Event, ...]
    snapshot: Moment
    failed: int

    def problems(self) -> list[str]:
        """Return what is not as it must be, in words; empty when the run proved its point."""
        fired = {slice_of(event) for event in self.events if is_page(event)}
        lines = []
        if ARCHIVE not in fired:
            lines.append(f"{ARCHIVE} did not fire")
        if others := fired - {ARCHIVE}:
            lines.append(f"fired without a reason: {', '.join(sorted(others))}")
        aggregate = self.snapshot.slice(ALL)
        if aggregate is None or aggregate.verdict != "ok":
            lines.append(
                f"all traffic together is {said(aggregate.verdict) if aggregate else 'not known'}, and must be OK"
            )
        if self.failed:
            lines.append(f"{self.failed} requests got no proper answer")
        return lines

    def decided(self) -> dict[str, str]:
        """Return per slice what is wrong with it, as the first line of its last alert says after the version."""
        return {
            slice_of(event): event.body.partition("\n")[0].partition(": ")[2]
            for event in self.events
            if event.attributes.get(VERDICT) in {"warning", "firing"}
        }

    def figures(self, served: Quality) -> str:
        """Return the shares of changed answers of the archive that are printed, each with what it is of; empty before a page.

        Parameters
        ----------
        served
            All of its pages that were served.
        """
        paged = next(
            (event.attributes for event in self.events if is_page(event) and slice_of(event) == ARCHIVE), {}
        )
        state = self.snapshot.slice(ARCHIVE)
        if not paged or state is None or state.flip_mean is None:
            return ""
        lines = []
        # What decided is in `after`; where that is the divergence, the changed answers are in `flips`.
        share = paged.get(
            "quantdrift.after" if paged.get("quantdrift.metric") == "flip" else "quantdrift.flips"
        )
        if share is not None:
            n = paged["quantdrift.n_since_onset"]
            lines.append(f"{share:7.2%}  when it paged: {n:,} readers since the drift began")
        return "\n".join(
            [
                *lines,
                f"{state.flip_mean:7.2%}  lately: the window of the table of verdicts",
                f"{served.flip:7.2%}  all {served.n:,} pages that were served, also before the drift",
                "One rate is behind them: another sample of pages has another share.",
            ]
        )

    def conclusion(self) -> str:
        """Return what a run without problems has shown: all traffic is called fine only where its figures are."""
        fired = "The archive's slice fired; no other did, and"
        aggregate = self.snapshot.slice(ALL)
        if aggregate is None or aggregate.flip_mean is None or aggregate.flip_budget is None:
            return f"{fired} all traffic taken together does not alert."
        figures = f"{aggregate.flip_mean:.2%} changed, {aggregate.flip_budget:.2%} accepted"
        fine = aggregate.verdict == "ok" and aggregate.flip_mean <= aggregate.flip_budget
        if fine and aggregate.divergence_mean is not None and aggregate.divergence_budget is not None:
            fine = aggregate.divergence_mean <= aggregate.divergence_budget
        return f"{fired} all traffic taken together {'is fine' if fine else 'does not alert'}: {figures}."


def is_page(event: Event) -> bool:
    """Return whether `event` says that a slice began to fire."""
    return event.attributes.get(VERDICT) == "firing"


def slice_of(event: Event) -> str:
    """Return the slice that `event` speaks of."""
    return str(event.attributes.get(SLICE, ""))
