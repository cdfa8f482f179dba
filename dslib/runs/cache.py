"""One cache for the heavy steps that several notebooks share.

A step is a function of configuration only. Its entry's key holds the arguments, a hash of the
sources that the step can reach (its module and what that imports of dslib, those of its
arguments' classes too), and the versions of Python, torch and numpy: a changed line or library
never gives an old result, and a line that the step cannot reach forgets nothing.
``DSLIB_CACHE`` names the directory (default: the user's cache directory); ``DSLIB_CACHE=off``
computes every time.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import os
import platform
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, overload

from dslib.runs.files import replacing
from dslib.runs.sources import source_hash

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
    computed again.

    What a step reads besides its arguments and the sources, a file say, is named by ``also``: a function of
    all its arguments, in their order, whose text is part of the key::

        @cached(also=lambda config: load_corpus(config.corpus).digest)
        def trained(config: TrainConfig) -> TrainResult: ...

    Raises TypeError, when decorating, for anything but a function at the top of a dslib module,
    and, when calling, for an argument of another type, naming it, and for an ``also`` that gives no text.
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
        return _look_up(function, bound, directory / function.__name__ / f"{key}.joblib")

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


def entry_key(
    function: Callable[..., Any], arguments: dict[str, Any], also: Callable[..., str] | None = None
) -> str:
    """The key of a call: its function and arguments, what is read ``also``, the sources, the versions.

    Raises TypeError for an argument that has no stable content, naming it, and if ``also`` gives no text.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    content = ",".join(f"{key}={_canonical(key, value)}" for key, value in arguments.items())
    read = None if also is None else also(*arguments.values())
    if also is not None and not isinstance(read, str):
        raise TypeError(f"also of {name} gave a {type(read).__name__}; let it give text, such as a digest")
    parts = (f"{name}({content})", read, source_hash(function.__module__), _versions())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


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
        return f"{_kind_and_sources(type(value))}.{value.name}"
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
        return f"{_kind_and_sources(type(value))}({','.join(fields)})"
    hint = "pass the configuration and the seed that make it"
    if isinstance(value, (list, set, frozenset, dict)):
        hint = "use a tuple or a frozen dataclass"
    elif type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        hint = "use .item() to make it a plain number"
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise TypeError(f"{name} is a {kind}, which a cached function does not take; {hint}")


def _kind_and_sources(kind: type) -> str:
    # A step may call methods of what it is given, and its own module need not know the class.
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}@{source_hash(kind.__module__)}" if kind.__module__.startswith("dslib.") else name


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


def _look_up(function: Callable[..., R], bound: inspect.BoundArguments, file: Path) -> R:
    import joblib
    from filelock import FileLock

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"the cache directory {file.parent.parent} cannot be written ({error.strerror}); "
            "set DSLIB_CACHE to another directory, or to 'off'"
        ) from error
    with FileLock(file.with_suffix(".lock")):  # released by the system should this process die
        if file.is_file():
            try:
                return joblib.load(file)
            except MemoryError:
                raise
            except Exception as error:  # what unpickling raises for half a file has no common name
                warnings.warn(
                    f"the cache entry {file} is damaged ({error}): computing it again", stacklevel=3
                )
        result = function(*bound.args, **bound.kwargs)
        try:
            with replacing(file) as temporary:
                joblib.dump(result, temporary)
        except OSError as error:  # a full disk, after hours of training
            warnings.warn(f"the result of {function.__name__} is not kept: {error}", stacklevel=3)
        return result
