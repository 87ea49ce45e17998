"""What explains an alert, as `alert.details`, `transition.details` and the event carry it: flat, and free of SQL."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a slice alerts; `None` and empty ones are left out of the event. Moves are in the unit of what decided.

    Parts of a move add up to it. `_se` is a standard error; the onset was chosen by looking, which no standard error
    knows of.
    """

    explanation: Annotated[
        tuple[str, ...], Meta(description="All of the below in sentences, the most telling first.")
    ] = ()
    unexplained: Annotated[
        str | None, Meta(description="Why there is no explanation: the alert itself is as sound as any.")
    ] = None
    explained_by: Annotated[
        str | None,
        Meta(
            description="The smaller alerting slice, no less severe, without whose items nothing is left of this alert."
        ),
    ] = None
    incident: Annotated[
        str | None,
        Meta(description="The slice that explains it, or its own: what an alert manager groups by."),
    ] = None
    explained_by_id: Annotated[int | None, Meta(description="Its slice id.")] = None
    explains: Annotated[
        tuple[str, ...], Meta(description="Larger alerting slices of which nothing is left without this one.")
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
        Meta(description="What the reference's outputs say against the configuration: figures may mislead."),
    ] = None
    begin: Annotated[
        str | None,
        Meta(
            description="How the slice stood before the onset: new_version (the version came within an hour of it),"
            " first_seen (fewer than 30 exchanges before it: nothing tells that anything changed) or changed."
        ),
    ] = None
    cause: Annotated[
        str | None,
        Meta(
            description="damage (at equal margins), input_shift (other margins), unseen (margins that were not there"
            " before), both (more than one), undecided, or too_few (exchanges before or since)."
        ),
    ] = None
    damage: Annotated[
        float | None, Meta(description="Part of the slice's move at equal margins of the reference.")
    ] = None
    damage_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    shift: Annotated[float | None, Meta(description="Part of it by other margins than before.")] = None
    shift_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    unseen: Annotated[
        float | None,
        Meta(description="Part of it at margins that were not there before: neither of the two."),
    ] = None
    unseen_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    divergence_damage: Annotated[
        float | None,
        Meta(description="The same of the mean graded divergence, where another measure decided."),
    ] = None
    divergence_damage_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    divergence_shift: Annotated[
        float | None, Meta(description="The same of the mean divergence by other margins.")
    ] = None
    divergence_shift_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    divergence_unseen: Annotated[
        float | None,
        Meta(description="The same of the mean divergence at margins that were not there before."),
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
            " (traffic that was not there before), both (more than one), undecided or too_few."
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
        float | None, Meta(description="Part of it by traffic that was not there before: neither of the two.")
    ] = None
    aggregate_unseen_se: Annotated[float | None, Meta(description="Its standard error.")] = None
    moved: Annotated[
        tuple[str, ...],
        Meta(
            description="Other measures of the slice, as in comparison.detail, whose means moved beyond chance, the surest"
            " first."
        ),
    ] = ()
    moved_before: Annotated[tuple[float, ...], Meta(description="Their means before the onset.")] = ()
    moved_after: Annotated[tuple[float, ...], Meta(description="Their means since the onset.")] = ()
    n_measures: Annotated[int | None, Meta(description="How many other measures were looked at.")] = None
    changes: Annotated[
        tuple[str, ...],
        Meta(description="Candidate version, replay engine, provider, device or sidecar that are new."),
    ] = ()
    compared_with: Annotated[
        str | None, Meta(description="Which window is the before of all of this, in words.")
    ] = None
    compared_version: Annotated[
        str | None,
        Meta(description="The version it is of, where this one has too little of its own before the onset."),
    ] = None
    n_window_before: Annotated[
        int | None, Meta(description="Exchanges of the slice that were looked at before the onset.")
    ] = None
    n_window_after: Annotated[int | None, Meta(description="The same since the onset.")] = None

    def attributes(self) -> dict[str, Any]:
        """Return it as plain JSON types, without what is not known, empty or no finite number."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {
            name: value for name, value in plain.items() if value not in (None, [], ()) and _sayable(value)
        }


def _sayable(value: Any) -> bool:
    """Return whether JSON has a word for it: an error of infinity, of a single exchange, has none."""
    return not isinstance(value, float) or math.isfinite(value)


def explanation_of(details: Mapping[str, Any]) -> Explanation:
    """Return what `details` say; empty where they were written by a release that explained nothing."""
    try:
        return msgspec.convert(details, Explanation)
    except msgspec.ValidationError:
        return Explanation()
