"""The natural-gradient norm at the moments of q, computed from definitions: what a verdict is judged by.

    a = Cᵀ E[∇ℓ]        P = Cᵀ E[∇²ℓ] C - γI        |a|² + ½‖P‖²_F        V = C Cᵀ

for linear models from quadrature of each row, for a log joint from many draws of N(m, V) and Stein's identity
E[∇²ℓ] = E[V⁻¹(θ - m) ∇ℓᵀ], which holds for every Lipschitz ℓ.  Of the library only the coordinates of q are read.
"""

import math

import numpy as np
import reference
import torch

from torchngvi import CholeskyGaussian, DiagonalGaussian, NaturalGaussian


def moments(q):
    """m and a root C of V = C Cᵀ in float64, from what q stores: (m, C), (m, c), (Sm, S) or (m, T)."""
    vector, matrix = (part.detach().double() for part in q.coordinates)
    if isinstance(q, DiagonalGaussian):
        return vector, torch.diag_embed(matrix)
    if isinstance(q, CholeskyGaussian):
        return vector, matrix
    if isinstance(q, NaturalGaussian):
        return torch.linalg.solve(matrix, vector), torch.linalg.inv(torch.linalg.cholesky(matrix)).mT
    return vector, torch.linalg.inv(matrix).mT


def norm_of(a, P, mean_field):
    """√(|a|² + ½‖P‖²), of the diagonal of P in mean field."""
    P = np.diag(np.diag(P)) if mean_field else P
    return math.sqrt(float(a @ a) + 0.5 * float((P * P).sum()))


def sampled_norm2(q, log_joint, gamma, seed, draws=40_000, parts=20):
    """|∇L|²/γ² without bias, from products of independent parts, its standard error, and the share not finite."""
    mean, root = moments(q)
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(draws, len(mean), dtype=torch.float64, generator=generator)
    theta = (mean + z @ root.mT).requires_grad_()
    value = log_joint(theta)
    (gradient,) = torch.autograd.grad(value.sum(), theta)
    finite = value.isfinite() & gradient.isfinite().all(-1)
    unit = gamma or 1.0
    force = (-gradient @ root / unit - (gamma / unit) * z)[finite]
    z = z[finite]
    pieces = []
    for f, x in zip(force.tensor_split(parts), z.tensor_split(parts), strict=True):
        P = f.mT @ x / len(x)
        P = 0.5 * (P + P.mT)
        P = torch.diag(P.diagonal()) if (q.structure.widest == 1) else P
        pieces.append(torch.cat([f.mean(0), P.flatten() * math.sqrt(0.5)]))
    pieces = torch.stack(pieces)
    inner = pieces @ pieces.mT
    pairs = inner[~torch.eye(parts, dtype=torch.bool)]
    jackknife = torch.stack(
        [(inner.sum() - 2 * inner[k].sum() - inner.trace() + 2 * inner[k, k]) for k in range(parts)]
    )
    jackknife = jackknife / ((parts - 1) * (parts - 2))
    error = math.sqrt(float((jackknife - jackknife.mean()).square().sum()) * (parts - 1) / parts)
    return float(pairs.mean()), error, 1 - float(finite.double().mean())


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def student(noise, dof):
    """f' and f'' of ½(ν + 1) log(1 + x²), x = (η - y)/(σ√ν)."""
    size = noise * math.sqrt(dof)

    def slope(x):
        return (dof + 1) / size * x / (1 + x * x)

    def curvature(x):
        return (dof + 1) / size**2 * (1 - x * x) / (1 + x * x) ** 2

    return size, slope, curvature


def row_derivatives(family, e, s, y):
    """E f'(η) and E f''(η) under N(e, s²), of one row."""
    mean = reference.precise_mean
    if family == "gaussian":
        return e - y, 1.0
    if family == "bernoulli_logit":
        return mean(sigmoid, e, s) - (y > 0), mean(lambda x: sigmoid(x) * sigmoid(-x), e, s)
    if family == "poisson_log":
        rate = math.exp(e + 0.5 * s * s)
        return rate - y, rate
    if family == "negative_binomial":  # r = 1
        return (y + 1) * mean(sigmoid, e, s) - y, (y + 1) * mean(lambda x: sigmoid(x) * sigmoid(-x), e, s)
    size, slope, curvature = student(1.0, 4.0)
    x, t = (e - y) / size, s / size
    return mean(slope, x, t), mean(curvature, x, t)


def moderate(q, X, y, weights, offset):
    """Whether E[log(1 + x²)] is accurate at every row: second moments of residuals up to 1e10."""
    mean, C = (part.numpy() for part in moments(q))
    X, y, offset = (part[weights > 0] for part in (X, y, offset))
    return bool((((X @ mean + offset - y) ** 2 + ((X @ C) ** 2).sum(1)) < 1e10).all())


def linear_norm(q, family, X, y, weights, offset, precision, gamma):
    """The natural norm of L at q over γ, and the size of the terms that cancel in it."""
    mean, C = (part.numpy() for part in moments(q))
    X, y, weights, offset = (part[weights > 0] for part in (X, y, weights, offset))
    XC = X @ C
    predictor, deviation = X @ mean + offset, np.sqrt((XC * XC).sum(1))
    rows = [
        row_derivatives(family, *(float(part) for part in row)) for row in zip(predictor, deviation, y, strict=True)
    ]
    alpha, beta = (weights * np.array(part) for part in (zip(*rows, strict=True) if rows else ((), ())))
    unit = gamma or 1.0
    forces = np.concatenate([XC * alpha[:, None], gamma * precision * mean[:, None] * C]) / unit
    curvature = (XC.T * beta) @ XC / unit + gamma / unit * precision * C.T @ C
    # E f' is a difference of numbers of the order 1, or of y; a mean is known to its last bit
    terms = np.abs(forces).sum() + (np.abs(XC) * (weights * (1 + np.abs(beta)))[:, None]).sum() / unit + len(mean)
    terms += np.abs(np.linalg.inv(C)).sum(0) @ np.abs(mean)
    return norm_of(forces.sum(0), curvature - gamma / unit * np.eye(len(mean)), (q.structure.widest == 1)), terms
