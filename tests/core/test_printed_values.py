"""One table of printed values: for each part a tiny input, and what its printed formula gives there, worked out here.

`test_conformance` holds the parts to their contract, this table to their formulas: a row yields pairs of what the part
returns and of what the formula says, which is plain arithmetic and never what the library returned once.  The formula
stands beside it with its source; KPM is Kumar et al. (2025), T is Tan (2025), GNT Godichon-Baggioni, Nguyen and Tran
(2023).  `benchmarks/mutants.py` judges a part by its check and by `check_values`.
"""

import functools
import math
from types import SimpleNamespace

import pytest
import test_conformance as conformance
import torch
from helpers import DTYPE, EXACT, close, step
from reference import normal_mean, tril_half

from torchngvi import expectations, metrics, models, momentum, rules, stepsizes
from torchngvi.expectations import Draws, Fixed, flat
from torchngvi.interfaces import Congruence, Coordinates, Cost, Expectation, FullPrior, Local, Path, Prior, Raw, Trial
from torchngvi.models import FactorTarget, GeneralizedLinear, LogJoint, PerDatum
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.posteriors import flat as laws
from torchngvi.structures import Diagonal, Forest, arrow
from torchngvi.structures.pattern import is_whole

ROWS = {}  # "kind: part", as in `benchmarks/mutants.py` -> a generator of pairs (found, printed)


def row(*parts):
    """Put a row into the table, for one part or for several."""

    def entered(values):
        ROWS.update(dict.fromkeys(parts, values))
        return values

    return entered


def check_values(part):
    """Hold a part to the printed values of its row."""
    for found, printed in ROWS[part]():
        expected = torch.as_tensor(printed, dtype=DTYPE)
        close(torch.as_tensor(found, dtype=None if isinstance(found, torch.Tensor) else DTYPE), expected, EXACT)


def t(*rows):
    return torch.tensor(rows if len(rows) > 1 else rows[0], dtype=DTYPE)


def seeded():
    return torch.Generator().manual_seed(5)


def outer(x, y):
    return x[..., :, None] * y[..., None, :]


def sym(M):
    return 0.5 * (M + M.mT)


def psi1(x):
    """ψ'(x) of whole and half numbers, from ψ'(1) = π²/6, ψ'(½) = π²/2 and ψ'(x + 1) = ψ'(x) - 1/x²."""
    start = 1.0 if x == int(x) else 0.5
    steps = range(round(x - start))
    return math.pi**2 / (6 if start == 1 else 2) - sum(1 / (start + k) ** 2 for k in steps)


def point():
    """N(m, V), V = CCᵀ = S⁻¹, where a packet says g and H at the temperature γ, and what the formulas make of them."""
    p = SimpleNamespace(rho=0.3, gamma=0.7, eye=torch.eye(2, dtype=DTYPE))
    p.m, p.C, p.g, p.H = t(0.3, -0.5), t([0.8, 0.0], [0.3, 0.6]), t(0.7, -0.4), t([1.5, 0.4], [0.4, 0.9])
    p.V = p.C @ p.C.mT
    p.S = p.V.inverse()
    p.G = p.H - p.gamma * p.S
    p.a, p.W = p.C.mT @ p.g, p.C.mT @ p.H @ p.C
    p.P = p.W - p.gamma * p.eye
    p.packet = Expectation(t([1.3])[0], Raw(p.g, p.H), p.gamma, True, Cost(1, 1))
    return p


# ------------------------------------------------------------------------------- rules: (m', V') after a step of ρ


def printed_rules():
    """(rule, m', V') at `point`."""
    p = point()
    m, C, V, S, g, G, P, eye, rho, gamma = p.m, p.C, p.V, p.S, p.g, p.G, p.P, p.eye, p.rho, p.gamma
    natural, euclidean = m - rho * V @ g, m - rho * g
    K = tril_half(P)  # KPM, Eq 13

    def of_root(mean, root):
        return mean, root @ root.mT

    def with_diagonal(matrix, diagonal):
        return matrix.tril(-1) + diagonal.diag()

    # VN (KPM, Eq 7)    S' = (1 - γρ)S + ρH,  m' = m - ρS'⁻¹g
    newton = ((1 - gamma * rho) * S + rho * p.H).inverse()
    yield rules.VariationalNewton(), m - rho * newton @ g, newton
    # SR-VN (KPM, Eq 17; T, Theorem 2)    C' = C - ρC tril½[P],  m' = m - ρCa
    yield rules.NaturalGradient(), *of_root(natural, C - rho * C @ K)
    # the same in log C_ii (T, Eq 4)    C'_ii = C_ii exp(-ρ(CK)_ii/C_ii)
    logs = C.diagonal() * (-rho * (C @ K).diagonal() / C.diagonal()).exp()
    yield rules.LogNaturalGradient(), *of_root(natural, with_diagonal(C - rho * C @ K, logs))
    # local coordinates (Lin, Nielsen, Khan and Schmidt 2021)    C' = C(I - ρK + ½ρ²K²)
    yield rules.LocalExponential(), *of_root(natural, C @ (eye - rho * K + 0.5 * rho**2 * K @ K))
    # iBLR (Lin, Schmidt and Khan 2020)    S' = (1 - γρ)S + ρH + ½ρ²GS⁻¹G
    improved = (1 - gamma * rho) * S + rho * p.H + 0.5 * rho**2 * G @ V @ G
    yield rules.Retraction(), natural, improved.inverse()
    # the geodesic (Lin et al. 2021)    V' = C exp(-ρP)Cᵀ
    values, axes = torch.linalg.eigh(P)
    yield rules.Geodesic(), natural, C @ axes @ (-rho * values).exp().diag() @ axes.mT @ C.mT
    # SR-VN with ½P for tril½[P] (KPM, the remark on other square roots)    V' = C(I - ½ρP)²Cᵀ
    yield rules.SymmetricRoot(), *of_root(natural, C @ (eye - 0.5 * rho * P))
    # BW-GD (Lambert et al. 2022, Algorithm 1)    m' = m - αg,  V' = MVM,  M = I - α(H - γS)
    yield rules.BuresWasserstein(), *of_root(euclidean, (eye - rho * G) @ C)
    # gradient descent in (m, V) (KPM, Eqs 4, 33, 34)    V' = V - ½ρG
    yield rules.CovarianceGradient(), euclidean, V - 0.5 * rho * G
    # Gaussian SVGD (Liu et al. 2024, Algorithm 1)    θ' = θ + ε(Bθ - g),  B = γI - HV - gmᵀ
    B = gamma * eye - p.H @ V - outer(g, m)
    yield rules.SVGD(), *of_root(m + rho * (B @ m - g), (eye + rho * B) @ C)
    # with its kernel centred    θ' = θ + ε(B(θ - m) - g),  B = γI - HV
    yield rules.CenteredSVGD(), *of_root(euclidean, (eye + rho * (gamma * eye - p.H @ V)) @ C)
    # gradient descent in (m, C) (KPM, Eqs 16, 37)    C' = C - ρ tril[GC]
    down = C - rho * (G @ C).tril()
    yield rules.RootGradient(), *of_root(euclidean, down)
    # the same in log C_ii (T, section 3)    C'_ii = C_ii exp(-ρC_ii(GC)_ii)
    logs = C.diagonal() * (-rho * C.diagonal() * (G @ C).diagonal()).exp()
    yield rules.LogRootGradient(), *of_root(euclidean, with_diagonal(down, logs))
    # projected (Kim, Ma and Gardner 2024, section 3.1)    C'_ii = max(C⁺_ii, c)
    floor = float(down.diagonal().mean())  # binds in one coordinate
    yield rules.ProjectedRootGradient(floor), *of_root(euclidean, with_diagonal(down, down.diagonal().clamp_min(floor)))
    # proximal (Domke 2020, section 4)    C⁺ = C - ρ tril[HC],  C'_ii = ½(C⁺_ii + √(C⁺_ii² + 4γρ))
    forward = C - rho * (p.H @ C).tril()
    near = 0.5 * (forward.diagonal() + (forward.diagonal() ** 2 + 4 * gamma * rho).sqrt())
    yield rules.ProximalRootGradient(), *of_root(euclidean, with_diagonal(forward, near))
    # projected in the symmetric root (Domke 2020)    R⁺ = R - ½ρ(GR + RG),  R' = Q max(Λ, c)Qᵀ
    values, axes = torch.linalg.eigh(V)
    R = axes @ values.sqrt().diag() @ axes.mT
    values, axes = torch.linalg.eigh(R - 0.5 * rho * (G @ R + R @ G))
    floor = float(values.mean())
    yield rules.ProjectedSquareRoot(floor), euclidean, axes @ values.clamp_min(floor).square().diag() @ axes.mT


