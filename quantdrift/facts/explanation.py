"""Why a slice alerts: the part of an alert's event that compares the time before the onset with the time since. Flat."""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

FEWEST_BEFORE: Final = 30
"""Exchanges or people before the onset. Everything is compared with their means, and below 30 even a window without a single flip
is compatible with one in ten (the rule of three), so that no move from it can be shown."""
FEWEST_AFTER: Final = 10
"""The same since the onset: clear damage pages within a dozen, and they are enough for standard errors."""
Z: Final = 1.96
"""So many standard errors from 0 a part of a move is more than chance."""


class Begin(StrEnum):
    """The state of an alert's slice before the estimated onset."""

    NEW_VERSION = "new_version"  # the version was first seen around the onset
    FIRST_SEEN = "first_seen"  # too few exchanges before the onset to say that anything changed
    OLDER = "older"  # it was above its budget before the onset already, beyond chance: the fault is older than the alert
    CHANGED = "changed"  # it has a history, and moved away from it


class DamageCause(StrEnum):
    """The cause of a rise."""

    DAMAGE = "damage"
    INPUT_SHIFT = "input_shift"
    UNSEEN = "unseen"  # margins that did not occur before
    BOTH = "both"  # more than one of them
    UNDECIDED = "undecided"
    TOO_FEW = "too_few"  # exchanges before or after


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a slice alerts; `None` and empty values are left out of the event.

    Moves are in the unit of the metric that decided, and the parts of a move add up to it. `_se` is a standard error; it
    does not account for the onset being chosen from the same data.
    """

    unexplained: Annotated[
        str | None, Meta(description="Why there is no explanation; the alert itself is valid.")
    ] = None
    explained_by: Annotated[
        str | None,
        Meta(
            description="The smaller slice, or the slices, that explain this alert: without their items this slice would not"
            " alert. They alert too, at least as severely."
        ),
    ] = None
    incident: Annotated[
        str | None,
        Meta(
            description="Number of the incident that this alert belongs to, with the alerts that explain it or that it explains;"
            " an alert manager can group by it."
        ),
    ] = None
    explained_by_id: Annotated[
        int | None, Meta(description="Id of the slice in explained_by, of several that of the first.")
    ] = None
    explains: Annotated[
        tuple[str, ...], Meta(description="Larger slices that alert only because of this slice.")
    ] = ()
    explains_ids: Annotated[tuple[int, ...], Meta(description="Ids of the slices in explains.")] = ()
    changed: Annotated[
        float | None,
        Meta(
            description="Share of the slice's answers that changed, from the onset until the alert, by weight."
        ),
    ] = None
    changed_low: Annotated[
        float | None,
        Meta(
            description="Lower end of its 95 % interval: shares taken when an alert opens are often too high."
        ),
    ] = None
    changed_high: Annotated[float | None, Meta(description="Upper end of that interval.")] = None
    n_answers: Annotated[
        int | None,
        Meta(description="Answers of the slice that were compared from the onset until the alert."),
    ] = None
    n_people: Annotated[
        int | None,
        Meta(description="People who got them, where sampling.sticky_header says who sends a request."),
    ] = None
    requests_per_day: Annotated[
        float | None,
        Meta(description="Requests of the slice in a day, at the rate from the onset until the alert."),
    ] = None
    basis: Annotated[
        str | None, Meta(description="What that rate rests on, while that is less than a day.")
    ] = None
    build: Annotated[
        str | None,
        Meta(
            description="What the model is made of, as far as its reference tells: network, trees, language or other (only a server has"
            " it)."
        ),
    ] = None
    sets_apart: Annotated[
        str | None,
        Meta(
            description="Of a learned slice: what its inputs have in common, each with evidence that it is more frequent there than elsewhere."
        ),
    ] = None
    mostly: Annotated[
        str | None,
        Meta(description="The one of these that most inputs of the learned slice have."),
    ] = None
    divergence_is: Annotated[
        str | None,
        Meta(
            description="Of generated text: which divergence its answers since the onset have. KL where the log-probabilities of"
            " both sides are known, regret of greedy answers where only those of the reference are."
        ),
    ] = None
    not_finite: Annotated[
        float | None,
        Meta(
            description="Share of the slice's items since the onset whose output was not a number, infinite or empty."
        ),
    ] = None
    not_finite_before: Annotated[float | None, Meta(description="The same share before the onset.")] = None
    doubt: Annotated[
        str | None,
        Meta(description="An option that the reference's outputs contradict: the figures may be wrong."),
    ] = None
    begin: Annotated[
        str | None,
        Meta(
            description="State of the slice before the onset: new_version (the version was first seen within an hour of"
            " it), first_seen (fewer than 30 exchanges before it, too few to say that anything changed), older (above its budget"
            " before it already) or changed."
        ),
    ] = None
    cause: Annotated[
        str | None,
        Meta(
            description="damage (at equal margins), input_shift (margins changed), unseen (margins that did not occur"
            " before), both (more than one), undecided, or too_few (exchanges before or since)."
        ),
    ] = None
    damage: Annotated[
        float | None, Meta(description="Part of the slice's move at equal margins of the reference.")
    ] = None
    damage_se: Annotated[float | None, Meta(description="Standard error of damage.")] = None
    shift: Annotated[
        float | None, Meta(description="Part of the slice's move because the margins changed.")
    ] = None
    shift_se: Annotated[float | None, Meta(description="Standard error of shift.")] = None
    unseen: Annotated[
        float | None,
        Meta(
            description="Part of the slice's move at margins that did not occur before; it counts as neither."
        ),
    ] = None
    unseen_se: Annotated[float | None, Meta(description="Standard error of unseen.")] = None
    divergence_damage: Annotated[
        float | None,
        Meta(
            description="Part of the move of the mean divergence at equal margins, if another metric decided."
        ),
    ] = None
    divergence_damage_se: Annotated[
        float | None, Meta(description="Standard error of divergence_damage.")
    ] = None
    divergence_shift: Annotated[
        float | None, Meta(description="Part of the move of the mean divergence because the margins changed.")
    ] = None
    divergence_shift_se: Annotated[float | None, Meta(description="Standard error of divergence_shift.")] = (
        None
    )
    divergence_unseen: Annotated[
        float | None,
        Meta(description="Part of the move of the mean divergence at margins that did not occur before."),
    ] = None
    divergence_unseen_se: Annotated[
        float | None, Meta(description="Standard error of divergence_unseen.")
    ] = None
    low_margin_before: Annotated[
        float | None, Meta(description="Share of the slice with a margin below 0.1 before the onset.")
    ] = None
    low_margin_after: Annotated[float | None, Meta(description="The same share since the onset.")] = None
    aggregate_cause: Annotated[
        str | None,
        Meta(
            description="Cause of the move over all traffic since the onset: within (its slices), mix (of traffic), unseen"
            " (traffic that did not occur before), both (more than one), undecided or too_few."
        ),
    ] = None
    aggregate_move: Annotated[float | None, Meta(description="Move of the mean over all traffic.")] = None
    aggregate_move_se: Annotated[float | None, Meta(description="Standard error of aggregate_move.")] = None
    aggregate_within: Annotated[
        float | None, Meta(description="Part of the move over all traffic by changes within the slices.")
    ] = None
    aggregate_within_se: Annotated[float | None, Meta(description="Standard error of aggregate_within.")] = (
        None
    )
    aggregate_mix: Annotated[
        float | None, Meta(description="Part of the move over all traffic by another mix of slices.")
    ] = None
    aggregate_mix_se: Annotated[float | None, Meta(description="Standard error of aggregate_mix.")] = None
    aggregate_unseen: Annotated[
        float | None,
        Meta(
            description="Part of the move over all traffic by traffic that did not occur before; it counts as neither."
        ),
    ] = None
    aggregate_unseen_se: Annotated[float | None, Meta(description="Standard error of aggregate_unseen.")] = (
        None
    )
    slow_elsewhere: Annotated[
        float | None,
        Meta(
            description="Of a latency: share of the other traffic since the onset that took longer than the budget, or than what was learned allows."
        ),
    ] = None
    n_elsewhere: Annotated[int | None, Meta(description="Exchanges of slow_elsewhere.")] = None
    items_before: Annotated[
        float | None, Meta(description="Of a latency: mean items of a request before the onset.")
    ] = None
    items_after: Annotated[float | None, Meta(description="The same since the onset.")] = None
    moved: Annotated[
        tuple[str, ...],
        Meta(
            description="Other measures of the slice (comparison.detail) whose means moved beyond chance, the most"
            " certain first."
        ),
    ] = ()
    moved_before: Annotated[
        tuple[float, ...], Meta(description="Means of these measures before the onset.")
    ] = ()
    moved_after: Annotated[
        tuple[float, ...], Meta(description="Means of these measures since the onset.")
    ] = ()
    n_measures: Annotated[int | None, Meta(description="Number of other measures that were compared.")] = None
    changes: Annotated[
        tuple[str, ...],
        Meta(description="New candidate version, replay engine, provider, device or sidecar."),
    ] = ()
    compared_with: Annotated[
        str | None,
        Meta(description="Description of the window that the figures since the onset are compared with."),
    ] = None
    compared_version: Annotated[
        str | None,
        Meta(
            description="The version of that window, if this version has too few exchanges before the onset."
        ),
    ] = None
    n_window_before: Annotated[
        int | None, Meta(description="Exchanges of the slice in the window before the onset.")
    ] = None
    n_window_after: Annotated[int | None, Meta(description="The same since the onset.")] = None

    @property
    def causes(self) -> tuple[DamageCause, ...]:
        """The causes of a rise, the largest first; empty where none is decided."""
        if self.cause != DamageCause.BOTH:
            return tuple(cause for cause in _PARTS if cause == self.cause)
        parts = {cause: (getattr(self, name), getattr(self, f"{name}_se")) for cause, name in _PARTS.items()}
        risen = {cause: value for cause, (value, se) in parts.items() if value and se and value > Z * se}
        return tuple(sorted(risen, key=lambda cause: -risen[cause]))

    def attributes(self) -> dict[str, Any]:
        """Return it as plain JSON types, without values that are unknown, empty or not finite."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {
            name: value
            for name, value in plain.items()
            if value not in (None, [], ()) and _is_json_value(value)
        }


def _is_json_value(value: Any) -> bool:
    """Return whether JSON can hold the value: an infinite standard error, of a single exchange, it cannot."""
    return not isinstance(value, float) or math.isfinite(value)


def explanation_of(details: Mapping[str, Any]) -> Explanation:
    """Return the explanation in `details`; an empty one where they hold none."""
    try:
        return msgspec.convert(details, Explanation)
    except msgspec.ValidationError:
        return Explanation()


_PARTS: Final = {DamageCause.DAMAGE: "damage", DamageCause.INPUT_SHIFT: "shift", DamageCause.UNSEEN: "unseen"}
