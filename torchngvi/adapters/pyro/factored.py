"""The log joint of a Pyro model as a sum over the nodes of its forest, a term a function of a node and its ancestors.

The terms of all members of plates are evaluated in one run of the model, in which a latent that they share has one
value for each of them: every member has draws of its own.  That a term depends on its own node alone, and that the
terms add up to the log joint, is tried and not assumed.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import final

import torch
from torch import Tensor

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.adapters.pyro.layout import Layout, Level, Plate, Scored, Site, Values
from torchngvi.errors import InputError
from torchngvi.models import FactorTarget

_SPREAD = 0.1  # of the points where the terms are tried, around the initial θ


@final
class FactoredLogJoint(FactorTarget):
    """A `ModelLogJoint` in terms of one node each, for a q over the forest of the model.

    >>> import pyro.distributions as dist
    >>> from torchngvi.adapters.pyro import AutoGaussian
    >>> def model():
    ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("groups", 3):
    ...         pyro.sample("x", dist.Normal(mu, 1.0))
    >>> guide = AutoGaussian(model, structure="auto").setup()
    >>> target = FactoredLogJoint(guide.density(model), guide.structure)
    >>> theta = torch.zeros(4)
    >>> torch.allclose(target.log_joint(theta), target.density.log_joint(theta))
    True
    """

    def __init__(self, density: ModelLogJoint, structure: Layout) -> None:
        assert structure.forest is not None
        self.density, self.found, self.layout = density, structure, density.layout
        self.initial, self.dim = density.initial, density.dim
        self.levels = [_Term(density, structure, number) for number in range(len(structure.levels))]
        kinds, starts, start = structure.forest.kinds, [], 0
        for level in structure.levels:
            starts.append(start)
            start += level.nodes * level.size
        self.by_kind_of_node = [
            [number for number, first in enumerate(starts) if bool((kind.place[:, 0] == first).any())] for kind in kinds
        ]
        terms = [(kind, partial(self._terms, kind)) for kind in range(len(kinds))]
        super().__init__(structure.forest, terms)
        self._try()

    def unpack(self, theta: Tensor) -> Values:
        """The values of the latent sites at θ (*sample, D), by name."""
        return self.density.unpack(theta)

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `unpack`."""
        return self.density.pack(values)

    def __call__(self, theta: Tensor) -> Tensor:
        """The log joint at θ (*sample, D), (*sample,)."""
        return self.log_joint(theta)

    def _terms(self, kind: int, theta: Tensor) -> Tensor:
        """The terms of all nodes of a kind at θ_c (*sample, n, k), (*sample, n)."""
        numbers, flat = self.by_kind_of_node[kind], theta.reshape(-1, *theta.shape[-2:])
        pieces = flat.split([self.found.levels[number].nodes for number in numbers], 1)
        parts = [self.levels[number](piece) for number, piece in zip(numbers, pieces, strict=True)]
        return torch.cat(parts, 1).to(theta.dtype).reshape(theta.shape[:-1])

    @torch.no_grad()
    def _try(self) -> None:
        try:
            self._check()
        except MismatchError:
            raise
        except Exception as error:  # whatever a model does that was not written for several members
            line = str(error).splitlines()[0] if str(error) else ""
            raise MismatchError(
                "the model does not broadcast over shared latents that have a value for each member "
                f"({type(error).__name__}: {line})"
            ) from error

    def _check(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def near(shape: torch.Size) -> Tensor:
            return _SPREAD * torch.randn(shape, generator=generator, dtype=torch.float64).to(self.initial)

        for kind, cliques in enumerate(self.structure.gather(self.initial)):
            numbers, cliques = self.by_kind_of_node[kind], cliques + near(cliques.shape)
            pieces = cliques.split([self.found.levels[number].nodes for number in numbers], 0)
            for number, piece in zip(numbers, pieces, strict=True):
                self.levels[number].check_apart(piece, piece + near(piece.shape))
        points = self.initial + near(torch.Size((2, self.dim)))
        ours, whole = self.log_joint(points), self.density.log_joint(points)
        if not torch.allclose(ours, whole, rtol=torch.finfo(ours.dtype).eps ** 0.6, equal_nan=True):
            raise MismatchError("the terms of the members do not add up to the log joint")


class MismatchError(InputError):
    """A model whose terms cannot be told by member."""


class _Term:
    """The terms of the nodes of one level, from a run of the model."""

    def __init__(self, density: ModelLogJoint, structure: Layout, number: int) -> None:
        levels, layout = structure.levels, density.layout
        self.density, self.level = density, levels[number]
        sites = {site.name: site for site in layout.sites}
        self.nesting = max([density.nesting, *(site.batch_dims for site in layout.sites)])
        fixed = layout.constrained(density.initial[None], self.nesting)[0]
        self.fixed = {name: self._for_members(x) for name, x in fixed.items()}
        self.names = {name for name, level in (structure.terms or {}).items() if level == number}
        self.last = number == len(levels) - 1  # which has what depends on no latent
        self.known = set(structure.terms or {})
        self.places: list[tuple[Site, slice, tuple[Plate, ...]]] = []
        start, up = 0, number
        while up is not None:
            level: Level = levels[up]
            for name in level.sites:
                count = math.prod(sites[name].free) // level.nodes
                self.places.append((sites[name], slice(start, start + count), level.plates))
                start += count
            up = level.up  # type: ignore[assignment]

    def _for_members(self, value: Tensor) -> Tensor:
        """The value of a site, (1, *nesting, *event), as that of each member of the plates of this level."""
        sizes = [-1] * value.ndim
        for plate in self.level.plates:
            if value.shape[axis := 1 + self.nesting + plate.dim] == 1:
                sizes[axis] = plate.size
        return value.expand(sizes)

    def __call__(self, theta: Tensor) -> Tensor:
        """Their sum over sites at θ_c (S, n, k), (S, n)."""
        return sum(self.by_site(theta).values())  # type: ignore[return-value]

    def by_site(self, theta: Tensor) -> dict[str, Tensor]:
        """The terms at θ_c (S, n, k), (S, n) for each site."""
        values, terms = {name: x.expand(len(theta), *x.shape[1:]) for name, x in self.fixed.items()}, {}
        for site, where, plates in self.places:
            u = self._laid_out(site, theta[..., where], plates)
            values[site.name] = x = site.transform(u)
            if site.name in self.level.sites:
                terms[f"{site.name} "] = self._by_node(site.transform.log_abs_det_jacobian(u, x), len(theta))
        for name, log_prob in Scored(values, {}, {}, self._is_mine).run(self.density).items():
            if name in self.known:
                terms[name] = self._by_node(log_prob, len(theta))
            else:
                terms[name] = (log_prob.sum() / self.level.nodes).expand(theta.shape[:-1])
        return terms

    def _is_mine(self, name: str) -> bool:
        return name in self.names or (self.last and name not in self.known)

    def _laid_out(self, site: Site, part: Tensor, plates: tuple[Plate, ...]) -> Tensor:
        """The unconstrained values (S, n, m) of a site with a value for each node, (S, *nesting, *event)."""
        mine, lead = self.level.plates, self.nesting - site.batch_dims
        at = {self.nesting + plate.dim: plate.size for plate in mine}
        shared = {self.nesting + plate.dim for plate in plates}
        rest = {lead + axis: size for axis, size in enumerate(site.free) if lead + axis not in shared}
        if any(size > 1 and position in at for position, size in rest.items()):
            raise MismatchError(
                f"the site {site.name!r} has a dimension of its own where the plates of other sites are; give it "
                ".to_event(1)"
            )
        rest = {position: size for position, size in rest.items() if position not in at}
        axes, sizes = [*at, *rest], [*at.values(), *rest.values()]
        order = sorted(range(len(axes)), key=lambda k: axes[k])
        full = [1] * (self.nesting + len(site.free) - site.batch_dims)
        for axis, size in zip(axes, sizes, strict=True):
            full[axis] = size
        moved = part.reshape(len(part), *sizes).permute(0, *(1 + k for k in order))
        return moved.reshape(len(part), *full)

    def _by_node(self, values: Tensor, count: int) -> Tensor:
        """Numbers of the shape of a site, (S, *nesting, ...) or without draws, summed for each node, (S, n)."""
        values = values.flatten(1 + self.nesting).sum(-1) if values.ndim > 1 + self.nesting else values
        values = values.reshape((1,) * (1 + self.nesting - values.ndim) + values.shape)
        axes = [1 + self.nesting + plate.dim for plate in self.level.plates]
        if [values.shape[axis] for axis in axes] != [plate.size for plate in self.level.plates]:
            raise MismatchError("a site has no density for each member of its plates")
        values = values.movedim(axes, list(range(1, 1 + len(axes))))
        return values.reshape(len(values), self.level.nodes, -1).sum(-1).expand(count, -1)

    def check_apart(self, theta: Tensor, other: Tensor) -> None:
        """Check that the term of a node stays as it is where other nodes of the level move."""
        moves, plates = [torch.zeros(len(theta), dtype=torch.bool)], [""]
        number = torch.arange(len(theta)).reshape([plate.size for plate in self.level.plates])
        for axis, plate in enumerate(self.level.plates):
            shape = [1] * number.ndim
            shape[axis] = plate.size
            index = torch.arange(plate.size).reshape(shape).expand(number.shape).flatten()
            for bit in range((plate.size - 1).bit_length()):
                one = (index >> bit) % 2 == 1
                moves, plates = [*moves, one, ~one], [*plates, plate.name, plate.name]
        moved = torch.stack(moves).to(theta.device)
        terms = self.by_site(torch.where(moved[..., None], other, theta))
        for name, term in terms.items():
            tolerance = torch.finfo(term.dtype).eps ** 0.6 * (1 + term[0].abs())
            wrong = ((term - term[0]).abs() > tolerance) & ~moved
            if bool(wrong.any()):
                where = plates[int(wrong.any(-1).nonzero()[0])]
                raise MismatchError(f"the site {name.strip()!r} joins members of the plate {where!r}")