def stepped(rule, mean, covariance):
    p = point()
    q = CholeskyGaussian(2, mean=p.m, scale=p.C)
    path = rule(q, p.packet)
    new = step(q, path.at(t([p.rho])[0]))
    yield from zip(new, (mean, covariance), strict=True)
    yield path.norm2(), p.a @ p.a + 0.5 * (p.P * p.P).sum()  # |∇L|²_F⁻¹ = |a|² + ½‖P‖²_F


ROWS |= {f"rule: {type(rule).__name__}": functools.partial(stepped, rule, m, V) for rule, m, V in printed_rules()}


@row("rule: RootNewton")
def root_newton():
    """Near the optimum in one dimension ρ = 1/γ is Newton's step: Wδ = -a and WT + γT = -P, C' = C(1 + T)."""
    gamma, C, m, a, P = 2.0, 0.8, 0.3, 1e-3, -2e-3
    W = P + gamma
    e = Expectation(t([0.0])[0], Raw(t([a / C]), t([[W / C**2]])), gamma, True, Cost(1, 1))
    q = CholeskyGaussian(1, mean=t([m]), scale=t([[C]]))
    path = rules.RootNewton()(q, e)
    mean, covariance = step(q, path.at(t([1 / gamma])[0]))
    yield (mean - m) / C / a, t([-1 / W])
    yield (covariance / C**2 - 1) / P, t([[((1 - P / (W + gamma)) ** 2 - 1) / P]])
    yield path.slope() / (gamma * a**2), 1 / W + (P / a) ** 2 / (W + gamma)  # -γ(δa + TP)


# --------------------------------------------------------------------------------- estimators: E_q[ℓ], a and W, cost


class Given(Draws):
    """Draws that are given."""

    comparable, independent, mirrored, generator = False, True, False, None

    def __init__(self, *z):
        self.z, self.num_samples = t(*z), len(z)

    def __call__(self, like):
        return self.z.reshape(len(self.z), *(1,) * (like.ndim - 1), -1).expand(-1, *like.shape)


def cubic(theta):
    """ℓ = ½θᵀAθ + bᵀθ + θ₁³/6, with its gradients and Hessians, (S, ...)."""
    A, b, first = t([1.4, 0.5], [0.5, 0.9]), t(-0.3, 0.8), theta[..., 0]
    gradient = theta @ A + b + 0.5 * torch.stack([first**2, 0 * first], -1)
    value = 0.5 * (theta @ A * theta).sum(-1) + theta @ b + first**3 / 6
    return value, gradient, A + torch.stack([first, 0 * first], -1).diag_embed()


def mean_of(values, force, z):
    """E[ℓ], a = E[f] and M = E[f zᵀ] over draws."""
    return values.mean(0), force.mean(0), force.mT @ z / len(z)


def packet(e, q, value, a, W, cost):
    found = e.derivative.framed(q.frame())
    yield from zip((e.value, found.a, found.W, list(e.cost)), (value, a, W, cost), strict=True)


def printed_estimators():
    """(estimator, value, a, W, cost) of `cubic` at `point`, from four draws."""
    p, E = point(), expectations
    rows = [0.3, -1.2], [-0.7, 0.4], [1.5, 0.9], [-0.2, 0.6]
    z, draws = t(*rows), Given(*rows)
    values, gradients, hessians = cubic(p.m + z @ p.C.mT)
    pulled, gamma = gradients @ p.C, p.gamma
    # ClosedEntropyStein (Kingma and Welling 2014)    a = E[Cᵀ∇ℓ], W = E[Cᵀ∇ℓ zᵀ], of which the symmetric part
    value, a, M = mean_of(values, pulled, z)
    yield E.ClosedEntropyStein(draws), value, a, sym(M), [4, 0, 0]
    # Reparametrized (Wu and Gardner 2024, Algorithm 1)    W = tril½[M] + tril½[M]ᵀ
    yield E.Reparametrized(draws), value, a, tril_half(M) + tril_half(M).mT, [4, 0, 0]
    # Stein (Lin, Khan and Schmidt 2019; Roeder, Wu and Duvenaud 2017)    r = Cᵀ∇ℓ - γz, a = E[r], W = γI + E[r zᵀ]
    value, a, M = mean_of(values, pulled - gamma * z, z)
    yield E.Stein(draws), value, a, gamma * p.eye + sym(M), [4, 0, 0]
    # PathDerivative (T, section 3.2)    the lower triangle of E[r zᵀ], and ℓ - ½γ(|z|² - D)
    less = value - 0.5 * gamma * (z.square().sum(-1) - 2).mean()
    yield E.PathDerivative(draws), less, a, gamma * p.eye + tril_half(M) + tril_half(M).mT, [4, 0, 0]
    # ScoreFunction in the frame (T, section 3.1)    h = ℓ - ½γ|z|², a = E[(h - b)z], W = γI + E[(h - b)zzᵀ]
    h = values - 0.5 * gamma * z.square().sum(-1)
    _, a, M = mean_of(values, (h - (h.sum() - h) / 3)[:, None] * z, z)
    yield E.ScoreFunction(draws), value, a, gamma * p.eye + M, [0, 0, 4]
    # Hessian and HessianVector (Bonnet 1964; Price 1958)    a = Cᵀ E[∇ℓ], W = Cᵀ E[∇²ℓ] C
    for kind in (E.Hessian, E.HessianVector):
        yield kind(draws), value, pulled.mean(0), p.C.mT @ hessians.mean(0) @ p.C, [4, 4, 0]
    # LeastSquaresStein (Salimans and Knowles 2013)    Cᵀ∇ℓ ≈ a + Wz, by the normal equations
    X = torch.cat([torch.ones(4, 1, dtype=DTYPE), z], -1)
    fit = (X.mT @ X).inverse() @ X.mT @ pulled
    a, W = fit[0], sym(fit[1:])
    value = (values - z @ a - 0.5 * (z @ W * z).sum(-1)).mean() + 0.5 * W.trace()
    yield E.LeastSquaresStein(draws), value, a, W, [4, 0, 0]


def estimated(estimator, *printed):
    p = point()
    q = CholeskyGaussian(2, mean=p.m, scale=p.C)
    target = LogJoint(lambda theta: -cubic(theta)[0], p.gamma)
    yield from packet(estimator(q, target), q, *printed)


ROWS |= {f"estimator: {type(e).__name__}": functools.partial(estimated, e, *rest) for e, *rest in printed_estimators()}


@row("estimator: Drawing")
def fixed_draws():
    """Fixed draws in `Stein`: the derivative of the mean of ℓ in (m, C), a = E[Cᵀ∇ℓ], W of the triangle of E[Cᵀ∇ℓ zᵀ]."""
    p, draws = point(), Fixed(6)
    z = draws(p.m)
    values, gradients, _ = cubic(p.m + z @ p.C.mT)
    value, a, M = mean_of(values, gradients @ p.C, z)
    yield from estimated(expectations.Stein(draws), value, a, tril_half(M) + tril_half(M).mT, [6, 0, 0])


def poisson(means, variances, y, weights):
    """E[e^η - yη + log y!], ∂/∂e and 2 ∂/∂v under N(e, v), by the mean e^(e + v/2) of a log-normal number."""
    rate = (means + 0.5 * variances).exp()
    return weights * (rate - y * means + torch.lgamma(y + 1)), weights * (rate - y), weights * rate


def glm(family="poisson_log"):
    """Rows X, y, w; their means and variances at `point`; the model; and what makes a packet of sites (F, α, β)."""
    p, X, w = point(), t([1.0, 0.5], [-0.4, 1.2], [0.3, -0.8]), t(1.0, 0.5, 2.0)
    y = t(2.0, 0.0, 1.0) if family == "poisson_log" else t(1.0, 0.0, 1.0)
    m0, lam = t(0.1, 0.2), t(1.5, 0.6)
    model = GeneralizedLinear(X, y, family, prior_precision=lam, prior_mean=m0, weights=w, temperature=p.gamma)
    # g = Xᵀα + γΛ(m - m₀), H = Xᵀ diag(β)X + γΛ; E_q[-log prior] = ½Σ(λ((m - m₀)² + V_ii) - log λ + log 2π)
    prior = 0.5 * (lam * ((p.m - m0) ** 2 + p.V.diagonal()) - lam.log() + math.log(2 * math.pi)).sum()

    def printed(F, alpha, beta, mean_prior=prior):
        g, H = X.mT @ alpha + p.gamma * lam * (p.m - m0), X.mT @ beta.diag() @ X + p.gamma * lam.diag()
        return F.sum() + p.gamma * mean_prior, p.C.mT @ g, p.C.mT @ H @ p.C

    q = CholeskyGaussian(2, mean=p.m, scale=p.C)
    return SimpleNamespace(p=p, X=X, y=y, w=w, q=q, model=model, printed=printed, e=X @ p.m, v=(X @ p.V * X).sum(-1))


