"""A result in a file, and back: the columns that its formula names, its family and priors by name, and joint draws.

The file holds tensors, numbers and texts alone, and reading it runs no code.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.errors import InputError
from torchngvi.tables.design import Formula
from torchngvi.tables.exports import FORMAT, SAID
from torchngvi.tables.families import FAMILIES, Family, Held, Multinomial, Ordinal, family_of
from torchngvi.tables.model import TableModel
from torchngvi.tables.parts import Coordinates, Design, Factor, Posterior, Weighted
from torchngvi.tables.result import TableResult


class _OfJoint(Weighted):
    """Weighted draws of the globals, of which those with effects were taken: others are not to be had."""

    joint: Tensor  # (S, dim), equally likely

    def resampled(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Take equally likely draws of those that have effects, each once before any comes twice."""
        size = len(self.joint)
        rounds = [torch.randperm(size, generator=generator, device="cpu") for _ in range(-(-count // size))]
        return self.joint[torch.cat(rounds)[:count]]


class Stored(Posterior):
    """The posterior of a saved result: weighted draws of the globals, and equally likely ones with their effects."""

    def __init__(
        self, coordinates: Coordinates, weighted: Weighted, theta: Tensor, drawn: tuple[Tensor, ...], said: Any
    ) -> None:
        self.coordinates, self.theta, self.drawn = coordinates, theta, drawn
        self.weighted = _OfJoint(*weighted)
        self.weighted.joint = theta
        self.log_evidence, self.converged, self.gradients = said["log_evidence"], said["converged"], said["gradients"]
        self.reason, self.method = said["reason"], said["method"]

    def effects(self, theta: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return those that were drawn for these values of the globals."""
        if theta.shape == self.theta.shape and bool((theta == self.theta).all()):
            return self.drawn
        same = (theta[:, None, :] == self.theta).all(-1)
        if not bool(same.any(-1).all()):
            raise InputError("a result that was read from a file has effects for its own draws of the globals alone.")
        at = same.int().argmax(-1)
        return tuple(b[at] for b in self.drawn)

    def of_groups(self, theta: Tensor) -> Tensor:
        """Refuse: the likelihood of a group needs its effects integrated out."""
        raise InputError("leaving groups out needs the fit; a result that was read from a file has its draws alone.")


def load(path: str | os.PathLike[str], family: Family | None = None) -> TableResult:
    """Read a result that `TableResult.save` has written; what it says and predicts is the same.

    Args:
        path: of the file.
        family: the family, where it is one of your own.

    Returns:
        The result, with equally likely draws; groups cannot be left out of it.

    Raises:
        InputError: a file that is no such result.
    """
    try:
        state = torch.load(Path(path), weights_only=True)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # of torch and of pickle, at what they cannot read
        raise InputError(f"{str(path)!r} is no result that was saved: it cannot be read. Save it again.") from error
    return result_of(state, family, str(path))


def result_of(state: Any, family: Family | None = None, name: str = "the file") -> TableResult:
    """Make the result of what `state_of` has returned; each part is checked."""
    try:
        return _result(state, family)
    except InputError as error:
        raise InputError(f"{name!r} holds what no fit has written: {error}") from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
        raise InputError(f"{name!r} holds what no fit has written: {' '.join(str(error).split())}.") from error


def _result(state: Any, family: Family | None, rounding: float = 1e-9) -> TableResult:
    # rounding: of a sum of weights
    if type(state) is not dict or state.get("format") != FORMAT:
        raise InputError(f"it is no result of format {FORMAT}.")
    found = _family(state, family)
    made, priors = read_instance("made", state["made"], dict, "is a dict"), state["priors"]
    formula = Formula.of_state(made, found) if "formula" in made else None
    design = _design(made) if formula is None else formula.design
    model = TableModel(design, found, priors=priors, formula=formula)
    theta = _numbers("theta", state["theta"], (None, model.coordinates.dim))
    shapes = [(len(theta), len(of.levels), len(of.effects)) for of in design.factors]
    drawn = tuple(_numbers("effects", b, shape) for b, shape in zip(state["effects"], shapes, strict=True))
    for part, kind in SAID.items():
        if type(state[part]) is not kind:
            raise InputError(f"{part} must be of type {kind.__name__}.")
    if type(state["log_evidence"]) not in (float, type(None)):
        raise InputError("log_evidence must be a number.")
    points = _numbers("weighted", state["weighted"][0], (None, model.coordinates.dim))
    weights = _numbers("weighted", state["weighted"][1], (len(points),))
    if bool((weights < 0).any()) or abs(float(weights.sum()) - 1) > rounding:
        raise InputError("the weights of its draws must be shares of 1.")
    weighted = Weighted(points, weights, state["k_hat"], state["effective"])
    posterior = Stored(model.coordinates, weighted, theta, drawn, state)
    result = TableResult(model.design, model.family, posterior, model.priors, formula=formula)
    result._kept[len(theta), 0] = result.drawn(theta, torch.Generator())  # so that it predicts what it did
    return result


def _family(state: Mapping[str, Any], family: Family | None) -> Family:
    word = state["family"]
    if family is not None:
        return family_of(family)
    if word not in FAMILIES:
        raise InputError(f"its family is {word!r}, which is none of this library: hand it in, load(path, family=...).")
    found = FAMILIES[word]()
    if isinstance(found, Ordinal | Multinomial):
        found = type(found)(state["outcomes"])
    return Held(found, state["held"]) if state["held"] else found


def _design(made: Mapping[str, Any]) -> Design:
    """The design of a model of arrays."""
    X = _numbers("X", made["X"], (None, len(made["names"])))
    rows = (len(X),)
    factors = []
    for of in made["factors"]:
        Z, groups = _numbers("Z", of["Z"], (len(X), len(of["effects"]))), of["groups"]
        there = isinstance(groups, Tensor) and groups.dtype == torch.long and groups.shape == rows
        if not there or bool(((groups < 0) | (groups >= len(of["levels"]))).any()):
            raise InputError("groups must be the number of a level for each row.")
        factors.append(
            Factor(str(of["name"]), tuple(map(str, of["effects"])), tuple(map(str, of["levels"])), Z, groups)
        )
    y = tuple(_numbers("y", one, rows) for one in made["y"])
    offset, weights = (_numbers(name, made[name], rows) for name in ("offset", "weights"))
    return Design(X, tuple(map(str, made["names"])), tuple(factors), offset, y, weights)


def _numbers(name: str, value: Any, shape: tuple[int | None, ...]) -> Tensor:
    """A finite tensor of float64 and a shape."""
    plain = isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
    if not plain or value.dtype != torch.float64 or value.ndim != len(shape):
        raise InputError(f"{name} must be a tensor of float64 with {len(shape)} dimensions.")
    if not all(wanted is None or size == wanted for size, wanted in zip(value.shape, shape, strict=True)):
        raise InputError(f"{name} must have the shape {shape}; got {tuple(value.shape)}.")
    if not len(value) or not bool(value.isfinite().all()):
        raise InputError(f"{name} must be finite numbers.")
    return value.detach()
