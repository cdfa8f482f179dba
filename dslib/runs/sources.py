"""Which sources of dslib a module can reach, and one hash of them: what a kept result depends on."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


@functools.cache
def source_hash(module: str | None = None) -> str:
    """Twelve hex digits of the Python sources that ``module`` can reach; None: of all there are.

    The same in a checkout and in an installed wheel, whatever the line endings. Computed once a process: what
    runs is what was imported. Raises ValueError for a module that is none of dslib's.
    """
    files = _modules()
    names = files.keys() if module is None else reachable(module)
    digest = hashlib.sha256()
    for name in sorted(names):
        content = _content(files.get(name) or _file(name))
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


@functools.cache
def reachable(module: str) -> frozenset[str]:
    """The modules of dslib that ``module`` imports, and those import, itself and packages on the way included.

    Read from the sources, nothing is executed: imports at the top and inside functions, absolute and relative,
    of modules and of names that may be submodules. What is imported for type checkers only does not count, and
    nor does what is imported by a computed name, which dslib's methods never do.
    """
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imports(name)
    return frozenset(found)


@functools.cache
def _modules() -> dict[str, Path]:
    """Every module's file by its name; kernels and data stand elsewhere in a checkout than in a wheel."""
    import dslib

    roots = {"dslib": Path(dslib.__file__).resolve().parent}
    for package in ("dslib.kernels", "dslib.data"):
        if spec := importlib.util.find_spec(package):
            roots[package] = Path(next(iter(spec.submodule_search_locations))).resolve()
    files: dict[str, Path] = {}
    for package, root in roots.items():
        for file in root.rglob("*.py"):
            parts = file.relative_to(root).with_suffix("").parts
            name = ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))
            files[name] = file
    return files


def _file(module: str) -> Path:
    if file := _modules().get(module):
        return file
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if not module.startswith("dslib.") or loaded is None:
        raise ValueError(f"module={module!r} is none of dslib's: its sources are not known")
    return Path(loaded)


@functools.cache
def _imports(module: str) -> frozenset[str]:
    """What the sources of ``module`` import of dslib, with every package on the way."""
    file = _file(module)
    package = module if file.stem == "__init__" else module.rpartition(".")[0]
    named = {module}
    for node in _runtime_nodes(ast.parse(_content(file))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*above, base)) if base else ".".join(above)
            named |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    packages = {
        ".".join(parts[:n]) for parts in (name.split(".") for name in named) for n in range(1, len(parts))
    }
    return frozenset((named | packages) & _modules().keys())


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but the bodies of ``if TYPE_CHECKING:``."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        children: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            children = node.orelse
        waiting += children


def _content(file: Path) -> bytes:
    return file.read_bytes().replace(b"\r\n", b"\n")
