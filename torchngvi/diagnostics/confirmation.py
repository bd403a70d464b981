"""The linear response of single coordinates, with all orders of ℓ: conjugate gradients on the Hessian of L.

In the frame θ = m + C (p + (I + R) z), with R symmetric and in the pattern of q, the Hessian of L/γ at an optimum is

    <(p, R), A (p, R)> = E[dᵀ y] + |R|²_F,        d = p + R z,        y = Cᵀ∇²ℓ(θ) C d / γ

so that A (p, R) = (E[y], Π(E[½(y zᵀ + z yᵀ)]) + R).  A tilt by θ_k pulls at p along u = Cᵀe_k/|Cᵀe_k|, and with
A (p, R) = (u, 0) the standard deviation by linear response is sd_k √(uᵀp) (Giordano, Broderick and Jordan 2018).
The expectations are means over fixed antithetic draws, the second derivatives differences of gradients.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_callable, read_number, read_sizes
from torchngvi.derivatives import energy_and_gradient
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.interfaces import Target
from torchngvi.models.arguments import as_target, read_gaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures.pattern import Structured

_MOST = 8  # products
_FLAT = 0.01  # growth of the log sd in one product at which it is believed
_STEP = 1e-2  # of a difference, in standard deviations, times (machine precision / that of float32)^(1/9)
LARGEST = math.log(3.0)  # a log sd beyond which the size is not told


class Confirmed(NamedTuple):
    """What conjugate gradients found, an entry a coordinate.

    Attributes:
        coordinates: which coordinates k were asked for, (K,).
        log_sd: log(sd by linear response / sd of q), at most log 3, (K,).
        standard_error: of log_sd, from the draws, (K,).
        singular: where the response is indefinite, or grows beyond a factor of 3, (K,).
        finished: where the iterations had come to their end; elsewhere log_sd is a lower bound, (K,).

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q = CholeskyGaussian(2, dtype=torch.float64)
    >>> found = confirm(q, LogJoint(lambda theta: -0.5 * theta.square().sum(-1)), torch.tensor([0]), num_samples=8)
    >>> abs(found.log_sd.item()) < 1e-6, found.singular.tolist()  # q is the density itself
    (True, [False])
    """

    coordinates: Tensor  # k, (K,)
    log_sd: Tensor  # log(sd by linear response / sd of q), at most log 3, (K,)
    standard_error: Tensor  # from the draws, (K,)
    singular: Tensor  # the response is indefinite, or grows beyond a factor of 3, (K,)
    finished: Tensor  # it had come to its end; else log_sd is a lower bound, (K,)


class Response:
    """The Hessian of L/γ at q, as a product with several (p, R) at once.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q = CholeskyGaussian(2, dtype=torch.float64)
    >>> A = Response(q, LogJoint(lambda theta: -0.5 * theta.square().sum(-1)), Fixed(8))
    >>> x = A.joined(torch.ones(1, 2).double(), torch.ones(1, 2, 2).double())
    >>> p, R = A.parted(A(x)[0])  # the identity on p, twice the identity on R
    >>> p.round(decimals=6).tolist(), R.round(decimals=6).tolist()
    ([[1.0, 1.0]], [[[2.0, 2.0], [2.0, 2.0]]])
    """

    def __init__(self, q: Gaussian, target: Target, draws: Fixed) -> None:
        self.target, self.frame, self.structure = target, q.frame(), q.structure
        self.z = draws(q.mean_probe.detach())
        self.theta = self.frame.mean + self.frame.push(self.z)
        eps = torch.finfo(self.z.dtype).eps
        self.step = _STEP * (eps / torch.finfo(torch.float32).eps) ** (1 / 9)
        self.cost = 2 * len(self.z)  # gradients of a product, each coordinate

    def joined(
        self,
        p: Tensor,  # (K, D)
        R: Structured,  # (K, ...)
    ) -> Tensor:
        """Join p and R into vectors (K, n) whose dot product is <p, p'> + <R, R'>_F."""
        return torch.cat([p, math.sqrt(2) * self.structure.flat(R)], -1)

    def parted(
        self,
        x: Tensor,  # (K, n)
    ) -> tuple[Tensor, Structured]:
        """Part vectors that `joined` made into p and R again."""
        p, flat = x.split([self.structure.dim, x.shape[-1] - self.structure.dim], -1)
        return p, self.structure.unflat(flat / math.sqrt(2))

    def pull(
        self,
        coordinates: Tensor,  # (K,)
    ) -> Tensor:
        """Make the vector (u, 0) of each coordinate, u its unit vector in the frame, (K, n)."""
        units = torch.nn.functional.one_hot(coordinates, self.structure.dim).to(self.z)
        u = self.frame.pull(units)
        u = u / u.norm(dim=-1, keepdim=True)
        return torch.cat([u, u.new_zeros(len(u), self.structure.parameters)], -1)

    def __call__(
        self,
        x: Tensor,  # (K, n)
    ) -> tuple[Tensor, Tensor]:
        """A x (K, n), and y at the draws, (S, K, D)."""
        p, R = self.parted(x)
        d = p + self._turned(R)
        y = self._curved(d)
        left, right = y.movedim(0, 1) / len(y), self.z.expand(len(p), *self.z.shape)
        return self.joined(y.mean(0), self._gathered(left, right, R)), y

    def along(
        self,
        x: Tensor,  # (K, n)
        y: Tensor,  # as the product gave it, (S, K, D)
    ) -> Tensor:
        """Compute dᵀ y + |R|²_F of each draw, whose mean is <x, A x>, (S, K)."""
        p, R = self.parted(x)
        own = self.structure.norm2(R) if self.structure.closed else self._diagonal2(R)
        return ((p + self._turned(R)) * y).sum(-1) + own

    def _turned(self, R: Structured) -> Tensor:
        """R z, (S, K, D); where products leave the pattern the triangular root with the same change of V."""
        z, structure = self.z[:, None].expand(-1, len(R), -1), self.structure
        if structure.closed:
            return structure.smv(R, z)
        root = 2 * structure.tril_half(R)
        return structure.tmv(root, z) if self.frame.upper else structure.mv(root, z)

    def _gathered(self, y: Tensor, z: Tensor, R: Structured) -> Structured:
        """The gradient in R of half the quadratic form."""
        structure = self.structure
        if structure.closed:
            return structure.sym_lower(y, z) + R
        one_triangle = structure.lower(z, y) if self.frame.upper else structure.lower(y, z)
        only_diagonal = structure.with_diagonal(torch.zeros_like(R), structure.diagonal(R))
        return structure.one_sided(one_triangle) + only_diagonal

    def _diagonal2(self, R: Structured) -> Tensor:
        return self.structure.diagonal(R).square().sum(-1)

    def _curved(self, d: Tensor) -> Tensor:
        """Cᵀ∇²ℓ C d / γ by central differences of gradients, (S, K, D)."""
        size = d.square().mean((0, 2), keepdim=True).sqrt().clamp_min(torch.finfo(d.dtype).tiny)
        h = self.step / size  # (1, K, 1)
        shift = h * self.frame.push(d)
        points = torch.stack([self.theta[:, None] + shift, self.theta[:, None] - shift])
        energy, gradient = energy_and_gradient(self.target, points.flatten(0, 2))
        gradient = torch.where(energy.isfinite()[:, None], gradient, torch.nan)
        plus, minus = gradient.unflatten(0, points.shape[:3])
        return self.frame.pull(plus - minus) / (2 * h * self.target.temperature)


@torch.no_grad()
def confirm(
    q: Gaussian,
    target: Target,
    coordinates: Tensor,  # k, (K,)
    *,
    num_samples: int = 512,
    seed: int = 0,
    max_gradients: float = math.inf,
    over: Callable[[], bool] = lambda: False,
) -> Confirmed | None:
    """The linear response of coordinates by conjugate gradients, all of them side by side.

    A product takes 2S gradients a coordinate, and three to six products are enough; uᵀp rises from one to the next.
    Where the Hessian is not positive definite along a direction the response is called singular: q is no minimum of
    these draws' average, and its standard deviation may be any multiple of that of q.

    Args:
        q: the posterior, at the optimum of L.
        target: a log joint that gives the same value twice.
        coordinates: of θ.
        num_samples: S, fixed and whitened.
        seed: of the draws.
        max_gradients: a product that would exceed it is not made.
        over: whether there is no time left; asked before each product.

    Returns:
        What was found; None where not one product was allowed, or where the log joint is not finite near the draws.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> a = 3.0  # ℓ = Σ exp θ - a θ: the best Gaussian has the variance 1/a, the response is 1/a + 1/(2 a²)
    >>> q = CholeskyGaussian(1, mean=math.log(a) - 0.5 / a, scale=a**-0.5, dtype=torch.float64)
    >>> target = LogJoint(lambda theta: (a * theta - theta.exp()).sum(-1))
    >>> found = confirm(q, target, torch.tensor([0]), num_samples=4096)
    >>> abs(found.log_sd.item() - 0.5 * math.log(1 + 0.5 / a)) < 0.02
    True
    """
    q, target = read_gaussian("confirm", q, target), as_target(target)
    what = f"are indices of coordinates from 0 to {q.dim - 1}"
    given = coordinates.tolist() if isinstance(coordinates, Tensor) and not coordinates.is_meta else coordinates
    indices = read_sizes("coordinates", given, what, at_least=0, none=False)
    if max(indices) >= q.dim:
        raise InputError(f"coordinates {what}; got {list(indices)}.")
    coordinates = torch.tensor(indices, device=q.device)
    read_callable("over", over, "is a function that says whether the time is over", arguments="")
    max_gradients = read_number("max_gradients", max_gradients, "is a budget", above=0, infinite=True)
    A = Response(q, target, Fixed(num_samples, seed))
    b = A.pull(coordinates)
    dim, K = q.dim, len(b)
    weight = torch.cat([b.new_ones(dim), b.new_full((b.shape[1] - dim,), 0.5)])  # preconditioner
    x, residual, seen = torch.zeros_like(b), b.clone(), b.new_zeros(len(A.z), K, dim)
    direction = weight * residual
    log_sd = b.new_full((K,), -math.inf)
    singular, finished = (
        torch.zeros(K, dtype=torch.bool, device=b.device),
        torch.zeros(K, dtype=torch.bool, device=b.device),
    )
    spent = 0
    for _ in range(_MOST):
        active = (~(singular | finished)).nonzero()[:, 0]
        spent += A.cost * len(active)
        if not len(active) or spent > max_gradients or over():
            break
        p, r = direction[active], residual[active]
        Ap, y = A(p)
        if not bool(torch.isfinite(Ap).all()):
            return None
        curvature, before = (p * Ap).sum(-1), (r * weight * r).sum(-1)
        definite = curvature > 0
        length = torch.where(definite, before / curvature, 0.0)[:, None]
        x[active] += length * p
        seen[:, active] += length * y
        r = r - length * Ap
        residual[active] = r
        direction[active] = weight * r + ((r * weight * r).sum(-1) / before)[:, None] * p
        new = 0.5 * (b[active] * x[active]).sum(-1).log()
        singular[active] = ~definite | (new > LARGEST)
        finished[active] = new - log_sd[active] < _FLAT
        log_sd[active] = torch.where(definite, new, LARGEST)
    if bool(torch.isneginf(log_sd).any()):
        return None
    finished |= singular
    each = A.along(x, seen)
    pairs = 0.5 * (each[: len(each) // 2] + each[len(each) // 2 :])
    error = 0.5 * pairs.std(0) / math.sqrt(len(pairs)) / (b * x).sum(-1)
    return Confirmed(coordinates, log_sd.clamp_max(LARGEST), error, singular, finished)