@row("estimator: Autograd", "estimator: Quadrature")
def exact():
    s = glm()
    printed = s.printed(*poisson(s.e, s.v, s.y, s.w))
    yield from packet(expectations.Quadrature()(s.q, s.model), s.q, *printed, [1, 1, 0])
    yield from packet(expectations.Autograd()(s.q, s.model), s.q, *printed, [1, 0, 0])


@row("estimator: MonteCarlo")
def of_predictors():
    """(KPM, appendix E) α = mean f'(η), β = mean f''(η), η = e + √v z of each row."""
    s, z = glm(), ([0.5, -1.0, 0.2], [1.1, 0.4, -0.6])
    F, alpha, beta = poisson(s.e + s.v.sqrt() * t(*z), 0 * s.v, s.y, s.w)
    printed = s.printed(F.mean(0), alpha.mean(0), beta.mean(0))
    yield from packet(expectations.MonteCarlo(Given(*z))(s.q, s.model), s.q, *printed, [2, 2, 0])


@row("estimator: BonnetPrice")
def of_theta():
    """(Wu and Gardner 2024, Eq 11) The same with η = X(m + Cz) of joint draws; one design a member as well."""
    s, z = glm(), ([0.5, -1.0], [1.1, 0.4])
    F, alpha, beta = poisson((s.p.m + t(*z) @ s.p.C.mT) @ s.X.mT, 0 * s.v, s.y, s.w)
    value, a, W = s.printed(F.mean(0), alpha.mean(0), beta.mean(0))
    yield from packet(expectations.BonnetPrice(Given(*z))(s.q, s.model), s.q, value, a, W, [2, 2, 0])
    q = CholeskyGaussian(2, (2,), mean=s.p.m, scale=s.p.C.expand(2, 2, 2))
    X, plain = torch.stack([s.X, 2 * s.X]), {"prior_precision": 1.0, "temperature": s.p.gamma}
    model = GeneralizedLinear(X, s.y.expand(2, 3), "poisson_log", **plain)
    for member, found in enumerate(expectations.BonnetPrice(Given(*z))(q, model).derivative.raw().g):
        eta = (s.p.m + t(*z) @ s.p.C.mT) @ X[member].mT
        yield found, X[member].mT @ (eta.exp() - s.y).mean(0) + s.p.gamma * s.p.m


@row("estimator: PiecewiseBound")
def bounded():
    """(Marlin, Khan and Murphy 2011) Of log 2 + max(x, 0) E is eΦ(e/s) + sφ(e/s); of ax² + bx + c a(e² + v) + be + c."""
    s = glm("bernoulli_logit")
    sign = 1 - 2 * s.y  # softplus(-ỹη)
    e, sd = sign * s.e, s.v.sqrt()
    Phi, phi = 0.5 * torch.erfc(-e / sd / math.sqrt(2)), (-0.5 * s.v.reciprocal() * e**2).exp() / math.sqrt(2 * math.pi)
    sites = math.log(2) + e * Phi + sd * phi, sign * Phi, phi / sd
    printed = s.printed(*(s.w * part for part in sites))
    yield from packet(expectations.PiecewiseBound(2)(s.q, s.model), s.q, *printed, [1, 1, 0])
    table = [(-math.inf, -40.0, 0.0, 0.0, 0.7), (-40.0, 40.0, 0.125, 0.5, 0.7), (40.0, math.inf, 0.0, 1.0, 0.7)]
    sites = 0.125 * (e**2 + s.v) + 0.5 * e + 0.7, sign * (0.25 * e + 0.5), 0.25 + 0 * e
    printed = s.printed(*(s.w * part for part in sites))
    yield from packet(expectations.PiecewiseBound(table=table)(s.q, s.model), s.q, *printed, [1, 1, 0])


@row("estimator: GaussNewton")
def empirical_fisher():
    """(Khan et al. 2018) g = E[∇ℓ], H = E[Σ_n ∇log p_n ∇log p_nᵀ] - E[∇²log p(θ)]; log p_n = -½(y_n - x_nᵀθ)²."""
    s, z = glm(), ([0.5, -1.0], [1.1, 0.4])
    theta = s.p.m + t(*z) @ s.p.C.mT
    left = s.y - theta @ s.X.mT
    g = (2 * theta - left @ s.X).mean(0)
    H = torch.einsum("sn,ni,nj->ij", left**2, s.X, s.X) / 2 + 2 * s.p.eye
    target = PerDatum(lambda x: -0.5 * (s.y - x @ s.X.mT) ** 2, lambda x: -x.square().sum(-1), s.p.gamma)
    value = (0.5 * left.square().sum(-1) + theta.square().sum(-1)).mean()
    e = expectations.GaussNewton(Given(*z))(s.q, target)
    yield from packet(e, s.q, value, s.p.C.mT @ g, s.p.C.mT @ H @ s.p.C, [2, 0, 0])


def noise2(force, z, own, above=()):
    """Σ_pairs |r̄|² + ¼(|r|²|z|² + (r·z)²) + |r|²|z_above|², over pairs (pairs - 1), of the coordinates of a node."""
    (plus, minus), z = force[:, own].chunk(2), z.chunk(2)[0]
    even, odd = 0.5 * (plus + minus), 0.5 * (plus - minus)
    squares, mine = odd.square().sum(-1), z[:, own]
    each = (even - even.mean(0)).square().sum(-1) + squares * z[:, list(above)].square().sum(-1)
    each = each + 0.25 * (squares * mine.square().sum(-1) + (odd * mine).sum(-1).square())
    return each.sum() / (len(z) * (len(z) - 1))


@row("estimator: SampleAverage")
def average():
    """Stein's a and W with noise²; over a forest a border takes one triangle, and noise² is that of r - Wz by nodes."""
    p, draws = point(), Fixed(6)
    q, z = CholeskyGaussian(2, mean=p.m, scale=p.C), draws(p.m)
    values, gradients, _ = cubic(p.m + z @ p.C.mT)
    r = gradients @ p.C - p.gamma * z
    value, a, M = mean_of(values, r, z)
    e = expectations.SampleAverage(draws)(q, LogJoint(lambda theta: -cubic(theta)[0], p.gamma))
    yield from packet(e, q, value, a, p.gamma * p.eye + sym(M), [6, 0, 0])
    yield e.noise2, noise2(r, z, [0, 1])

    pattern = arrow(groups=1, local=2, globals=1)  # 0 and 1 of the group, 2 above them
    T, m, draws = t([1.2, 0.0, 0.0], [0.3, 0.9, 0.0], [-0.4, 0.5, 1.1]), t(0.2, -0.3, 0.4), Fixed(6, pattern=pattern)
    q = PrecisionCholeskyGaussian(3, structure=pattern, mean=m, scale=torch.linalg.cholesky((T @ T.mT).inverse()))
    z, C = draws(m), T.inverse().mT

    def ell(theta):
        return 0.5 * theta.square().sum(-1) + theta.prod(-1)

    theta = m + z @ C.mT
    others = torch.stack([theta[:, 1] * theta[:, 2], theta[:, 0] * theta[:, 2], theta[:, 0] * theta[:, 1]], -1)
    pulled = (theta + others) @ C
    value, a, M = mean_of(ell(theta), pulled - p.gamma * z, z)
    W = p.gamma * torch.eye(3, dtype=DTYPE)
    W[:2, :2] += sym(M[:2, :2])
    W[2, 2] += M[2, 2]
    W[2, :2] = W[:2, 2] = M[:2, 2]
    e = expectations.SampleAverage(draws)(q, LogJoint(lambda theta: -ell(theta), p.gamma))
    found = e.derivative.framed(q.frame())
    yield from ((e.value, value), (found.a, a), (pattern.full(found.W), W))
    rest = pulled - z @ W
    yield e.noise2, noise2(rest, z, [0, 1], [2]) + noise2(rest, z, [2])


