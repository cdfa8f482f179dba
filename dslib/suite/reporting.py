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
from dslib.suite.formats import interval, number, with_interval
from dslib.suite.verdicts import Judgement, judge

MIME = "application/vnd.dslib.report+json"


def report(id: str, samples: Any, null: Any = None, gate: Any = None) -> Judgement:
    """Hand in the raw samples of a registered claim, and show its row where the reader stands.

    ``samples``, ``null`` and ``gate`` are lists, arrays or tensors of the shape the claim registers:
    (n,) for seeds, (n, 2) for pairs, (seeds, problems) for problems. The null is the same measurement
    without what matters (paired: sample i of the same seed as sample i), the gate the premise under
    which the effect could show. The runner collects them from the executed notebook; the judgement
    shown here is computed by the same function.

    Raises ClaimError, naming the claim, for an id that no claim registers, a wrong shape, too few
    samples, NaN or infinity, and for a null or a gate that is missing or not registered.
    """
    claims = _registered()
    if id not in claims:
        raise ClaimError(f"claim {id!r} is not registered in {claims_file()}{nearest(str(id), claims)}")
    claim = claims[id]
    profile = current_profile()
    plain, plain_null, plain_gate = (
        None if values is None else plain_numbers(values) for values in (samples, null, gate)
    )
    judgement = judge(claim, plain, plain_null, profile, plain_gate)
    payload = {"id": id, "samples": plain, "null": plain_null, "gate": plain_gate, "profile": profile}
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


def one_line(claim: Claim, judgement: Judgement) -> str:
    """The judgement in one line of plain text."""
    parts = [f"{number(judgement.measured)} {claim.unit}".rstrip()]
    if judgement.ci is not None:
        parts.append(f"95 % {interval(judgement.ci)}")
    elif judgement.smallest != judgement.largest:
        parts.append(f"from {number(judgement.smallest)} to {number(judgement.largest)}")
    parts.append(f"n = {judgement.n}")
    if judgement.null_measured is not None:
        parts.append(f"null {with_interval(judgement.null_measured, judgement.null_ci)}")
    if judgement.contrast is not None:
        parts.append(f"claim − null {with_interval(judgement.contrast, judgement.contrast_ci)}")
    if judgement.gate_measured is not None:
        parts.append(f"premise {with_interval(judgement.gate_measured, judgement.gate_ci)}")
    kind = " (structural)" if claim.kind == "structural" else ""
    return f"{claim.id}{kind}: {judgement.verdict} · {', '.join(parts)} · rule: {claim.rule} · {judgement.reason}"


def as_html(claim: Claim, judgement: Judgement) -> str:
    """The judgement as a small table that takes its colours from the page, dark or light."""
    mark = {"held": "✓", "contradicted": "✗", "did not reproduce": "✗ (as registered)"}.get(
        judgement.verdict, "○"
    )
    cell = "text-align:left;padding:.15em .8em .15em 0;vertical-align:top;background:none;color:inherit;"
    body = "".join(
        f'<tr style="background:none"><th style="{cell}opacity:.7;font-weight:normal">{name}</th>'
        f'<td style="{cell}">{html.escape(text)}</td></tr>'
        for name, text in [
            *_rows(claim, judgement),
            ("verdict", f"{mark} {judgement.verdict}: {judgement.reason}"),
        ]
    )
    frame = "border:1px solid currentColor;border-radius:4px;padding:.4em .8em;color:inherit;background:none"
    kind = " · structural: true by construction" if claim.kind == "structural" else ""
    return (
        f'<div class="dslib-claim" style="{frame}"><code style="background:none;color:inherit">'
        f"{html.escape(claim.id)}</code>{kind}"
        f'<table style="border-collapse:collapse;margin:.2em 0">{body}</table></div>'
    )


def _rows(claim: Claim, judgement: Judgement) -> list[tuple[str, str]]:
    """All that stands above the verdict: name and text of each row."""
    spread = interval(judgement.ci)
    if judgement.ci is None and judgement.smallest != judgement.largest:
        spread = f"{number(judgement.smallest)} … {number(judgement.largest)}"
    rows = [
        ("claim", claim.statement),
        ("source", f"{claim.source} · paper: {claim.paper}"),
        ("measured", f"{number(judgement.measured)} {claim.unit} · {spread} · n = {judgement.n}"),
        ("quantity", claim.quantity),
    ]
    if claim.gate is not None:
        premise = with_interval(judgement.gate_measured, judgement.gate_ci)
        rows.append(("premise", f"{premise} · {claim.gate.rule} · {claim.gate.statement}"))
    if claim.null is not None:
        null = f"{number(judgement.null_measured)} · {interval(judgement.null_ci)} · {claim.null.statement}"
        rows.append(("null", null))
    if judgement.contrast is not None:
        contrast = with_interval(judgement.contrast, judgement.contrast_ci)
        rows.append(("claim − null", f"{contrast} · of the same seeds"))
    rows.append(
        ("rule", f"{claim.rule}, at profile {claim.profile} and larger; registered {claim.registered}")
    )
    rows += [("changed", entry) for entry in claim.changed]
    return rows


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
