"""Many outcomes of one design in one call: thousands of regressions or mixed models, each with its own posterior.

Genes counted in the same samples, questions answered by the same people, pixels of the same images: the rows, columns
and groups are shared, and the outcome y_g of member g = 1, ..., G differs.  Each member is a model of its own,

    log p(y_g, θ_g) = log p_g(θ_g) + Σ_i log ∫ Π_{j ∈ i} p(y_gj | x_jᵀa + z_jᵀC u, φ) N(u; 0, I) du,

with its own coefficients, standard deviations over groups and parameters of the family, and with priors in the units of
its own outcome.  The steps are those of one model (`torchngvi.tables.globals`), and each of them is one table of all
members: quasi-Newton steps to the mode of the globals with acceptance in each member, modes of u carried along; the
Hessian by differences of gradients at 2P points, which also says how modes of u follow the globals; draws about the
mode, at each of which u takes one Newton step; Pareto-smoothed weights.  Members that are done leave the table.  No
member sees another: random numbers are the same for all, and whatever decides something decides it for one member.

Tensors have members before values of the globals: θ (M, C, P), effects (M, C, n, r).
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from tqdm import tqdm

from torchngvi.arguments import read_instance, read_seed, read_size, read_tensor
from torchngvi.diagnostics.importance import USELESS, Smoothed, smoothed
from torchngvi.errors import InputError
from torchngvi.numerics import linalg
from torchngvi.tables.families import Family, family_of
from torchngvi.tables.globals import mixture_log_density, spread_evenly
from torchngvi.tables.integrated import Block, Integrated, Integration
from torchngvi.tables.model import TableModel
from torchngvi.tables.parts import Coordinates, Design, Globals, Weighted, replace_where, take_rows
from torchngvi.tables.priors import Priors, locations_and_unit, settle
from torchngvi.tables.table import Marginals


@dataclass(frozen=True)
class ManySettings:
    """All numbers of `fit_many`, each with what chose it; "the bench" is `benchmarks/many_models.py`.

    Attributes:
        draws: weighted draws of the globals of each member, at least 100. With 100, which fill the space evenly, means
            are right to .05 sds and sds to 10 %, with 200 to .04 and 8 % (the bench).
        orders: numbers of quadrature nodes in each dimension of the effects. A member takes the first at which its log
            joint differs from that of the next by less than ``settled``, up to a constant, at the 2P points ``probe``
            sds from its mode; then weights of draws differ by about that.
        settled: nats; weights then differ by 2 %.
        at_once: numbers in one table of rows, members, values and nodes: it bounds the memory, about 15 such tables of
            8 bytes a number, and decides how many members make a chunk. Tables of 4·10⁶ took twice the time of 10⁶.
        begin: log τ where the search begins, in units of y.
        first: by which coordinates are moved for the Hessian where it begins, or 1/√N if that is less.
        steps: of the search in each order; 1,000 members of the bench took 6.5 on average and 13 at most.
        end: of the search: gᵀH⁻¹g, twice the nats that a Newton step still promises.
        stride: the longest step in any coordinate, which is a number of sds of y or of its link, or a logarithm.
        convex: the curvature along a step, in that of the Hessian so far, from which on it is updated.
        stuck: Levenberg's shift, in units of the diagonal, from which on the Hessian is found again by differences.
        apart: sds between the mode and the points of the differences for the Hessian.
        noise: nats by which a step whose gradients say that it gains may seem to lose: what a quadrature with few nodes
            leaves, since they move with the mode.
        least: the smallest eigenvalue of a Hessian on the way; default priors have .16 for coefficients.
        mode: the search for modes of u ends where a step of Newton's method promises less than ½ mode³ nats.
        mode_steps: of the search for modes of u. From 0 it takes about 10, from a neighbour 3.
        dof: degrees of freedom of the wider half of the draws.
        wider: their scale, in that of the Gaussian half.
        probe: sds from the mode at which the fall of the log joint says how far draws go to that side: a density of
            log τ that falls like τ itself is wider to the left. It took the share of members with a k-hat above .7
            from 8 to 5 % before any second round, and the error of means from .06 to .045 sds.
        reach: the least and the largest such width, in sds of the Gaussian at the mode.
        k_hat: above which draws come a second time, from their own weighted moments.
        effective: the share of draws that have to be effective, or they come a second time.
        again: how many such rounds there are; after two few members of the bench are above ``k_hat``.
        ridge: the share by which the variances of these moments are enlarged, since 60 draws can miss a direction.
    """

    draws: int = 100
    orders: tuple[int, ...] = (5, 7, 9, 15, 25, 41, 61)
    settled: float = 0.02
    at_once: int = 1_000_000
    begin: float = -0.7
    first: float = 0.1
    steps: int = 60
    end: float = 1e-6
    stride: float = 2.0
    convex: float = 1e-3
    stuck: float = 1e4
    apart: float = 0.3
    noise: float = 0.1
    least: float = 1e-2
    mode: float = 1e-5
    mode_steps: int = 60
    dof: float = 5.0
    wider: float = 1.2
    probe: float = 2.0
    reach: tuple[float, float] = (0.5, 4.0)
    k_hat: float = 0.5
    effective: float = 0.5
    again: int = 2
    ridge: float = 0.02


class ManyResult:
    """The posteriors of many models of one design, as `fit_many` returns them.

    Attributes:
        design: the shared rows.
        family: the likelihood.
        coordinates: of the globals, shared by all members.
        names: of the members.
        theta: draws of the globals, (G, S, P).
        weights: of the draws, which sum to 1 in each member, (G, S).
        k_hat: of the weights, (G,): above 0.7 the intervals of a member are not to be believed.
        effective: the effective number of draws, (G,).
        converged: whether the search for the mode has ended well, (G,).
        mode: of the globals, (G, P).
        log_joint: log p(y, θ) at the mode, (G,).
        nodes: of the quadrature, (G,); 1 without a grouping factor.
    """

    def __init__(
        self,
        design: Design,
        family: Family,
        coordinates: Coordinates,
        Y: Tensor,  # (N, G)
        priors: Mapping[str, Any] | str | None,
        names: tuple[str, ...],
        found: "_Found",
    ) -> None:
        self.design, self.family, self.coordinates, self.names = design, family, coordinates, names
        self.theta, self.weights, self.k_hat, self.effective = found[:4]
        self.converged, self.mode, self.log_joint, self.nodes = found[4:8]
        self._promise, self._Y, self._priors = found.promise, Y, priors

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        bad = len(self.doubtful)
        fine = "all converged with weights to believe" if not bad else f"{bad} doubtful, see .doubtful"
        return f"<ManyResult: {len(self)} {self.family.name} models of {len(self.design.X)} rows; {fine}>"

    @cached_property
    def globals(self) -> Globals:
        """Draws of the globals in the units of the user: the fields of `Globals`, each (G, S, ...)."""
        return self.coordinates.to_user(self.theta)

    @cached_property
    def coefficients(self) -> Marginals:
        """The coefficients of the columns of X, the intercept at X = 0."""
        return self._marginals(self.design.names, self.globals.coefficients)

    @cached_property
    def sd(self) -> Marginals:
        """The standard deviations of effects over groups, and their correlations where there are several."""
        names, columns = list[str](), list[Tensor]()
        for factor, sd, correlation in zip(self.design.factors, self.globals.sd, self.globals.correlation, strict=True):
            names += [f"sd({effect}|{factor.name})" for effect in factor.effects]
            row, column = torch.tril_indices(sd.shape[-1], sd.shape[-1], -1, device="cpu")
            pairs = zip(row.tolist(), column.tolist(), strict=True)
            names += [f"cor({factor.effects[j]}, {factor.effects[i]}|{factor.name})" for i, j in pairs]
            columns += [sd, correlation[..., row, column]]
        return self._marginals(tuple(names), torch.cat(columns, -1) if columns else self.theta[..., :0])

    @cached_property
    def parameters(self) -> Marginals:
        """The parameters of the family, such as the size of negative binomial counts."""
        phi = self.globals.phi
        natural = self.family.natural(phi.flatten(0, 1)).unflatten(0, phi.shape[:2])
        return self._marginals(self.family.parameters, natural)

    @property
    def doubtful(self) -> dict[str, str]:
        """The members that are not to be believed as they are, each with a sentence that says why."""
        found = dict[str, str]()
        for g in (~self.converged).nonzero()[:, 0].tolist():
            found[self.names[g]] = (
                f"The search for the mode has ended where a step still promises {self._promise[g]:.2g} nats."
                if math.isfinite(self._promise[g])
                else "The search for the mode has ended where the log joint is not finite or has no maximum."
            )
        for g in (self.converged & ~(self.k_hat <= USELESS)).nonzero()[:, 0].tolist():
            found[self.names[g]] = (
                f"The weights of its draws have a k-hat of {self.k_hat[g]:.2f}: fit this member alone, .member({g})."
            )
        return found

    def draws(self, g: int) -> Weighted:
        """Return the weighted draws of the globals of one member, as the engine of one model has them."""
        return Weighted(self.theta[g], self.weights[g], float(self.k_hat[g]), float(self.effective[g]))

    def member(self, g: int) -> TableModel:
        """Return one member as a model of its own: its ``fit()`` predicts, compares and shows effects of groups."""
        y = (self._Y[:, g], *self.design.y[1:])
        return TableModel(self.design._replace(y=y), self.family, priors=self._priors)

    def table(self) -> Any:
        """Return all estimates as a `pandas.DataFrame`, one row for each member and global.

        Returns:
            Columns ``member``, ``parameter``, ``mean``, ``sd``, ``low``, ``high``, and ``converged`` and ``k_hat`` of
            the member.

        Raises:
            ImportError: without pandas.
        """
        import pandas

        parts = (self.coefficients, self.sd, self.parameters)
        names = [name for part in parts for name in part.names]
        columns: dict[str, Any] = {
            "member": [name for name in self.names for _ in names],
            "parameter": names * len(self),
        }
        for column in ("mean", "sd", "low", "high"):
            columns[column] = torch.cat([getattr(part, column) for part in parts], -1).flatten().cpu().numpy()
        for column in ("converged", "k_hat"):
            columns[column] = getattr(self, column).repeat_interleave(len(names)).cpu().numpy()
        return pandas.DataFrame(columns)

    def _marginals(self, names: tuple[str, ...], x: Tensor) -> Marginals:
        """Weighted moments and quantiles of draws (G, S, k)."""
        w = self.weights[..., None]
        mean = (w * x).sum(1)
        sd = (w * (x - mean[:, None]).square()).sum(1).sqrt()
        return Marginals(names, mean, sd, *(_quantile(x, w.expand_as(x), p) for p in (0.025, 0.975)))


def _quantile(x: Tensor, w: Tensor, p: float) -> Tensor:
    """Weighted quantiles along the draws of (G, S, k), (G, k), linear between draws at their expected shares."""
    # of equal weights k/(S + 1): with (k - ½)/S the 95 % intervals of 100 draws had the probability .942
    x, order = x.sort(1)
    w, each = w.gather(1, order), 1 / x.shape[1]
    middle = (w.cumsum(1) - 0.5 * w + 0.5 * each) / (1 + each)
    place = (middle < p).sum(1, keepdim=True).clamp(1, x.shape[1] - 1)
    low, high = middle.gather(1, place - 1), middle.gather(1, place)
    part = ((p - low) / (high - low).clamp_min(torch.finfo(x.dtype).tiny)).clamp(0, 1)
    return torch.lerp(x.gather(1, place - 1), x.gather(1, place), part)[:, 0]


def fit_many(
    design: Design,
    Y: Any,  # (G, N)
    family: str | Family = "negative_binomial",
    *,
    priors: Mapping[str, Any] | str | None = None,
    names: Any = None,
    settings: ManySettings | None = None,
    seed: int = 0,
    progress: bool = True,
) -> ManyResult:
    """Fit the same regression or mixed model to many outcomes at once.

    Use it where one design has hundreds to many thousands of outcomes, as genes of the same samples. Each member is a
    model with priors in the units of its own outcome and learns all of its own parameters, standard deviations over
    groups and dispersions among them; see `torchngvi.tables.many` for what is computed. Its answer is that of
    `torchngvi.tables.TableModel.fit` for one outcome, up to fewer draws.

    Ten thousand negative binomial mixed models of 200 rows and 20 groups take 12 ms each of one core and 0.2 GB in all
    (`benchmarks/many_models.py`); none failed to converge, and 46 had a k-hat above .7.

    Args:
        design: the rows, columns and at most one grouping factor, from `torchngvi.tables.design_of_arrays` or from
            ``Formula(...).design``; its own outcome is not looked at, and what is known beside it, such as the trials,
            is shared by all members.
        Y: the outcomes, (G, N), one row a member.
        family: a word, such as "negative_binomial", or a `torchngvi.tables.Family`.
        priors: by name, as in `torchngvi.regression`, the same for all members; those that are not named are the
            defaults in the units of each member.
        names: of the members; by default their numbers.
        settings: all numbers of the fit; ``ManySettings(draws=400)`` for intervals with another digit.
        seed: of the draws.
        progress: show a bar of members.

    Returns:
        The posteriors, with members first in every tensor.

    Raises:
        InputError: outcomes that are no (G, N) numbers or that the family cannot produce, several grouping factors,
            or a prior that the model does not have.

    >>> from torchngvi.tables.design import design_of_arrays
    >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64)
    >>> X = torch.stack([torch.ones_like(x), x], -1)
    >>> Y = torch.poisson((1 + torch.tensor([[0.0], [1.0]]) * x).exp(), torch.Generator().manual_seed(0))
    >>> design = design_of_arrays(X, Y[0], (X[:, :1], torch.arange(40) // 4))
    >>> result = fit_many(design, Y, "poisson", progress=False)
    >>> result.converged.tolist(), (result.coefficients.low[:, 1] > 0).tolist()  # a slope in the second alone
    ([True, True], [False, True])
    """
    settings = ManySettings() if settings is None else settings
    read_size("draws", settings.draws, "is the number of weighted draws of each member", at_least=100)
    seed = read_seed("seed", seed)
    joint, design, Y = _joint(design, Y, family, priors, settings)
    named = tuple(map(str, range(Y.shape[1]) if names is None else names))
    if len(named) != Y.shape[1]:
        raise InputError(f"names must be those of the {Y.shape[1]} members, one each; got {len(named)}.")
    with tqdm(total=Y.shape[1], disable=not progress, unit="model") as bar:
        found = _fitted(joint, seed, bar)
    return ManyResult(design, joint.family, joint.coordinates, Y, priors, named, found)


# ------------------------------------------------------------------------------------------------ the log joints


def _joint(
    design: Design, Y: Any, family: str | Family, priors: Mapping[str, Any] | str | None, settings: ManySettings
) -> tuple["_Joint", Design, Tensor]:
    """Check everything, and put the rows in order."""
    read_instance("design", design, Design, "is a design of rows, as TableModel.design or Formula.design")
    if len(design.factors) > 1:
        raise InputError(f"fit_many takes at most one grouping factor; the design has {len(design.factors)}.")
    read = read_tensor("Y", Y, finite=False).to(design.X)
    if read.ndim != 2 or read.shape[1] != len(design.X) or not len(read):
        raise InputError(
            f"Y must be (G, {len(design.X)}), one row for each member and one column for each row of the design; got "
            f"shape {tuple(read.shape)}."
        )
    here, kind = design.weights > 0, family_of(family)
    if kind.nominal:
        raise InputError(
            f"fit_many takes families of one linear predictor, and the {kind.name} family has one for each category. "
            "Fit the outcomes one by one, as TableModel(design._replace(y=(y,)), family).fit()."
        )
    G, N = len(read), int(here.sum())
    design = take_rows(design, here)
    of_all = tuple(one.expand(G, N).flatten() for one in (read[:, here], *design.y[1:], design.offset, design.weights))
    try:
        y = kind.checked(of_all[:-2])
        kind = kind.settled(of_all[:-2], of_all[-1], of_all[-2])
    except InputError as error:
        raise InputError(f"{error} Rows of members follow one another, {N} of each.") from error
    Y = y[0].unflatten(0, (G, N)).mT.contiguous()
    extras = tuple(one.unflatten(0, (G, N))[0] for one in y[1:])
    design = design._replace(y=(Y[:, 0], *extras))
    coordinates = Coordinates(design, len(kind.parameters), thresholds=not kind.intercept)
    own = settle(design, kind, coordinates, priors)
    return _Joint(design, kind, coordinates, Y, _Units.of(design, kind, coordinates, Y, own), settings), design, Y


class _Units(NamedTuple):
    """The units of members, θ = shift + scale ψ, in which searches and draws are, and the priors in them."""

    shift: Tensor  # (G, P)
    scale: Tensor  # (G, P)
    own: Tensor  # whether a coordinate has a prior that the user named, in the units of the user, (P,)
    usual: tuple[Tensor, Tensor]  # shift and scale of the data that the priors were settled on, (P,) each
    priors: Priors

    @classmethod
    def of(cls, design: Design, family: Family, coordinates: Coordinates, Y: Tensor, priors: Priors) -> Self:
        """Find location and unit of each member."""
        each = (design._replace(y=(y, *design.y[1:])) for y in Y.unbind(1))
        found = [locations_and_unit(of_member, family, coordinates.columns) for of_member in each]
        location, unit = Y.new_tensor([[level[0], size] for level, size in found]).unbind(1)
        p, P = coordinates.p, coordinates.dim
        logs = torch.zeros(P, dtype=Y.dtype, device=Y.device)
        place = p
        for r, length in zip(coordinates.sizes, coordinates.lengths[1:-1], strict=True):
            logs[place : place + r] = 1.0  # of log τ; correlations have no unit
            place += length
        noise = hasattr(family, "unit")  # a family of noise in the units of y: its parameters are logarithms of scales
        logs[place:] = float(noise)
        level = coordinates.columns.level(1.0).to(Y) if not coordinates.thresholds else logs.new_zeros(p)
        shift = logs * unit.log()[:, None]
        shift[:, :p] = location[:, None] * level
        scale = torch.ones_like(shift)
        scale[:, :p] = unit[:, None]
        usual = logs * math.log(priors.unit)
        usual[place:] = math.log(getattr(family, "unit", 1.0))
        usual[:p] = priors.location.to(Y)
        of_usual = torch.ones_like(usual)
        of_usual[:p] = priors.unit
        named = [name in priors.named for name, _ in priors.table()]
        if any(len(factor.effects) > 1 for factor in design.factors):  # one row of the table for all correlations
            pairs = coordinates.lengths[1] - coordinates.sizes[0]
            at = p + coordinates.sizes[0]
            named[at : at + 1] = [named[at]] * pairs
        return cls(shift, scale, torch.tensor(named, device=Y.device), (usual, of_usual), priors)

    def theta(self, psi: Tensor, members: Tensor) -> Tensor:  # (M, C, P)
        """θ of members."""
        return self.shift[members, None] + self.scale[members, None] * psi

    def log_prior(self, psi: Tensor, members: Tensor) -> Tensor:
        """log p(θ) of members, (M, C): a default prior is that of other data in their own units."""
        usual = self.usual[0] + self.usual[1] * psi
        ratio = torch.where(self.own, 1.0, self.usual[1] / self.scale[members]).log().sum(-1, keepdim=True)
        return self.priors.log_prob(torch.where(self.own, self.theta(psi, members), usual)) + ratio


class _Joint(Integrated):
    """log p(y, θ) of some members, as functions of ψ: of C values for each member, (M, C, ...)."""

    def __init__(
        self,
        design: Design,
        family: Family,
        coordinates: Coordinates,
        Y: Tensor,  # (N, G)
        units: _Units,
        many: ManySettings,
    ) -> None:
        numbers = Integration(0.5 * many.mode**3, many.mode_steps, math.inf, many.at_once)
        super().__init__(design._replace(y=(Y, *design.y[1:])), family, coordinates, units.priors, numbers)
        self.units, self.many, self.N = units, many, len(Y)
        self.members = torch.arange(Y.shape[1], device=Y.device)  # those that are here

    def of(self, index: Tensor) -> "_Joint":
        """Of some of the members."""
        new = copy.copy(self)
        new.members = self.members[index]
        return new

    def at_most(self, values: int, nodes: int) -> int:
        """How many members, or values of one, make a table."""
        return max(1, self.many.at_once // (self.N * values * nodes**self.r))

    def start(self) -> tuple[Tensor, Tensor]:
        """ψ = 0 (G, P), which is no effect of a column, g(ȳ), and a noise of s_y, but for log τ; and u = 0."""
        c = self.coordinates
        psi = c.X.new_zeros(len(self.members), c.dim)
        psi[:, c.p : c.p + self.r] = self.many.begin
        return psi, psi.new_zeros(len(psi), self.n, self.r)

    def _each(self, count: int) -> Tensor:
        """The member of each of so many values, those of a member together."""
        return self.members.repeat_interleave(count // len(self.members))

    def _pieces(self, count: int, nodes: int) -> Iterator[tuple[Block, slice]]:
        members = self._each(count)
        for block, part in super()._pieces(count, nodes):
            here = members[part]
            yield block._replace(y=(block.y[0][:, here], *block.y[1:]), members=here), part

    def _predictor(self, block: Block, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert block.members is not None
        return super()._predictor(block, self.units.theta(theta[:, None], block.members)[:, 0])

    def log_prior(self, theta: Tensor) -> Tensor:
        """Evaluate log p(θ) of members, (S,)."""
        return self.units.log_prior(theta[:, None], self._each(len(theta)))[:, 0]

    def energy(
        self,
        psi: Tensor,  # (M, C, P)
        u: Tensor,  # near the modes, (M, 1 or C, n, r)
        nodes: int,
        one_step: bool = False,
        gradient: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-log p(y, θ) (M, C), its gradient in ψ, and modes (M, C, n, r), each of which costs an evaluation of all."""
        M, C = psi.shape[:2]
        modes = u.expand(-1, C, -1, -1).flatten(0, 1).transpose(0, 1)
        found = self.values(psi.flatten(0, 1), modes, nodes, one_step, gradient)
        parts = (-found.value, -found.gradient, found.modes.transpose(0, 1))
        energy, slope, u = (part.unflatten(0, (M, C)) for part in parts)
        return energy, slope, u

    def of_draws(self, psi: Tensor, around: "_Mode", nodes: int) -> Tensor:  # psi (M, C, P)
        """log p(y, θ) (M, C), u one Newton step from where the mode is to be expected."""
        u = around.u + torch.einsum("mpnr,mcp->mcnr", around.follows, psi - around.psi[:, None])
        return -self.energy(psi, u, nodes, True, False)[0]


def _like(mask: Tensor, table: Tensor) -> Tensor:
    """A mask with the dimensions of a table."""
    return mask.reshape(*mask.shape, *[1] * (table.ndim - mask.ndim))


# ----------------------------------------------------------------------------------------------------- the mode


class _Mode(NamedTuple):
    """What a search knows of members, and in the end their modes."""

    psi: Tensor  # (M, P)
    energy: Tensor  # -log joint, (M,)
    slope: Tensor  # (M, P)
    H: Tensor  # (M, P, P)
    u: Tensor  # (M, 1, n, r)
    follows: Tensor  # du/dψ, (M, P, n, r)
    promise: Tensor  # gᵀH⁻¹g by the Hessian of differences, (M,)
    shift: Tensor  # Levenberg's, relative, (M,)

    def of(self, index: Tensor) -> "_Mode":
        """Of some members."""
        return _Mode(*(part[index] for part in self))

    def put(self, index: Tensor, new: "_Mode") -> None:
        """Replace some members."""
        for part, other in zip(self, new, strict=True):
            part[index] = other


def _search(joint: _Joint, psi: Tensor, u: Tensor, nodes: int) -> _Mode:
    """Find the modes of members by quasi-Newton steps, with a shift and with acceptance in each of them."""
    s = joint.many
    energy, slope, u = (x[:, 0] if x.ndim < 4 else x for x in joint.energy(psi[:, None], u[:, None], nodes))
    begin = torch.full_like(psi, min(s.first, joint.N**-0.5))
    nothing = torch.full_like(energy, torch.inf), torch.zeros_like(energy)
    state = _differenced(joint, _Mode(psi, energy, slope, psi, u, psi, *nothing), begin, nodes)
    out, left = _Mode(*(part.clone() for part in state)), torch.arange(len(psi), device=psi.device)
    for count in range(1, s.steps + 1):
        state = _stepped(joint, state, nodes)
        promise = _promise(state)
        near = (promise < s.end) | (state.shift > s.stuck) | (count == s.steps)
        done = torch.zeros_like(near)
        if bool(near.any()):
            at = near.nonzero()[:, 0]
            some = state.of(at)
            variance = linalg.cholesky(some.H)[0].cholesky_inverse().diagonal(dim1=-2, dim2=-1)
            some = _differenced(joint.of(at), some, s.apart * variance.sqrt().clamp_max(1.0), nodes)
            state.put(at, some)
            done[at] = some.promise < s.end
        end = done | (count == s.steps)
        out.put(left[end], state.of(end))
        if bool(end.all()):
            break
        left, joint, state = left[~end], joint.of(~end), state.of(~end)
    return out


def _promise(state: _Mode) -> Tensor:
    """gᵀH⁻¹g, (M,)."""
    return (state.slope * torch.linalg.solve_ex(state.H, state.slope)[0]).sum(-1)


def _stepped(joint: _Joint, at: _Mode, nodes: int) -> _Mode:
    """One step for each member; it is taken where it gains."""
    s = joint.many
    ridge = torch.diag_embed(at.shift[:, None] * at.H.diagonal(dim1=-2, dim2=-1))
    step = -torch.linalg.solve_ex(at.H + ridge, at.slope)[0].nan_to_num(0.0, 0.0, 0.0)
    step = step * (s.stride / step.abs().amax(-1, keepdim=True).clamp_min(s.stride))
    new = at.psi + step
    energy, slope, u = joint.energy(new[:, None], at.u, nodes)
    energy, slope = energy[:, 0], slope[:, 0]
    gains = ((at.slope + slope) * step).sum(-1) < 0  # by the trapezoid rule
    took = (energy <= at.energy) | (gains & (energy < at.energy + s.noise))
    took = took & energy.isfinite() & slope.isfinite().all(-1)
    change, expected = slope - at.slope, (at.H @ step[..., None])[..., 0]
    along, before = (change * step).sum(-1), (expected * step).sum(-1)
    good = took & (along > s.convex * before)  # where the curvature along the step is that of a minimum
    pairs = ((change, along), (expected, before))
    gained, lost = (x[:, :, None] * (x / size[:, None])[:, None] for x, size in pairs)
    shift = torch.where(took, torch.where(at.shift > 1e-2, 0.1 * at.shift, 0.0), (10 * at.shift).clamp_min(0.1))
    psi, energy, slope, u = replace_where(took, (new, energy, slope, u), (at.psi, at.energy, at.slope, at.u))
    (H,) = replace_where(good, (at.H + (gained - lost),), (at.H,))
    return _Mode(psi, energy, slope, H, u, at.follows, at.promise, shift)


def _differenced(joint: _Joint, at: _Mode, step: Tensor, nodes: int) -> _Mode:
    """The state with the Hessian, and how modes follow, by central differences at 2P points."""
    P, shift = at.psi.shape[1], torch.diag_embed(step)
    points = torch.cat([at.psi[:, None] + shift, at.psi[:, None] - shift], 1)
    _, slope, u = joint.energy(points, at.u, nodes)
    columns, follows = ((x[:, :P] - x[:, P:]) / _like(2 * step, x) for x in (slope, u))
    H = (0.5 * (columns + columns.mT)).nan_to_num(0.0, 0.0, 0.0)
    values, vectors, _ = linalg.eigh(H)
    fine = values[:, 0] > 0
    other = (vectors * values.abs().clamp_min(joint.many.least)[:, None]) @ vectors.mT
    state = at._replace(H=torch.where(_like(fine, H), H, other), follows=follows, shift=torch.zeros_like(at.shift))
    return state._replace(promise=torch.where(fine, _promise(state), torch.inf))


# ---------------------------------------------------------------------------------------------------- the draws


class _Found(NamedTuple):
    """All that is known of members in the end."""

    theta: Tensor  # (G, S, P)
    weights: Tensor  # (G, S)
    k_hat: Tensor  # (G,)
    effective: Tensor  # (G,)
    converged: Tensor  # (G,)
    mode: Tensor  # (G, P)
    log_joint: Tensor  # (G,)
    nodes: Tensor  # (G,)
    promise: Tensor  # (G,)


def _fitted(joint: _Joint, seed: int, bar: tqdm) -> _Found:
    """Search and draw in chunks of members; what a few nodes do not settle goes on to more of them."""
    s, (psi, u) = joint.many, joint.start()
    (G, P), like = psi.shape, psi
    base = [_Points.of(s, seed + k, psi) for k in range(1 + s.again)]
    k_hat, effective, log_joint, promise = like.new_full((4, G), torch.nan)
    converged, nodes = torch.zeros_like(joint.members, dtype=torch.bool), torch.zeros_like(joint.members)
    draws, even = like.new_zeros(G, s.draws, P), like.new_full((G, s.draws), 1 / s.draws)
    found = _Found(draws, even, k_hat, effective, converged, torch.zeros_like(psi), log_joint, nodes, promise)
    left = joint.members
    for order, following in pairwise((*s.orders, 0) if joint.r else (1, 0)):
        on = list[Tensor]()
        for index in left.split(joint.at_most(2 * P, order)):
            some = joint.of(index)
            mode = _search(some, psi[index], u[index], order)
            converged = mode.promise < s.end
            psi[index], u[index] = mode.psi, mode.u[:, 0]
            root = _frame(mode)
            points = mode.psi[:, None] + s.probe * torch.cat([root.mT, -root.mT], 1)
            at = some.of_draws(points, mode, order)
            settled = torch.ones_like(converged)
            if following:
                change = some.of_draws(points, mode, following) - at
                settled = converged & ((change - change.mean(1, keepdim=True)).abs().amax(1) < s.settled)
                settled |= mode.promise.isinf()  # there is no maximum, and more nodes give none
            on.append(index[~settled])
            drawn = (settled & converged).nonzero()[:, 0]
            for few in drawn.split(joint.at_most(s.draws, order)) if len(drawn) else ():
                of = mode.of(few)
                theta, smooth = _drawn(some.of(few), of, root[few], at[few], base, order)
                here = index[few]
                found.theta[here], found.weights[here] = theta, smooth.log_weights.mT.exp()
                found.k_hat[here], found.effective[here] = smooth.k_hat, smooth.effective
            ended = index[settled]
            found.converged[ended], found.promise[ended] = converged[settled], mode.promise[settled]
            found.mode[ended] = joint.units.theta(mode.psi[settled, None], ended)[:, 0]
            found.log_joint[ended], found.nodes[ended] = -mode.energy[settled], order
            bar.update(len(ended))
        left = torch.cat(on)
        if not len(left):
            break
    return found


class _Points(NamedTuple):
    """Where draws are: half of them Gaussian, half of them Student's t."""

    share: Tensor  # (S, P), uniform, evenly spread (Sobol' points, scrambled)
    factor: Tensor  # (S, 1), of the length
    turn: Tensor  # of each member, by which its points are shifted, so that errors of members are independent, (G, P)

    @classmethod
    def of(cls, s: ManySettings, seed: int, like: Tensor) -> "_Points":
        """Draw them for members (G, P); the squared lengths of the t half are stratified too."""
        generator, half = torch.Generator().manual_seed(seed), s.draws // 2
        share = [spread_evenly(n, like.shape[1], generator) for n in (half, s.draws - half)]
        wide = torch._standard_gamma(
            torch.full((64 * (s.draws - half),), 0.5 * s.dof, dtype=torch.float64, device="cpu"), generator
        )
        chi2 = 2 * wide.sort().values[32::64][torch.randperm(s.draws - half, generator=generator, device="cpu")]
        factor = torch.cat([torch.ones(half, dtype=torch.float64, device="cpu"), s.wider * (s.dof / chi2).sqrt()])
        turn = torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu")
        return cls(torch.cat(share).to(like), factor[:, None].to(like), turn.to(like))

    def of_members(self, members: Tensor) -> Tensor:
        """The points of some members, (M, S, P)."""
        return (self.share + self.turn[members, None]).frac().clamp(1e-9, 1 - 1e-9)


def _frame(mode: _Mode) -> Tensor:
    """R, upper triangular with R Rᵀ = H⁻¹: the last coordinates, logarithms of scales, move the others with them."""
    return linalg.triangular_inverse(linalg.cholesky(mode.H)[0]).mT


def _drawn(
    joint: _Joint, mode: _Mode, root: Tensor, probes: Tensor, base: list[_Points], nodes: int
) -> tuple[Tensor, Smoothed]:
    """Weighted draws of θ (M, S, P): about the mode, and where their weights are poor from their own moments."""
    s = joint.many
    fall = (-mode.energy[:, None] - probes).nan_to_num(nan=torch.inf).clamp_min(1e-3)
    reach = (s.probe / (2 * fall).sqrt()).clamp(*s.reach).unflatten(1, (2, -1))
    psi, smooth = _weighed(joint, mode, mode.psi, root, reach, base[0], nodes)
    for points in base[1:]:
        poor = ~((smooth.k_hat <= s.k_hat) & (smooth.effective >= s.effective * s.draws))
        at = poor.nonzero()[:, 0]
        if not len(at):
            break
        frame = _moments(psi[at], smooth.log_weights.mT[at].exp().nan_to_num(1 / s.draws), s)
        new, other = _weighed(joint.of(at), mode.of(at), *frame, points, nodes)
        before, after = (x.effective / x.k_hat.clamp_min(s.k_hat) for x in (smooth, other))
        better = ~(after <= before[at])
        to = at[better]
        psi[to], smooth.k_hat[to] = new[better], other.k_hat[better]
        smooth.log_weights[:, to] = other.log_weights[:, better]
    return joint.units.theta(psi, joint.members), smooth


def _moments(psi: Tensor, w: Tensor, s: ManySettings) -> tuple[Tensor, Tensor, Tensor]:
    """Centre, root, and the widths to both sides, of weighted draws."""
    centre = (w[..., None] * psi).sum(1)
    apart = psi - centre[:, None]
    covariance = torch.einsum("ms,msp,msq->mpq", w, apart, apart)
    covariance = covariance + s.ridge * torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))
    root = linalg.reverse_cholesky(covariance)[0]
    white = torch.linalg.solve_triangular(root, apart.mT, upper=True).mT
    sides = [white.clamp_min(0.0), white.clamp_max(0.0)]
    widths = [(w[..., None] * x.square()).sum(1) / (w[..., None] * (x != 0)).sum(1).clamp_min(1e-6) for x in sides]
    return centre, root, torch.stack(widths, 1).sqrt().clamp(s.reach[0], s.wider * 2)


def _weighed(
    joint: _Joint, mode: _Mode, centre: Tensor, root: Tensor, reach: Tensor, points: _Points, nodes: int
) -> tuple[Tensor, Smoothed]:
    """Draws of ψ about a centre, of widths (M, 2, P) to the right and to the left of each axis, with their weights."""
    # continuous along each axis: the right side has the probability right/(right + left); Geweke's (1989) jumps
    s, P = joint.many, root.shape[-1]
    right, left = reach[:, :1], reach[:, 1:]
    edge, share = left / (left + right), points.of_members(joint.members)
    to_left = share < edge
    tail = 0.5 * torch.where(to_left, share / edge, (1 - share) / (1 - edge))
    z = -torch.special.ndtri(tail.clamp(1e-12, 0.5)) * points.factor  # |z|
    psi = centre[:, None] + torch.where(to_left, -left, right) * z @ root.mT
    log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1) + (0.5 * reach.sum(1)).log().sum(-1)
    log_q = mixture_log_density(z.square().sum(-1), P, s.wider, s.dof) - log_det[:, None]
    log_p = joint.of_draws(psi, mode, nodes).nan_to_num(nan=-torch.inf)
    return psi, smoothed((log_p - log_q).mT)
