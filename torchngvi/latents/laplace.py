"""A log joint of the hyperparameters alone, its many latents integrated out by Laplace's approximation.

    log p(y, θ) ≈ log p(y, û, θ) + (D/2) log 2π - ½ log|H|,     û = argmax_u log p(y, u, θ),  H = -∇²_u log p(y, û, θ)

(Tierney and Kadane 1986; Rue, Martino and Chopin 2009.)  It is exact where u given y and θ is Gaussian.  H is sparse:
its entries come from coloured Hessian-vector products, its factor from a chain of blocks, and the gradient in θ from
the adjoint, see `torchngvi.latents.modes`.
"""

import contextlib
import copy
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Self, final

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior, Target, where_members
from torchngvi.latents.modes import Curvature, Joint, Layout, Modes, check_pattern, find_modes, probed_pairs
from torchngvi.latents.summary import GaussianMembers, LaplaceError, Latents, Members, Rule, laplace_error, thetas_of
from torchngvi.models.checks import numbers
from torchngvi.numerics.arrays import ENTRIES_AT_ONCE
from torchngvi.structures import Pattern

# Which pairs of latents occur in one term of a log joint: as a user declares it, and how it is coloured
#
# The Hessian of a sum of terms has an entry (i, j) only where some term sees both latents.  The latents are coloured so
# that of two neighbours one has no other neighbour of the colour of the other: then the products of the Hessian with
# the indicators of the colours have each entry alone in one of its two rows (Coleman and Moré 1984; Gebremedhin, Manne
# and Pothen 2005, section 5).

_FORMS = (
    "a pattern is a table of integers (n, k), each row the latents that one term sees, pairs of neighbours for k = 2; "
    "or several such tables in a list, a sparse matrix with an entry for each pair, or a structure as arrow(...)"
)


