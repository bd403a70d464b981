"""Which members of plates each term of a model reads, found by moving them; and the forest that follows from it.

A row of data that reads the latent of its group by index, as ``b[group]``, is outside of the plate of the groups, and
nothing in a run of the model says which group it is.  It is found by trial: of the members of a plate those with a one
in the k-th bit of their number move, then those with a zero.  A term that reads one member changes with one of the two
for each k, and so spells the number; one that changes with both reads several.  2 log₂ n runs tell it for all rows.

What a term reads together is joined in the precision of the posterior.  Of two plates each member of the one may be
read with one member of the other only: its parent in the forest.  Plates that cross are none; the smaller is shared.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import pyro
import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.adapters.pyro.factored import MismatchError
from torchngvi.adapters.pyro.sites import Scored, Values
from torchngvi.adapters.pyro.structure import Level, Plate, Plates, Structure, coordinates_by_member
from torchngvi.errors import InputError
from torchngvi.structures import Forest

_SPREADS = (0.1, 1.0, 3.0)  # of the points where members are moved, around the initial θ: a term may be flat
_ROUNDING = 4  # units of the last place in which a term may differ: beside large data in float32 a member moves few
_NONE, _SEVERAL = -1, -2  # in the place of the number of a member


class _Nodes(NamedTuple):
    """The latents in the same plates, by member."""

    plates: tuple[Plate, ...]
    sites: tuple[str, ...]
    place: Tensor  # (n, m), the coordinates of each member, in the order of the sites

    @property
    def names(self) -> str:
        """Of the plates, in words."""
        return " x ".join(repr(plate.name) for plate in self.plates)


class _Named(Scored):
    """`Scored`, with the names of the sites."""

    def __init__(self, values: Values, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__(values, shapes, {})
        self.names: list[str] = []

    def _pyro_post_sample(self, msg: Any) -> None:
        before = len(self.log_probs)
        super()._pyro_post_sample(msg)
        self.names += [msg["name"]] * (len(self.log_probs) - before)


class Reads(NamedTuple):
    """The member of each level that each term reads."""

    dim: int
    inner: list[_Nodes]  # the levels, that with the most members first
    shared: list[_Nodes]
    names: list[str]  # the site of each term
    links: Tensor  # (terms, levels)

    def join(self, structure: Structure) -> bool:
        """Whether a term reads several members of a level of a structure that has a node for each."""
        nodes = {frozenset(level.plates): level.nodes for level in structure.levels}
        joined = (self.links == _SEVERAL).any(0).tolist()
        return any(
            several and nodes.get(frozenset(level.plates)) == len(level.place)
            for several, level in zip(joined, self.inner, strict=True)
        )


@torch.no_grad()
def reads_of(density: ModelLogJoint, trace: Trace) -> Reads:
    """Find what the terms of a model read."""
    groups = _groups(density, trace)
    inner = sorted((nodes for nodes in groups if nodes.plates), key=lambda nodes: -len(nodes.place))
    return Reads(density.dim, inner, [nodes for nodes in groups if not nodes.plates], *_links(density, inner))


def structure_by(reads: Reads) -> Structure:
    """Make the forest of a model of what its terms read."""
    dim, inner, shared, names, links = reads.dim, list(reads.inner), reads.shared, reads.names, reads.links
    reasons: list[str] = []
    for column in reversed(range(len(inner))):
        joins = links[:, column] == _SEVERAL
        if bool(joins.any()):
            site = names[int(joins.nonzero()[0])]
            reasons.append(f"the site {site!r} joins members of the plate {inner[column].names}")
            shared, links = [inner.pop(column), *shared], _without(links, column)
    while isinstance(parents := _parents(links, [len(nodes.place) for nodes in inner]), tuple):
        column, other = sorted(parents, key=lambda number: (inner[number].place.numel(), inner[number].names))
        reasons.append(
            f"terms join the plates {inner[column].names} and {inner[other].names}; the smaller is shared by all"
        )
        shared, links = [inner.pop(column), *shared], _without(links, column)
    return _structure(dim, inner, shared, parents, tuple(dict.fromkeys(reasons)))


def _groups(density: ModelLogJoint, trace: Trace) -> list[_Nodes]:
    """The latents by their plates."""
    by_plates: dict[Plates, list[tuple[str, tuple[Plate, ...], Tensor]]] = {}
    for site in density.layout.sites:
        node: Any = trace.nodes[site.name]
        frames = [frame for frame in node["cond_indep_stack"] if frame.vectorized and frame.size > 1]
        plates = tuple(
            sorted((Plate(frame.name, frame.dim, frame.size) for frame in frames), key=lambda each: each.dim)
        )
        found = site.name, plates, coordinates_by_member(site, plates)
        by_plates.setdefault(frozenset(plate.name for plate in plates), []).append(found)
    return [
        _Nodes(found[0][1], tuple(name for name, _, _ in found), torch.cat([place for _, _, place in found], 1))
        for found in by_plates.values()
    ]


def _links(density: ModelLogJoint, inner: list[_Nodes]) -> tuple[list[str], Tensor]:
    """The site of each term, and the member that it reads of each level, (terms, levels)."""
    generator = torch.Generator().manual_seed(0)
    start = density.layout.by_site(density.initial)
    columns: list[list[Tensor]] = [[] for _ in inner]
    names, _ = _terms(density, start)
    for spread, sign in itertools.product(_SPREADS, (1.0, -1.0)):  # of two members each is the greater once
        if sign > 0:
            drawn = torch.randn(2, density.dim + 1, generator=generator, dtype=torch.float64).to(start)
            noise = spread * (drawn[:, 1:] + drawn[:, :1])  # of which a part is common: means of many members move too
        theta, other = start + sign * noise[0], start + sign * noise.sum(0)
        try:
            terms = _same(names, *_terms(density, theta))
            seen = [_read(density, nodes, theta, other, names, terms) for nodes in inner]
        except InputError:
            raise
        except Exception:  # far away a model need not run: a matrix is not positive definite there
            if spread == _SPREADS[0]:
                raise
            continue
        for column, member in zip(columns, seen, strict=True):
            column.append(member)
    if not inner:
        return names, torch.zeros(len(names), 0, dtype=torch.long)
    return names, torch.stack([_agreed(torch.stack(column)) for column in columns], -1)


def _same(names: list[str], now: list[str], terms: Tensor) -> Tensor:
    """The terms, if they are those of the same sites."""
    if now != names:
        raise MismatchError("the model has other sites, or more or fewer terms in them, at other values of its latents")
    return terms


def _read(
    density: ModelLogJoint, nodes: _Nodes, theta: Tensor, other: Tensor, names: list[str], terms: Tensor
) -> Tensor:
    """The member that each term reads, (terms,)."""
    number, several = (torch.zeros(len(terms), dtype=dtype) for dtype in (torch.long, torch.bool))
    touched = several.clone()
    member = torch.arange(len(nodes.place), device="cpu")
    for bit in range((len(member) - 1).bit_length()):
        one = (member >> bit) % 2 == 1
        changes = []
        for moving in (one, ~one):
            moved, place = theta.clone(), nodes.place[moving].flatten().to(theta.device)
            moved[place] = other[place]
            now, rtol = _same(names, *_terms(density, moved)), _ROUNDING * torch.finfo(terms.dtype).eps
            changes.append(~torch.isclose(now, terms, rtol=rtol, atol=0.0, equal_nan=True).cpu())
        several |= changes[0] & changes[1]
        touched |= changes[0] | changes[1]
        number += changes[0].long() << bit
    return torch.where(several, _SEVERAL, torch.where(touched, number, _NONE))


def _agreed(seen: Tensor) -> Tensor:
    """One number of several trials, (trials, terms): a term that reads other members in each reads several."""
    most, least = seen.amax(0), torch.where(seen == _NONE, seen.amax(0), seen).amin(0)
    return torch.where(most == least, most, _SEVERAL)


def _terms(density: ModelLogJoint, theta: Tensor) -> tuple[list[str], Tensor]:
    """The log probabilities of one run, of all sites in one vector, with the site of each."""
    order = density.layout.order
    values = density.layout.constrained(theta if order is None else theta[order.to(theta.device)])[0]
    with pyro.validation_enabled(False), _Named(values, density.layout.shapes) as scored:
        density.model(*density.args, **density.kwargs)
    scored.check()
    names = [name for name, term in zip(scored.names, scored.log_probs, strict=True) for _ in range(term.numel())]
    return names, torch.cat([term.flatten().to(theta) for term in scored.log_probs])


def _without(links: Tensor, column: int) -> Tensor:
    return torch.cat([links[:, :column], links[:, column + 1 :]], 1)


def _parents(links: Tensor, counts: list[int]) -> list[int] | tuple[int, int]:
    """The parent of each node, the levels one after another and then a root; or two levels that cross."""
    starts = [sum(counts[:level]) for level in range(len(counts) + 1)]
    parents: list[int] = []
    for level, count in enumerate(counts):
        links = links.unique(dim=0)
        mine = links[links[:, level] >= 0]
        up = torch.full((count, len(counts)), _NONE, dtype=torch.long)
        parent = torch.full((count,), starts[-1], dtype=torch.long)
        for other in reversed(range(level + 1, len(counts))):
            child, with_it = mine[mine[:, other] >= 0][:, [level, other]].unbind(-1)
            up[child, other] = with_it
            if bool((up[child, other] != with_it).any()):
                return level, other
            parent = torch.where(up[:, other] >= 0, starts[other] + up[:, other], parent)
        links = torch.cat([links[links[:, level] < 0], up])  # given the rest, the ancestors of a node are joined
        parents += parent.tolist()
    return parents


def _structure(
    dim: int, inner: list[_Nodes], shared: list[_Nodes], parents: list[int], reasons: tuple[str, ...]
) -> Structure:
    """The structure of levels, the innermost first, above which is what all share."""
    if not inner:
        return Structure(dim, reasons=reasons)
    levels = [Level(nodes.plates, nodes.sites, len(nodes.place), nodes.place.shape[1], None) for nodes in inner]
    places, root = [nodes.place.flatten() for nodes in inner], [nodes.place.flatten() for nodes in shared]
    sizes = [level.size for level in levels for _ in range(level.nodes)]
    if root:
        places.append(torch.cat(root).sort().values)
        levels.append(Level((), tuple(name for nodes in shared for name in nodes.sites), 1, len(places[-1]), None))
        forest = Forest((*parents, -1), (*sizes, len(places[-1])))
    else:
        forest = Forest(tuple(-1 if parent == len(parents) else parent for parent in parents), tuple(sizes))
    return Structure(dim, tuple(levels), forest, torch.cat(places), None, reasons)
