"""The forest of a Pyro model: which latents are local to the members of plates, found by moving them.

A row of data that reads the latent of its group by index, as ``b[group]``, is outside of the plate of the groups, and
nothing in a run of the model says which group it is.  It is found by trial: of the members along a plate those with a
one in the k-th bit of their number move, then those with a zero.  A term of the log joint that reads one member changes
with one of the two for each k, and so spells the number; one that changes with both reads several.  2 log₂ n runs tell
it for all rows.

What a term reads together is joined in the precision of the posterior.  Of two plates each member of the one may be
read with one member of the other only: its parent in the forest (Webb, Golinski, Zinkov, Naesseth, Rainforth, Teh and
Wood 2018).  A plate whose members a term joins is no level of the forest: its latents stay together one level above.
Plates that cross are none; the smaller is shared.
"""

import copy
import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.adapters.pyro.factored import FactoredLogJoint, MismatchError
from torchngvi.adapters.pyro.layout import Layout, Level, Plate, Scored, Site, random_sites
from torchngvi.errors import InputError
from torchngvi.interfaces import Target
from torchngvi.structures import Forest

_SPREADS = (0.1, 1.0, 3.0)  # of the points where members are moved, around the initial θ: a term may be flat
_ROUNDING = 4  # units of the last place in which a term may differ: beside large data in float32 a member moves few
_NONE, _SEVERAL = -1, -2  # in the place of the number of a member


