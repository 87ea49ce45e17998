"""The explanation of an alert, as stored in `alert.details` and `transition.details` and sent with the event: flat."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a slice alerts; `None` and empty values are left out of the event.

    Moves are in the unit of the metric that decided, and the parts of a move add up to it. `_se` is a standard error; it
    does not account for the onset being chosen from the same data.
    """

    explanation: Annotated[
        tuple[str, ...], Meta(description="All of the below in sentences, the most important first.")
    ] = ()
    unexplained: Annotated[
        str | None, Meta(description="Why there is no explanation; the alert itself is valid.")
    ] = None
    explained_by: Annotated[
        str | None,
        Meta(
            description="The smaller alerting slice, or the slices, at least as severe, without whose items this alert"
            " vanishes."
        ),
    ] = None
    incident: Annotated[
        str | None,
        Meta(
            description="The slice that explains it, the first of several, or its own slice: an alert manager can group by"
            " it."
        ),
    ] = None
    explained_by_id: Annotated[
        int | None, Meta(description="Its slice id, of several that of the first.")
    ] = None
    explains: Annotated[
        tuple[str, ...], Meta(description="Larger alerting slices whose alerts vanish without this one.")
    ] = ()
    explains_ids: Annotated[tuple[int, ...], Meta(description="Their slice ids.")] = ()
    not_finite: Annotated[
        float | None,
        Meta(
            description="Share of the slice's items since the onset whose output was not a number, infinite or empty."
        ),
    ] = None
    not_finite_before: Annotated[float | None, Meta(description="The same before the onset.")] = None
    doubt: Annotated[
        str | None,
        Meta(
            description="Where the reference's outputs contradict the configuration: the figures may be misleading."
        ),
    ] = None
    begin: Annotated[
        str | None,
        Meta(
            description="State of the slice before the onset: new_version (the version was first seen within an hour of"
            " it), first_seen (fewer than 30 exchanges before it, too few to say that anything changed) or changed."
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
    damage_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    shift: Annotated[float | None, Meta(description="Part of it because the margins changed.")] = None
    shift_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    unseen: Annotated[
        float | None,
        Meta(description="Part of it at margins that did not occur before: neither of the two."),
    ] = None
    unseen_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    divergence_damage: Annotated[
        float | None,
        Meta(description="The same of the mean graded divergence, where another measure decided."),
    ] = None
    divergence_damage_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    divergence_shift: Annotated[
        float | None, Meta(description="The same of the mean divergence because the margins changed.")
    ] = None
    divergence_shift_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    divergence_unseen: Annotated[
        float | None,
        Meta(description="The same of the mean divergence at margins that did not occur before."),
    ] = None
    divergence_unseen_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    low_margin_before: Annotated[
        float | None, Meta(description="Share of the slice with a margin below 0.1 before the onset.")
    ] = None
    low_margin_after: Annotated[float | None, Meta(description="The same since the onset.")] = None
    aggregate_cause: Annotated[
        str | None,
        Meta(
            description="Why the aggregate moved since the onset: within (its slices), mix (of traffic), unseen"
            " (traffic that did not occur before), both (more than one), undecided or too_few."
        ),
    ] = None
    aggregate_move: Annotated[
        float | None, Meta(description="By how much the mean over all traffic moved.")
    ] = None
    aggregate_move_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    aggregate_within: Annotated[float | None, Meta(description="Part of it by change within the slices.")] = (
        None
    )
    aggregate_within_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    aggregate_mix: Annotated[float | None, Meta(description="Part of it by another mix of slices.")] = None
    aggregate_mix_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    aggregate_unseen: Annotated[
        float | None, Meta(description="Part of it by traffic that did not occur before: neither of the two.")
    ] = None
    aggregate_unseen_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    moved: Annotated[
        tuple[str, ...],
        Meta(
            description="Other measures of the slice, as in comparison.detail, whose means moved beyond chance, the most"
            " certain first."
        ),
    ] = ()
    moved_before: Annotated[tuple[float, ...], Meta(description="Their means before the onset.")] = ()
    moved_after: Annotated[tuple[float, ...], Meta(description="Their means since the onset.")] = ()
    n_measures: Annotated[int | None, Meta(description="How many other measures were compared.")] = None
    changes: Annotated[
        tuple[str, ...],
        Meta(description="Candidate version, replay engine, provider, device or sidecar that are new."),
    ] = ()
    compared_with: Annotated[
        str | None,
        Meta(description="Description of the window before the onset that everything is compared with."),
    ] = None
    compared_version: Annotated[
        str | None,
        Meta(
            description="The version of that window, where this version has too few exchanges before the onset."
        ),
    ] = None
    n_window_before: Annotated[
        int | None, Meta(description="Exchanges of the slice in the window before the onset.")
    ] = None
    n_window_after: Annotated[int | None, Meta(description="The same since the onset.")] = None

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
