"""Draws of z ~ N(0, I), S at a time: what every estimator of a black box stands on."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from torchngvi.arguments import (
    LARGEST_SIZE,
    is_size,
    read_flag,
    read_generator,
    read_instance,
    read_seed,
    read_size,
    read_sizes,
    shown,
)
from torchngvi.derivatives import energy_and_gradient
from torchngvi.errors import InputError
from torchngvi.interfaces import Estimator, Framed, Posterior, Target
from torchngvi.numerics.arrays import faked
from torchngvi.structures import Forest


def drawn_seed(bits: int = 31) -> int:
    """Draw a seed below 2³¹ from torch's default generator."""
    return int(whole_numbers(bits, ()))


def whole_numbers(bits: int, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    """Draw whole numbers of so many bits, uniformly, on the CPU.

    ``torch.randint(2**bits)`` takes 32 bits of the generator's up to PyTorch 2.6 and 64 later, from 2²⁸ on.  Below 2³²
    numbers are 64 bits modulo 2³² on all of them, and the remainder is what later versions return.
    """
    return torch.randint(2**32, tuple(shape), generator=generator, device="cpu") % 2**bits


_FRESH = 1024  # least draws of a set that judges: whitening then shifts its mean by less than its standard error
_SOBOL_BITS = 30  # of torch's Sobol points


class Draws(ABC):
    """The abstract base of S draws of z ~ N(0, I): see `Independent`, `Antithetic`, `Quasi` and `Fixed`.

    Attributes:
        comparable: whether each call gives the same draws.
        independent: whether they are independent of one another, or pair of pair.
        mirrored: whether they are pairs z and -z, the second half of the draws minus the first.
        num_samples: the number S of draws.
        generator: their generator, whose state is saved with the optimizer.
        apart: whether members along the last dimension of a batch have draws of their own.

    >>> draws: Draws = Fixed(8)
    >>> z = draws(torch.zeros(2))
    >>> z.shape, torch.equal(z, draws(torch.zeros(2)))
    (torch.Size([8, 2]), True)
    """

    comparable: bool
    independent: bool
    mirrored: bool
    num_samples: int
    generator: torch.Generator | None
    apart: bool = False

    @abstractmethod
    def __call__(self, like: Tensor) -> Tensor:
        """Return draws z, (S, *batch, D), of the dtype and on the device of ``like``, (*batch, D)."""

    def fresh(self, number: int) -> "Draws":
        """Return the number-th set of draws to judge by what was fitted to these; themselves if new at each call."""
        return self


@final
class Independent(Draws):
    """Independent draws of z ~ N(0, I), new at each call.

    Use them where a theorem asks for independence, or for an odd number of draws; `Antithetic` has less variance
    where ℓ is nearly quadratic.

    Args:
        num_samples: the number S of draws, at least 1.
        generator: the generator of the draws, whose state is saved with the optimizer; torch's own by default.

    Raises:
        InputError: if the number of samples is not positive.

    >>> Independent(3)(torch.zeros(2)).shape
    torch.Size([3, 2])
    """

    comparable, independent, mirrored = False, True, False

    def __init__(self, num_samples: int, generator: torch.Generator | None = None) -> None:
        self.num_samples = read_size("num_samples", num_samples, "counts draws")
        self.generator = read_generator("generator", generator)

    def __call__(self, like: Tensor) -> Tensor:
        """Return new draws z, (S, *batch, D)."""
        return _randn(self.num_samples, like, self.generator)


@final
class Antithetic(Draws):
    """Draws of z ~ N(0, I) in pairs z, -z, new at each call.

    The means of odd functions are exact, among them the gradient of a quadratic.  They are the default of every
    estimator that is given a number of draws.

    Args:
        num_samples: the number S of draws, the mirror images included, positive and even.
        generator: the generator of the draws, whose state is saved with the optimizer; torch's own by default.

    Raises:
        InputError: if the number of samples is not positive and even.

    >>> z = Antithetic(4)(torch.zeros(2))
    >>> bool((z[:2] == -z[2:]).all())
    True
    """

    comparable, independent, mirrored = False, True, True

    def __init__(self, num_samples: int, generator: torch.Generator | None = None) -> None:
        self.num_samples, self.generator = _even(num_samples), read_generator("generator", generator)

    def __call__(self, like: Tensor) -> Tensor:
        """Return new draws z, (S, *batch, D), the second half of which mirrors the first."""
        return _with_mirror_images(_randn(self.num_samples // 2, like, self.generator))


@final
class Quasi(Draws):
    """Quasi-random draws: Sobol points through Φ⁻¹, scrambled again at each call.

    Their means are unbiased, and of smaller error than those of independent draws in few dimensions.  All members of a
    batch share a random linear scrambling of the digits (Matoušek 1998), and each has a random digital shift of its
    own.

    Args:
        num_samples: the number S of draws, at least 1; powers of two are best.
        seed: the seed of the scrambling; the state that it has reached is saved with the optimizer.

    Raises:
        InputError: if the number of samples is not positive; on use, if there are more than 21201 dimensions.

    >>> z = Quasi(1024)(torch.zeros(2))
    >>> bool((z.mean(0).abs() < 0.01).all())
    True
    """

    comparable, independent, mirrored = False, False, False
    generator: torch.Generator

    def __init__(self, num_samples: int, seed: int = 0) -> None:
        self.num_samples = read_size("num_samples", num_samples, "counts draws")
        self.generator = torch.Generator().manual_seed(read_seed("seed", seed))

    def __call__(self, like: Tensor) -> Tensor:
        """Return draws z, (S, *batch, D), scrambled again."""
        dim = like.shape[-1]
        if dim > torch.quasirandom.SobolEngine.MAXDIM:
            raise InputError(
                f"Quasi knows Sobol points of up to {torch.quasirandom.SobolEngine.MAXDIM} dimensions; got {dim}. "
                "Use Antithetic."
            )
        top = 2**_SOBOL_BITS
        seed, *_ = whole_numbers(_SOBOL_BITS, (1,), self.generator).tolist()
        engine = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
        digits = (engine.draw(self.num_samples, dtype=torch.float64) * top).long()
        shift = whole_numbers(_SOBOL_BITS, like.shape, self.generator)
        points = digits.reshape(self.num_samples, *(1,) * (like.ndim - 1), dim) ^ shift
        # the middles of the cells, so that neither 0 nor 1 occurs
        return torch.special.ndtri((points.double() + 0.5) / top).to(like)


@final
class Fixed(Draws):
    """The same antithetic draws at each call, whitened: steps by trial and exact convergence on any log joint.

    Z ← Z L⁻ᵀ with ZᵀZ/S = L Lᵀ where S ≥ 2D, so that the draws have mean 0 and covariance I exactly;
    with fewer, only the variance of each coordinate is 1, which serves a diagonal covariance.  All
    members of a batch see the same draws, unless they are to be ``apart``.

    The objective is then the average over the draws, an ordinary function (sample average approximation: Burroni, Domke
    and Sheldon 2023; Giordano, Ingram and Broderick 2024): the optimum that is found differs from the true one by an
    error of order 1/√S, the same at each call, which no further step reduces; and it is a function of the root C, so
    that `CholeskyGaussian` and `NaturalGaussian` find slightly different optima.  `torchngvi.fit` therefore judges what
    was fitted to them on fresh draws.

    Args:
        num_samples: the number S of draws, the mirror images included, positive and even; at least 2D for a full
            covariance.
        seed: the seed of the draws, which depend on it, on S, on D and on those left out only.
        left_out: numbers of pairs in the order in which they are drawn, S/2 and more among them, in the place of which
            later ones are taken: those at which a log joint fails.
        apart: whether each member along the last dimension of a batch has draws of its own.  For the groups of a
            `PerFactor`: their errors in the global coordinates are then independent, and do not add up.
        pattern: a forest, of which the coordinates of each node and of its ancestors are whitened together, which
            takes as many draws as 2D there.  What a log joint of that pattern has of second order in z then has its
            mean without error, however large D is.

    Raises:
        InputError: if the number of samples is not positive and even.

    >>> z = Fixed(8)(torch.zeros(2, dtype=torch.float64))
    >>> torch.allclose(z.mT @ z / 8, torch.eye(2, dtype=torch.float64))
    True
    """

    comparable, independent, mirrored = True, False, True
    generator = None

    def __init__(
        self,
        num_samples: int,
        seed: int = 0,
        left_out: Sequence[int] = (),
        *,
        apart: bool = False,
        pattern: Forest | None = None,
    ) -> None:
        self.num_samples, self.seed = _even(num_samples), read_seed("seed", seed)
        self.left_out = read_sizes("left_out", left_out, "are numbers of pairs of draws, from 0 on", at_least=0)
        self.apart, self.pattern = read_flag("apart", apart), pattern
        if pattern is not None:
            read_instance("pattern", pattern, Forest, "is a forest of torchngvi.structures, or None")
        self._kept: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}  # by the members and D

    def __call__(self, like: Tensor) -> Tensor:
        """Return the draws z, (S, *batch, D), which are the same at each call."""
        members = like.shape[-2:-1] if self.apart else torch.Size()
        known = torch.Size((*members, like.shape[-1])), like.dtype, like.device
        kept = None if faked() else self._kept.get(known)
        if kept is None:
            with torch.inference_mode(False), torch.no_grad():
                kept = self._whitened(known[0]).to(like)
            if not faked():
                self._kept[known] = kept
        return kept.reshape(-1, *(1,) * (like.ndim - kept.ndim + 1), *kept.shape[1:]).expand(-1, *like.shape)

    def fresh(self, number: int) -> "Fixed":
        """Return fixed draws of another seed, 1024 of them or more."""
        return Fixed(max(self.num_samples, _FRESH), seed=self.seed + number, apart=self.apart, pattern=self.pattern)

    def pairs(self) -> list[int]:
        """The numbers of the pairs z_s, z_{s + S/2} that are taken.

        >>> Fixed(8, left_out=(1, 4)).pairs()
        [0, 2, 3, 5]
        """
        return [pair for pair in range(self.num_samples // 2 + len(self.left_out)) if pair not in self.left_out]

    def _whitened(self, shape: torch.Size) -> Tensor:
        """(S, *members, D), from float64 on the CPU whatever the posterior."""
        half = self.num_samples // 2
        generator = torch.Generator().manual_seed(self.seed)
        z = torch.randn((half, *shape), dtype=torch.float64, generator=generator, device="cpu")
        if self.left_out:  # one at a time, so that those before do not depend on how many there are
            more = [
                torch.randn(1, *shape, dtype=torch.float64, generator=generator, device="cpu") for _ in self.left_out
            ]
            z = torch.cat([z, *more])[self.pairs()]
        if self.pattern is None:
            return _with_mirror_images(_white(z.movedim(0, -2)).movedim(-2, 0))
        for k, kind in reversed(list(enumerate(self.pattern.kinds))):  # ancestors first, which stay as they are
            clique = self.pattern.gather(z)[k].movedim(0, -2).roll(kind.above, -1)  # (n, S/2, p + r)
            z[:, kind.place] = _white(clique)[..., kind.above :].movedim(-2, 0)
        return _with_mirror_images(z)


def _white(columns: Tensor) -> Tensor:
    """Columns (*batch, N, k) with second moments I, each made from itself and those before; variance 1 if N < k."""
    rows = columns.shape[-2]
    if rows < columns.shape[-1]:
        return columns / columns.square().mean(-2, keepdim=True).sqrt()
    basis, factor = torch.linalg.qr(columns)  # Z = Q R, L = ±Rᵀ/√N
    return rows**0.5 * basis * factor.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


def as_draws(draws: Draws | int) -> Draws:
    """Make draws of what a user gives: draws stay as they are, and a number S becomes ``Antithetic(S)``."""
    if isinstance(draws, Draws):
        return draws
    if not is_size(draws, at_least=-LARGEST_SIZE):
        raise InputError(
            f"draws must be a number of antithetic draws, or draws such as Independent(16); got {shown(draws)}."
        )
    return Antithetic(draws)


def _even(num_samples: int) -> int:
    if not is_size(num_samples) or num_samples % 2:
        raise InputError(
            f"num_samples must be even, since the draws come in antithetic pairs; got {shown(num_samples)}."
        )
    return num_samples


def _randn(count: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn((count, *like.shape), dtype=like.dtype, device=like.device, generator=generator)


def _with_mirror_images(z: Tensor) -> Tensor:
    return torch.cat([z, -z])


# What every estimator that draws has in common: the draws, and what is seen at them


class Seen(NamedTuple):
    """What is seen of a log joint at S draws θ = m + C z."""

    z: Tensor  # (S, *batch, D)
    theta: Tensor  # (S, *batch, D)
    energy: Tensor  # ℓ, (S, *batch)
    gradient: Tensor  # ∇ℓ, (S, *batch, D)
    pulled: Tensor  # Cᵀ∇ℓ, (S, *batch, D)


class Drawing(Estimator):
    """The abstract base of every estimator that evaluates a target at standard normal draws."""

    derives_value = False  # with fixed draws, the derivative is that of the value
    needs = Target

    def __init__(self, draws: Draws | int = 16) -> None:
        self.draws = as_draws(draws)
        self.comparable = self.derives_value and self.draws.comparable
        self.unbiased = self.unbiased and not self.draws.comparable  # fixed draws have a mean of their own
        self.generator = self.draws.generator  # the optimizer saves its state

    @property
    def fixed(self) -> bool:
        """Whether every call sees the same draws, as the draws themselves say."""
        return self.draws.comparable

    def fresh(self, number: int) -> Self:
        """Return the same estimator on the number-th set of other draws, where its draws are fixed."""
        new = copy.copy(self)
        new.draws = self.draws.fresh(number)
        return new

    def see(self, q: Posterior, target: Target) -> Seen:
        """Draw from q, and evaluate the log joint and its gradient there."""
        frame = q.frame()
        z = self.draws(q.mean_probe.detach())
        theta = frame.mean + frame.push(z)
        energy, gradient = energy_and_gradient(target, theta)
        return Seen(z, theta, energy, gradient, frame.pull(gradient))

    def derivative_of_mean(self, q: Posterior, seen: Seen) -> Framed:
        """The exact derivative of the mean of ℓ over fixed draws, of which W takes the triangle of the root."""
        least = 2 * q.structure.widest
        if q.structure.widest > 1 and self.draws.num_samples < least:
            raise InputError(
                f"fixed draws determine a full covariance in {q.structure.widest} dimensions if there are at least "
                f"{least} of them: with fewer the objective has no minimum; got {self.draws.num_samples}. "
                f"Use Fixed({least}) or more, or a DiagonalGaussian."
            )
        return self.one_triangle(q, seen.pulled, seen.z)

    def one_triangle(self, q: Posterior, force: Tensor, z: Tensor) -> Framed:
        """The packet of a and W as means of f and of f zᵀ, of which W takes the triangle that belongs to the root."""
        force = force / len(z)
        return Framed(force.sum(0), q.one_triangle(force, z))
