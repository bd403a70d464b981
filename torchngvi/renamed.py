"""Names that have changed: for one release the old spelling works, and warns; or a sentence says where it is now.

The tables of this release are here, and only here: modules that were merged into others, modules that left the
package, and names that left the front door for the module that they belong to.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from torchngvi.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")

# the old path of a module, and that of the module which holds its content now
MODULES: dict[str, str] = {}

# the path of a module that is gone, and what to use in its place, as the end of a sentence
GONE: dict[str, str] = {
    "torchngvi.studies": "the studies of the papers are examples/papers of a clone, where python -m examples.papers "
    "lists and runs them; what torchngvi compare is made of is torchngvi.app.compare",
}

# the names that left `torchngvi`, by the public module that has them
NAMES: dict[str, tuple[str, ...]] = {
    "torchngvi.averaging": ("ExpectationAverage",),
    "torchngvi.diagnostics": ("simulation_based_calibration",),
    "torchngvi.distributed": ("sum_gradients", "synchronize"),
    "torchngvi.expectations": ("Antithetic", "Autograd", "Independent", "Quasi"),
    "torchngvi.fitting": ("LaplaceResult", "RowSpace"),
    "torchngvi.methods": ("CovarianceGD", "ProximalBBVI", "RootGD", "SVGDDensity", "SymmetricSRVN"),
    "torchngvi.models": ("ShardedDraws",),
    "torchngvi.networks": ("IVON", "VOGN", "GradientNoise", "Reparametrized", "SampledLabels"),
    "torchngvi.numerics": ("show_config",),
    "torchngvi.optim": ("CapturedStep",),
    "torchngvi.rules": ("QuasiNewton", "SiteNewton"),
    "torchngvi.solved": ("merge", "sensitivity", "site_sum", "solve"),
}


def find_moved_name(name: str) -> Any:
    """Return what ``torchngvi.name`` was, with a warning that says where it is now."""
    home = {moved: module for module, names in NAMES.items() for moved in names}[name]
    new = f"{home}.{name}"
    warnings.warn(
        f"torchngvi.{name} is now {new}. The old name is understood in this release only; write {new}.",
        FutureWarning,
        stacklevel=3,
    )
    return getattr(import_module(home), name)


class MovedModules(MetaPathFinder, Loader):
    """The finder of the modules of `MODULES` and `GONE`, which is asked before all others."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec for a path of the tables, and None for any other."""
        if fullname in GONE:
            raise ModuleNotFoundError(f"{fullname} is gone: {GONE[fullname]}.", name=fullname)
        return ModuleSpec(fullname, self) if fullname in MODULES else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the making of a placeholder to Python; `exec_module` replaces it."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module that holds the content in the place of the placeholder."""
        old, new = module.__name__, MODULES[module.__name__]
        warnings.warn(
            f"{old} is now {new}. The old path is understood in this release only; import {new}.",
            FutureWarning,
            stacklevel=2,
        )
        sys.modules[old] = import_module(new)


def install_finder() -> None:
    """Let imports of moved modules find their content."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())


def warn_renamed(where: str, old: str, new: str) -> None:
    """Warn that a name has changed, at the line that still uses the old one: the caller of the caller.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_renamed("fit", "acceleration=", "metric=")
    >>> str(caught[0].message)
    'fit: acceleration= is now called metric=. The old name is understood in this release only; write metric=.'
    """
    warnings.warn(
        f"{where}: {old} is now called {new}. The old name is understood in this release only; write {new}.",
        FutureWarning,
        stacklevel=3,
    )


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator by which a function takes the old names of its keyword arguments, too, with a warning.

    >>> @renamed(size="dim")
    ... def zeros(dim):
    ...     return [0.0] * dim
    >>> with warnings.catch_warnings(action="ignore"):
    ...     zeros(size=2)
    [0.0, 0.0]
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        where = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def called(*arguments: P.args, **keywords: P.kwargs) -> R:
            for old in [old for old in names if old in keywords]:
                new = names[old]
                if new in keywords:
                    raise InputError(f"{where} got both {new}= and its old name {old}=. Leave {old}= out.")
                warn_renamed(where, f"{old}=", f"{new}=")
                keywords[new] = keywords.pop(old)
            return function(*arguments, **keywords)

        return called

    return decorate


def moved(**places: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator by which a function refuses keyword arguments that it had once, and says where each is now.

    >>> @moved(radius="step_size=KLRadius(...)")
    ... def fitted(step_size=None):
    ...     return step_size
    >>> fitted(radius=0.1)
    Traceback (most recent call last):
    torchngvi.errors.InputError: fitted: radius= has moved. Write step_size=KLRadius(...) in its place.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        where = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def called(*arguments: P.args, **keywords: P.kwargs) -> R:
            for old, place in places.items():
                if old in keywords:
                    raise InputError(f"{where}: {old}= has moved. Write {place} in its place.")
            return function(*arguments, **keywords)

        return called

    return decorate
