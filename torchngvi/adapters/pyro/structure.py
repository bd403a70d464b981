"""The forest of a Pyro model: which latents are local to the members of plates, found by moving them.

Which group a row reads, as ``b[group]``, no run of the model says.  It is found by trial: of the members along a plate
those with a one in the k-th bit of their number move, then those with a zero.  A term of the log joint that reads one
member changes with one of the two for each k, and so spells the number; one that changes with both reads several.

What a term reads together is joined in the precision of the posterior.  Of two plates each member of the one may be
read with one member of the other only: its parent in the forest (Webb, Golinski, Zinkov, Naesseth, Rainforth, Teh and
Wood 2018).  The latents of a plate whose members a term joins stay together one level above; of plates that cross the
smaller is shared.
"""

import copy
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, cast, final

import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.adapters.pyro.layout import Layout, Level, Plate, Scored, Site, Values, random_sites, unwrapped
from torchngvi.errors import InputError
from torchngvi.interfaces import Target
from torchngvi.models import FactorTarget
from torchngvi.structures import Forest

_NONE, _SEVERAL = -1, -2  # in the place of the number of a member
_GAUSSIAN = (torch.distributions.Normal, torch.distributions.MultivariateNormal)


class KeptCall:
    """A model with its arguments, of which none is kept alive: whether another call is the same."""

    def __init__(self, model: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.model = None if model is None else weakref.ref(model)
        self.arguments = [_recognised(each) for each in tree_leaves((args, dict(kwargs)))]

    def same(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is this one."""
        leaves = tree_leaves((args, dict(kwargs)))
        same_model = self.model is not None and self.model() is model and len(leaves) == len(self.arguments)
        return same_model and all(is_it(each) for is_it, each in zip(self.arguments, leaves, strict=True))

    def __reduce__(self) -> tuple[type[Self], tuple[None, tuple[()], dict[str, Any]]]:
        return type(self), (None, (), {})


def _recognised(each: Any) -> Callable[[Any], bool]:
    """What tells whether another argument is this one, unchanged."""
    if isinstance(each, Tensor) and not each.is_inference():
        ref, version = weakref.ref(each), each._version
        return lambda other: isinstance(other, Tensor) and ref() is other and other._version == version
    if each is None or isinstance(each, int | float | str):
        return lambda other: type(other) is type(each) and bool(other == each)
    return lambda _: False


Structure, Call = Layout, KeptCall  # the names of these in the pickles of guides of 0.2.0


# -------------------------------------------------------------------------------- for a guide


def found(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trace: Trace) -> Layout:
    """The layout of a model, with the levels of its forest, and its terms by member where the model can give them."""
    density = ModelLogJoint(model, args, kwargs, trace)
    layout = Layout(trace)
    try:
        layout_by(reads_of(_fixed(density)), layout)
    except InputError as error:
        layout.reasons = (str(error).rstrip("."),)
        return layout
    if layout.terms is not None:
        try:
            FactoredLogJoint(density, layout)
        except InputError:
            layout.terms = None
    layout.call = KeptCall(model, args, kwargs)
    return layout


def factored(density: ModelLogJoint, layout: Layout) -> Target:
    """The log joint as one of a guide that has members of plates apart: in terms of the members where that can be."""
    try:
        _fixed(density).pattern = layout.pattern
        if layout.terms is not None:
            return FactoredLogJoint(density, layout)
        if layout.call is not None and layout.call.same(density.model, density.args, density.kwargs):
            return density  # it was tried when the guide was set up
        now = layout_by(reads_of(density), copy.copy(density.layout))
        if (now.forest, now.levels) != (layout.forest, layout.levels):
            raise InputError("its terms read other members together")
        return density
    except InputError as error:
        raise InputError(
            f"the guide has members of plates apart that this model or these data have not: {str(error).rstrip('.')}. "
            "Set another guide up with them."
        ) from error


def _fixed(density: ModelLogJoint) -> ModelLogJoint:
    """The log joint, if it is one function of θ and a plain sum over sites."""
    if density.enumerates:
        raise InputError("the model sums out discrete latents, whose terms are not told by member")
    if not density.comparable:
        raise InputError("the model subsamples its data, of which other rows may join other members")
    try:
        density.check_comparable("")
    except InputError as error:
        raise InputError("the model has other values at the same latents in each run: it draws") from error
    return density


# -------------------------------------------------------------------------------- what is Gaussian given the others


def priors_of(density: ModelLogJoint) -> tuple[Values, dict[str, Any]]:
    """The latents at the initial point, by name, and the priors of one element of each that are computed from them."""
    with torch.enable_grad():
        values = {name: x.detach().clone().requires_grad_() for name, x in density.unpack(density.initial).items()}
        nodes: Any = density.trace(values).nodes
    return values, {name: unwrapped(nodes[name]["fn"]) for name in values}


@torch.enable_grad()
def latent_field(density: ModelLogJoint, layout: Layout) -> list[Site]:
    """Find the sites of a latent Gaussian model that are integrated out together; none where the forest has all."""
    values, priors = priors_of(_fixed(density))
    locations, others = dict[str, set[str]](), dict[str, set[str]]()
    for name, prior in priors.items():
        parts = {part: _ancestors(getattr(prior, part), values) for part in prior.arg_constraints}
        locations[name] = parts.pop("loc", set())
        others[name] = set[str]().union(*parts.values())
    scales, apart = set[str]().union(*others.values()), set(layout.apart)
    found, left = list[Site](), False
    for site in layout.sites:
        several, varies = math.prod(site.free) > 1, bool(locations[site.name] | others[site.name])
        gaussian = isinstance(priors[site.name], _GAUSSIAN) and site.name not in scales
        if site.name in apart or (gaussian and (several or varies)):
            found.append(site)
            left = left or (site.name not in apart and several and (varies or not apart))
    return found if left and len(found) < len(layout.sites) else []


def _ancestors(number: Any, values: Values) -> set[str]:
    """The latents that a parameter of a prior is computed from."""
    if not isinstance(number, Tensor) or not number.requires_grad:
        return set()
    slopes = torch.autograd.grad(number.sum(), list(values.values()), retain_graph=True, allow_unused=True)
    return {name for name, slope in zip(values, slopes, strict=True) if slope is not None}


# -------------------------------------------------------------------------------- what terms read


@dataclass
class _Group:
    """The latents in the same plates, and the number along each plate of the member that each term reads."""

    plates: tuple[Plate, ...]
    sites: list[Site]
    links: Tensor  # (terms, plates)

    @property
    def key(self) -> frozenset[str]:
        """The names of the plates."""
        return frozenset(plate.name for plate in self.plates)

    @property
    def place(self) -> Tensor:
        """The coordinates of each member, in the order of the sites, (n, m)."""
        return torch.cat([site.by_member(self.plates) for site in self.sites], 1)

    @property
    def numbers(self) -> Tensor:
        """The member that each term reads, (terms,)."""
        number = torch.zeros(len(self.links), dtype=torch.long)
        for plate, along in zip(self.plates, self.links.unbind(1), strict=True):
            number = number * plate.size + along
        return torch.where((self.links < 0).any(1), _NONE, number)

    def without(self, plate: Plate) -> "_Group":
        """The same latents, with the members along a plate together."""
        kept = [k for k, each in enumerate(self.plates) if each != plate]
        return _Group(tuple(self.plates[k] for k in kept), self.sites, self.links[:, kept])

    def merged(self, other: "_Group") -> "_Group":
        """The latents of two groups in the same plates."""
        one, two = self.links, other.links
        links = torch.where(one == _NONE, two, torch.where((two == _NONE) | (one == two), one, _SEVERAL))
        return _Group(self.plates, sorted([*self.sites, *other.sites], key=lambda site: site.where.start), links)


class Reads(NamedTuple):
    """What the terms of a model read."""

    groups: list[_Group]
    names: list[str]  # the site of each term
    plates: dict[str, set[str]]  # of each site


@torch.no_grad()
def reads_of(density: ModelLogJoint, spreads: tuple[float, ...] = (0.1, 1.0, 3.0)) -> Reads:
    """Find what the terms of a model read."""
    # spreads: of the points where members are moved, around the initial θ: a term may be flat
    layout = density.layout
    by_plates: dict[frozenset[str], list[Site]] = {}
    for site in layout.sites:
        by_plates.setdefault(frozenset(plate.name for plate in site.plates), []).append(site)
    generator, start = torch.Generator().manual_seed(0), density.initial
    names, _ = _terms(density, start)
    seen: dict[frozenset[str], list[Tensor]] = {names: [] for names in by_plates}
    for spread, sign in itertools.product(spreads, (1.0, -1.0)):  # of two members each is the greater once
        if sign > 0:
            drawn = torch.randn(2, density.dim + 1, generator=generator, dtype=torch.float64).to(start)
            noise = spread * (drawn[:, 1:] + drawn[:, :1])  # of which a part is common: means of many members move too
        theta, other = start + sign * noise[0], start + sign * noise.sum(0)
        try:
            _, terms = _terms(density, theta, names)
            now = {
                key: [_read(density, plate, sites, theta, other, names, terms) for plate in sites[0].plates]
                for key, sites in by_plates.items()
            }
        except InputError:
            raise
        except Exception:  # far away a model need not run: a matrix is not positive definite there
            if spread == spreads[0]:
                raise
            continue
        for key, links in now.items():
            seen[key].append(torch.stack([*links, torch.full((len(names),), _NONE)], 1))
    groups = [_Group(sites[0].plates, sites, _agreed(seen[key])[:, :-1]) for key, sites in by_plates.items()]
    trace = density.trace(density.unpack(density.initial))
    plates = {site["name"]: {frame.name for frame in site["cond_indep_stack"]} for site in random_sites(trace)}
    return Reads(groups, names, plates)


def _read(
    density: ModelLogJoint,
    plate: Plate,
    sites: list[Site],
    theta: Tensor,
    other: Tensor,
    names: list[str],
    terms: Tensor,
    units: int = 4,
) -> Tensor:
    """The number along a plate of the member of some sites that each term reads, (terms,)."""
    # units: units of the last place in which a term may differ: beside large data in float32 a member moves few
    place = torch.cat([site.by_member((plate,)) for site in sites], 1)
    bits = torch.arange((plate.size - 1).bit_length(), device="cpu")[:, None]
    ones = (torch.arange(plate.size, device="cpu") >> bits) % 2 == 1

    def changed(moving: Tensor) -> Tensor:
        moved, which = theta.clone(), place[moving].flatten().to(theta.device)
        moved[which] = other[which]
        now, rtol = _terms(density, moved, names)[1], units * torch.finfo(terms.dtype).eps
        return ~torch.isclose(now, terms, rtol=rtol, atol=0.0, equal_nan=True).cpu()

    with_one, with_zero = (torch.stack([changed(moving) for moving in half]) for half in (ones, ~ones))
    number = (with_one.long() << bits).sum(0)
    touched = (with_one | with_zero).any(0)
    return torch.where((with_one & with_zero).any(0), _SEVERAL, torch.where(touched, number, _NONE))


def _agreed(trials: list[Tensor]) -> Tensor:
    """One number of several trials: a term that reads other members in each reads several."""
    seen = torch.stack(trials)
    most, least = seen.amax(0), torch.where(seen == _NONE, seen.amax(0), seen).amin(0)
    return torch.where(most == least, most, _SEVERAL)


def _terms(density: ModelLogJoint, theta: Tensor, known: list[str] | None = None) -> tuple[list[str], Tensor]:
    """The terms of one run at θ in the order of the sites, and the site of each; those that are known, if given."""
    values = density.layout.constrained(theta)[0]
    scores = Scored(values, density.layout.shapes, {}).run(density)
    names = [name for name, score in scores.items() for _ in range(score.numel())]
    if known is not None and names != known:
        raise InputError("the model has other sites, or more or fewer terms in them, at other values of its latents")
    return names, torch.cat([score.flatten().to(theta) for score in scores.values()])


# -------------------------------------------------------------------------------- the forest


def layout_by(reads: Reads, layout: Layout) -> Layout:
    """The layout of the sites in levels that follow from what terms read, the level with the most members first."""
    groups, reasons = reads.groups, list[str]()
    while True:
        merged: dict[frozenset[str], _Group] = {}
        for group in groups:
            merged[group.key] = merged[group.key].merged(group) if group.key in merged else group
        inner = sorted((group for group in merged.values() if group.plates), key=lambda group: -len(group.place))
        joined = _joined(reads, inner)
        if joined is None:
            parents = _parents(inner)
            if isinstance(parents, list):
                break
            joined = _crossed(reads, *parents)
        apart, plate, reason = joined
        reasons.append(reason)
        groups = [group.without(plate) if group is apart else group for group in merged.values()]
    layout.reasons = tuple(dict.fromkeys(reasons))
    if not inner:
        return layout
    levels = inner + [group for group in merged.values() if not group.plates]
    root = len(levels) > len(inner)
    layout.levels = tuple(
        Level(group.plates, tuple(site.name for site in group.sites), nodes, size, _up(group, levels))
        for group in levels
        for nodes, size in [group.place.shape]
    )
    last = sum(level.nodes for level in layout.levels) - root  # the number of the root
    parents = [parent if root or parent < last else -1 for parent in parents] + [-1] * root
    layout.forest = Forest(tuple(parents), tuple(level.size for level in layout.levels for _ in range(level.nodes)))
    layout.arrange(torch.cat([group.place.flatten() for group in levels]), of_theta=False)
    if parents == _parents_by_plates(layout.levels):
        terms = dict.fromkeys(reads.names, len(inner)) if root else {}
        for level, group in reversed([*enumerate(inner)]):  # the innermost that a site reads
            terms |= {reads.names[int(term)]: level for term in (group.links[:, 0] != _NONE).nonzero()}
        layout.terms = terms
    return layout


def _joined(reads: Reads, inner: list[_Group]) -> tuple[_Group, Plate, str] | None:
    """A group of which a term reads several members along a plate."""
    for group in reversed(inner):
        for plate, along in zip(group.plates, group.links.unbind(1), strict=True):
            if not bool((along == _SEVERAL).any()):
                continue
            name = reads.names[int((along == _SEVERAL).nonzero()[0])]
            reason = f"the site {name!r} joins members of the plate {plate.name!r}"
            if plate.name not in reads.plates[name]:
                local = group.sites[0].name
                reason = (
                    f"the site {name!r}, outside of the plate {plate.name!r}, reads {local!r} and joins its members"
                )
            elif reads.names.count(name) < plate.size:
                reason = "a site has no density for each member of its plates"
            return group, plate, reason
    return None


def _crossed(reads: Reads, one: _Group, two: _Group) -> tuple[_Group, Plate, str]:
    """Of two groups whose plates cross the smaller, with the plate that it loses."""
    small, large = sorted((one, two), key=lambda group: (group.place.numel(), group.plates))
    plate = min([plate for plate in small.plates if plate.name not in large.key] or small.plates)
    others = [other.name for other in large.plates if other.name not in small.key]
    both = (small.links[:, 0] != _NONE) & (large.links[:, 0] != _NONE)
    names = [reads.names[int(term)] for term in both.nonzero()]
    who = next(
        (f"the site {name!r} joins" for name in names if reads.plates[name] >= {plate.name, *others}), "terms join"
    )
    text = f"{who} the plates {plate.name!r} and {' x '.join(map(repr, others))}; the smaller is shared by all"
    return small, plate, text


def _parents(inner: list[_Group]) -> list[int] | tuple[_Group, _Group]:
    """The parent of each node, the levels one after another and then a root; or two levels that cross."""
    counts, parents = [len(group.place) for group in inner], list[int]()
    starts = [0, *itertools.accumulate(counts)]
    links = torch.stack([group.numbers for group in inner], 1) if inner else torch.empty(0, 0)
    for level, count in enumerate(counts):
        links = links.unique(dim=0)
        mine = links[links[:, level] >= 0]
        up = torch.full((count, len(counts)), _NONE, dtype=torch.long)
        parent = torch.full((count,), starts[-1], dtype=torch.long)
        for other in reversed(range(level + 1, len(counts))):
            child, with_it = mine[mine[:, other] >= 0][:, [level, other]].unbind(-1)
            up[child, other] = with_it
            if bool((up[child, other] != with_it).any()):
                return inner[level], inner[other]
            parent = torch.where(up[:, other] >= 0, starts[other] + up[:, other], parent)
        links = torch.cat([links[links[:, level] < 0], up])  # given the rest, the ancestors of a node are joined
        parents += parent.tolist()
    return parents


def _up(group: _Group, levels: list[_Group]) -> int | None:
    """The number of the level in the most of the plates of a group, but not in all."""
    above = [k for k, other in enumerate(levels) if other.key < group.key]
    return max(above, key=lambda k: len(levels[k].plates), default=None)


def _parents_by_plates(levels: tuple[Level, ...]) -> list[int]:
    """The parent of each node, if that is the member of outer plates in which it is."""
    starts, parents = [0, *itertools.accumulate(level.nodes for level in levels)], list[int]()
    for level in levels:
        if level.up is None:
            parents += [-1] * level.nodes
            continue
        outer, sizes = levels[level.up], [plate.size for plate in level.plates]
        shared = {plate.name for plate in outer.plates}
        within = torch.arange(outer.nodes).reshape([each.size if each.name in shared else 1 for each in level.plates])
        parents += (starts[level.up] + within.expand(sizes).flatten()).tolist()
    return parents


# -------------------------------------------------------------------------------- the log joint by member


@final
class FactoredLogJoint(FactorTarget):
    """A `ModelLogJoint` in terms of one node each, for a q over the forest of the model."""

    def __init__(self, density: ModelLogJoint, structure: Layout) -> None:
        pattern = structure.pattern
        self.density, self.layout = density, density.layout
        self.initial, self.dim = density.initial, density.dim
        self.unpack, self.pack = density.unpack, density.pack
        levels = [_Term(density, structure, number) for number in range(len(structure.levels))]
        firsts = [kind.place[:, :1] for kind in pattern.kinds]
        self.by_kind_of_node = [[term for term in levels if bool((first == term.first).any())] for first in firsts]
        super().__init__(pattern, [(kind, partial(self._terms, kind)) for kind in range(len(firsts))])
        try:
            self._check()
        except InputError:
            raise
        except Exception as error:  # whatever a model does that was not written for several members
            line = str(error).splitlines()[0] if str(error) else ""
            raise InputError(
                "the model does not broadcast over shared latents that have a value for each member "
                f"({type(error).__name__}: {line})"
            ) from error

    __call__ = FactorTarget.log_joint

    def _by_level(self, kind: int, cliques: Tensor) -> Iterable[tuple["_Term", Tensor]]:
        """The terms of each level of nodes of a kind, and its part of the cliques (*sample, n, k)."""
        terms = self.by_kind_of_node[kind]
        return zip(terms, cliques.split([term.level.nodes for term in terms], -2), strict=True)

    def _terms(self, kind: int, theta: Tensor) -> Tensor:
        """The terms of all nodes of a kind at θ_c (*sample, n, k), (*sample, n)."""
        pieces = self._by_level(kind, theta.reshape(-1, *theta.shape[-2:]))
        parts: Any = [sum(term.by_site(piece).values()) for term, piece in pieces]
        return torch.cat(parts, 1).to(theta.dtype).reshape(theta.shape[:-1])

    @torch.no_grad()
    def _check(self, spread: float = 0.1) -> None:
        """Check that the terms of nodes read no others of the level, and add up to the log joint."""
        # spread: of the points where terms by member are tried, around the initial θ
        generator = torch.Generator().manual_seed(0)

        def near(shape: torch.Size) -> Tensor:
            return spread * torch.randn(shape, generator=generator, dtype=torch.float64).to(self.initial)

        for kind, cliques in enumerate(self.structure.gather(self.initial)):
            for term, piece in self._by_level(kind, cliques + near(cliques.shape)):
                term.check_apart(piece, piece + near(piece.shape))
        points = self.initial + near(torch.Size((2, self.dim)))
        ours, whole = self.log_joint(points), self.density.log_joint(points)
        if not torch.allclose(ours, whole, rtol=torch.finfo(ours.dtype).eps ** 0.6, equal_nan=True):
            raise InputError("the terms of the members do not add up to the log joint")


class _Term:
    """The terms of the nodes of one level, from a run of the model."""

    def __init__(self, density: ModelLogJoint, structure: Layout, number: int) -> None:
        levels, layout = structure.levels, density.layout
        self.density, self.level = density, levels[number]
        sites = {site.name: site for site in layout.sites}
        self.first = sites[self.level.sites[0]].by_member(self.level.plates)[0, 0]  # coordinate
        self.nesting = max([density.nesting, *(site.batch_dims for site in layout.sites)])
        self.fixed = layout.constrained(density.initial[None], self.nesting)[0]
        assert structure.terms is not None
        self.terms, self.number = structure.terms, number
        self.last = len(levels) - 1  # which has what depends on no latent
        self.places: list[tuple[Site, slice, tuple[Plate, ...]]] = []
        start, up = 0, cast(int | None, number)
        while up is not None:
            level = levels[up]
            for name in level.sites:
                count = math.prod(sites[name].free) // level.nodes
                self.places.append((sites[name], slice(start, start + count), level.plates))
                start += count
            up = level.up

    def by_site(self, theta: Tensor) -> dict[str, Tensor]:
        """The terms at θ_c (S, n, k), (S, n) for each site."""
        values, terms = {name: x.expand(len(theta), *x.shape[1:]) for name, x in self.fixed.items()}, {}
        for site, where, plates in self.places:
            u = self._laid_out(site, theta[..., where], plates)
            values[site.name] = x = site.transform(u)
            if site.name in self.level.sites:
                terms[f"{site.name} "] = self._by_node(site.transform.log_abs_det_jacobian(u, x), len(theta))
        wanted = Scored(values, {}, {}, lambda name: self.terms.get(name, self.last) == self.number)
        for name, log_prob in wanted.run(self.density).items():
            if name in self.terms:
                terms[name] = self._by_node(log_prob, len(theta))
            else:
                terms[name] = (log_prob.sum() / self.level.nodes).expand(theta.shape[:-1])
        return terms

    def _laid_out(self, site: Site, part: Tensor, plates: tuple[Plate, ...]) -> Tensor:
        """The unconstrained values (S, n, m) of a site with a value for each node, (S, *nesting, *event)."""
        lead = self.nesting - site.batch_dims
        at = {self.nesting + plate.dim: plate.size for plate in self.level.plates}
        shared = {self.nesting + plate.dim for plate in plates}
        rest = {lead + axis: size for axis, size in enumerate(site.free) if lead + axis not in shared}
        if any(size > 1 and position in at for position, size in rest.items()):
            raise InputError(
                f"the site {site.name!r} has a dimension of its own where the plates of other sites are; give it "
                ".to_event(1)"
            )
        sizes = at | {position: size for position, size in rest.items() if position not in at}  # as they stand in part
        axes = list(sizes)
        moved = part.reshape(len(part), *sizes.values()).permute(0, *(1 + axes.index(axis) for axis in sorted(axes)))
        return moved.reshape(len(part), *(sizes.get(axis, 1) for axis in range(lead + len(site.free))))

    def _by_node(self, values: Tensor, count: int) -> Tensor:
        """Numbers of the shape of a site, (S, *nesting, ...) or without draws, summed for each node, (S, n)."""
        values = values.flatten(1 + self.nesting).sum(-1) if values.ndim > 1 + self.nesting else values
        values = values.reshape((1,) * (1 + self.nesting - values.ndim) + values.shape)
        axes = [1 + self.nesting + plate.dim for plate in self.level.plates]
        if [values.shape[axis] for axis in axes] != [plate.size for plate in self.level.plates]:
            raise InputError("a site has no density for each member of its plates")
        values = values.movedim(axes, list(range(1, 1 + len(axes))))
        return values.reshape(len(values), self.level.nodes, -1).sum(-1).expand(count, -1)

    def check_apart(self, theta: Tensor, other: Tensor) -> None:
        """Check that the term of a node stays as it is where other nodes of the level move."""
        moves, plates = [torch.zeros(len(theta), dtype=torch.bool)], [""]
        members = torch.ones([plate.size for plate in self.level.plates], dtype=torch.bool).nonzero().T
        for plate, index in zip(self.level.plates, members, strict=True):  # the number of each node along each plate
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
                raise InputError(f"the site {name.strip()!r} joins members of the plate {where!r}")