def pairs_of(pattern: Any, dim: int) -> Tensor:
    """Read a pattern: the pairs of different latents that occur together in a term."""
    found = torch.cat([_pairs(part, dim) for part in _parts(pattern)]).cpu()
    outside = found[(found < 0) | (found >= dim)]
    if len(outside):
        raise InputError(
            f"the pattern names latent {int(outside[0])}, and the {dim} latents are numbered from 0 to {dim - 1}."
        )
    found = found[found[:, 0] != found[:, 1]]
    keys = torch.unique(found.amax(-1) * dim + found.amin(-1))  # sorted
    return torch.stack([keys // dim, keys % dim], -1)


def _parts(pattern: Any) -> list[Any]:
    """The tables of a list of tables; pairs in a list are one table."""
    if not isinstance(pattern, list | tuple):
        return [pattern]
    tables = [part for part in pattern if isinstance(part, Tensor) and part.ndim == 2]
    if len(tables) == len(pattern):
        return tables or [torch.zeros(0, 2, dtype=torch.long, device="cpu")]
    return [pattern]


def _pairs(pattern: Any, dim: int) -> Tensor:
    """The pairs of one table, matrix or structure, (E, 2), with repetitions."""
    if isinstance(pattern, Pattern):
        rows, columns = pattern.positions()
        own = (rows < dim) & (columns < dim)  # what follows are global coordinates
        return torch.stack([rows[own], columns[own]], -1)
    if hasattr(pattern, "tocoo"):  # of SciPy
        matrix = pattern.tocoo()
        _check_square(tuple(matrix.shape), dim)
        return torch.stack([torch.as_tensor(matrix.row).long(), torch.as_tensor(matrix.col).long()], -1)
    if isinstance(pattern, Tensor) and pattern.layout != torch.strided:
        _check_square(tuple(pattern.shape), dim)
        return pattern.to_sparse_coo().coalesce().indices().mT
    try:
        table = torch.as_tensor(pattern)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{_FORMS}; got {type(pattern).__name__}.") from error
    if table.numel() == 0:
        return torch.zeros(0, 2, dtype=torch.long, device="cpu")
    if table.ndim != 2 or table.is_floating_point() or table.is_complex() or table.dtype == torch.bool:
        raise InputError(f"{_FORMS}; got {table.dtype} of shape {tuple(table.shape)}.")
    if len(table) == 2 and table.shape[1] > 2:
        raise InputError(
            f"a pattern of shape {tuple(table.shape)} may hold pairs in its columns, or two terms of {table.shape[1]} "
            "latents each. Of pairs, pass pattern.T, shape (n, 2); of two terms, a list of two tensors, one a term, "
            f"(1, {table.shape[1]}) each."
        )
    first, second = torch.combinations(torch.arange(table.shape[1], device=table.device), 2).unbind(-1)
    return torch.stack([table[:, first].flatten(), table[:, second].flatten()], -1).long()


def _check_square(shape: tuple[int, ...], dim: int) -> None:
    if shape != (dim, dim):
        raise InputError(f"a sparse matrix is a pattern if it is {dim} x {dim}, one row a latent; got shape {shape}.")


def neighbours(
    pairs: Tensor,  # (E, 2)
    dim: int,
) -> list[list[int]]:
    """List the neighbours of every latent, in rising order."""
    both = torch.cat([pairs, pairs.flip(-1)])
    keys = (both[:, 0] * dim + both[:, 1]).sort().values
    ends = torch.bincount(keys // dim, minlength=dim).cumsum(0).tolist()
    others = (keys % dim).tolist()
    return [others[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def colours(around: list[list[int]]) -> list[int]:
    """Colour the latents so that each entry of the Hessian stands alone in one of its two rows, greedily."""
    found = [-1] * len(around)
    seen = [Counter[int]() for _ in around]  # the colours of the neighbours
    for latent in sorted(range(len(around)), key=lambda one: -len(around[one])):
        taken = set[int]()
        for near in around[latent]:
            if found[near] < 0:
                taken.update(seen[near])
            else:
                taken.add(found[near])
                taken.update(found[one] for one in around[near] if seen[one][found[near]] > 1)
        colour = 0
        while colour in taken:
            colour += 1
        found[latent] = colour
        for near in around[latent]:
            seen[near][colour] += 1
    return found


def in_a_narrow_order(around: list[list[int]]) -> list[list[int]]:
    """Order each connected part so that neighbours stand close together (Cuthill and McKee 1969)."""
    degrees = [len(near) for near in around]
    seen = [False] * len(around)
    parts = []
    for latent in range(len(around)):
        if seen[latent]:
            continue
        part, rounds = _outwards(around, degrees, latent)
        while True:
            other, more = _outwards(around, degrees, part[-1])
            if more <= rounds:
                break
            part, rounds = other, more
        for one in part:
            seen[one] = True
        parts.append(other if _width(around, other) < _width(around, part) else part)
    return sorted(parts, key=len, reverse=True)


def _outwards(around: list[list[int]], degrees: list[int], start: int) -> tuple[list[int], int]:
    """All that can be reached, neighbours of few neighbours first, and the number of rounds."""
    order, ring, rounds = [start], [start], 0
    reached = {start}
    while ring:
        following = []
        for latent in ring:
            fresh = [one for one in around[latent] if one not in reached]
            reached.update(fresh)
            following += sorted(fresh, key=degrees.__getitem__)
        order += following
        ring, rounds = following, rounds + 1
    return order, rounds


def _width(around: list[list[int]], order: list[int]) -> int:
    """The largest distance of neighbours in an order."""
    place = {latent: k for k, latent in enumerate(order)}
    return max((abs(place[one] - k) for k, latent in enumerate(order) for one in around[latent]), default=0)


_MOST = 2**30  # of those of one θ
_GRAPH = 16  # numbers for each latent and colour that a graph is taken to hold


_BESIDE = 0.3  # of a standard normal: how far from `at` the pattern is looked at once more


def _probed(log_joint: Joint, thetas: Iterable[Tensor], u: Tensor) -> Tensor:
    """The pairs at the first value of theta, with those at the others where the log joint has them."""
    first, *others = thetas
    found = [probed_pairs(log_joint, first, u)]
    for theta in others:
        with contextlib.suppress(InputError):
            found.append(probed_pairs(log_joint, theta, u))
    return torch.cat(found).unique(dim=0)


@final
class MarginalLaplace(Target):
    """The log joint of hyperparameters θ with latents u integrated out by Laplace's approximation: see `marginal`.

    A value takes a search for the mode of u, one factorisation of a sparse matrix a step; a gradient in θ about as much
    again as two of these steps, whatever the number of hyperparameters.  No D x D matrix is formed.  Where no mode is
    found the value is NaN, which a fit passes by.

    Args:
        log_joint: log p(y, u, θ), a function of θ (S, P) and u (S, D) -> (S,), three times differentiable in u.
        latents: the number D of latents, or where the search for their mode begins, (D,).
        at: a typical θ, (P,).
        pattern: which latents occur together in a term; None to find out, for at most 2,048 latents.

    Attributes:
        dim: the number P of hyperparameters.
        latents_dim: the number D of latents.
        start: the mode of u at ``at``, where every other search begins, (D,).
        drift: the derivative of the mode in θ there, (P, D), along which a search begins if that is nearer.
        colours: the number of Hessian-vector products that give the Hessian.
        rule: of a quadrature in the place of Laplace's approximation; None for that itself.

    Raises:
        InputError: as `marginal`.

    >>> def joint(theta, u):
    ...     return -0.5 * (u - theta).square().sum(-1) - 0.5 * theta.square().sum(-1)
    >>> target = MarginalLaplace(joint, 5, torch.zeros(1, dtype=torch.float64))
    >>> target
    MarginalLaplace(1 hyperparameters, 5 latents in 1 colours)
    >>> round(target.log_joint(torch.ones(1, dtype=torch.float64)).item(), 6)  # 5/2 log 2π - ½
    4.094693
    """

    temperature = 1.0

    def __init__(self, log_joint: Joint, latents: int | Tensor, at: Tensor, pattern: Any = None) -> None:
        if not callable(log_joint) or isinstance(log_joint, type):
            raise InputError(f"marginal takes a function of theta and the latents; got {type(log_joint).__name__}.")
        self.at = _vector("at", at, None)
        start = _start(latents, self.at)
        self.dim, self.latents_dim = len(self.at), len(start)
        own = torch.Generator().manual_seed(0)
        noise = torch.randn(len(start), generator=own, dtype=torch.float64, device="cpu").to(start)
        step = torch.randn(self.dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64, device="cpu")
        beside = self.at + _BESIDE * step.to(self.at)  # in general position, where no coupling vanishes by chance
        found = _probed(log_joint, (self.at, beside), start + noise) if pattern is None else pattern
        pairs = pairs_of(found, len(start))
        self.rule: Rule | None = None
        self.most = sys.maxsize  # values of θ in one call of the log joint, whatever the memory of the latents takes
        around = neighbours(pairs.cpu(), len(start))
        coloured = torch.tensor(colours(around), device=start.device)
        self.colours = int(coloured.max()) + 1
        self.layout = Layout(in_a_narrow_order(around), pairs.cpu(), start.device)
        if self.layout.numbers > _MOST:
            raise InputError(
                f"the pattern ties the latents together in blocks of {self.layout.block}, so that a factor has "
                f"{self.layout.numbers:.1e} numbers, more than {_MOST:.1e}. Leave what all latents share to theta, or "
                "integrate out fewer of them."
            )
        self.curvature = Curvature(log_joint, len(start), pairs.to(start.device), coloured)
        self.start = start
        self.drift: Tensor | None = None
        self.start = self._first_mode(noise)
        for theta in (self.at, beside):
            check_pattern(self.curvature, theta, self.start, noise)
        self.begin_at(self.at)

    def __repr__(self) -> str:
        return f"MarginalLaplace({self.dim} hyperparameters, {self.latents_dim} latents in {self.colours} colours)"

    # ---------------------------------------------------------------------------- as a target

    def check(self, q: Posterior) -> None:
        """Check that q is over the hyperparameters.

        Raises:
            InputError: if their number, the dtype or the device is another.
        """
        mine, at = q.mean_probe, self.at
        if q.dim != self.dim or mine.dtype != at.dtype or mine.device != at.device:
            raise InputError(
                f"q must be over the {self.dim} hyperparameters, {at.dtype} on {at.device}, as at= was; got "
                f"{q.dim} coordinates, {mine.dtype} on {mine.device}."
            )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return no tensors: those that the function depends on are unknown."""
        return ()

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute Laplace's log p(y, θ), (*sample, *batch), differentiable once; NaN where no mode of u is found."""
        if theta.shape[-1] != self.dim:
            raise InputError(f"theta has {self.dim} hyperparameters, as at= had; got shape {tuple(theta.shape)}.")
        return _Value.apply(theta.reshape(-1, self.dim), self).reshape(theta.shape[:-1])

    def begin_at(self, theta: Tensor) -> None:
        """Begin every search for a mode from that at another θ (P,), which changes values by rounding alone."""
        modes = self._modes(theta[None])
        if bool(modes.found):
            slopes = self.curvature.slopes_by_theta(theta, modes.u[0])
            drift = -modes.factor.solve(slopes.mT[None])[0].mT
            self.at, self.start, self.drift = theta, modes.u[0], drift if bool(drift.isfinite().all()) else None

    # ---------------------------------------------------------------------------- what follows a fit

    def latents(self, source: Any, draws: int = 64, generator: torch.Generator | None = None) -> Latents:
        """Compute the marginal distributions of the latents: mixtures over θ of their Gaussians given θ.

        The mean given θ is û + w, with w the first-order difference of mean and mode (`Curvature.slope`), the
        variances are the diagonal of H⁻¹.

        Args:
            source: a posterior of θ, the result of its fit, or values of θ, (S, P).
            draws: the number of θ that are drawn of a posterior.
            generator: of these draws.

        Returns:
            Means, standard deviations, quantiles, and joint draws.

        Raises:
            InputError: a source of another kind; a θ at which the latents have no mode.
        """
        theta = thetas_of(source, self.at, draws, generator)
        parts = [members.moments() for members in self.members(theta)]
        means, variances = (torch.cat(some) for some in zip(*parts, strict=True))
        return Latents(theta, means, variances.sqrt(), self.members)

    def draw(
        self,
        theta: Tensor,  # (S, P)
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw the latents once given each θ, (S, D); NaN where they have no mode."""
        drawn = []
        for part in self.chunks(theta):
            modes = self._modes(part)
            sample = self._given(part, modes).sample(1, generator)[0]
            drawn.append(torch.where(modes.found[:, None], sample, torch.nan))
        return torch.cat(drawn)

    def members(
        self,
        theta: Tensor,  # (S, P)
    ) -> Iterator[GaussianMembers | Members]:
        """Find the distributions of the latents given θ, for as many θ at once as the memory takes.

        Raises:
            InputError: as `modes`.
        """
        for part, modes in self.modes(theta):
            yield self._given(part, modes)

    def _given(self, theta: Tensor, modes: Modes) -> GaussianMembers | Members:
        if self.rule is not None:
            return Members.at(self.curvature, theta, modes, self.rule)
        return GaussianMembers.at(self.curvature, theta, modes)

    def laplace_error(
        self, source: Any, draws: int = 32, pairs: int = 256, generator: torch.Generator | None = None
    ) -> LaplaceError:
        """Estimate by how much log p(y, θ) exceeds its Laplace approximation, at draws of θ.

        Args:
            source: a posterior of θ, the result of its fit, or values of θ, (S, P).
            draws: the number of θ that are drawn of a posterior.
            pairs: of draws of the latents at each θ.
            generator: of all draws.

        Returns:
            The error and its standard error at each θ, and how far it moves the posterior mean of θ; see
            `torchngvi.latents.LaplaceError`.

        Raises:
            InputError: as `latents`; fewer than two pairs.
        """
        if isinstance(pairs, bool) or not isinstance(pairs, int) or pairs < 2:
            raise InputError(f"pairs is a number of pairs of draws, at least 2, which have a spread; got {pairs!r}.")
        theta = thetas_of(source, self.at, draws, generator)
        z = torch.randn(pairs, self.latents_dim, generator=generator, dtype=theta.dtype, device=theta.device)
        return laplace_error(theta, z, self.curvature, self.modes(theta))

    def by_quadrature(self, rule: Rule) -> Self | None:
        """The same by quadrature; None where two latents occur in one term, or one of them may not be any number."""
        at = self.at[None]
        if len(self.curvature.pairs) or Members.at(self.curvature, at, self._modes(at), rule).outside:
            return None
        other = copy.copy(self)
        other.rule = rule
        return other

    @torch.no_grad()
    def error_beside(
        self,
        other: Self,  # without the approximation
        theta: Tensor,  # (S, P)
    ) -> LaplaceError:
        """Compare log p(y, θ) with that by quadrature."""
        error = other.log_joint(theta) - self.log_joint(theta)
        return LaplaceError(theta, error, torch.zeros_like(error), torch.zeros_like(error) > 0)

    def quadrature_error(
        self,
        theta: Tensor,  # (S, P)
    ) -> str:
        """Say by how much the quadrature changes with half of its nodes, in a clause.

        Raises:
            InputError: as `latents`; latents that are integrated out by Laplace's approximation.
        """
        if self.rule is None:
            raise InputError("the latents are integrated out by Laplace's approximation; see laplace_error.")
        errors = [each.error().abs().amax() for each in self.members(theta) if isinstance(each, Members)]
        return (
            "the members are integrated by quadrature, which half of its nodes change by "
            f"{float(max(errors)):.1g} nats at {len(theta)} values of theta."
        )

    def modes(
        self,
        theta: Tensor,  # (S, P)
    ) -> Iterator[tuple[Tensor, Modes]]:
        """Find the modes of the latents, for as many θ at once as the memory takes.

        Raises:
            InputError: if there is none at some θ.
        """
        for part in self.chunks(theta):
            modes = self._modes(part)
            if not bool(modes.found.all()):
                where = part[~modes.found][0].tolist()
                raise InputError(f"the latents have no mode at theta = {[round(x, 4) for x in where]}.")
            yield part, modes

    def chunks(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Tensor, ...]:
        """Split values of θ so that the blocks of all of them fit the memory."""
        nodes = self.colours if self.rule is None else len(self.rule.t)
        each = max(self.layout.numbers, _GRAPH * nodes * self.latents_dim)
        return theta.split(max(1, min(ENTRIES_AT_ONCE // each, self.most)))

    def _modes(self, theta: Tensor) -> Modes:
        """The modes, from that at ``at``, or from where it moves to with θ to first order, if the density is larger."""
        still = self.start.expand(len(theta), -1)
        if self.drift is None:
            return find_modes(self.curvature, self.layout, theta, still)
        moved = still + (theta - self.at) @ self.drift
        with torch.no_grad():
            before, after = self.curvature.energy(theta.repeat(2, 1), torch.cat([still, moved])).chunk(2)
        return find_modes(self.curvature, self.layout, theta, where_members(after < before, moved, still))

    def value(
        self,
        theta: Tensor,  # (S, P)
        differentiate: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute the values (S,) and, where wanted, their gradients in θ (S, P)."""
        modes = self._modes(theta)
        gradient = torch.zeros_like(theta)
        if self.rule is not None:
            members = Members.at(self.curvature, theta, modes, self.rule)
            value = members.log_integral()
            if differentiate:
                gradient = members.gradient(self.curvature, theta)
        else:
            value = 0.5 * self.latents_dim * math.log(2 * math.pi) - modes.energy - 0.5 * modes.factor.log_det()
            if differentiate:
                inverse = modes.factor.selected_inverse()
                gradient = self.curvature.adjoint(theta, modes.u, inverse, modes.factor.solve)
        return torch.where(modes.found, value, torch.nan), torch.where(modes.found[:, None], gradient, torch.nan)

    # ---------------------------------------------------------------------------- what is checked at the start

    def _first_mode(self, noise: Tensor) -> Tensor:
        """The mode at the typical θ."""
        modes = self._modes(self.at[None])
        if bool(modes.found):
            return modes.u[0]
        if not bool(modes.energy.isfinite()):
            raise InputError(
                f"the log joint must be finite at theta = at with the latents where their search begins; got "
                f"{-float(modes.energy)}. Give another at=, or latents= as a vector to begin from."
            )
        check_pattern(self.curvature, self.at, modes.u[0], noise)  # with a wrong Hessian it finds none
        raise InputError(
            f"Newton's method finds no mode of the latents at theta = at: after {modes.steps} steps the log joint "
            f"rises no further, and its curvature is {'not ' if bool(modes.damped) else ''}that of a maximum. Give "
            "every latent a proper prior, another at=, or latents= as a vector to begin from."
        )


class _Value(torch.autograd.Function):
    """Values with their gradients, as many θ at once as the memory takes."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, target: MarginalLaplace) -> Tensor:
        parts = [target.value(part, ctx.needs_input_grad[0]) for part in target.chunks(theta.detach())]
        values, gradients = (torch.cat(some) for some in zip(*parts, strict=True))
        ctx.save_for_backward(gradients)
        return values

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # for a second derivative, of which there is none
            raise InputError(
                "a marginal log joint is differentiable once; got a call for its second derivatives. Use fit(q, "
                "target), or an estimator that takes gradients, such as Stein."
            )
        (gradients,) = ctx.saved_tensors
        return upstream[:, None] * gradients, None


def _vector(name: str, value: Any, like: Tensor | None) -> Tensor:
    """A finite vector."""
    vector = numbers(name, value, like)
    if vector.ndim != 1 or not len(vector):
        raise InputError(f"{name} is one vector; got shape {tuple(vector.shape)}.")
    return vector


def _start(latents: Any, at: Tensor) -> Tensor:
    """Where the search for the first mode begins, (D,)."""
    if isinstance(latents, int | float):
        return at.new_zeros(read_size("latents", latents, "is their number, or a vector to begin from,"))
    return _vector("latents", latents, at)


def marginal(log_joint: Joint, latents: int | Tensor, at: Tensor, *, pattern: Any = None) -> MarginalLaplace:
    """Integrate many latents out of a log joint by Laplace's approximation, which leaves the hyperparameters to `fit`.

        log p(y, θ) ≈ log p(y, û, θ) + (D/2) log 2π - ½ log|H|,  H = -∇²_u log p(y, û, θ)  at the mode û of u given θ.

    Use it for models with a field of latents, such as disease maps, spatial and temporal effects or groups, of
    which each term of the log joint sees a few: the Hessian is sparse, and its factor costs about D² operations for a
    lattice of D latents, D for a chain or for groups.  The likelihood may be any with three derivatives; for Gaussian
    noise the result is exact, otherwise `MarginalLaplace.laplace_error` says how far it is off.  The gradient in θ is
    exact too, by the implicit function theorem, the change of log|H| with û included (Margossian 2023).

    Args:
        log_joint: log p(y, u, θ), a function of θ (S, P) and u (S, D) -> (S,).
        latents: the number D of latents, or where the search for their mode begins, (D,); by default at 0.
        at: a typical θ, (P,): the search at all other θ begins at the mode of u there. Its dtype and device are those
            of all that follows.
        pattern: which latents occur together in a term: a table of integers (n, k), each row the latents of one term,
            pairs of neighbours for k = 2; a list of such tables; a sparse matrix with an entry for each pair; or a
            structure such as an `arrow`, of whose D first coordinates the latents are. None finds it by D products
            with the Hessian, for at most 2,048 latents.

    Returns:
        A target for `torchngvi.fit`, with `latents` for what the data say of them and `laplace_error`.

    Raises:
        InputError: a log joint that is no function, does not return one value for each θ, or does not depend on the
            latents; a pattern of another form, or one that misses an entry of the Hessian, which is named; no mode of
            the latents at ``at``; a pattern so wide that its factor would have more than 2³⁰ numbers.

    >>> from torchngvi import CholeskyGaussian, fit
    >>> y = torch.tensor([1.0, 2.0, 0.0, 3.0], dtype=torch.float64)
    >>> def joint(theta, u):  # counts around a common mean
    ...     mean, spread = theta[..., :1], theta[..., 1:].exp()
    ...     data = (y * u - u.exp()).sum(-1) - 0.5 * ((u - mean) / spread).square().sum(-1) - 4 * theta[..., 1]
    ...     return data - 0.5 * theta.square().sum(-1)
    >>> target = marginal(joint, latents=4, at=torch.zeros(2, dtype=torch.float64))
    >>> q = CholeskyGaussian(2, dtype=torch.float64)
    >>> fit(q, target, progress=False, examine=False).converged
    True
    >>> target.latents(q.mean[None]).mean.shape
    torch.Size([4])
    """
    return MarginalLaplace(log_joint, latents, at, pattern)