@row("estimator: PerFactor")
def by_factor():
    """a = Σ_c a_c and W = Σ_c W_c over the cliques, in their places, and noise² = Σ_c noise²_c."""
    gamma, y, pattern, draws = 0.7, t(0.5, -1.0), arrow(groups=2, local=1, globals=1), Fixed(6, apart=True)
    T, m = t([1.2, 0.0, 0.0], [0.0, 0.9, 0.0], [-0.4, 0.5, 1.1]), t(0.2, -0.3, 0.4)
    q = PrecisionCholeskyGaussian(3, structure=pattern, mean=m, scale=torch.linalg.cholesky((T @ T.mT).inverse()))

    def group(theta):  # of b_n and the global x: ½(y_n - b_n)² + e^x b_n²
        return -0.5 * (y - theta[..., 0]) ** 2 - theta[..., 1].exp() * theta[..., 0] ** 2

    target = FactorTarget(pattern, [(0, group), (-1, lambda theta: -(theta[..., 0] ** 4))], gamma)
    e = expectations.PerFactor(expectations.SampleAverage(draws))(q, target)
    value, a, W, noise = t([0.0])[0], 0 * m, torch.zeros(3, 3, dtype=DTYPE), 0.0
    for place in ([0, 2], [1, 2], [2]):
        C = T[place][:, place].inverse().mT
        z = draws(torch.zeros(2, 2, dtype=DTYPE))[:, place[0]] if len(place) == 2 else draws(t([[0.0]]))[:, 0]
        theta = m[place] + z @ C.mT
        b, x = theta[:, 0], theta[:, -1]
        if len(place) == 2:
            ell = 0.5 * (y[place[0]] - b) ** 2 + x.exp() * b**2
            gradient = torch.stack([b - y[place[0]] + 2 * x.exp() * b, x.exp() * b**2], -1)
        else:
            ell, gradient = x**4, 4 * x[:, None] ** 3
        pulled = gradient @ C
        one, own, M = mean_of(ell, pulled - gamma * z, z)
        own_W = gamma * torch.eye(len(place), dtype=DTYPE) + sym(M)
        value, noise = value + one, noise + noise2(pulled - z @ own_W, z, list(range(len(place))))
        a[place] += own
        W[torch.tensor(place)[:, None], torch.tensor(place)] += own_W
    yield from ((e.value, value), (e.derivative.a, a), (pattern.full(e.derivative.W), W), (e.noise2, noise))
    yield list(e.cost), [6, 0, 0]


@row("estimator: StatisticRegression")
def regressed():
    """(Salimans and Knowles 2013) Of a class the fit is exact: c_k = h_k - h_K, ∇L = -Fc, F = diag(ω) - ωωᵀ."""
    p, f, gamma = t(0.2, 0.5, 0.3), t(0.4, -1.0, 0.7), 0.6
    q = laws.Categorical(p[:2].log() - p[2].log())
    e = expectations.StatisticRegression()(q, LogJoint(lambda k: f[k[..., 0].long()], gamma))
    h = f - gamma * p.log()
    omega, c = p[:2], h[:2] - h[2]
    yield from ((e.value, -(p @ h)), (e.derivative.a, omega * (omega @ c) - omega * c), (list(e.cost), [0, 0, 3]))


def flat_problem():
    """q = N(μ, σ²) over (μ, log σ), log p(θ) = sin θ - θ², and h = log p - γ log q."""
    lam, gamma = t(0.4, -0.3), 0.6
    q, sd = laws.MeanFieldGaussian(lam), math.exp(-0.3)
    target = LogJoint(lambda theta: (theta.sin() - theta**2)[..., 0], gamma)

    def scored(generator):  # φ = ((θ - μ)/σ², (θ - μ)²/σ² - 1) and h at draws
        z = (q.sample(5, generator)[:, 0] - lam[0]) / sd
        theta = lam[0] + sd * z
        log_q = -0.5 * z**2 - lam[1] - 0.5 * math.log(2 * math.pi)
        return torch.stack([z / sd, z**2 - 1], -1), theta.sin() - theta**2 - gamma * log_q

    return q, target, gamma, scored


@row("estimator: ScoreFunction")
def by_scores():
    """(GNT, Eq 2.4) -∇L is the mean of φh; and the row of the estimator of that name in the frame."""
    q, target, _, scored = flat_problem()
    (phi, h), e = scored(seeded()), flat.ScoreFunction(5, seeded())(q, target)
    yield from ((e.value, -h.mean()), (e.derivative.a, -(phi * h[:, None]).mean(0)), (list(e.cost), [0, 0, 5]))
    yield from estimated(*next(rest for rest in printed_estimators() if "ScoreFunction" in type(rest[0]).__name__))


@row("estimator: ControlVariate")
def controlled():
    """-∇L is the mean of φ_i(h - c_i), c_i = Cov(φ_i h, φ_i)/Var(φ_i) of the batch before."""
    q, target, _, scored = flat_problem()
    generator = seeded()
    (first, h1), (phi, h) = scored(generator), scored(generator)
    weighted, away = first * h1[:, None], first - first.mean(0)
    c = (weighted * away).sum(0) / (away**2).sum(0)
    e = flat.ControlVariate(5, seeded())(q, target)
    yield from ((e.value, -h.mean()), (e.derivative.a, -(phi * (h[:, None] - c)).mean(0)), (list(e.cost), [0, 0, 10]))


@row("estimator: Pathwise")
def pathwise():
    """-∇L is the mean of ∇_λ h(μ + σz), λ inside log q held fixed: (h', h'σz), h' = cos θ - 2θ + γ(θ - μ)/σ²."""
    q, target, gamma, scored = flat_problem()
    phi, h = scored(seeded())
    sd = math.exp(-0.3)
    z = phi[:, 0] * sd
    theta = 0.4 + sd * z
    slope = theta.cos() - 2 * theta + gamma * z / sd
    e = flat.Pathwise(5, seeded())(q, target)
    yield from ((e.value, -h.mean()), (e.derivative.a, -t((slope.mean().item(), (slope * sd * z).mean().item()))))


@row("estimator: ClosedForm")
def closed():
    """∇L of the bound itself, from no draws."""
    q, *_ = flat_problem()
    e = flat.ClosedForm()(q, flat.ClosedForm().prepared(lambda lam: lam[..., 0] ** 2 * lam[..., 1]))
    yield from ((e.value, 0.4**2 * 0.3), (e.derivative.a, [2 * 0.4 * 0.3, -(0.4**2)]), (flat.ClosedForm().draws, 0))


# ----------------------------------------------------------------------------------------------------- step sizes


def path_of(norm2, speed2=None, change2=None, leaves=1):
    parts = [None if x is None else (lambda x=x: t(*x)) for x in (norm2, speed2, change2)]
    return Path(lambda rho: rho, parts[0], parts[0], change2=parts[2], leaves=leaves, speed2=parts[1])


@row("step_size: Clip", "step_size: KLRadius", "step_size: Shortest", "step_size: Convex", "step_size: Constant")
def proposed():
    """lr min(1, norm/|d|); min(lr, √(2 radius)/|λ̇|); the shortest of them; lr in [0, 1]; lr."""
    like, path = t(0.0, 0.0), path_of((4.0, 0.01), speed2=(9.0, 0.04), change2=(25.0, 0.25))
    clip, radius = stepsizes.Clip(2.0), stepsizes.KLRadius(0.18)
    yield clip.propose(path, 0.5, like, {}), [0.5 * 2 / 5, 0.5]
    yield radius.propose(path, 0.5, like, {}), [math.sqrt(2 * 0.18) / 3, 0.5]
    both = stepsizes.Shortest(stepsizes.Clip(2.0), radius)
    yield both.propose(path, 0.5, like, both.init(like)), [min(0.5 * 2 / 5, math.sqrt(2 * 0.18) / 3), 0.5]
    within = stepsizes.Convex().propose(path, t(0.5, 1.5), like, {})
    yield from ((within[0], 0.5), (within.isnan().double(), [0.0, 1.0]), (stepsizes.Constant(0.3).rate, 0.3))
    yield stepsizes.Constant().propose(path, 0.5, like, {}), [0.5, 0.5]


def judged(control, state, *trials):
    """What `judge` says of trials (L, L', s, length, ρ), one a member."""
    return control.judge(Trial(*t(*trials).mT, 0 * t(*trials)[:, 0]), state)