class Call:
    """A model with its arguments, of which none is kept alive: whether another call is the same.

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


# -------------------------------------------------------------------------------- for a guide


def found(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trace: Trace) -> Layout:
    """The layout of a model, with the levels of its forest, and its terms by member where the model can give them."""
    density = ModelLogJoint(model, args, kwargs, trace)
    try:
        layout = layout_by(reads_of(_fixed(density)), Layout(trace))
    except InputError as error:
        layout = Layout(trace)
        layout.reasons = (str(error).rstrip("."),)
        return layout
    if layout.forest is not None:
        try:
            FactoredLogJoint(ModelLogJoint(model, args, kwargs, trace, layout.order), layout)
        except InputError:
            layout.terms = None
    layout.call = Call(model, args, kwargs)
    return layout


def factored(density: ModelLogJoint, layout: Layout) -> Target:
    """The log joint as one of a guide that has members of plates apart: in terms of the members where that can be."""
    try:
        _fixed(density)
        if layout.terms is not None:
            return FactoredLogJoint(density, layout)
        if layout.call is not None and layout.call.same(density.model, density.args, density.kwargs):
            return density  # it was tried when the guide was set up
        now = layout_by(reads_of(density), copy.copy(density.layout))
        if (now.forest, now.levels) != (layout.forest, layout.levels):
            raise MismatchError("its terms read other members together")
        return density
    except InputError as error:
        raise InputError(
            f"the guide has members of plates apart that this model or these data have not: {str(error).rstrip('.')}. "
            "Set another guide up with them."
        ) from error


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
    def width(self) -> int:
        """The number of coordinates of a member."""
        return self.place.shape[1]

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
def reads_of(density: ModelLogJoint) -> Reads:
    """Find what the terms of a model read."""
    layout = density.layout
    by_plates: dict[frozenset[str], list[Site]] = {}
    for site in layout.sites:
        by_plates.setdefault(frozenset(plate.name for plate in site.plates), []).append(site)
    generator, start = torch.Generator().manual_seed(0), layout.by_site(density.initial)
    names = _names(_scores(density, start))
    seen: dict[frozenset[str], list[Tensor]] = {names: [] for names in by_plates}
    for spread, sign in itertools.product(_SPREADS, (1.0, -1.0)):  # of two members each is the greater once
        if sign > 0:
            drawn = torch.randn(2, density.dim + 1, generator=generator, dtype=torch.float64).to(start)
            noise = spread * (drawn[:, 1:] + drawn[:, :1])  # of which a part is common: means of many members move too
        theta, other = start + sign * noise[0], start + sign * noise.sum(0)
        try:
            terms = _terms(density, theta, names)
            now = {
                key: [_read(density, plate, sites, theta, other, names, terms) for plate in sites[0].plates]
                for key, sites in by_plates.items()
            }
        except InputError:
            raise
        except Exception:  # far away a model need not run: a matrix is not positive definite there
            if spread == _SPREADS[0]:
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
) -> Tensor:
    """The number along a plate of the member of some sites that each term reads, (terms,)."""
    number, several = (torch.zeros(len(terms), dtype=dtype) for dtype in (torch.long, torch.bool))
    touched = several.clone()
    place, member = torch.cat([site.by_member((plate,)) for site in sites], 1), torch.arange(plate.size, device="cpu")
    for bit in range((plate.size - 1).bit_length()):
        one = (member >> bit) % 2 == 1
        changes = []
        for moving in (one, ~one):
            moved, which = theta.clone(), place[moving].flatten().to(theta.device)
            moved[which] = other[which]
            now, rtol = _terms(density, moved, names), _ROUNDING * torch.finfo(terms.dtype).eps
            changes.append(~torch.isclose(now, terms, rtol=rtol, atol=0.0, equal_nan=True).cpu())
        several |= changes[0] & changes[1]
        touched |= changes[0] | changes[1]
        number += changes[0].long() << bit
    return torch.where(several, _SEVERAL, torch.where(touched, number, _NONE))


def _agreed(trials: list[Tensor]) -> Tensor:
    """One number of several trials: a term that reads other members in each reads several."""
    seen = torch.stack(trials)
    most, least = seen.amax(0), torch.where(seen == _NONE, seen.amax(0), seen).amin(0)
    return torch.where(most == least, most, _SEVERAL)


def _scores(density: ModelLogJoint, theta: Tensor) -> dict[str, Tensor]:
    """The log probabilities of one run at θ in the order of the sites."""
    order = density.layout.order
    values = density.layout.constrained(theta if order is None else theta[order.to(theta.device)])[0]
    return Scored(values, density.layout.shapes, {}).run(density)


def _names(scores: dict[str, Tensor]) -> list[str]:
    """The site of each term."""
    return [name for name, score in scores.items() for _ in range(score.numel())]


def _terms(density: ModelLogJoint, theta: Tensor, names: list[str]) -> Tensor:
    """The terms of one run in one vector, if they are those of the same sites."""
    scores = _scores(density, theta)
    if _names(scores) != names:
        raise MismatchError("the model has other sites, or more or fewer terms in them, at other values of its latents")
    return torch.cat([score.flatten().to(theta) for score in scores.values()])


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
            parents = _parents(torch.stack([group.numbers for group in inner], 1) if inner else None, inner)
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
        Level(group.plates, tuple(site.name for site in group.sites), len(group.place), group.width, _up(group, levels))
        for group in levels
    )
    last = sum(level.nodes for level in layout.levels) - root  # the number of the root
    parents = [parent if root or parent < last else -1 for parent in parents] + [-1] * root
    layout.forest = Forest(tuple(parents), tuple(level.size for level in layout.levels for _ in range(level.nodes)))
    layout.arrange(torch.cat([group.place.flatten() for group in levels]))
    if parents == _parents_by_plates(layout.levels):
        layout.terms = _terms_by_level(reads, inner, root)
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


def _parents(links: Tensor | None, inner: list[_Group]) -> list[int] | tuple[_Group, _Group]:
    """The parent of each node, the levels one after another and then a root; or two levels that cross."""
    counts = [len(group.place) for group in inner]
    starts = [sum(counts[:level]) for level in range(len(counts) + 1)]
    parents: list[int] = []
    for level, count in enumerate(counts):
        assert links is not None
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
        outer = levels[level.up]
        within = torch.arange(outer.nodes).reshape(
            [plate.size if plate in outer.plates else 1 for plate in level.plates]
        )
        parents += (starts[level.up] + within.expand([plate.size for plate in level.plates]).flatten()).tolist()
    return parents


def _terms_by_level(reads: Reads, inner: list[_Group], root: int) -> dict[str, int]:
    """The innermost level that each site reads."""
    terms: dict[str, int] = {}
    for level, group in reversed([*enumerate(inner)]):
        terms |= {reads.names[int(term)]: level for term in (group.links[:, 0] != _NONE).nonzero()}
    return {**({name: len(inner) for name in reads.names} if root else {}), **terms}
