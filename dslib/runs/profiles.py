"""How much a run of a notebook does: seconds, about a minute, or hours."""

from __future__ import annotations

from typing import Literal, get_args

Profile = Literal["smoke", "quick", "full"]

#: From the least to the most.
PROFILES: tuple[str, ...] = get_args(Profile)


def check_profile(profile: str) -> str:
    """``profile``, if it is one. Raises ValueError, naming all there are."""
    if profile not in PROFILES:
        raise ValueError(f"profile={profile!r} must be one of {', '.join(PROFILES)}")
    return profile