@row("step_size: Backtracking", "step_size: TrialStepSize")
def backtracked():
    """(Armijo 1966) Kept where L - L' ≥ cρs up to 64ε max(|L|, 1); else ρ becomes ½ρ²s/(ρs - (L - L')) in [ρ/10, ρ/2]."""
    control, rounding = stepsizes.Backtracking(0.2), 64 * torch.finfo(DTYPE).eps
    first = {"share": t(1.0, 1.0, 1.0, 0.5, 1.0, 1.0)}
    yield control.propose(path_of((1.0,)), 0.8, t(0.0), {"share": t(0.25, 0.25)}), [0.2, 0.2]
    trials = (
        [3.0, 2.0, 1.0, 1.0, 2.0],
        [3.0, 2.7, 1.0, 1.0, 2.0],
        [3.0, 3.4, 1.0, 1.0, 2.0],
        [3.0, 30.0, 1.0, 1.0, 2.0],
    )
    edge = [[0.0, 1.1 * rounding, 1e-300, 1.0, 1.0], [0.0, 0.9 * rounding, 1e-300, 1.0, 1.0]]
    kept, new = judged(control, first, *trials, *edge)
    yield kept.double(), [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    yield new["share"], [1.0, 0.5, 0.5 * 2 / (2 + 0.4), 0.1 * 0.5, 0.1, 1.0]


@row("step_size: SufficientDecrease")
def sufficient():
    """ρ = min(lr, reach/|∇L|, cap); after a trial the reach grows by 4 or shrinks by ¼, the cap by the same parabola."""
    control, wide = stepsizes.SufficientDecrease(2.0), t(0.0, 0.0)
    state = control.init(wide)
    yield from ((state["reach"], [2.0, 2.0]), (control.propose(path_of((16.0, 4.0)), 0.7, wide, state), [0.5, 0.7]))
    many = control.propose(path_of((16.0, 400.0), leaves=100), 9.0, wide, state)
    yield many, [math.sqrt(2 * 0.1 * 100) / 4, 2 / 20]
    state = {"reach": t(2.0, 2.0, 2.0, 2.0), "cap": t(math.inf, 0.9, 0.9, math.inf)}
    trials = [3.0, 1.5, 1.0, 1.5, 2.0], [3.0, 2.6, 1.0, 1.5, 2.0], [3.0, 3.4, 1.0, 1.5, 2.0], [3.0, 3.4, 1.0, 1.5, 2.0]
    kept, new = judged(control, state, *trials)
    yield from ((kept.double(), [1.0, 1.0, 0.0, 0.0]), (new["reach"], [6.0, 2.0, 0.25 * 1.5, 0.25 * 1.5]))
    cut = 2 * 0.5 * 2 / (2 + 0.4)
    yield from ((new["cap"][1:], [2 * 0.7, cut, cut]), (new["cap"].isinf().double(), [1.0, 0.0, 0.0, 0.0]))


# ------------------------------------------------------------------------------------------------------- momenta


def moved_twice(part, q, norm2=None):
    """Two changes of (m, C), as flat vectors of their own entries, and what the part makes of them."""
    changes, state, found = [t(0.6, -0.2, 0.9, 0.4, -0.5), t(-0.3, 0.7, 0.2, -0.6, 0.8)], part.init(q), []
    for x in changes:
        matrix = torch.stack([torch.stack([x[2], 0 * x[2]]), x[3:]])
        new, state = part(q, Coordinates(x[:2], matrix), norm2, state)
        found.append(torch.cat([new.vector, new.matrix[[0, 1, 1], [0, 0, 1]]]))
    return *changes, *found


@row("momentum: ExponentialAverage")
def averaged():
    """M ← ωM + (1 - ω)d from 0."""
    first, second, *found = moved_twice(momentum.ExponentialAverage(0.6), CholeskyGaussian(2, dtype=DTYPE))
    yield from zip(found, (0.4 * first, 0.6 * 0.4 * first + 0.4 * second), strict=True)


@row("momentum: NormalizedMomentum")
def normalised():
    """(T, section 4) m ← βm + (1 - β)g/|g|, and the step m/(1 - βᵗ); or g/‖g‖_F and no correction."""
    q = CholeskyGaussian(2, dtype=DTYPE)
    first, second, *found = moved_twice(momentum.NormalizedMomentum(beta=0.8), q)
    once, twice = first / first.norm(), 0.8 * first / first.norm() + second / second.norm()
    yield from zip(found, (once, 0.2 * twice / (1 - 0.8**2)), strict=True)
    part = momentum.NormalizedMomentum("riemannian", beta=0.8, bias_correction=False)
    first, second, *found = moved_twice(part, q, lambda: t([9.0])[0])
    yield from zip(found, (0.2 * first / 3, 0.2 * (0.8 * first + second) / 3), strict=True)


def adam(betas, eps, *gradients):
    """(Kingma and Ba 2015, Algorithm 1) m̂/(√v̂ + ε) after each gradient."""
    m = v = 0.0
    for count, g in enumerate(gradients, 1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        yield m / (1 - betas[0] ** count) / ((v / (1 - betas[1] ** count)).sqrt() + eps)


@row("momentum: Adam", "metric: Adam")
def adam_twice():
    betas, eps = (0.8, 0.95), 0.1
    first, second, *found = moved_twice(momentum.Adam(betas, eps), CholeskyGaussian(2, dtype=DTYPE))
    yield from zip(found, adam(betas, eps, first, second), strict=True)
    metric, q = metrics.Adam(betas, eps), laws.MeanFieldGaussian(t(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    gradients, state = [t(0.5, -1.0, 2.0, 0.1, -0.2, 0.3), t(-0.7, 0.2, 1.0, 0.3, 0.4, -0.9)], metric.fresh(q)
    for g, printed in zip(gradients, adam(betas, eps, *gradients), strict=True):
        state = metric.noticed(state, g, q)
        yield metric.direction(state, g, q), printed


# ---------------------------------------------------------------------------------------- accelerations and metrics


@row("acceleration: QuasiNewton")
def bfgs():
    """(Nocedal and Wright 2006, Eq 6.17) B = (I - syᵀ/sᵀy)(I - ysᵀ/sᵀy) + ssᵀ/sᵀy in x = (a, P/√2), from B = I."""
    q, part, root = CholeskyGaussian(1, dtype=DTYPE), metrics.QuasiNewton(), math.sqrt(2)
    xs, went = [t(0.9, 0.4), t(0.5, 0.3), t(0.3, 0.1)], (0.0, 0.5, 0.8)
    state, B, seen = part.init(q), torch.eye(2, dtype=DTYPE), []
    for x, rho in zip(xs, went, strict=True):
        if seen:
            s, y = -rho * seen[-1][1], x - seen[-1][0]
            left = torch.eye(2, dtype=DTYPE) - outer(s, y) / (s @ y)
            B = left @ B @ left.mT + outer(s, s) / (s @ y)
        bent, new = part(q, Local(x[:1], root * x[1:, None]), t([rho])[0], state)
        state = state | new
        seen.append((x, B @ x))
        yield torch.cat([bent.local.a, bent.local.P[0] / root]), B @ x
        yield bent.slope, x @ B @ x


@row("acceleration: SiteNewton")
def site_newton():
    """Wδ = -a - ½Aβ_eδv, D = P + A²(β_eAδ + β_vδv), δv = -A²D, W = 1 + P, with β = β_e = 2β_v = e^(e + v/2) of one row."""
    m, C, x, gamma, a, P = 0.2, 0.9, 0.8, 1.6, 0.25, 0.1
    q = CholeskyGaussian(1, mean=t([m]), scale=t([[C]]))
    model = GeneralizedLinear(t([[x]]), t([2.0]), "poisson_log", temperature=gamma)
    A, W = x * C, 1 + P
    beta_e = math.exp(x * m + 0.5 * A**2) / gamma
    change = -(A**2) * (P - A**3 * beta_e * a / W) / (1 + A**4 * (0.5 * beta_e - 0.5 * beta_e**2 * A**2 / W))
    delta, D = -(a + 0.5 * A * beta_e * change) / W, -change / A**2
    part = metrics.SiteNewton(model)
    bent, _ = part(q, Local(t([a]), t([[P]])), t([0.0])[0], part.init(q))
    printed = -(1 + D) * delta, D, -a * (1 + D) * delta + 0.5 * P * D
    yield from zip((bent.local.a[0], bent.local.P[0, 0], bent.slope), printed, strict=True)


def scores(count, size):
    return torch.cos(torch.arange(1, count * size + 1, dtype=DTYPE) ** 2).reshape(count, size)


def mean_field(size):
    return laws.MeanFieldGaussian(torch.zeros(size, dtype=DTYPE))


def learned(metric, q, *batches, generator=None):
    """The metric's direction of 1 after batches of scores."""
    state = metric.fresh(q)
    for batch in batches:
        state = state | metric.absorb(state, batch, generator)
    return metric.direction(state, torch.ones_like(q.vector), q)


def damped(phi, rho):
    """(F̂ + ρ tr(F̂)/D I)⁻¹1, F̂ = ΦᵀΦ/n."""
    F = phi.mT @ phi / len(phi)
    return (F + rho * F.trace() / len(F) * torch.eye(len(F), dtype=DTYPE)).inverse().sum(-1)


@row("metric: BatchFisher", "metric: Window")
def empirical():
    """(GNT, Eq 4.1, damped) Of the last batch, or of the last scores; fewer and more than D."""
    q, old, new = mean_field(4), scores(2, 4), 0.7 * scores(5, 4).flip(0)
    yield learned(metrics.BatchFisher(5, rho=0.0), q, old, new), damped(new, 0.0)
    yield learned(metrics.BatchFisher(2, rho=0.3), q, new, old), damped(old, 0.3)
    yield learned(metrics.Window(6, 2, rho=0.3), q, old, new), damped(torch.cat([old[1:], new]), 0.3)
    yield learned(metrics.Window(3, 2, rho=0.3), q, new, old), damped(torch.cat([new[-1:], old]), 0.3)


def recursion(phi, eps, Z=None):
    """(GNT, Eqs 4.3-4.5) t(εI + Σφφᵀ + Σβ_jZ_jZ_jᵀ)⁻¹1, β_j = ½ j^{-β}, β = 0.2."""
    H = eps * torch.eye(phi.shape[-1], dtype=DTYPE) + phi.mT @ phi
    if Z is not None:
        H = H + (Z.mT * (0.5 * torch.arange(1.0, len(Z) + 1, dtype=DTYPE) ** -0.2)) @ Z
    return len(phi) * H.inverse().sum(-1)


@row("metric: Recursive", "metric: MatrixFree")
def recursive():
    phi = scores(6, 16)
    for kind in (metrics.Recursive, metrics.MatrixFree):
        each = [learned(kind(n, eps=0.4, c_beta=0.0), mean_field(16), *phi.split(n)) for n in (1, 2)]
        yield from ((found, recursion(phi, 0.4)) for found in each)
        yield learned(kind(6, c_beta=0.0), mean_field(16), phi), recursion(phi, (phi**2).mean())  # ε of the scores
        found = learned(kind(3, eps=0.4, c_beta=0.5, beta=0.2), mean_field(16), *phi.split(3), generator=seeded())
        same = seeded()
        Z = torch.cat([torch.randn(3, 16, generator=same, dtype=DTYPE) for _ in range(2)])
        yield found, recursion(phi, 0.4, Z)


@row("metric: Blocks", "metric: Preconditioner")
def blocks():
    """One recursion for each block; a first step draws the scores of the warm-up and its own."""
    phi = scores(3, 4)
    found = learned(metrics.Blocks(metrics.Recursive(1, eps=0.4, c_beta=0.0), [3, 1]), mean_field(4), *phi.split(1))
    yield found, torch.cat([recursion(phi[:, :3], 0.4), recursion(phi[:, 3:], 0.4)])
    metric, q = metrics.Recursive(5, warmup=20), mean_field(4)
    _, state = metric(q, Local(t(1.0, 0.0, 0.0, 0.0), q.no_matrix), t([0.0])[0], metric.init(q))
    yield from ((state["fisher_draws"], 25), (state["count"], 25.0))


# ----------------------------------------------------------------------------------------------------- posteriors


@row("posterior: CholeskyGaussian", "posterior: NaturalGaussian", "posterior: PrecisionCholeskyGaussian")
def gaussians():
    """N(m, V) in (m, C), (Sm, S) and (m, T): density, entropy, divergence, loss, gradients and a move by a congruence."""
    p = point()
    theta, m2, V2 = t(0.9, 0.1), t(-0.2, 0.4), t([0.9, -0.2], [-0.2, 1.3])
    away, log_2pi = theta - p.m, math.log(2 * math.pi)
    entropy = 0.5 * p.V.logdet() + 1 + log_2pi
    kl = 0.5 * ((V2.inverse() @ p.V).trace() + (p.m - m2) @ V2.inverse() @ (p.m - m2) - 2 + (V2 @ p.S).logdet())
    kinds = CholeskyGaussian, NaturalGaussian, PrecisionCholeskyGaussian
    for kind in kinds:
        q = kind.from_moments(p.m, p.V)
        yield from ((q.mean, p.m), (q.covariance, p.V), (q.precision, p.S), (q.variance, p.V.diagonal()))
        yield q.log_prob(theta), -0.5 * away @ p.S @ away - 0.5 * p.V.logdet() - log_2pi
        yield from ((q.entropy(), entropy), (q.loss(p.packet), p.packet.value - p.gamma * entropy))
        yield from ((q.kl(other.from_moments(m2, V2)), kl) for other in kinds)
        T = torch.linalg.cholesky(p.S)
        C = p.C if kind is CholeskyGaussian else T.inverse().mT
        N, f, P = t([1.5, 0.2], [0.2, 0.8]), t(0.4, -0.3), C.mT @ p.H @ C - p.gamma * p.eye
        new = step(q, Congruence(N, f))  # V' = CN⁻¹Cᵀ, m' = m + CN⁻¹f
        yield from zip(new, (p.m + C @ N.inverse() @ f, C @ N.inverse() @ C.mT), strict=True)
        # the natural gradients of KPM, Eq 17 and of T, Theorem 2, and the plain ones ∂L/∂C = GC, ∂L/∂T = -VGT⁻ᵀ
        natural, plain = {
            CholeskyGaussian: ((p.V @ p.g, C @ tril_half(P)), (p.g, (p.G @ C).tril())),
            NaturalGaussian: ((p.g - p.G @ p.m, -p.G), None),
            PrecisionCholeskyGaussian: ((p.V @ p.g, -T @ tril_half(P)), (p.g, -(p.V @ p.G @ C).tril())),
        }[kind]
        yield from zip(q.tangent(p.packet), natural, strict=True)
        yield from zip(q.euclidean(p.packet), plain, strict=True) if plain else ()
    wide = NaturalGaussian(65, mean=t(*[0.5] * 65), scale=2.0)  # of more than 64 coordinates no root is taken
    new, inside = wide.moved(Congruence(2 * torch.eye(65, dtype=DTYPE), t(*[1.0] * 65)))
    yield from ((new.vector / 0.5, t(*[0.5 + 0.5 * 2] * 65)), (inside.double(), 1.0))


@row("posterior: DiagonalGaussian")
def independent():
    """The same for N(m, diag c²): KL(p‖q) keeps the marginal variances; tangent (c²g, ½c(c²h - γ)), plain (g, ch - γ/c)."""
    p = point()
    q = DiagonalGaussian.from_moments(p.m, p.V)
    c = p.V.diagonal().sqrt()
    yield from ((q.mean, p.m), (q.stddev, c), (q.entropy(), c.log().sum() + 1 + math.log(2 * math.pi)))
    natural = c**2 * p.g, 0.5 * c * (c**2 * p.H.diagonal() - p.gamma)
    yield from zip(q.tangent(p.packet), natural, strict=True)
    yield from zip(q.euclidean(p.packet), (p.g, c * p.H.diagonal() - p.gamma / c), strict=True)
    mixed = 0.5 * ((p.S * (c**2).diag()).sum() - 2 + p.V.logdet()) - c.log().sum()
    yield q.kl(CholeskyGaussian.from_moments(p.m, p.V)), mixed
    yield CholeskyGaussian.from_moments(p.m, p.V).kl(q), -mixed + 0.5 * ((p.S * (c**2).diag()).sum() - 2)


@row("posterior: ConvertibleGaussian", "posterior: RememberingPosterior")
def started():
    """The start at a prior; and what is read within a settled block after the coordinates were assigned."""
    p = point()
    q = CholeskyGaussian.from_prior(Prior(t(0.0), t(4.0, 0.25)), (3,))
    yield from ((q.mean, torch.zeros(3, 2)), (q.stddev, [[0.5, 2.0]] * 3))
    q = NaturalGaussian.from_prior(FullPrior(p.m, p.S, torch.linalg.cholesky(p.S).mT))
    yield from ((q.mean, p.m), (q.covariance, p.V))
    with q.settled():
        q.assign(Coordinates(2 * p.g, 2 * p.S), torch.tensor(True))
        yield q.mean, p.V @ p.g


@row("structure: Pattern")
def of_patterns():
    """XL of one design for each member; a pattern has its total in one process."""
    X, pattern = scores(8, 3).reshape(2, 4, 3), Forest((2, 2, -1), (1, 1, 1))
    L = t([1.2, 0.0, 0.0], [0.0, 0.9, 0.0], [-0.4, 0.5, 1.1])
    root = pattern.from_dense(torch.stack([L, 2 * L]))
    yield from ((pattern.rows(X, root), torch.stack([X[0] @ L, 2 * X[1] @ L])), (is_whole(Diagonal(2)), True))


# ------------------------------------------------------------------------------------------------- flat posteriors


def family(q, theta, other, parts, F, A, T, base):
    """log q = log h + ⟨η, T⟩ - A, ω = ∇A, F = ∇²A, entropy A - ⟨η, ω⟩ - E log h (Wainwright and Jordan 2008, section 3)."""
    eta, change = q.vector, torch.linspace(0.5, -0.7, q.size, dtype=DTYPE)
    omega, F = torch.func.grad(A)(eta), torch.as_tensor(F, dtype=DTYPE)
    yield q.log_prob(theta), (T @ base if isinstance(base, torch.Tensor) else base) + eta @ T - A(eta)
    yield from ((q.score(theta), T - omega), (q.expectation(), omega), (q.natural(omega), eta))
    yield from ((q.fisher_product(change), F @ change), (q.exact_fisher_solve(F @ change), change))
    yield q.norm2(Local(F @ change, q.no_matrix)), change @ F @ change
    yield q.kl(q.at(other)), A(other) - A(eta) - (other - eta) @ omega
    yield from zip((q.mean, q.variance), parts, strict=True)
    if isinstance(base, torch.Tensor):
        yield q.entropy(), A(eta) - (eta + base) @ omega


def of_shares(alpha):
    return torch.lgamma(alpha).sum() - torch.lgamma(alpha.sum())


@row("flat_posterior: Dirichlet", "flat_posterior: Beta")
def shares():
    """T = log x_k, h = Π 1/x_k, A = Σ lnΓ(α_k) - lnΓ(α_0), F = diag ψ'(α) - ψ'(α_0)11ᵀ."""
    for kind, alpha, x in (
        (laws.Dirichlet, t(1.0, 3.0, 5.0), t(0.2, 0.5, 0.3)),
        (laws.Beta, t(32.0, 47.0), t(0.4, 0.6)),
    ):
        F = t(*map(psi1, alpha.tolist())).diag() - psi1(float(alpha.sum()))
        mean, size = alpha / alpha.sum(), 1 if kind is laws.Beta else 3
        parts = mean[:size], (mean * (1 - mean) / (alpha.sum() + 1))[:size]
        yield from family(kind(alpha), x[:size], 2 * alpha, parts, F, of_shares, x.log(), -torch.ones_like(alpha))
        yield kind(alpha).reference_vector(), torch.full_like(alpha, 2.0)
    yield laws.Beta(alpha).retracted(alpha, t(-40.0, 1.0)), [0.01, 48.0]


@row("flat_posterior: Gamma", "flat_posterior: InverseGamma")
def shape_and_rate():
    """T = (log u, -u), A = lnΓ(a) - a log b, F = [[ψ'(a), -1/b], [-1/b, a/b²]], of u and of 1/u, h = 1/x."""
    (a, b), x = (7.0, 2.0), 0.4
    F = [[psi1(a), -1 / b], [-1 / b, a / b**2]]

    def A(eta):
        return torch.lgamma(eta[0]) - eta[0] * eta[1].log()

    parts = t([a / b]), t([a / b**2])
    yield from family(laws.Gamma(t(a, b)), t([x]), t(5.0, 3.0), parts, F, A, t(math.log(x), -x), t(-1.0, 0.0))
    parts = t([b / (a - 1)]), t([b**2 / ((a - 1) ** 2 * (a - 2))])
    yield from family(laws.InverseGamma(t(a, b)), t([1 / x]), t(5.0, 3.0), parts, F, A, t(math.log(x), -x), t(1.0, 0.0))


@row("flat_posterior: Poisson", "flat_posterior: Categorical")
def counted():
    """T = x, h = 1/x!, A = e^η; T_k = 1[x = k], A = log(1 + Σe^η), F = diag(ω) - ωωᵀ."""
    rate, p = 3.5, t(0.2, 0.5, 0.3)
    parts, fisher = (t([rate]), t([rate])), [[rate]]
    q = laws.Poisson(t([math.log(rate)]))
    yield from family(q, t([2.0]), t([0.3]), parts, fisher, lambda eta: eta.exp().sum(), t([2.0]), -math.log(2))
    parts = t([0.5 + 0.6]), t([0.5 + 4 * 0.3 - 1.1**2])
    q, F = laws.Categorical.of(2 * p), p[:2].diag() - outer(p[:2], p[:2])
    yield from ((q.vector, (p[:2] / p[2]).log()), (q.probabilities, p))
    yield from family(q, t([1.0]), t(0.4, -0.2), parts, F, lambda x: x.exp().sum().log1p(), t(0.0, 1.0), t(0.0, 0.0))


@row("flat_posterior: Wishart")
def wishart():
    """T = (log|X|, -X_ii, -2X_ij), h = |X|^-(d+1)/2, A = lnΓ_d(a) - a log|B|; E X = aB⁻¹, Var X_ij = ν(V_ij² + V_iiV_jj)."""
    a, B, X = 3.5, t([0.8, -0.3], [-0.3, 1.2]), t([2.0, 0.4], [0.4, 1.5])
    eta, lower = t(a, 0.8, -0.3, 1.2), ([0, 1, 1], [0, 0, 1])
    V = 0.5 * B.inverse()

    def A(x):
        gamma_d = torch.lgamma(x[0]) + torch.lgamma(x[0] - 0.5) + 0.5 * math.log(math.pi)
        return gamma_d - x[0] * (x[1] * x[3] - x[2] ** 2).log()

    F = torch.func.hessian(A)(eta)
    F[0, 0] = psi1(a) + psi1(a - 0.5)  # with all digits
    T = t(X.logdet().item(), -2.0, -2 * 0.4, -1.5)
    parts = (a * B.inverse())[lower], (2 * a * (V**2 + outer(V.diagonal(), V.diagonal())))[lower]
    q, base = laws.Wishart.of(t([2 * a])[0], V), t(-1.5, 0.0, 0.0, 0.0)
    yield from family(q, X[lower], t(4.0, 1.0, 0.2, 0.7), parts, F, A, T, base)


def density(q, theta, log_q, moments=None, F=None):
    """log q and its score by autograd of the formula; of N(μ(λ), Σ(λ)) I_F = ∂μᵀΣ⁻¹∂μ + ½tr(Σ⁻¹∂ΣΣ⁻¹∂Σ)."""
    lam = q.vector
    if moments is not None:

        def log_q(lam):
            (mean, V), d = moments(lam), len(theta)
            return (
                -0.5 * (theta - mean) @ V.inverse() @ (theta - mean)
                - 0.5 * V.logdet()
                - 0.5 * d * math.log(2 * math.pi)
            )

        (mean, V), (dm, dV) = moments(lam), torch.func.jacrev(moments)(lam)
        bent = torch.einsum("ij,jka->ika", V.inverse(), dV)
        F = dm.mT @ V.inverse() @ dm + 0.5 * torch.einsum("ija,jib->ab", bent, bent)
        yield from ((q.mean, mean), (q.variance, V.diagonal()))
    yield from ((q.log_prob(theta), log_q(lam)), (q.score(theta), torch.func.grad(log_q)(lam)))
    if F is not None and torch.linalg.matrix_rank(F) == len(F):
        change = torch.linspace(0.5, -0.7, len(F), dtype=DTYPE)
        yield q.exact_fisher_solve(F @ change), change


def root_of(x):
    """The lower triangle of 2 x 2 with these entries, row after row."""
    return torch.stack([torch.stack([x[0], 0 * x[0]]), x[1:]])


@row(*(f"flat_posterior: {name}" for name in ("FlatCholesky", "VecGaussian", "VechGaussian", "MeanFieldGaussian")))
def flat_gaussians():
    """λ = (μ, vech T with log T_ii), Σ = TTᵀ; (μ, vec Σ); (μ, vech Σ); (μ, log σ)."""
    p, theta = point(), t(0.9, 0.1)

    def cholesky(lam):
        T = root_of(torch.stack([lam[2].exp(), lam[3], lam[4].exp()]))
        return lam[:2], T @ T.mT

    yield from density(laws.FlatCholesky(p.m, p.V), theta, None, cholesky)
    full = laws.VecGaussian(p.m, p.V)
    yield from density(full, theta, None, lambda lam: (lam[:2], sym(lam[2:].reshape(2, 2))))
    yield full.retracted(full.vector, t(1.0, 0.0, 0.0, 0.4, 0.0, 0.0))[2:], full.vector[2:] + t(0.0, 0.2, 0.2, 0.0)
    lower = lambda lam: root_of(lam[2:])  # noqa: E731
    yield from density(
        laws.VechGaussian(p.m, p.V), theta, None, lambda lam: (lam[:2], lower(lam) + lower(lam).tril(-1).mT)
    )
    own = laws.MeanFieldGaussian(t(0.3, -0.2, -0.5, 0.4))
    yield from density(own, theta, None, lambda lam: (lam[:2], (2 * lam[2:]).exp().diag()))
    yield own.norm2(Local(t(1.0, 0.0, 2.0, 0.0), own.no_matrix)), math.exp(-1.0) + 0.5 * 4
    same = laws.MeanFieldGaussian.standard(2, mean=t(0.3, -0.2), scale=t(0.5, 2.0))
    yield same.vector, [0.3, -0.2, math.log(0.5), math.log(2.0)]


@row("flat_posterior: LowRankGaussian", "flat_posterior: RankOneGaussian", "metric: NAGVAC", "metric: PublishedNAGVAC")
def factors():
    """Σ = BBᵀ + diag c² over (μ, B, c); its starts; NAGVAC drops F_bc, and as published takes Σ/(2a) for F_bb⁻¹."""
    m, c, theta = t(0.4, -0.1, 0.2), t(1.1, 0.8, 1.4), t(0.9, 0.1, -0.6)
    B = t([0.5, 0.2], [0.1, -0.4], [0.3, 0.3])

    def moments(lam):
        B = lam[3:-3].reshape(3, -1)
        return lam[:3], B @ B.mT + lam[-3:].square().diag()

    yield from density(laws.LowRankGaussian(m, B, c), theta, None, moments)
    b = t(0.6, -0.3, 0.8)
    q = laws.RankOneGaussian(m, b, c)
    yield from density(q, theta, None, moments)
    V, (_, dV) = moments(q.vector)[1], torch.func.jacrev(moments)(q.vector)
    bent = torch.einsum("ij,jka->ika", V.inverse(), dV)
    F, g = 0.5 * torch.einsum("ija,jib->ab", bent, bent), torch.linspace(0.5, -0.7, 9, dtype=DTYPE)
    mine, last = F[3:6, 3:6].inverse() @ g[3:6], F[6:, 6:].inverse() @ g[6:]
    yield metrics.NAGVAC().direction({}, g, q), torch.cat([V @ g[:3], mine, last])
    k = (b / c).square().sum()
    usual = V @ g[3:6] * (1 + k) / (2 * k)
    yield metrics.PublishedNAGVAC().direction({}, g, q), torch.cat([V @ g[:3], usual, last])
    yield metrics.Exact().direction({}, g, q), q.exact_fisher_solve(g)
    wave = [[1.0 if math.cos(math.pi / 6 * (i + 0.5) * k) >= 0 else -1.0 for k in range(6)] for i in range(6)]
    standard = laws.LowRankGaussian.standard(6, rank=6, scale=2.0, dtype=DTYPE).parts()
    yield from zip(standard, ([0.0] * 6, 0.2 / math.sqrt(6) * t(*wave), [2 * math.sqrt(0.99)] * 6), strict=True)
    standard = laws.RankOneGaussian.standard(3, scale=2.0, dtype=DTYPE).vector
    yield standard, [0.0] * 3 + [0.2] * 3 + [2 * math.sqrt(0.99)] * 3


@row("metric: Exact", "metric: Identity")
def unlearned():
    q, g = laws.MeanFieldGaussian(t(0.3, -0.5)), t(0.7, 0.4)
    yield metrics.Exact().direction({}, g, q), [math.exp(-1.0) * 0.7, 0.5 * 0.4]
    yield metrics.Identity().direction({}, g, q), g


@row("flat_posterior: NormalInverseGamma")
def of_mean_and_variance():
    """(GNT, Example 2) N(μ; m, v) IG(σ²; a, b), I_F = blockdiag(diag(1/v, 1/(2v²)), [[ψ'(a), -1/b], [-1/b, a/b²]])."""
    (m, v, a, b), (mu, s2) = (0.3, 0.8, 40.0, 20.0), (0.7, 0.6)

    def log_q(lam):
        m, v, a, b = lam
        normal = -0.5 * (2 * math.pi * v).log() - (mu - m) ** 2 / (2 * v)
        return normal + a * b.log() - torch.lgamma(a) - (a + 1) * math.log(s2) - b / s2

    q, F = laws.NormalInverseGamma(t(m, v, a, b)), torch.zeros(4, 4, dtype=DTYPE)
    F[:2, :2], F[2:, 2:] = t(1 / v, 1 / (2 * v**2)).diag(), t([psi1(a), -1 / b], [-1 / b, a / b**2])
    yield from density(q, t(mu, s2), log_q, F=F)
    yield from ((q.fisher(), F), (q.mean, [m, b / (a - 1)]), (q.variance, [v, b**2 / ((a - 1) ** 2 * (a - 2))]))


class Shifted(torch.nn.Module):
    """x -> x e^s + b."""

    def __init__(self):
        super().__init__()
        self.s, self.b = (torch.nn.Parameter(t(*x)) for x in ((0.3, -0.2), (0.5, 1.0)))

    def forward(self, x, inverse=False):
        sign = -1 if inverse else 1
        return ((x - self.b) * (-self.s).exp() if inverse else x * self.s.exp() + self.b), sign * self.s.sum().expand(
            x.shape[:-1]
        )


@row("flat_posterior: ModuleFlow", "flat_posterior: OrthogonalFlow")
def flows():
    """log q = log N(T⁻¹(θ)) + log|∂T⁻¹/∂θ|; θ = W₂h(ε + b₁) + b₂ (GNT, Eq 6.3), the score along the manifold."""
    theta = t(0.9, 0.1)

    def shifted(lam):
        z = (theta - lam[2:]) * (-lam[:2]).exp()
        return -0.5 * z @ z - math.log(2 * math.pi) - lam[:2].sum()

    yield from density(laws.ModuleFlow(Shifted(), 2), theta, shifted)
    b1, b2, W = t(0.3, -0.5), t(0.1, 0.2), t([0.6, -0.8], [0.8, 0.6])
    x = W @ t(0.7, 0.2) + b2

    def rotated(lam):
        z = lam[2:6].reshape(2, 2).mT @ (x - lam[6:])
        return -0.5 * ((z / (1 - z)).log() - lam[:2]).square().sum() - (z * (1 - z)).log().sum() - math.log(2 * math.pi)

    q = laws.OrthogonalFlow(b1, W, b2)
    free = torch.func.grad(rotated)(q.vector)
    inner = W.mT @ free[2:6].reshape(2, 2)
    along = torch.cat([free[:2], (0.5 * W @ (inner - inner.mT)).flatten(), free[6:]])  # W skew(WᵀG)
    yield from ((q.log_prob(x), rotated(q.vector)), (q.score(x), along))
    mean = normal_mean(torch.sigmoid, b1, torch.ones_like(b1))
    square = normal_mean(lambda s: torch.sigmoid(s) ** 2, b1, torch.ones_like(b1))
    yield from ((q.mean, W @ mean + b2), (q.variance, W**2 @ (square - mean**2)))


# ---------------------------------------------------------------------------------------------------- likelihoods


def printed_likelihoods():
    """(likelihood, y, -log p): its expectation, E f' and E f'' are by the trapezoid rule."""

    def softplus(x):
        return torch.log1p(torch.exp(x))

    # p = 1/(1 + e^{-yη}); Φ(yη)
    yield models.BernoulliLogit(), t(-1.0, 1.0), lambda eta, y: softplus(-y * eta)
    yield models.BernoulliProbit(), t(-1.0, 1.0), lambda eta, y: -(0.5 * torch.erfc(-y * eta / math.sqrt(2))).log()
    # e^{yη - exp η}/y!; N(η, σ²)
    yield models.PoissonLog(), t(0.0, 4.0), lambda eta, y: eta.exp() - y * eta + torch.lgamma(y + 1)
    normal = 0.5 * math.log(2 * math.pi * 0.5**2)
    yield models.GaussianNoise(0.5), t(0.3, -1.0), lambda eta, y: (y - eta) ** 2 / (2 * 0.5**2) + normal
    # (Hilbe 2011, NB2) Γ(y + r)/(Γ(r)y!) (r/(r + μ))^r (μ/(r + μ))^y, μ = e^η
    yield (
        models.NegativeBinomial(3.0),
        t(0.0, 5.0),
        lambda eta, y: (
            (3 + y) * (3 + eta.exp()).log() - 3 * math.log(3) - y * eta
            + math.lgamma(3) + torch.lgamma(y + 1) - torch.lgamma(y + 3)
        ),
    )  # fmt: skip
    # Γ((ν + 1)/2)/(Γ(ν/2) √(νπ) σ) (1 + (y - η)²/(νσ²))^{-(ν + 1)/2}
    constant = math.lgamma(1.5) - math.lgamma(2) + math.log(math.sqrt(3 * math.pi) * 1.6)
    student = models.StudentT(1.6, dof=3.0)
    yield student, t(0.3, -1.0), lambda eta, y: 2 * (1 + (y - eta) ** 2 / (3 * 1.6**2)).log() + constant


def observed(likelihood, y, energy):
    mean, variance = t(0.4, -0.2), t(0.6, 0.3)
    yield likelihood.energy(mean, y), energy(mean, y)
    slope = torch.func.grad(lambda eta: energy(eta, y[:, None]).sum())
    curvature = torch.func.grad(lambda eta: slope(eta).sum())
    parts = [normal_mean(f, mean, variance) for f in (lambda eta: energy(eta, y[:, None]), slope, curvature)]
    yield from zip(likelihood.expected(mean, variance, y), parts, strict=True)
    if likelihood.two_classes:
        yield likelihood.checked(t(3.0, 0.0, 3.0)), [1.0, -1.0, 1.0]


ROWS |= {
    f"likelihood: {type(part).__name__}": functools.partial(observed, part, *x) for part, *x in printed_likelihoods()
}


# ------------------------------------------------------------------------------------------------------- the table


def test_every_part_has_a_row():
    """All but the structures, whose check compares with dense matrices."""
    kinds = {check: check.__name__.removeprefix("check_").partition("_of")[0] for check, *_ in conformance.PRODUCT}
    parts = {f"{kinds[check]}: {part.__name__}" for check, table, _ in conformance.PRODUCT for part in table}
    assert {part for part in parts if not part.startswith("structure")} <= set(ROWS)


@pytest.mark.parametrize("part", ROWS)
def test_the_printed_values_of_a_part(part):
    check_values(part)
