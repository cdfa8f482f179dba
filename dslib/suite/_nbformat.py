"""nbformat, imported without a detour that costs seconds.

``jsonschema`` looks for an optional checker of internationalised addresses, which JupyterLab
brings along and which builds a grammar when it is imported: more than two seconds in every
process, for a format that no notebook uses. While nbformat is imported, it is hidden.
"""

from __future__ import annotations

import sys

_SLOW = "rfc3987_syntax"

if "jsonschema" in sys.modules or _SLOW in sys.modules:
    import nbformat
else:
    sys.modules[_SLOW] = None  # type: ignore[assignment]
    try:
        import nbformat
    finally:
        del sys.modules[_SLOW]

__all__ = ["nbformat"]
