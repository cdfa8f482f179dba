"""``report``: what a notebook calls to hand in the samples of a claim."""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from dslib.suite.claims import PROFILES, Claim, ClaimError, claims_file, load_claims, nearest
from dslib.suite.verdicts import Judgement, judge

MIME = "application/vnd.dslib.report+json"


def report(id: str, samples: Any, null: Any = None) -> Judgement:
    """Hand in the raw samples of a registered claim, and show its row where the reader stands.

    ``samples`` and ``null`` are lists, arrays or tensors of the shape the claim registers:
    (n,) for seeds, (n, 2) for pairs, (seeds, problems) for problems. The runner collects them
    from the executed notebook; the judgement shown here is computed by the same function.

    Raises ClaimError, naming the claim, for an id that no claim registers, a wrong shape, too
    few samples, NaN or infinity, and a null that is missing or not registered.
    """
    claims = _registered()
    if id not in claims:
        raise ClaimError(f"claim {id!r} is not registered in {claims_file()}{nearest(str(id), claims)}")
    claim = claims[id]
    profile = current_profile()
    plain = plain_numbers(samples)
    plain_null = None if null is None else plain_numbers(null)
    judgement = judge(claim, plain, plain_null, profile)
    payload = {"id": id, "samples": plain, "null": plain_null, "profile": profile}
    _show(claim, judgement, payload)
    return judgement


def plain_numbers(values: Any) -> Any:
    """Arrays, tensors and nested sequences as nested lists of plain Python numbers.

    What is no number stays as it is, for ``judge`` to refuse by name.
    """
    # torch and numpy both have tolist(); neither has to be imported for it. A tensor that
    # asks for gradients or lives on a device answers it too.
    if hasattr(values, "tolist"):
        return values.tolist()
    if isinstance(values, (list, tuple)):
        return [plain_numbers(value) for value in values]
    if isinstance(values, (range, set, frozenset)) or hasattr(values, "__next__"):
        return [plain_numbers(value) for value in values]
    return values


def current_profile() -> str:
    """The profile in force: ``DSLIB_PROFILE``, else the notebook's ``profile``, else quick.

    Raises ValueError when it is none of the profiles.
    """
    profile: Any = os.environ.get("DSLIB_PROFILE")
    where = "the environment variable DSLIB_PROFILE"
    if not profile:
        profile, where = _notebook_namespace().get("profile", "quick"), "the notebook's variable profile"
    if profile not in PROFILES:
        raise ValueError(f"{where} is {profile!r}; it must be one of {', '.join(PROFILES)}")
    return profile


def number(value: float | None) -> str:
    """Four significant digits, and a true minus sign."""
    return "–" if value is None else f"{value:.4g}".replace("-", "−")


def interval(bounds: Any) -> str:
    """``"[low, high]"``, or ``"–"`` for None."""
    return "–" if bounds is None else f"[{number(bounds[0])}, {number(bounds[1])}]"


def one_line(claim: Claim, judgement: Judgement) -> str:
    """The judgement in one line of plain text."""
    parts = [f"{number(judgement.measured)} {claim.unit}"]
    if judgement.ci is not None:
        parts.append(f"95 % {interval(judgement.ci)}")
    elif judgement.smallest != judgement.largest:
        parts.append(f"from {number(judgement.smallest)} to {number(judgement.largest)}")
    parts.append(f"n = {judgement.n}")
    if judgement.null_measured is not None:
        parts.append(f"null {number(judgement.null_measured)} {interval(judgement.null_ci)}")
    return f"{claim.id}: {judgement.verdict} · {', '.join(parts)} · rule: {claim.rule} · {judgement.reason}"


def as_html(claim: Claim, judgement: Judgement) -> str:
    """The judgement as a small table that takes its colours from the page, dark or light."""
    mark = {"held": "✓", "contradicted": "✗", "did not reproduce": "✗ (as registered)"}.get(
        judgement.verdict, "○"
    )
    spread = interval(judgement.ci)
    if judgement.ci is None and judgement.smallest != judgement.largest:
        spread = f"{number(judgement.smallest)} … {number(judgement.largest)}"
    rows = [
        ("claim", claim.statement),
        ("source", f"{claim.source} · paper: {claim.paper}"),
        ("measured", f"{number(judgement.measured)} {claim.unit} · {spread} · n = {judgement.n}"),
        ("quantity", claim.quantity),
    ]
    if claim.null is not None:
        null = f"{number(judgement.null_measured)} · {interval(judgement.null_ci)} · {claim.null.statement}"
        rows.append(("null", null))
    rows.append(("rule", f"{claim.rule}, at profile {claim.profile} and larger"))
    rows.append(("verdict", f"{mark} {judgement.verdict}: {judgement.reason}"))
    cell = "text-align:left;padding:.15em .8em .15em 0;vertical-align:top;background:none;color:inherit;"
    body = "".join(
        f'<tr style="background:none"><th style="{cell}opacity:.7;font-weight:normal">{name}</th>'
        f'<td style="{cell}">{html.escape(text)}</td></tr>'
        for name, text in rows
    )
    frame = "border:1px solid currentColor;border-radius:4px;padding:.4em .8em;color:inherit;background:none"
    return (
        f'<div class="dslib-claim" style="{frame}"><code style="background:none;color:inherit">'
        f"{html.escape(claim.id)}</code>"
        f'<table style="border-collapse:collapse;margin:.2em 0">{body}</table></div>'
    )


def _show(claim: Claim, judgement: Judgement, payload: Mapping[str, Any]) -> None:
    line = one_line(claim, judgement)
    if _shell() is None:
        print(line)
        return
    from IPython.display import display

    display({"text/plain": line, "text/html": as_html(claim, judgement), MIME: dict(payload)}, raw=True)


def _shell() -> Any:
    # Only a process that already runs IPython can be a notebook; do not import it to ask.
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _notebook_namespace() -> Mapping[str, Any]:
    shell = _shell()
    return {} if shell is None else shell.user_ns


def _registered() -> dict[str, Claim]:
    path = Path(claims_file())
    # The file's time is part of the key: a claim edited while a notebook is open counts at once.
    return _load(path, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=4)
def _load(path: Path, changed: int) -> dict[str, Claim]:
    return load_claims(path)
