"""Progress that never floods a notebook: one display in place, a few lines in a log."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from dslib.notebook.environment import headless, kernel_shell, live

T = TypeVar("T")
REDRAWS_PER_SECOND = 4


def progress(iterable: Iterable[T], total: int | None = None, label: str = "") -> Iterator[T]:
    """Iterate over ``iterable`` (a generator too) and show how far it is.

    In a live notebook one display is updated at most four times a second; on a terminal rich
    draws a bar; in a log there are at most five plain lines; a headless notebook stays silent,
    because its reader sees the result only. ``total`` is needed for a share of a generator.
    Exceptions of the iterable and of the loop's body propagate.

    Raises ValueError for a negative total, TypeError for something that cannot be iterated.
    """
    if total is not None and total < 0:
        raise ValueError(f"total={total} is negative; give the number of items or None")
    if not isinstance(iterable, Iterable):
        raise TypeError(f"iterable={iterable!r} cannot be iterated; give a sequence or a generator")
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)
    if live():
        return _in_place(iterable, total, label)
    if headless() or kernel_shell() is not None:
        return iter(iterable)
    if sys.stderr.isatty():
        return _on_terminal(iterable, total, label)
    return _in_log(iterable, total, label)


def _in_place(iterable: Iterable[T], total: int | None, label: str) -> Iterator[T]:
    from IPython.display import display

    started = drawn = time.monotonic()
    handle: Any = display(_bundle(0, total, label, 0.0, False), raw=True, display_id=True)
    done, ended = 0, False
    try:
        for item in iterable:
            yield item
            done += 1
            now = time.monotonic()
            if now - drawn >= 1 / REDRAWS_PER_SECOND:
                drawn = now
                handle.update(_bundle(done, total, label, now - started, False), raw=True)
        ended = True
    finally:  # an exception or a break leaves how far it came, not a bar that seems to run
        bundle = _bundle(done, total, label, time.monotonic() - started, True, stopped=not ended)
        handle.update(bundle, raw=True)


def _bundle(
    done: int, total: int | None, label: str, seconds: float, last: bool, stopped: bool = False
) -> dict[str, str]:
    count = f"{done}" if total is None else f"{done} of {total}"
    text = f"{label + ': ' if label else ''}{'stopped at ' if stopped else ''}{count}, {seconds:.1f} s"
    if last:
        return {"text/plain": text, "text/html": f'<small style="opacity:0.8">{html.escape(text)}</small>'}
    share = "" if total is None else f' max="{max(total, 1)}" value="{done}"'
    return {
        "text/plain": text,
        "text/html": f'<small style="opacity:0.8"><progress{share}></progress> {html.escape(text)}</small>',
    }


def _on_terminal(iterable: Iterable[T], total: int | None, label: str) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import track

    yield from track(
        iterable,
        description=label or "working",
        total=total,
        console=Console(stderr=True),
        update_period=1 / REDRAWS_PER_SECOND,
    )


def _in_log(iterable: Iterable[T], total: int | None, label: str) -> Iterator[T]:
    quarter = 0
    head = f"{label}: " if label else ""
    if total:
        print(f"{head}0 %", file=sys.stderr, flush=True)
    for done, item in enumerate(iterable, 1):
        yield item
        if total and (reached := min(4 * done // total, 4)) > quarter:
            quarter = reached
            print(f"{head}{25 * quarter} %", file=sys.stderr, flush=True)
