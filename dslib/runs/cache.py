"""One cache for the heavy steps that several notebooks share.

A step is a function of configuration only. Its entry's key holds the arguments, a hash of the
sources of ``dslib`` and ``dslib.kernels``, and the versions of Python, torch and numpy, so a
changed line or library never gives an old result. ``DSLIB_CACHE`` names the directory
(default: the user's cache directory); ``DSLIB_CACHE=off`` computes every time.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.util
import inspect
import os
import platform
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")


@overload
def cached(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def cached(*, also: Callable[..., str]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def cached(function: Any = None, /, *, also: Callable[..., str] | None = None) -> Any:
    """Keep the results of ``function`` on disk, computed once even by processes in parallel.

    Its arguments are frozen dataclasses, numbers, text, None, enums, and tuples of these; the
    result is anything that pickles (dicts of tensors do), and is loaded anew for every call, so
    nobody can change another's. An interrupted computation leaves no entry and a damaged entry is
    computed again. What a step reads besides its arguments, a file say, is named by ``also``: a function of
    all its arguments, in their order, whose text is part of the key.

    Raises TypeError, when decorating, for anything but a function at the top of a dslib module,
    and, when calling, for an argument of another type, naming it.
    """
    if function is None and also is not None:
        return functools.partial(_cached, also=also)
    return _cached(function, also)


def _cached(function: Callable[P, R], also: Callable[..., str] | None) -> Callable[P, R]:
    _check_function(function)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        key = entry_key(function, bound.arguments, also)
        directory = cache_directory()
        if directory is None:
            return function(*args, **kwargs)
        return _look_up(function, bound, directory, key)

    return wrapper


def cache_directory() -> Path | None:
    """Where results are kept: DSLIB_CACHE, or the user's cache directory; None when it is off."""
    named = os.environ.get("DSLIB_CACHE", "")
    if named.strip().lower() == "off":
        return None
    if named:
        return Path(named).expanduser().absolute()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "dslib"


@functools.cache
def source_hash() -> str:
    """Twelve hex digits of all Python sources of ``dslib`` and ``dslib.kernels``.

    The same in a checkout and in an installed wheel, whatever the line endings.
    """
    import dslib

    digest = hashlib.sha256()
    root = Path(dslib.__file__).resolve().parent
    spec = importlib.util.find_spec("dslib.kernels")
    kernels = Path(next(iter(spec.submodule_search_locations))).resolve() if spec else root / "kernels"
    own = (p for p in root.rglob("*.py") if not {"kernels", "data"} & {p.relative_to(root).parts[0]})
    named = [(f"dslib/{p.relative_to(root).as_posix()}", p) for p in own]
    named += [(f"dslib/kernels/{p.relative_to(kernels).as_posix()}", p) for p in kernels.rglob("*.py")]
    for name, path in sorted(named):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def entry_key(
    function: Callable[..., Any], arguments: dict[str, Any], also: Callable[..., str] | None = None
) -> str:
    """The key of a call: its function and arguments, what is read ``also``, the sources, the versions.

    Raises TypeError for an argument that has no stable content, naming it.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    content = ",".join(f"{key}={_canonical(key, value)}" for key, value in arguments.items())
    read = "" if also is None else also(*arguments.values())
    return hashlib.sha256(f"{name}({content})|{read}|{source_hash()}|{_versions()}".encode()).hexdigest()[:32]


@functools.cache
def _versions() -> str:
    versions = [f"python {platform.python_version()}"]
    for distribution in ("torch", "numpy"):
        try:
            versions.append(f"{distribution} {metadata.version(distribution)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{distribution} none")
    return ", ".join(versions)


def _canonical(name: str, value: Any) -> str:
    """A text that is equal exactly for equal arguments, or TypeError."""
    if value is None or isinstance(value, (bool, str, bytes)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
    if isinstance(value, int):
        return f"int {int(value)}"
    if isinstance(value, float):  # numpy's float64 is one, and must not differ from its value
        return f"float {float(value).hex()}"
    if isinstance(value, complex):
        return f"complex {value.real.hex()} {value.imag.hex()}"
    if isinstance(value, tuple):
        return f"({','.join(_canonical(f'{name}[{i}]', item) for i, item in enumerate(value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if not type(value).__dataclass_params__.frozen:
            raise TypeError(f"{name} is a {kind}, a dataclass that can change; declare it frozen=True")
        fields = (
            f"{f.name}={_canonical(f'{name}.{f.name}', getattr(value, f.name))}"
            for f in dataclasses.fields(value)
        )
        return f"{kind}({','.join(fields)})"
    hint = "pass the configuration and the seed that make it"
    if isinstance(value, (list, set, frozenset, dict)):
        hint = "use a tuple or a frozen dataclass"
    elif type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        hint = "use .item() to make it a plain number"
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise TypeError(f"{name} is a {kind}, which a cached function does not take; {hint}")


def _check_function(function: Any) -> None:
    if not inspect.isfunction(function):
        raise TypeError(
            f"cached takes a function, not {function!r}; decorate a plain function of a dslib module"
        )
    name = f"{function.__module__}.{function.__qualname__}"
    if function.__name__ == "<lambda>" or "<locals>" in function.__qualname__ or "." in function.__qualname__:
        raise TypeError(
            f"{name} cannot be cached: it has no name of its own; define it at the top of a dslib module"
        )
    if function.__module__ != "dslib" and not function.__module__.startswith("dslib."):
        raise TypeError(
            f"{name} cannot be cached: the key covers the sources of dslib only, so a change in "
            f"{function.__module__} would go unnoticed; move the function into a dslib module"
        )
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            raise TypeError(f"{name} cannot be cached: *args and **kwargs hide its arguments; name each one")


def _look_up(function: Callable[..., R], bound: inspect.BoundArguments, directory: Path, key: str) -> R:
    from filelock import FileLock
    from joblib import Memory

    # An entry is a store of its own: joblib keeps a function's source beside its results and
    # throws all of them away when it reads a half-written copy, which parallel writers produce.
    store = directory / function.__name__ / key
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"the cache directory {directory} cannot be written ({error.strerror}); "
            "set DSLIB_CACHE to another directory, or to 'off'"
        ) from error
    with FileLock(store / "lock"):  # released by the system should this process die
        # The store is of this call alone. joblib would hash the arguments once more, with what a configuration
        # has worked out and keeps for itself since. And it writes a function's source into the first store that a
        # process makes with it only, and finds no entry where there is none: so a function of this call alone, too.
        memory = Memory(store, verbose=0).cache(_copy_of(function), ignore=list(bound.arguments))
        return memory(*bound.args, **bound.kwargs)


def _copy_of(function: Callable[P, R]) -> Callable[P, R]:
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copy, function, updated=())
