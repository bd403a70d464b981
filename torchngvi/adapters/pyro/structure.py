"""The structure of a Pyro model: which latents are local to the members of plates, and which the members share.

Pyro's own record of dependencies (`pyro.infer.inspect.get_dependencies`) says on which latents each site depends, and
the plates of a site say for which of its members.  A latent in plates is local to a member where every site that
depends on it is in the same plates: given the latents outside of them the members are then independent, and the
precision of the posterior is that of a forest (Webb, Golinski, Zinkov, Naesseth, Rainforth, Teh and Wood 2018).  A
plate whose members a site joins is no level of the forest; its latents stay together one level above.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pyro
import torch
from pyro.infer.autoguide.initialization import InitMessenger, init_to_median
from pyro.infer.inspect import get_dependencies
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from torchngvi.adapters.pyro.sites import Layout, Site, random_sites
from torchngvi.adapters.pyro.starting import start
from torchngvi.arguments import read_choice
from torchngvi.errors import InputError
from torchngvi.metrics.recursive import free_bytes
from torchngvi.posteriors import CholeskyGaussian, NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Forest

Plates = frozenset[str]


class Plate(NamedTuple):
    """A plate of a model, at a dimension counted from the right."""

    name: str
    dim: int
    size: int


class Uses(NamedTuple):
    """What a site depends on."""

    plates: Plates  # in which the site is
    latents: tuple[str, ...]  # on which its density depends, itself included


class Level(NamedTuple):
    """The latents that are local to the members of the same plates: one node of the forest a member."""

    plates: tuple[Plate, ...]  # outermost first; none of what all share
    sites: tuple[str, ...]
    nodes: int
    size: int  # coordinates of a node
    up: int | None  # the level of the parents


@dataclass(eq=False)
class Structure:
    """What was found of a model: the levels of its forest, and in sentences why they are not more.

    >>> print(Structure(2))
    one dense block of 2 coordinates
    """

    dim: int
    levels: tuple[Level, ...] = ()
    forest: Forest | None = None
    order: Tensor | None = None
    terms: Mapping[str, int] | None = None
    reasons: tuple[str, ...] = ()
    call: Any = field(default=None, repr=False)
    _back: Tensor | None = field(default=None, repr=False)

    def by_site(
        self,
        theta: Tensor,  # (*sample, D)
    ) -> Tensor:
        """θ (*sample, D) in the order of the sites."""
        if self.order is None:
            return theta
        if self._back is None or self._back.device != theta.device:
            self._back = torch.argsort(self.order).to(theta.device)
        return theta[..., self._back]

    def __str__(self) -> str:
        lines = [f"one dense block of {self.dim} coordinates"] if self.forest is None else []
        for level in self.levels if self.forest is not None else ():
            plates = " x ".join(f"{plate.name} ({plate.size})" for plate in reversed(level.plates))
            where = f"for each member of {plates}" if plates else "shared by all"
            lines.append(f"{', '.join(level.sites)}: {level.size} coordinate{'s'[: level.size - 1]} {where}")
        return "\n".join([*lines, *(f"({reason})" for reason in self.reasons)])


class Dependencies(NamedTuple):
    """The record from which levels are made."""

    layout: Layout
    plates: dict[str, Plate]  # by name
    uses: dict[str, Uses]  # by site


def dependencies(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trace: Trace
) -> Dependencies | str:
    """Follow one run of the model."""
    layout, met = Layout(trace), pyro.poutine.trace(InitMessenger(partial(start, init_to_median))(model))
    try:
        with pyro.validation_enabled(False):
            record: Any = get_dependencies(met, args, kwargs)["prior_dependencies"]
    except Exception as error:  # whatever a model does with a tensor that is no plain one
        line = str(error).splitlines()[0] if str(error) else ""
        return f"the dependencies of the sites could not be followed ({type(error).__name__}: {line})"
    latents = {site.name for site in layout.sites}
    plates: dict[str, Plate] = {}
    uses: dict[str, Uses] = {}
    for site in random_sites(met.trace):
        frames = [frame for frame in site["cond_indep_stack"] if frame.vectorized and frame.size > 1]
        for frame in frames:
            plates[frame.name] = Plate(frame.name, frame.dim, frame.size)
        ups = record.get(site["name"], latents & {site["name"]})
        uses[site["name"]] = Uses(frozenset(frame.name for frame in frames), tuple(n for n in ups if n in latents))
    return Dependencies(layout, plates, uses)


def structure_of(known: Dependencies, joined: Mapping[str, str]) -> Structure:
    """Make the levels of a forest of what is known."""
    reasons, sites = dict(joined), {site.name: site for site in known.layout.sites}
    while (found := _joined(known, sites, reasons)) is not None:
        reasons |= found
    own = {name: known.uses[name].plates.difference(reasons) for name in sites}
    keys = sorted(dict.fromkeys(own.values()), key=lambda plates: -len(plates))
    texts = tuple(dict.fromkeys(reasons.values()))
    if keys == [frozenset()]:
        return Structure(known.layout.dim, reasons=texts)
    levels: list[Level] = []
    coordinates, starts = [], [0]
    for key in keys:
        plates = tuple(sorted((known.plates[name] for name in key), key=lambda plate: plate.dim))
        names = tuple(name for name in own if own[name] == key)
        each = torch.cat([coordinates_by_member(sites[name], plates) for name in names], 1)
        above = [number for number, other in enumerate(keys) if other < key]
        levels.append(Level(plates, names, len(each), each.shape[1], above[0] if above else None))
        coordinates.append(each.flatten())
        starts.append(starts[-1] + len(each))
    parents: list[int] = []
    for level in levels:
        if level.up is None:
            parents += [-1] * level.nodes
        else:
            parents += (starts[level.up] + _within(level.plates, levels[level.up].plates)).tolist()
    pattern = Forest(tuple(parents), tuple(level.size for level in levels for _ in range(level.nodes)))
    of = {name: [keys.index(own[up]) for up in use.latents] for name, use in known.uses.items()}
    terms = {name: min(numbers) for name, numbers in of.items() if numbers}  # of the innermost level
    return Structure(known.layout.dim, tuple(levels), pattern, torch.cat(coordinates), terms, texts)


def coordinates_by_member(site: Site, plates: tuple[Plate, ...]) -> Tensor:
    """The coordinates of a site for each member of some of its plates."""
    index = torch.arange(site.where.start, site.where.stop, device="cpu").reshape(site.free)
    axes = [site.batch_dims + plate.dim for plate in plates]
    return index.movedim(axes, list(range(len(axes)))).reshape(_members(plates), -1)


def _members(plates: tuple[Plate, ...]) -> int:
    return math.prod(plate.size for plate in plates)


def _within(plates: tuple[Plate, ...], outer: tuple[Plate, ...]) -> Tensor:
    """The number of the member of the outer plates in which each member of all plates is."""
    sizes = [plate.size if plate in outer else 1 for plate in plates]
    number = torch.arange(_members(outer), device="cpu").reshape(sizes)
    return number.expand([plate.size for plate in plates]).flatten()


def _joined(known: Dependencies, sites: Mapping[str, Site], reasons: Mapping[str, str]) -> dict[str, str] | None:
    """The next plate that is no level, with the reason; None where all others are."""
    own = {name: known.uses[name].plates.difference(reasons) for name in sites}
    for name, use in known.uses.items():
        for up in use.latents:
            for plate in sorted(own[up] - use.plates):
                return {plate: f"the site {name!r}, outside of the plate {plate!r}, reads {up!r} and joins its members"}
        if crossed := _crossed({own[up] for up in use.latents}, own, sites):
            plate, other = crossed
            return {plate: f"the site {name!r} joins the plates {plate!r} and {other!r}; the smaller is shared by all"}
    for plates in dict.fromkeys(own.values()):
        if crossed := _crossed({other for other in own.values() if other < plates}, own, sites):
            plate, other = crossed
            return {plate: f"the plates {plate!r} and {other!r} cross; the smaller is shared by all"}
    return None


def _crossed(keys: set[Plates], own: Mapping[str, Plates], sites: Mapping[str, Site]) -> tuple[str, str] | None:
    """Of two sets of plates of which neither is in the other a plate of that with fewer coordinates, and the other."""

    def weight(plates: Plates) -> tuple[int, list[str]]:
        mine = [sites[name].where for name in own if own[name] == plates]
        return sum(where.stop - where.start for where in mine), sorted(plates)

    for one, two in itertools.combinations(sorted(keys, key=weight), 2):
        if one - two and two - one:
            return min(one - two), min(two - one)
    return None


# -------------------------------------------------------------------------------- the posterior of a guide


def check_plates(sites: list[Any]) -> None:
    """Latent sites in loops over a plate have no place among those of Pyro's automatic guides."""
    for site in sites:
        for frame in site["cond_indep_stack"]:
            if not frame.vectorized:
                raise InputError(
                    f"the latent site {site['name']!r} is in the loop over the plate {frame.name!r}, which Pyro's "
                    "automatic guides do not take. Write it as `with pyro.plate(...)`, loop over a range, or fit "
                    "log_joint(model, *args) itself."
                )


