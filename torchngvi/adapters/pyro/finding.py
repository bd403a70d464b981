"""The structure of a model for a guide, by its plates or by what its terms read, and the log joint that fits it."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.adapters.pyro.factored import FactoredLogJoint, JoinedError, MismatchError
from torchngvi.adapters.pyro.reads import reads_of, structure_by
from torchngvi.adapters.pyro.structure import Structure, dependencies, structure_of
from torchngvi.errors import InputError
from torchngvi.interfaces import Target


class Call:
    """A model with its arguments, of which none is kept alive: whether another call is the same.

    >>> import torch
    >>> y = torch.zeros(2)
    >>> call = Call(print, (y, 3), {})
    >>> call.same(print, (y, 3), {}), call.same(print, (y.clone(), 3), {}), call.same(print, (y.add_(1), 3), {})
    (True, False, False)
    """

    def __init__(self, model: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.model = None if model is None else weakref.ref(model)
        self.arguments = [_mark(each) for each in tree_leaves((args, dict(kwargs)))]

    def same(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is this one."""
        leaves = tree_leaves((args, dict(kwargs)))
        same_model = self.model is not None and self.model() is model
        return same_model and len(leaves) == len(self.arguments) and all(map(_is, self.arguments, leaves))

    def __reduce__(self) -> tuple[type[Self], tuple[None, tuple[()], dict[str, Any]]]:
        return type(self), (None, (), {})


def _mark(each: Any) -> Any:
    """What is kept of an argument."""
    if isinstance(each, Tensor):
        return None if each.is_inference() else (weakref.ref(each), each._version)
    return (each,) if each is None or isinstance(each, int | float | str) else None


def _is(mark: Any, each: Any) -> bool:
    """Whether an argument is the one of which this was kept."""
    if mark is None:
        return False
    if isinstance(each, Tensor):
        return len(mark) == 2 and mark[0]() is each and mark[1] == each._version
    return len(mark) == 1 and type(mark[0]) is type(each) and bool(mark[0] == each)


def found(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trace: Trace) -> Structure:
    """Find the structure of a model, and try it."""
    density = ModelLogJoint(model, args, kwargs, trace)
    try:
        reads = reads_of(_fixed(density), trace)
    except InputError as error:
        return Structure(density.dim, reasons=(str(error).rstrip("."),))
    by_plates, by_reads = _found(density, trace), structure_by(reads)
    structure = by_reads if reads.join(by_plates) else _smaller(by_plates, by_reads)
    structure.call = Call(model, args, kwargs)
    return structure


def _smaller(by_plates: Structure, by_reads: Structure) -> Structure:
    """Of two structures the one of fewer parameters, the first if they are as many."""
    if by_reads.forest is None:
        return by_plates
    if by_plates.forest is None or by_reads.forest.parameters < by_plates.forest.parameters:
        return by_reads
    return by_plates


def _found(density: ModelLogJoint, trace: Trace) -> Structure:
    """The levels of the plates that sites are in, if the terms can be told by member."""
    joined, dim = dict[str, str](), density.dim
    known = dependencies(density.model, density.args, density.kwargs, trace)
    if isinstance(known, str):
        return Structure(dim, reasons=(known,))
    while True:
        structure = structure_of(known, joined)
        if structure.forest is None:
            return structure
        try:
            FactoredLogJoint(
                ModelLogJoint(density.model, density.args, density.kwargs, trace, structure.order), structure
            )
        except JoinedError as error:
            joined[error.plate] = str(error)
        except InputError as error:
            return Structure(dim, reasons=(str(error).rstrip("."),))
        else:
            return structure


def _fixed(density: ModelLogJoint) -> ModelLogJoint:
    """The log joint, if it is one function of θ and a plain sum over sites."""
    if density.enumerates:
        raise MismatchError("the model sums out discrete latents, whose terms are not told by member")
    if not density.comparable:
        raise MismatchError("the model subsamples its data, of which other rows may join other members")
    try:
        density.check_comparable("")
    except InputError as error:
        raise MismatchError("the model has other values at the same latents in each run: it draws") from error
    return density


def factored(density: ModelLogJoint, structure: Structure, trace: Trace) -> Target:
    """The log joint as one of a guide that has members of plates apart: in terms of the members where that can be."""
    try:
        _fixed(density)
        if structure.terms is not None:
            return FactoredLogJoint(density, structure)
        if structure.call is not None and structure.call.same(density.model, density.args, density.kwargs):
            return density  # it was tried when the guide was set up
        now = structure_by(reads_of(density, trace))
        if (now.forest, now.levels) != (structure.forest, structure.levels):
            raise MismatchError("its terms read other members together")
        return density
    except InputError as error:
        raise InputError(
            f"the guide has members of plates apart that this model or these data have not: {str(error).rstrip('.')}. "
            "Set another guide up with them."
        ) from error
