"""The log density of several rows together under a Gaussian, by draws that hardly vary.

p(y_B) = ∫ p(y_B | θ) q_0(θ) dθ, with q_0 the Gaussian without the rows of B, is the mean of

    w = p(y_B | θ) q_0(θ) / h(θ)        over θ ~ h = ½q_0 + ½q_1,

q_1 being q_0 times Gaussian sites for these rows.  Where the sites are good, w is nearly in proportion to x = q_1/h,
whose mean is known to be 1, so that w - b(x - 1) with b by regression hardly varies (Owen and Zhou 2000); for normal
targets it does not vary at all.  That h has half of its draws from q_0 bounds w by 2 p(y_B | θ).
"""

import torch
from torch import Tensor

from torchngvi.models import GeneralizedLinear

_DRAWS = 2048  # half of them of each Gaussian
_SEED = 0
_AT_ONCE = 20_000_000  # numbers
Moments = tuple[Tensor, Tensor]  # means (G, D) or (D,), roots (G, D, D) or (D, D)


@torch.no_grad()
def joint_log_density(
    model: GeneralizedLinear,
    member: Tensor,  # the group of each row, (N,)
    out: Moments,
    there: Moments,
) -> tuple[Tensor, Tensor]:
    """Compute log ∫ Π_B p(y_j | θ) q_0(θ) dθ of every group B, with its standard error."""
    count, dim = int(member.max()) + 1, model.dim
    pairs = [(m.expand(count, dim), C.expand(count, dim, dim)) for m, C in (out, there)]
    z = _normal(dim, model.X)
    size = max(1, _AT_ONCE // (len(z) * dim))
    order = member.argsort()
    found = []
    for groups in torch.arange(count, device=member.device).split(size):
        first, last = int(groups[0]), int(groups[-1])
        rows = order[(member[order] >= first) & (member[order] <= last)]
        some = [(m[first : last + 1], C[first : last + 1]) for m, C in pairs]
        found.append(_of_some(model, rows, member[rows] - first, z, *some))
    density, error = (torch.cat(parts) for parts in zip(*found, strict=True))
    return density, error


def _of_some(
    model: GeneralizedLinear,
    rows: Tensor,  # (n,)
    member: Tensor,  # (n,)
    z: Tensor,  # (S, D)
    out: Moments,
    there: Moments,
) -> tuple[Tensor, Tensor]:
    logs, likelihoods = [], []
    for mean, root in (out, there):
        logs.append(torch.stack([_log_prob(mean, root, z, other) for other in (out, there)]))  # (2, G, S)
        likelihoods.append(_log_likelihood(model, rows, member, mean, root, z))
    (log_out, log_there), log_p = torch.cat(logs, -1), torch.cat(likelihoods, -1)  # (G, 2 S)
    log_h = torch.logaddexp(log_out, log_there) + torch.tensor(0.5, dtype=z.dtype, device=z.device).log()
    log_w, x = log_p + log_out - log_h, (log_there - log_h).exp()
    top = log_w.amax(-1, keepdim=True)
    w = (log_w - top).exp()
    plain = w.mean(-1)
    apart = x - x.mean(-1, keepdim=True)
    slope = (w * apart).sum(-1) / apart.square().sum(-1).clamp_min(torch.finfo(w.dtype).tiny)
    left = w - slope[:, None] * (x - 1)
    value = left.mean(-1)
    value = torch.where(value > 0, value, plain)
    error = left.std(-1) / left.shape[-1] ** 0.5 / value
    return value.log() + top[:, 0], error


def _log_prob(mean: Tensor, root: Tensor, z: Tensor, other: Moments) -> Tensor:
    """log N(θ; other) at θ = mean + root z, up to the constant that all have, (G, S)."""
    L = other[1]
    shift = torch.linalg.solve_triangular(L, (mean - other[0])[..., None], upper=False)
    apart = shift + torch.linalg.solve_triangular(L, root, upper=False) @ z.mT  # (G, D, S)
    return -0.5 * apart.square().sum(-2) - L.diagonal(dim1=-2, dim2=-1).log().sum(-1)[:, None]


def _log_likelihood(
    model: GeneralizedLinear, rows: Tensor, member: Tensor, mean: Tensor, root: Tensor, z: Tensor
) -> Tensor:
    """Σ_B log p(y_j | θ) at θ = mean + root z of each group, (G, S)."""
    total = mean.new_zeros(len(mean), len(z))
    for chunk in torch.arange(len(rows), device=rows.device).split(max(1, _AT_ONCE // (len(z) + model.dim**2))):
        at, to = rows[chunk], member[chunk]
        x = model.X[at]
        e = (x * mean[to]).sum(-1) + model.offset[at]
        eta = e[:, None] + (x[:, None, :] @ root[to])[:, 0] @ z.mT
        total.index_add_(0, to, -model.likelihood.energy(eta, model.y[at][:, None]))
    return total


def _normal(dim: int, like: Tensor) -> Tensor:
    """Scrambled Sobol points as normal draws, each with its opposite, (S/2, D)."""
    sobol = torch.quasirandom.SobolEngine(dim, scramble=True, seed=_SEED)
    half = torch.special.ndtri(sobol.draw(_DRAWS // 4, dtype=torch.float64).clamp(1e-12, 1 - 1e-12))
    return torch.cat([half, -half]).to(like)
