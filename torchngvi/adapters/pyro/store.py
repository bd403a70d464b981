"""q in Pyro's parameter store: saved with it, and taken from it where it was loaded.

The store holds the coordinates of q themselves, under the name of the guide, so that it always saves what q is.  They
require no gradient, so that no optimizer moves them.  What `load`, `set_state` or an assignment put there goes into q
at the next use of the guide, as for a PyroModule; unlike there, what another guide of the same name wrote does not.
"""

import warnings
import weakref
from collections.abc import Iterable
from typing import Any, Self

import pyro
from pyro.nn import PyroModule
from torch import Tensor
from torch.distributions import constraints, transform_to
from torch.distributions.transforms import AffineTransform

from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior


class _Written(type(constraints.real)):  # type: ignore[misc]
    """The constraint of the entries of one guide: the store puts the plain one in its place where a state is set."""

    def __init__(self, guide: PyroModule, entries: dict[str, Tensor], others: Iterable[PyroModule]) -> None:
        self.guides, self.entries = weakref.WeakSet({guide, *others}), entries
        self.name = guide._pyro_name
        super().__init__()

    def settle(self) -> Self:
        """Bring the entries up to date, in place, with a step that an optimizer asked for."""
        for guide in self.guides:
            guide.settle()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """The plain constraint, which takes this one's place in a file."""
        self.settle()
        count = sum(guide._pyro_name == self.name for guide in self.guides)
        if count > 1:
            warnings.warn(
                f"{count} guides in use are named {self.name!r}, and the parameter store saves one of them, the one "
                "set up or called last. Give each a name, AutoGaussian(model, name=...).",
                stacklevel=3,
            )
        return type(constraints.real), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The plain constraint; the entries were copied before the step, and are copied again."""
        plain, _ = self.__reduce__()
        for entry in self.entries.values():
            if id(entry) in memo:
                memo[id(entry)].copy_(entry)
        return plain()


transform_to.register(_Written, lambda written: written.settle() and AffineTransform(0.0, 1.0))  # to read is to copy


def write(guide: PyroModule, q: Posterior) -> None:
    """Put the coordinates of q into the parameter store, in the place of what another guide of this name wrote."""
    store, entries = pyro.get_param_store(), _entries(guide, q)
    if _is_local() or all(store._params.get(key) is entry and _mark(store, key) for key, entry in entries.items()):
        return
    stale = {key: _mark(store, key) for key in store if key.startswith(_prefix(guide))}
    mark = _Written(guide, entries, {other for old in stale.values() if old for other in old.guides})
    for key in stale:
        del store[key]
    for key, entry in entries.items():
        store._params[key], store._param_to_name[entry], store._constraints[key] = entry, key, mark


def sync(guide: PyroModule, q: Posterior) -> None:
    """Set q to what was put into the parameter store under the name of the guide; if there is nothing, put q there."""
    store, entries = pyro.get_param_store(), _entries(guide, q)
    if _is_local() or all(store._params.get(key) is entry for key, entry in entries.items()):
        return
    found = {key: store._params[key] for key in store if key.startswith(_prefix(guide))}
    if not found:
        write(guide, q)
    if all(entries.get(key) is entry or _mark(store, key) for key, entry in found.items()):
        return
    theirs, mine = _shown(found), _shown(entries)
    if theirs != mine:
        raise InputError(
            f"the parameter store holds another posterior than that of the guide: {theirs} where it has {mine}. Load "
            "the store of this guide, or call pyro.clear_param_store()."
        )
    q.load_state_dict({key.removeprefix(_prefix(guide)): entry for key, entry in found.items()})
    write(guide, q)


def parameters() -> dict[str, Tensor]:
    """The unconstrained parameters of models in the parameter store, by name: all entries but those of our guides."""
    store = pyro.get_param_store()
    return {key: store._params[key] for key in store if not isinstance(store._constraints.get(key), _Written)}


def _is_local() -> bool:
    """Whether modules keep their parameters to themselves."""
    return bool(pyro.settings.get("module_local_params"))


def _prefix(guide: PyroModule) -> str:
    return f"{guide._pyro_name}.q."


def _entries(guide: PyroModule, q: Posterior) -> dict[str, Tensor]:
    return {_prefix(guide) + name: entry for name, entry in q.state_dict(keep_vars=True).items()}


def _mark(store: Any, key: str) -> _Written | None:
    """Of an entry that a guide wrote, where nobody has put another in its place."""
    mark = store._constraints.get(key)
    return mark if isinstance(mark, _Written) and mark.entries.get(key) is store._params[key] else None


def _shown(entries: dict[str, Tensor]) -> str:
    return ", ".join(f"{key} {tuple(entry.shape)}" for key, entry in sorted(entries.items()))
