"""The derivatives of a log joint in its latents: gradient, the entries of the Hessian, and what the adjoint needs.

For each colour one double backward pass gives the product of the Hessian with the indicator of the colour, whose
entries are those of the Hessian (`torchngvi.latents.sparsity`).  With the entries of the inverse Σ at the same places,

    c(θ, u) = -½ tr(Σ H(θ, u)),     Σ held fixed,

is a scalar whose gradient is that of -½ log|H|, third derivatives of the log joint and no others: one more backward
pass, whatever the number of hyperparameters (Margossian, Vehtari, Simpson and Agrawal 2020; Margossian 2023).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError

Joint = Callable[[Tensor, Tensor], Tensor]  # (θ (S, P), u (S, D)) -> log p(y, u, θ), (S,)

_SINGLE = 1e-5  # share of the Hessian that rounding in float32 may change
_OF_SHAPES = ("must match", "cannot be multiplied", "is invalid for input of size", "out of bounds")
_PROBED = 2048  # latents up to which a pattern can be found by differentiating along each of them


class Jet(NamedTuple):
    """ℓ = -log p(y, u, θ) as a function of u.

    Attributes:
        energy: ℓ, (S,).
        gradient: ∇ℓ, (S, D).
        entries: of H = ∇²ℓ, the diagonal and then the pairs of the pattern, (S, D + E).
    """

    energy: Tensor
    gradient: Tensor
    entries: Tensor


class Curvature:
    """A log joint with its derivatives in the latents, at many (θ, u) at once.

    Args:
        joint: the log joint, (θ (S, P), u (S, D)) -> (S,).
        dim: the number D of latents.
        pairs: the pairs of the pattern, (E, 2).
        colours: of the latents, (D,).

    >>> def joint(theta, u):
    ...     return -0.5 * u.square().sum(-1) - (u[..., 0] - u[..., 1]).square() * theta[..., 0]
    >>> curvature = Curvature(joint, 2, torch.tensor([[1, 0]]), torch.tensor([0, 1]))
    >>> curvature.jet(torch.ones(1, 1), torch.zeros(1, 2)).entries.tolist()
    [[3.0, 3.0, -2.0]]
    """

    def __init__(self, joint: Joint, dim: int, pairs: Tensor, colours: Tensor) -> None:
        self.joint, self.dim, self.pairs = joint, dim, pairs
        self.members = [(colours == k).nonzero()[:, 0] for k in range(int(colours.max()) + 1)]
        own = torch.arange(dim, device=pairs.device)[:, None].expand(-1, 2)
        self.places = torch.cat([own, pairs, pairs.flip(-1)])  # row and column of every entry, of both triangles
        self.seen = (
            colours[self.places[:, 1]] * dim + self.places[:, 0]
        )  # the row, in the product of the column's colour
        self.stored = dim + len(pairs)
        self.twice = torch.ones(self.stored, device=pairs.device)
        self.twice[dim:] = 2.0  # an entry and that of the transpose

    def energy(
        self,
        theta: Tensor,  # (S, P)
        u: Tensor,  # (S, D)
    ) -> Tensor:
        """Compute ℓ, (S,), after a check of what the function returns.

        Raises:
            InputError: if the result is no real tensor with one value for each pair of theta and latents, or has fewer
                digits than these; where the function cannot take so many of them.
        """
        try:
            value = self.joint(theta, u)
        except (RuntimeError, IndexError) as error:
            if isinstance(error, RuntimeError) and not any(words in str(error) for words in _OF_SHAPES):
                raise
            raise InputError(
                f"the log joint cannot take theta {tuple(theta.shape)} and latents {tuple(u.shape)}: {error}. There "
                f"are as many latents as latents= says, {u.shape[-1]}, and as many hyperparameters as at= has, "
                f"{theta.shape[-1]}."
            ) from error
        if not isinstance(value, Tensor) or value.is_complex():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"the log joint of theta and the latents must return a real tensor; got {got}.")
        if value.shape != theta.shape[:1]:
            raise InputError(
                f"the log joint must map theta {tuple(theta.shape)} and latents {tuple(u.shape)} to one value each, "
                f"shape {tuple(theta.shape[:1])}; got shape {tuple(value.shape)}. Index coordinates as theta[..., 0], "
                "sum over the last dimension, keep the first."
            )
        if torch.promote_types(value.dtype, u.dtype) != value.dtype:
            raise InputError(
                f"the log joint of theta and the latents in {u.dtype} returns {value.dtype}, whose digits are too few "
                f"for second derivatives. Have it compute in {u.dtype}, its data too, or give at= in {value.dtype}."
            )
        return -value.to(u.dtype)

    def jet(self, theta: Tensor, u: Tensor) -> Jet:
        """Compute ℓ, its gradient and the entries of its Hessian at u, without a graph."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            energy, gradient = self._gradient(theta.detach(), u)
            entries = self._entries(gradient, u, create_graph=False)
        return Jet(energy.detach(), gradient.detach(), entries)

    def adjoint(
        self,
        theta: Tensor,  # (S, P)
        u: Tensor,  # û, (S, D)
        inverse: Tensor,  # the entries of Σ = H⁻¹, (S, D + E)
        solve: Callable[[Tensor], Tensor],  # with H
    ) -> Tensor:
        """Differentiate log p(y, û, θ) - ½ log|H| in θ, where û is the mode of the latents at θ.

        With c as above and w = H⁻¹ ∇_u c, the implicit function theorem has dû/dθ = -H⁻¹ ∇_θ∇_u ℓ, so that the
        gradient is -∇_θ ℓ + ∇_θ c - ∇_θ(wᵀ ∇_u ℓ), w held fixed.

        Returns:
            The gradient, (S, P).
        """
        with torch.enable_grad():
            theta, u = theta.detach().requires_grad_(), u.detach().requires_grad_()
            energy, gradient = self._gradient(theta, u)
            by_theta, by_u = _gradients(self._change(gradient, u, inverse), (theta, u))
            w = solve(by_u)
            return by_theta + _gradients(-energy.sum() - (gradient * w).sum(), (theta,))[0]

    def slope(
        self,
        theta: Tensor,  # (S, P)
        u: Tensor,  # û, (S, D)
        inverse: Tensor,  # the entries of Σ = H⁻¹, (S, D + E)
    ) -> Tensor:
        """Compute ∇_u c, (S, D): the mean of the latents differs from their mode by H⁻¹ ∇_u c, to first order."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            _, gradient = self._gradient(theta.detach(), u)
            return _gradients(self._change(gradient, u, inverse), (u,))[0]

    def gradient(
        self,
        theta: Tensor,  # (S, P)
        u: Tensor,  # (S, D)
    ) -> tuple[Tensor, Tensor]:
        """Compute ℓ, (S,), and its gradient in u, (S, D)."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            energy = self.energy(theta.detach(), u)
            return energy.detach(), _gradients(energy.sum(), (u,))[0]

    def product(
        self,
        theta: Tensor,  # (S, P)
        u: Tensor,  # (S, D)
        v: Tensor,  # (S, D)
    ) -> Tensor:
        """Compute the product H v of the Hessian itself, whatever its pattern, (S, D)."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            _, gradient = self._gradient(theta.detach(), u)
            return _gradients((gradient * v).sum(), (u,))[0]

    def product_of_pattern(
        self,
        theta: Tensor,  # (S, P)
        u: Tensor,  # (S, D)
        v: Tensor,  # (S, D)
    ) -> Tensor:
        """Compute the product with the entries of the pattern alone, each as its own row has it, (S, D)."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            _, gradient = self._gradient(theta.detach(), u)
            entries = self._products(gradient, u, create_graph=False)[:, self.seen]
        rows, columns = self.places.unbind(-1)
        return torch.zeros_like(v).index_add(1, rows, entries * v[:, columns])

    def _gradient(self, theta: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """ℓ and ∇_u ℓ with their graphs."""
        energy = self.energy(theta, u)
        gradient = None
        if energy.requires_grad:
            (gradient,) = torch.autograd.grad(energy.sum(), u, create_graph=True, allow_unused=True)
        if gradient is None:
            raise InputError(
                "the log joint does not depend on the latents: its result has no gradient with respect to its second "
                "argument. Compute it from that by torch operations, without detach(), item() or NumPy."
            )
        return energy, gradient

    def _change(self, gradient: Tensor, u: Tensor, inverse: Tensor) -> Tensor:
        """c, summed over θ, with its graph."""
        entries = self._entries(gradient, u, create_graph=True)
        return -0.5 * (inverse * self.twice.to(u.dtype) * entries).sum()

    def _entries(self, gradient: Tensor, u: Tensor, create_graph: bool) -> Tensor:
        """The entries of the Hessian, (S, D + E)."""
        return self._products(gradient, u, create_graph)[:, self.seen[: self.stored]]

    def _products(self, gradient: Tensor, u: Tensor, create_graph: bool) -> Tensor:
        """The products of the Hessian with the indicators of the colours, (S, colours x D), a backward pass each."""
        products = [_gradients(gradient[:, some].sum(), (u,), create_graph)[0] for some in self.members]
        return torch.stack(products, 1).flatten(1)


def _gradients(scalar: Tensor, inputs: tuple[Tensor, ...], create_graph: bool = False) -> tuple[Tensor, ...]:
    """The gradients of a scalar, zeros where it does not depend on an input; the graph is kept."""
    needed = [x for x in inputs if x.requires_grad]
    found: dict[int, Tensor | None] = {}
    if scalar.requires_grad and needed:
        gradients = torch.autograd.grad(scalar, needed, retain_graph=True, create_graph=create_graph, allow_unused=True)
        found = {id(x): gradient for x, gradient in zip(needed, gradients, strict=True)}
    every = [(x, found.get(id(x))) for x in inputs]
    return tuple(torch.zeros_like(x) if gradient is None else gradient for x, gradient in every)


def probed_pairs(
    joint: Joint,
    theta: Tensor,  # (P,)
    u: Tensor,  # (D,)
) -> Tensor:
    """Find the pairs of latents between which the Hessian has an entry, by a product with each unit vector.

    >>> def joint(theta, u):
    ...     return -(u[..., 1:] - u[..., :-1]).square().sum(-1)
    >>> probed_pairs(joint, torch.zeros(1), torch.tensor([0.1, 0.2, 0.4])).tolist()
    [[1, 0], [2, 1]]
    """
    dim = len(u)
    if dim > _PROBED:
        raise InputError(
            f"with more than {_PROBED} latents say which of them occur together in a term of the log joint, by "
            f"pattern=; got {dim} latents and no pattern."
        )
    none, alone = torch.zeros(0, 2, dtype=torch.long, device=u.device), torch.zeros(dim, dtype=torch.long, device="cpu")
    curvature = Curvature(joint, dim, none, alone.to(u.device))
    found = []
    for units in torch.arange(dim, device=u.device).split(64):
        v = torch.zeros(len(units), dim, dtype=u.dtype, device=u.device).scatter_(1, units[:, None], 1.0)
        shape = (len(units), -1)
        rows = curvature.product(theta.expand(shape), u.expand(shape), v)
        if not bool(rows.isfinite().all()):
            raise InputError(
                "the Hessian of the log joint in the latents is not finite at a point near the one where their search "
                "begins, so that its pattern cannot be found. Declare it, by pattern=."
            )
        where = rows.nonzero()
        found.append(torch.stack([units[where[:, 0]], where[:, 1]], -1))
    every = torch.cat(found)
    return every[every[:, 0] > every[:, 1]]


def check_pattern(
    curvature: Curvature,
    theta: Tensor,  # (P,)
    mode: Tensor,  # (D,)
    noise: Tensor,  # (D,)
) -> None:
    """Compare a product with the Hessian itself with that of the entries in the pattern, near a mode."""
    theta, v = theta[None], noise.flip(0)[None]
    sd = curvature.jet(theta, mode[None]).entries[0, : curvature.dim].rsqrt()
    u = (mode + 0.1 * sd * noise)[None]  # in general position, where no entry vanishes by chance
    truth = curvature.product(theta, u, v)
    if not bool(truth.isfinite().all()):
        u = mode[None]
        truth = curvature.product(theta, u, v)
    apart = (truth - curvature.product_of_pattern(theta, u, v)).abs()[0]
    worst = int(apart.argmax())
    largest = float(truth.abs().max())
    if not float(apart[worst]) > torch.finfo(u.dtype).eps ** 0.5 * largest:
        return
    if u.dtype == torch.float64 and float(apart[worst]) < _SINGLE * largest:
        raise InputError(
            f"two ways to the Hessian of the log joint in float64 differ by {float(apart[worst]) / largest:.1g} of it, "
            "as they do where a part of it is computed in float32. Look for .float() and for data in float32, or give "
            "at= in float32."
        )
    unit = torch.zeros_like(v)
    unit[0, worst] = 1.0
    row, places = curvature.product(theta, u, unit)[0].abs(), curvature.places
    row[places[places[:, 0] == worst, 1]] = 0.0
    first, second = sorted((worst, int(row.argmax())))
    raise InputError(
        f"the pattern misses the pair of latents {first} and {second}, between which the Hessian of the log joint has "
        "an entry. Add every pair of latents that occur in one term, or leave pattern= out."
    )