def check_choice(structure: str, posterior: Callable[..., Any]) -> None:
    """Check what a guide is told of its structure."""
    read_choice("structure", structure, ("dense", "auto"), 'is "dense", or "auto", that of the plates of the model')
    if structure == "auto" and posterior not in _STRUCTURED:
        raise InputError(
            'structure="auto" gives the precision of a Gaussian the pattern of the model. Leave posterior out, or take '
            f"PrecisionCholeskyGaussian or NaturalGaussian; got {posterior!r}."
        )


def made(
    posterior: Callable[..., Any],
    structure: Structure,
    mean: Tensor,  # (D,), in the order of the sites
    scale: float,
) -> Any:
    """Make q over a structure."""
    if structure.forest is None:
        _check_room(posterior, mean)
        q = posterior(structure.dim, mean=mean, scale=scale)
        if not (isinstance(q, Gaussian) or getattr(q, "reparametrised", False)):
            raise InputError(
                f"{type(q).__name__} has no map from noise to draws, by which a loss of Pyro reaches q. Take a "
                "Gaussian or a flow, or fit log_joint(model, *args) itself."
            )
        return q
    mean = mean[structure.order]
    return _STRUCTURED[posterior](structure.dim, mean=mean, scale=scale, structure=structure.forest)


def _check_room(posterior: Callable[..., Any], mean: Tensor) -> None:
    """Before D² numbers are asked for, twice: a step makes the new beside the old."""
    dim, free = len(mean), free_bytes(mean.device)
    needed = 2.0 * mean.element_size() * dim**2
    if posterior in _STRUCTURED and needed > free:
        raise InputError(
            f"a Gaussian with all correlations of {dim:,} latents needs {needed / 2**30:.3g} GiB, and "
            f"{free / 2**30:.3g} GiB of {mean.device.type} memory are free. Take posterior=DiagonalGaussian, or "
            'structure="auto" for latents of the members of plates.'
        )


_STRUCTURED: dict[Any, type[Gaussian]] = {  # by what is asked for: only a precision has the pattern of a forest
    CholeskyGaussian: PrecisionCholeskyGaussian,
    PrecisionCholeskyGaussian: PrecisionCholeskyGaussian,
    NaturalGaussian: NaturalGaussian,
}
