"""A log joint of the hyperparameters alone, its many latents integrated out by Laplace's approximation.

    log p(y, θ) ≈ log p(y, û, θ) + (D/2) log 2π - ½ log|H|,     û = argmax_u log p(y, u, θ),  H = -∇²_u log p(y, û, θ)

(Tierney and Kadane 1986; Rue, Martino and Chopin 2009.)  It is exact where u given y and θ is Gaussian.  H is sparse:
its entries come from coloured Hessian-vector products, its factor from a chain of blocks, and the gradient in θ from
the adjoint, see `torchngvi.latents.curvature`.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior, Target
from torchngvi.latents.chain import Layout
from torchngvi.latents.curvature import Curvature, Joint, check_pattern, probed_pairs
from torchngvi.latents.error import LaplaceError, laplace_error
from torchngvi.latents.modes import Modes, find_modes
from torchngvi.latents.sparsity import colours, in_a_narrow_order, neighbours, pairs_of
from torchngvi.latents.summary import Latents, thetas_of
from torchngvi.models.checks import numbers

_AT_ONCE = 2**24  # numbers of the blocks of all θ in one call: bounds the memory
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
        colours: the number of Hessian-vector products that give the Hessian.

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
        self.start = self._first_mode(noise)
        for theta in (self.at, beside):
            check_pattern(self.curvature, theta, self.start, noise)

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

    # ---------------------------------------------------------------------------- what follows a fit

    def latents(
        self,
        source: Any,
        draws: int = 64,
        generator: torch.Generator | None = None,
    ) -> Latents:
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
        parts = [self._moments(part, modes) for part, modes in self.modes(theta)]
        means, variances = (torch.cat(some) for some in zip(*parts, strict=True))
        return Latents(theta, means, variances.sqrt(), self.modes)

    def laplace_error(
        self,
        source: Any,
        draws: int = 32,
        pairs: int = 256,
        generator: torch.Generator | None = None,
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

    def _moments(self, theta: Tensor, modes: Modes) -> tuple[Tensor, Tensor]:
        """Means û + w and variances of the latents given θ, (S, D) each."""
        inverse = modes.factor.selected_inverse()
        w = modes.factor.solve(self.curvature.slope(theta, modes.u, inverse))
        return modes.u + w, inverse[:, : self.latents_dim]

    def chunks(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Tensor, ...]:
        """Split values of θ so that the blocks of all of them fit the memory."""
        each = max(self.layout.numbers, _GRAPH * self.colours * self.latents_dim)
        return theta.split(max(1, _AT_ONCE // each))

    def _modes(self, theta: Tensor, start: Tensor | None = None) -> Modes:
        start = (self.start if start is None else start).expand(len(theta), -1)
        return find_modes(self.curvature, self.layout, theta, start)

    def value(
        self,
        theta: Tensor,  # (S, P)
        differentiate: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute the values (S,) and, where wanted, their gradients in θ (S, P)."""
        modes = self._modes(theta)
        value = 0.5 * self.latents_dim * math.log(2 * math.pi) - modes.energy - 0.5 * modes.factor.log_det()
        gradient = torch.zeros_like(theta)
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


def marginal(
    log_joint: Joint,
    latents: int | Tensor,
    at: Tensor,
    *,
    pattern: Any = None,
) -> MarginalLaplace:
    """Integrate many latents out of a log joint by Laplace's approximation, which leaves the hyperparameters to `fit`.

        log p(y, θ) ≈ log p(y, û, θ) + (D/2) log 2π - ½ log|H|,  H = -∇²_u log p(y, û, θ)  at the mode û of u given θ.

    One wants it for models with a field of latents, such as disease maps, spatial and temporal effects or groups, of
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
