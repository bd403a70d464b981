"""The structure of a model for a guide, by its plates or by what its terms read, and the log joint that fits it."""

from collections.abc import Callable
from typing import Any

from pyro.poutine.trace_struct import Trace

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.adapters.pyro.factored import FactoredLogJoint, JoinedError, MismatchError
from torchngvi.adapters.pyro.reads import reads_of, structure_by
from torchngvi.adapters.pyro.structure import Structure, dependencies, structure_of
from torchngvi.errors import InputError
from torchngvi.interfaces import Target


def found(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trace: Trace) -> Structure:
    """Find the structure of a model, and try it.

    Args:
        model, args, kwargs: the model with its arguments.
        trace: a trace of its latents, as the guide has it.

    Returns:
        The structure, of two with a forest the one of fewer parameters; a dense one says why.
    """
    density = ModelLogJoint(model, args, kwargs, trace)
    try:
        reads = reads_of(_fixed(density), trace)
    except InputError as error:
        return Structure(density.dim, reasons=(str(error).rstrip("."),))
    by_plates, by_reads = _found(density, trace), structure_by(reads)
    return by_reads if reads.join(by_plates) else _smaller(by_plates, by_reads)


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
    """The log joint as one of a guide that has members of plates apart: in terms of the members where that can be.

    Args:
        density: the log joint, whose θ has the order of the guide.
        structure: that of the guide, with a forest.
        trace: a trace of the latents, as the guide has it.

    Returns:
        The target.

    Raises:
        InputError: a model that joins these members, or that the guide was not set up with.
    """
    try:
        _fixed(density)
        if structure.terms is not None:
            return FactoredLogJoint(density, structure)
        now = structure_by(reads_of(density, trace))
        if (now.forest, now.levels) != (structure.forest, structure.levels):
            raise MismatchError("its terms read other members together")
        return density
    except InputError as error:
        raise InputError(
            f"the guide has members of plates apart that this model or these data have not: {str(error).rstrip('.')}. "
            "Set another guide up with them."
        ) from error
