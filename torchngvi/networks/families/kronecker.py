"""Matrices of weights with a Kronecker product for their covariance: θ = M + A Z Bᵀ.

For a parameter of o rows and i columns (of all its other dimensions), A is o x o, B is i x i, both lower triangular,
and the covariance of its rows, one after the other, is AAᵀ ⊗ BBᵀ.  With the pull R = AᵀĝB of a gradient on n labels
that the network predicts, the two factors of W = CᵀHC in the frame are

    W_A = N (n R Rᵀ + δ |B|² AᵀA)/i,   W_B = N (n RᵀR + δ |A|² BᵀB)/o,   P_A = W_A - I,  P_B = W_B - I,

and the natural gradient of the roots is A(P_A - ½τ I)/2, B(P_B - ½τ I)/2 with τ = tr P_A/o = tr P_B/i: neither an
inverse nor a hook on a layer.
"""

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.networks.families.base import Family, key
from torchngvi.networks.families.dense import LARGEST, lower_root

_LONGEST = 0.2  # rate of a step of the roots: one statistic is of one batch
_SMALL = 0.5  # largest Frobenius norm of K, so that I - K + ½K² stays near I


class Kronecker(Family):
    """Matrix normals with lower roots A of the rows and B of the columns: C = A ⊗ B.

    It is for layers whose weights depend on one another.  A step costs products of the matrix with its two
    roots, which is cheap where batches are large against the sides of the matrix.  Parameters have two dimensions or
    more, of which the first is the rows; for other arguments see :class:`Family`.
    """

    passes = 5  # after which the divergence is within 0.001 nats a weight of the smallest, in tests

    def lay_out_(self) -> None:
        """Register roots that make the start."""
        for name, mean, delta, h0 in zip(self.names, self.mean, self.prior, self.start, strict=True):
            scale = (self.num_data * (h0 + delta)) ** -0.25  # a root of the standard deviation for either side
            rows, columns = mean.shape[0], mean[0].numel()
            self.register_buffer(key("rows", name), scale * torch.eye(rows, device="cpu").to(mean))
            self.register_buffer(key("columns", name), scale * torch.eye(columns, device="cpu").to(mean))

    def roots(self) -> list[tuple[Tensor, Tensor]]:
        """Return (A, B) of every parameter."""
        return list(zip(self.stored("rows"), self.stored("columns"), strict=True))

    def colored(self, noise: list[Tensor]) -> list[Tensor]:
        """Return A ε Bᵀ."""
        return [(A @ e.flatten(1) @ B.mT).view_as(e) for e, (A, B) in zip(noise, self.roots(), strict=True)]

    def whitened(self, moves: list[Tensor]) -> list[Tensor]:
        """Return A⁻¹ dm B⁻ᵀ."""
        found = []
        for dm, (A, B) in zip(moves, self.roots(), strict=True):
            left = torch.linalg.solve_triangular(A, dm.flatten(1), upper=False)
            found.append(torch.linalg.solve_triangular(B.mT, left, upper=True, left=False))
        return found

    def natural(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return N AAᵀ g BBᵀ."""
        return [
            self.num_data * (A @ (A.mT @ g.flatten(1) @ B) @ B.mT).view_as(g)
            for g, (A, B) in zip(gradients, self.roots(), strict=True)
        ]

    def statistics(self, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        """Return N scale RRᵀ/i and N scale RᵀR/o of every parameter, R = AᵀgB; their sums where labels come first."""
        found: list[Tensor | None] = []
        for g, m, (A, B) in zip(gradients, self.mean, self.roots(), strict=True):
            if g is None:
                found += [None, None]
                continue
            R = A.mT @ g.flatten(g.ndim - m.ndim + 1) @ B
            rows, columns = R.movedim(-2, 0).flatten(1), R.flatten(0, -2)
            found += [
                self.num_data * scale / len(B) * (rows @ rows.mT),
                self.num_data * scale / len(A) * (columns.mT @ columns),
            ]
        return found

    def factors(self, statistics: list[Tensor | None]) -> list[tuple[Tensor, Tensor] | None]:
        """Return W_A and W_B of every parameter, the prior's part included, from what `statistics` returned."""
        found: list[tuple[Tensor, Tensor] | None] = []
        for k, ((A, B), delta) in enumerate(zip(self.roots(), self.prior, strict=True)):
            of_rows, of_columns = statistics[2 * k : 2 * k + 2]
            if of_rows is None or of_columns is None:
                found.append(None)
                continue
            W_A = of_rows + (self.num_data * delta * B.square().sum() / len(B)) * (A.mT @ A)
            W_B = of_columns + (self.num_data * delta * A.square().sum() / len(A)) * (B.mT @ B)
            found.append((W_A, W_B))
        return found

    def projected(self, statistics: list[Tensor | None]) -> list[tuple[Tensor, Tensor] | None]:
        """Return P_A - ½τI and P_B - ½τI of every parameter, the prior's part included."""
        found = self.factors(statistics)
        for P_A, P_B in filter(None, found):  # W_A and W_B still
            half = 0.5 * (P_A.diagonal().mean() - 1)
            P_A.diagonal().sub_(1 + half)
            P_B.diagonal().sub_(1 + half)
        return found

    def absorb_(self, statistics: list[Tensor | None], rate: float | Tensor) -> None:
        """Step along the natural gradient of the roots, A(I - K + ½K²), K = ρ tril½[P_A - ½τI], and B likewise."""
        for (A, B), pair in zip(self.roots(), self.projected(statistics), strict=True):
            for root, P in zip((A, B), pair or (), strict=False):
                K = torch.tril(P)
                K.diagonal().mul_(0.5)
                K *= rate.to(K).clamp(max=_LONGEST) if isinstance(rate, Tensor) else min(rate, _LONGEST)
                K *= _SMALL / torch.linalg.matrix_norm(K).clamp_min(_SMALL)
                root.sub_(root @ (K - 0.5 * K @ K))

    def refresh_(self) -> None:
        """Do nothing: the roots are what is known of the curvature, and leave the start by steps of their own."""

    def restart_(self, observed: bool) -> None:
        """Begin at the prior, but for what is frozen and known."""
        each = zip(self.parameters_of_network, self.roots(), self.prior, strict=True)
        for p, pair, delta in each:
            for root in pair if p.requires_grad or not observed else ():
                root.zero_().diagonal().fill_((self.num_data * delta) ** -0.25)

    def settle_(self, statistics: list[Tensor | None]) -> None:
        """Take AAᵀ to √τ A W_A⁻¹Aᵀ and BBᵀ to √τ B W_B⁻¹Bᵀ, τ = tr W_A/o = tr W_B/i: both blocks of a pass at once.

        A fixed point has W_A = W_B = I, as the steps have, and minimises KL(q‖N(m, (N (H + δ))⁻¹)) over either factor;
        if H + δ is a Kronecker product the first pass ends at its inverse.
        """
        self.bounded = False
        for pair, factors in zip(self.roots(), self.factors(statistics), strict=True):
            if factors is None:
                continue
            quarter = factors[0].double().diagonal().mean() ** 0.25
            for root, W in zip(pair, factors, strict=True):
                upper = lower_root(W.double().flip(0, 1), torch.finfo(W.dtype).eps).flip(0, 1)  # W = upper upperᵀ
                root.copy_(quarter * torch.linalg.solve_triangular(upper.mT, root.double(), upper=False, left=False))

    def variances(self) -> list[Tensor]:
        """Return (AAᵀ)_jj (BBᵀ)_kk, one tensor a parameter."""
        return [
            torch.outer(A.square().sum(1), B.square().sum(1)).view_as(m)
            for m, (A, B) in zip(self.mean, self.roots(), strict=True)
        ]

    def precisions(self) -> list[Tensor]:
        """Return (AAᵀ)⁻¹_jj (BBᵀ)⁻¹_kk, one tensor a parameter."""
        return [
            torch.outer(torch.cholesky_inverse(A).diagonal(), torch.cholesky_inverse(B).diagonal()).view_as(m)
            for m, (A, B) in zip(self.mean, self.roots(), strict=True)
        ]

    def log_det(self) -> Tensor:
        """Return 2 i Σ log A_jj + 2 o Σ log B_kk."""
        each = [2 * (len(B) * A.diagonal().log().sum() + len(A) * B.diagonal().log().sum()) for A, B in self.roots()]
        return torch.stack(each).sum()

    def blocks(self) -> list[Tensor]:
        """Return A ⊗ B of each parameter, written out, after a check of its size."""
        for name, m in zip(self.names, self.mean, strict=True):
            if m.numel() > LARGEST:
                raise InputError(
                    f"A covariance is written out for {LARGEST:,} weights at most, and {name} has {m.numel():,}; say "
                    "as_gaussian(marginals=True) for the variances alone."
                )
        return [torch.kron(A.contiguous(), B.contiguous())[None] for A, B in self.roots()]
