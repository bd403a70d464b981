"""Averages over fixed draws that tell their own error: what `torchngvi.fit` minimises where a log joint is a black box.

    r = Cᵀ∇ℓ(m + C z) - γz        a = mean r        W = γI + mean (r zᵀ + z rᵀ)/2

The symmetric part has about half the variance of the triangle that is the derivative of the mean of ℓ
over the draws (which `Stein(Fixed(S))` takes), and so comes twice as near to the optimum of L.  It
is a derivative of that mean up to noise, and steps are judged with that much slack:

    noise² = |standard error of (a, W)|²_F⁻¹ = Σ_pairs |r̄|² + ¼(|r|²|z|² + (r·z)²) / (pairs (pairs - 1))

with r̄ and r the even and the odd part of the residual of a pair z, -z, and of a mean field or blocks without what is
linear in z, which whitened draws see without error.  At the optimum of the average
L is about half of noise² above its minimum.

Under a q over a forest the gradient in the coordinates of a node depends on the draws of its clique, and that in those
of an ancestor on the draws of all its descendants, which are many.  With draws whitened in each clique
(``Fixed(S, pattern=...)``) the border of a node therefore takes one triangle, mean r_c z_aᵀ with r_c that of the node
and z_a the draws of its ancestors, and noise² leaves out of r_c what is quadratic in the draws of the clique.
"""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_callable, read_instance
from torchngvi.expectations.draws import Drawing, Draws, Fixed, Seen
from torchngvi.interfaces import Cost, Expectation, Framed, Posterior, Target
from torchngvi.structures import Forest
from torchngvi.structures.pattern import Structured, is_whole
from torchngvi.structures.storage import Part


@final
class SampleAverage(Drawing):
    """a, W and their squared standard error noise² from gradients at S fixed draws in antithetic pairs.

    `torchngvi.fit` uses it for a log joint that is only a function, and judges its steps with noise² as the slack.  It
    is `comparable` in the sense that noise² gives: two calls agree, and the derivative is that of the value up to this
    standard error.

    Args:
        draws: whitened draws, S ≥ 2D for a full covariance.
        watch: called with what is seen, while q is where it was seen.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(1), LogJoint(lambda theta: -0.5 * theta.square().sum(-1))
    >>> e = SampleAverage(Fixed(4))(q, target)  # q is the posterior
    >>> e.derivative.a.abs().item() < 1e-6, e.noise2.item() < 1e-12
    (True, True)
    """

    derives_value = True  # up to noise²

    draws: Fixed

    def __init__(self, draws: Fixed, watch: Callable[[Seen], None] | None = None) -> None:
        super().__init__(read_instance("draws", draws, Draws, "are fixed draws, such as Fixed(16)"))
        if watch is not None:
            read_callable("watch", watch)
        self.watch = watch

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a, W and noise² at q."""
        seen, gamma = self.see(q, target), target.temperature
        if self.watch is not None:
            self.watch(seen)
        residual = seen.pulled - gamma * seen.z
        share = residual / len(seen.z)
        a = share.sum(0)
        cost, pattern = Cost(self.draws.num_samples, 0), self.draws.pattern
        if pattern is not None:
            W = _by_nodes(pattern, share, seen.z) + gamma * pattern.eye(a)
            noise2 = _noise2_of_nodes(pattern, seen.pulled - pattern.smv(W, seen.z), seen.z)
            return Expectation(seen.energy.mean(0), Framed(a, W), gamma, target.comparable, cost, noise2)
        W = q.sym_outer(share, seen.z) + gamma * q.structure.eye(a)
        if self.draws.apart:  # terms of a sum, of which only that is near γI: whitened draws see W z without error
            residual = seen.pulled - q.structure.smv(W, seen.z)
        noise2 = _noise2(q, seen, residual, self.draws.apart)
        return Expectation(seen.energy.mean(0), Framed(a, W), gamma, target.comparable, cost, noise2)


def _by_nodes(pattern: Forest, share: Tensor, z: Tensor) -> Structured:
    """Π(Σ_s r zᵀ), with r of the node and z of its ancestors in each border, and squares made symmetric."""
    parts = pattern.parts(pattern.lower(z, share))
    return pattern.matrix([Part(0.5 * (square + square.mT), border) for square, border in parts])


def _noise2_of_nodes(pattern: Forest, residual: Tensor, z: Tensor) -> Tensor:
    """The same for `_by_nodes`, of a residual (S, D) without W z, 0-d."""
    (plus, minus), half = residual.chunk(2), z.chunk(2)[0]
    noise2 = residual.new_zeros(len(half))
    for kind, clique in zip(pattern.on(z), pattern.gather(half), strict=True):
        even, odd = (0.5 * (plus + sign * minus)[:, kind.place] for sign in (1, -1))  # (S / 2, n, r)
        own, above = clique.split([kind.size, kind.above], -1)
        even, product, squared = _without_quadratic(even, clique), odd * own, odd.square().sum(-1)
        square = 0.25 * (squared * own.square().sum(-1) + product.sum(-1).square())
        each = (even - even.mean(0)).square().sum(-1) + square + squared * above.square().sum(-1)
        noise2 = noise2 + each.sum(-1)
    return noise2.mean(0) / max(len(half) - 1, 1)


def _noise2(q: Posterior, seen: Seen, residual: Tensor, apart: bool) -> Tensor:
    """(*batch,)."""
    (plus, minus), z = residual.chunk(2), seen.z.chunk(2)[0]
    even, odd = 0.5 * (plus + minus), 0.5 * (plus - minus)
    if not apart and q.structure.widest < q.dim and is_whole(q.structure):
        odd = _without_linear(odd, z)
    if apart:  # in few coordinates
        even = _without_quadratic(even, z)
    near, product = q.structure.neighbours, odd * z
    # ½‖Π(½(r zᵀ + z rᵀ))‖²_F, entry by entry of the pattern
    spread = 0.25 * (odd.square() * near(z.square()) + product * near(product)).sum(-1)
    each = q.structure.total((even - even.mean(0)).square().sum(-1) + spread)
    return each.mean(0) / max(len(z) - 1, 1)


def _without_linear(odd: Tensor, z: Tensor) -> Tensor:
    """What a linear function of z leaves of the odd part, (S / 2, *batch, D); as large as its errors are."""
    pairs, dim = len(z), z.shape[-1]
    if pairs < 2 * dim:
        return odd
    columns, y = z.movedim(0, -2), odd.movedim(0, -2)  # (*batch, S / 2, D), of which zᵀz = S/2 I
    rest = y - columns @ (columns.mT @ y / pairs)
    return (rest * (pairs / (pairs - dim)) ** 0.5).movedim(-2, 0)


def _without_quadratic(even: Tensor, z: Tensor) -> Tensor:
    """Subtract from the even part, (S / 2, *batch, k), its least-squares quadratic in z."""
    row, column = torch.tril_indices(z.shape[-1], z.shape[-1], device=z.device)
    terms, pairs = 1 + len(row), len(z)
    if pairs < 2 * terms:
        return even
    basis = torch.cat([torch.ones_like(z[..., :1]), z[..., row] * z[..., column]], -1).movedim(0, -2)
    columns = torch.linalg.qr(basis)[0]
    y = even.movedim(0, -2)
    rest = y - columns @ (columns.mT @ y)
    return (rest * (pairs / (pairs - terms)) ** 0.5).movedim(-2, 0)
