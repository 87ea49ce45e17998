"""How many examples Hypothesis tries: as many as the profile says, or several times as many."""

from hypothesis import settings


def examples(times: int) -> settings:
    """Return settings with `times` as many examples as the profile has: what is cheap to try, or rarely hit."""
    profile = settings.default
    assert profile is not None
    return settings(profile, max_examples=times * profile.max_examples)
