"""Run the notebooks, judge their claims, print the scoreboard.

A notebook needs one name from here, ``report``. It is loaded on first use, so that
``import dslib.suite`` itself costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dslib.suite.reporting import report

__all__ = ["report"]


def __getattr__(name: str):
    if name == "report":
        from dslib.suite.reporting import report

        return report
    raise AttributeError(f"module 'dslib.suite' has no attribute {name!r}")
