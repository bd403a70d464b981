"""Varying effects of cafés, and sparse regression with interactions."""

import math

import torch
from torch import Tensor

from benchmarks.truths.target import normal, normals, vector

from .model import Model, numbered

CAFES, VISITS = 20, 10
ROWS, COLUMNS, ACTIVE = 60, 8, 3


def waits() -> tuple[Tensor, Tensor, Tensor]:
    """Café, afternoon and minutes of each visit: a = 3.5, b = -1, sds 1 and 0.5, correlation -0.7, noise 0.5."""
    draw = normals(22)
    covariance = torch.tensor([[1.0, -0.35], [-0.35, 0.25]], dtype=torch.float64)
    effects = vector(3.5, -1.0) + draw(CAFES, 2) @ torch.linalg.cholesky(covariance).mT
    cafe = torch.arange(CAFES).repeat_interleave(VISITS)
    afternoon = vector(0, 1).repeat(CAFES * VISITS // 2)
    return cafe, afternoon, effects[cafe, 0] + effects[cafe, 1] * afternoon + 0.5 * draw(CAFES * VISITS)


def cafes() -> Model:
    """Wait ~ N(a_c + b_c afternoon, σ²), (a_c, b_c) ~ N((a, b), S); a ~ N(5, 4), b ~ N(-1, 1/4), sds ~ Exp(1), LKJ."""
    cafe, afternoon, wait = waits()

    def log_joint(theta: Tensor) -> Tensor:
        a, b, log_a, log_b, arc, log_s = theta[..., :6].split(1, -1)
        intercept, slope = theta[..., 6:].chunk(2, -1)
        rho = torch.tanh(arc)
        x, y = (intercept - a) / log_a.exp(), (slope - b) / log_b.exp()
        rest = 1 - rho.square()
        effects = -0.5 * (x.square() - 2 * rho * x * y + y.square()) / rest - log_a - log_b - 0.5 * rest.log()
        logs = theta[..., [2, 3, 5]]
        prior = normal(a, 5.0, 2.0) + normal(b, -1.0, 0.5) + 2 * rest.log()  # LKJ(2): 1 - ρ², and as much for arctanh
        likelihood = normal((wait - intercept[..., cafe] - slope[..., cafe] * afternoon) / log_s.exp()) - log_s
        return prior[..., 0] + (logs - logs.exp()).sum(-1) + effects.sum(-1) + likelihood.sum(-1)

    tops = ("a", "b", "log sigma_a", "log sigma_b", "atanh rho", "log sigma")
    names = (*tops, *numbered("a_cafe", CAFES), *numbered("b_cafe", CAFES))
    return Model("cafés", "McElreath, Statistical Rethinking, 2nd ed., 14.1; simulated", names, log_joint)


def sparse_data() -> tuple[Tensor, Tensor]:
    """Standardised X (60, 8) and Y: three columns count, and the product of two of them."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    weight = 0.5 + 2.5 * torch.rand(ACTIVE, generator=generator, dtype=torch.float64)
    noise = 0.5 * torch.randn(ROWS, generator=generator, dtype=torch.float64)
    Y = X[:, :ACTIVE] @ weight + 2 * X[:, 0] * X[:, 1] + noise
    X = X - X.mean(0)
    Y = Y - Y.mean()
    return X / X.std(0), Y / Y.std()


def sparse_regression() -> Model:
    """All linear terms and products by a kernel: Y ~ N(0, k(κX, κX) + σ²), κ of a regularised horseshoe."""
    X, Y = sparse_data()
    eye = torch.eye(ROWS, dtype=torch.float64)

    def log_joint(theta: Tensor) -> Tensor:
        sigma, eta1, msq, xisq = theta[..., :4].exp().unbind(-1)
        lam = theta[..., 4:].exp()
        phi = sigma * ACTIVE / math.sqrt(ROWS) / (COLUMNS - ACTIVE)
        prior = -0.5 * sigma.square() - phi.log() - torch.log1p((eta1 / phi).square())  # N⁺(0, 1), Cauchy⁺(0, φ)
        prior = prior - 4 * (msq.log() + xisq.log()) - 1 / msq - 1 / xisq  # InverseGamma(3, 1)
        prior = prior - torch.log1p(lam.square()).sum(-1) + theta.sum(-1)
        eta2sq = (eta1.square() / msq).square() * xisq
        kappa = msq[..., None].sqrt() * lam / (msq[..., None] + (eta1[..., None] * lam).square()).sqrt()
        kX = kappa[..., None, :] * X
        linear, squares = kX @ kX.mT, kX.square() @ kX.square().mT
        a, b = eta1.square()[..., None, None], eta2sq[..., None, None]
        K = 0.5 * b * ((1 + linear).square() - squares - 1) + (a - b) * linear + 1
        root, failed = torch.linalg.cholesky_ex(K + (1e-4 + sigma.square())[..., None, None] * eye)
        z = torch.linalg.solve_triangular(root, Y.expand(theta.shape[:-1] + Y.shape)[..., None], upper=False)
        value = prior - 0.5 * z.square().sum((-1, -2)) - root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return torch.where(failed == 0, value, torch.nan)

    names = ("log sigma", "log eta1", "log msq", "log xisq", *(f"log {x}" for x in numbered("lambda", COLUMNS)))
    source = "Agrawal, Trippe, Huggins and Broderick 2019; Pyro's example sparse_regression, on simulated data"
    return Model("sparse regression", source, names, log_joint)


def models() -> list[Model]:
    """All of them."""
    return [cafes(), sparse_regression()]
