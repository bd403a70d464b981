"""One table of printed values: for each part a tiny input, and what its printed formula gives there, worked out here.

`test_conformance` holds the parts to their contract, this table to their formulas: a row yields pairs of what the part
returns and of what the formula says, which is plain arithmetic and never what the library returned once.  The formula
stands beside it with its source; KPM is Kumar et al. (2025), T is Tan (2025), GNT Godichon-Baggioni, Nguyen and Tran
(2023).  `benchmarks/mutants.py` judges a part by its check and by `check_values`.
"""

import math
from itertools import islice
from types import SimpleNamespace

import pytest
import test_conformance as conformance
import torch
from helpers import DTYPE, EXACT, close, step
from reference import normal_mean, tril_half

from torchngvi import expectations, metrics, models, momentum, rules, stepsizes
from torchngvi.errors import PairError
from torchngvi.expectations import Draws, Fixed, flat
from torchngvi.interfaces import Congruence, Coordinates, Cost, Expectation, FullPrior, Local, Path, Prior, Raw, Trial
from torchngvi.metrics.recursive import downdate
from torchngvi.models import FactorTarget, GeneralizedLinear, LogJoint
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


def enter(kind, printed, hold):
    """Put what a generator lists into the table; a part is made when its row is read, so that it is as it then is."""
    for place, (part, *_) in enumerate(printed()):
        ROWS[f"{kind}: {type(part).__name__}"] = lambda place=place: hold(*next(islice(printed(), place, None)))


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


def root_of(x):
    """The lower triangle of 2 x 2 with these entries, row after row."""
    return torch.stack([torch.stack([x[0], 0 * x[0]]), x[1:]])


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
    p.norm2 = p.a @ p.a + 0.5 * p.P.square().sum()
    p.packet = Expectation(t([1.3])[0], Raw(p.g, p.H), p.gamma, True, Cost(1, 1))
    return p


def printed_rules():
    """(rule, m', V', -dL/dρ at 0) at `point`; along a natural gradient the last is |∇L|²_F⁻¹ = |a|² + ½‖P‖²_F."""
    p = point()
    m, C, V, S, g, G, P, eye, rho, gamma = p.m, p.C, p.V, p.S, p.g, p.G, p.P, p.eye, p.rho, p.gamma
    natural, euclidean, norm2, g2 = m - rho * V @ g, m - rho * g, p.norm2, g @ g
    K, down = tril_half(P), (G @ C).tril()  # KPM, Eq 13; ∂L/∂C

    def of_root(mean, root, slope):
        return mean, root @ root.mT, slope

    def with_diagonal(matrix, diagonal):
        return matrix.tril(-1) + diagonal.diag()

    # VN (KPM, Eq 7)    S' = (1 - γρ)S + ρH,  m' = m - ρS'⁻¹g
    newton = ((1 - gamma * rho) * S + rho * p.H).inverse()
    yield rules.VariationalNewton(), m - rho * newton @ g, newton, norm2
    # SR-VN (KPM, Eq 17; T, Theorem 2)    C' = C - ρC tril½[P],  m' = m - ρCa
    yield rules.NaturalGradient(), *of_root(natural, C - rho * C @ K, norm2)
    # the same in log C_ii (T, Eq 4)    C'_ii = C_ii exp(-ρ(CK)_ii/C_ii)
    logs = C.diagonal() * (-rho * (C @ K).diagonal() / C.diagonal()).exp()
    yield rules.LogNaturalGradient(), *of_root(natural, with_diagonal(C - rho * C @ K, logs), norm2)
    # local coordinates (Lin, Nielsen, Khan and Schmidt 2021)    C' = C(I - ρK + ½ρ²K²)
    yield rules.LocalExponential(), *of_root(natural, C @ (eye - rho * K + 0.5 * rho**2 * K @ K), norm2)
    # iBLR (Lin, Schmidt and Khan 2020)    S' = (1 - γρ)S + ρH + ½ρ²GS⁻¹G
    improved = (1 - gamma * rho) * S + rho * p.H + 0.5 * rho**2 * G @ V @ G
    yield rules.Retraction(), natural, improved.inverse(), norm2
    # the geodesic (Lin et al. 2021)    V' = C exp(-ρP)Cᵀ
    values, axes = torch.linalg.eigh(P)
    yield rules.Geodesic(), natural, C @ axes @ (-rho * values).exp().diag() @ axes.mT @ C.mT, norm2
    # SR-VN with ½P for tril½[P] (KPM, the remark on other square roots)    V' = C(I - ½ρP)²Cᵀ
    yield rules.SymmetricRoot(), *of_root(natural, C @ (eye - 0.5 * rho * P), norm2)
    # BW-GD (Lambert et al. 2022, Algorithm 1)    m' = m - αg,  V' = MVM,  M = I - α(H - γS)
    yield rules.BuresWasserstein(), *of_root(euclidean, (eye - rho * G) @ C, g2 + (G @ C).square().sum())
    # gradient descent in (m, V) (KPM, Eqs 4, 33, 34)    V' = V - ½ρG
    yield rules.CovarianceGradient(), euclidean, V - 0.5 * rho * G, g2 + 0.25 * G.square().sum()
    # Gaussian SVGD (Liu et al. 2024, Algorithm 1)    θ' = θ + ε(Bθ - g),  B = γI - HV - gmᵀ; or B(θ - m) without gmᵀ
    centred = gamma * eye - p.H @ V
    B = centred - outer(g, m)
    yield rules.SVGD(), *of_root(m + rho * (B @ m - g), (eye + rho * B) @ C, g2 + B.square().sum())
    yield rules.CenteredSVGD(), *of_root(euclidean, (eye + rho * centred) @ C, g2 + centred.square().sum())
    # gradient descent in (m, C) (KPM, Eqs 16, 37)    C' = C - ρ tril[GC]
    new, slope = C - rho * down, g2 + down.square().sum()
    yield rules.RootGradient(), *of_root(euclidean, new, slope)
    # the same in log C_ii (T, section 3)    C'_ii = C_ii exp(-ρC_ii(GC)_ii)
    logs = C.diagonal() * (-rho * C.diagonal() * down.diagonal()).exp()
    steep = g2 + with_diagonal(down, C.diagonal() * down.diagonal()).square().sum()
    yield rules.LogRootGradient(), *of_root(euclidean, with_diagonal(new, logs), steep)
    # projected (Kim, Ma and Gardner 2024, section 3.1)    C'_ii = max(C⁺_ii, c)
    floor = float(new.diagonal().mean())  # binds in one coordinate
    projected = with_diagonal(new, new.diagonal().clamp_min(floor))
    yield rules.ProjectedRootGradient(floor), *of_root(euclidean, projected, slope)
    # proximal (Domke 2020, section 4)    C⁺ = C - ρ tril[HC],  C'_ii = ½(C⁺_ii + √(C⁺_ii² + 4γρ))
    forward = C - rho * (p.H @ C).tril()
    near = 0.5 * (forward.diagonal() + (forward.diagonal() ** 2 + 4 * gamma * rho).sqrt())
    yield rules.ProximalRootGradient(), *of_root(euclidean, with_diagonal(forward, near), slope)
    # projected in the symmetric root (Domke 2020)    R⁺ = R - ½ρ(GR + RG),  R' = Q max(Λ, c)Qᵀ
    values, axes = torch.linalg.eigh(V)
    R = axes @ values.sqrt().diag() @ axes.mT
    values, axes = torch.linalg.eigh(R - rho * sym(G @ R))
    floor = float(values.mean())
    new = axes @ values.clamp_min(floor).square().diag() @ axes.mT
    yield rules.ProjectedSquareRoot(floor), euclidean, new, g2 + sym(G @ R).square().sum()


def stepped(rule, mean, covariance, slope):
    p = point()
    q = CholeskyGaussian(2, mean=p.m, scale=p.C)
    path = rule(q, p.packet)
    yield from zip(step(q, path.at(t([p.rho])[0])), (mean, covariance), strict=True)
    yield from ((path.norm2(), p.norm2), (path.slope(), slope))


enter("rule", printed_rules, stepped)


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


class Given(Draws):
    """Draws that are given."""

    comparable, independent, mirrored, generator = False, True, False, None

    def __init__(self, *z):
        self.z, self.num_samples = t(*z), len(z)

    def __call__(self, like):
        return self.z.reshape(len(self.z), *(1,) * (like.ndim - 1), -1).expand(-1, *like.shape)


def cubic(theta):
    """ℓ = ½θᵀAθ + bᵀθ + θ₁³/6 of one θ."""
    return 0.5 * theta @ t([1.4, 0.5], [0.5, 0.9]) @ theta + t(-0.3, 0.8) @ theta + theta[0] ** 3 / 6


def seen(ell, theta, C):
    """ℓ at draws, (S,), with Cᵀ∇ℓ, (S, D), by autograd of the formula."""
    return torch.func.vmap(ell)(theta), torch.func.vmap(torch.func.grad(ell))(theta) @ C


def log_joint(ell, gamma):
    return LogJoint.vmapped(lambda theta: -ell(theta), gamma)


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
    (values, pulled), gamma = seen(cubic, p.m + z @ p.C.mT, p.C), p.gamma
    hessians = torch.func.vmap(torch.func.hessian(cubic))(p.m + z @ p.C.mT)
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
    yield from packet(estimator(q, log_joint(cubic, p.gamma)), q, *printed)


enter("estimator", printed_estimators, estimated)


@row("estimator: Drawing")
def fixed_draws():
    """Of fixed draws the derivative of the mean of ℓ in (m, C): a = E[Cᵀ∇ℓ], W of the triangle of E[Cᵀ∇ℓ zᵀ]."""
    p, draws = point(), Fixed(6)
    z = draws(p.m)
    value, a, M = mean_of(*seen(cubic, p.m + z @ p.C.mT, p.C), z)
    yield from estimated(expectations.Stein(draws), value, a, tril_half(M) + tril_half(M).mT, [6, 0, 0])


def poisson(means, variances, y, weights):
    """E[e^η - yη + log y!], ∂/∂e and 2 ∂/∂v under N(e, v), by the mean e^(e + v/2) of a log-normal number."""
    rate = (means + 0.5 * variances).exp()
    return weights * (rate - y * means + torch.lgamma(y + 1)), weights * (rate - y), weights * rate


def glm():
    """Rows X, y, w with their e and v at `point`; the model; and what makes a packet of sites (F, α, β)."""
    p, X, w, y = point(), t([1.0, 0.5], [-0.4, 1.2], [0.3, -0.8]), t(1.0, 0.5, 2.0), t(2.0, 0.0, 1.0)
    m0, lam = t(0.1, 0.2), t(1.5, 0.6)
    given = {"prior_precision": lam, "prior_mean": m0, "weights": w, "temperature": p.gamma}
    # g = Xᵀα + γΛ(m - m₀), H = Xᵀ diag(β)X + γΛ; E_q[-log prior] = ½Σ(λ((m - m₀)² + V_ii) - log λ + log 2π)
    prior = 0.5 * (lam * ((p.m - m0) ** 2 + p.V.diagonal()) - lam.log() + math.log(2 * math.pi)).sum()

    def printed(F, alpha, beta):
        g, H = X.mT @ alpha + p.gamma * lam * (p.m - m0), X.mT @ beta.diag() @ X + p.gamma * lam.diag()
        return F.sum() + p.gamma * prior, p.C.mT @ g, p.C.mT @ H @ p.C

    q, model = CholeskyGaussian(2, mean=p.m, scale=p.C), GeneralizedLinear(X, y, "poisson_log", **given)
    return SimpleNamespace(p=p, X=X, y=y, w=w, q=q, model=model, printed=printed, e=X @ p.m, v=(X @ p.V * X).sum(-1))


@row("estimator: Autograd", "estimator: Quadrature", "estimator: MonteCarlo", "estimator: BonnetPrice")
def linear_predictors():
    """Exact; from η = e + √v z of each row (KPM, appendix E); from η = X(m + Cz) (Wu and Gardner 2024, Eq 11)."""
    s, E, z = glm(), expectations, ([0.5, -1.0, 0.2], [1.1, 0.4, -0.6])
    printed = s.printed(*poisson(s.e, s.v, s.y, s.w))
    yield from packet(E.Quadrature()(s.q, s.model), s.q, *printed, [1, 1, 0])
    yield from packet(E.Autograd()(s.q, s.model), s.q, *printed, [1, 0, 0])
    printed = s.printed(*(part.mean(0) for part in poisson(s.e + s.v.sqrt() * t(*z), 0 * s.v, s.y, s.w)))
    yield from packet(E.MonteCarlo(Given(*z))(s.q, s.model), s.q, *printed, [2, 2, 0])
    draws = Given(*(each[:2] for each in z))
    eta = (s.p.m + draws.z @ s.p.C.mT) @ s.X.mT
    printed = s.printed(*(part.mean(0) for part in poisson(eta, 0 * s.v, s.y, s.w)))
    yield from packet(E.BonnetPrice(draws)(s.q, s.model), s.q, *printed, [2, 2, 0])
    q = CholeskyGaussian(2, (2,), mean=s.p.m, scale=s.p.C.expand(2, 2, 2))  # with a design for each member
    model = GeneralizedLinear(torch.stack([s.X, 2 * s.X]), s.y.expand(2, 3), "poisson_log", temperature=s.p.gamma)
    for times, found in enumerate(E.BonnetPrice(draws)(q, model).derivative.raw().g, 1):
        yield found, times * s.X.mT @ ((times * eta).exp() - s.y).mean(0) + s.p.gamma * s.p.m


def noise2(force, z, own, above=()):
    """Σ_pairs |r̄|² + ¼(|r|²|z|² + (r·z)²) + |r|²|z_above|², over pairs (pairs - 1), of the coordinates of a node."""
    (plus, minus), z = force[:, own].chunk(2), z.chunk(2)[0]
    even, odd = 0.5 * (plus + minus), 0.5 * (plus - minus)
    squares, mine = odd.square().sum(-1), z[:, own]
    each = (even - even.mean(0)).square().sum(-1) + squares * z[:, list(above)].square().sum(-1)
    each = each + 0.25 * (squares * mine.square().sum(-1) + (odd * mine).sum(-1).square())
    return each.sum() / (len(z) * (len(z) - 1))


@row("estimator: SampleAverage", "estimator: PerFactor")
def averages():
    """Stein's a and W, with noise²; over a forest a border takes one triangle, and noise² is of r - Wz by nodes."""
    p, draws, E = point(), Fixed(6), expectations
    q, z, gamma = CholeskyGaussian(2, mean=p.m, scale=p.C), draws(p.m), p.gamma
    values, pulled = seen(cubic, p.m + z @ p.C.mT, p.C)
    value, a, M = mean_of(values, pulled - gamma * z, z)
    e = E.SampleAverage(draws)(q, log_joint(cubic, gamma))
    yield from packet(e, q, value, a, gamma * p.eye + sym(M), [6, 0, 0])
    yield e.noise2, noise2(pulled - gamma * z, z, [0, 1])

    # two groups of one coordinate b_n under a global x: ℓ = Σ_n [½(y_n - b_n)² + e^x b_n²] + x⁴
    y, pattern, T, m = (
        t(0.5, -1.0),
        arrow(groups=2, local=1, globals=1),
        t([1.2, 0, 0], [0, 0.9, 0], [-0.4, 0.5, 1.1]),
        t(0.2, -0.3, 0.4),
    )  # noqa: E501
    q = PrecisionCholeskyGaussian(3, structure=pattern, mean=m, scale=torch.linalg.cholesky((T @ T.mT).inverse()))

    def group(b, x, y):
        return 0.5 * (y - b) ** 2 + x.exp() * b**2

    def whole(theta):
        return group(theta[:2], theta[2], y).sum() + theta[2] ** 4

    draws, C, eye = Fixed(6, pattern=pattern), T.inverse().mT, torch.eye(3, dtype=DTYPE)
    z = draws(m)
    values, pulled = seen(whole, m + z @ C.mT, C)
    value, a, M = mean_of(values, pulled - gamma * z, z)
    W = gamma * eye + M * (eye + t([0, 0, 1], [0, 0, 1], [0, 0, 0])) + M.mT * t([0, 0, 0], [0, 0, 0], [1, 1, 0])
    rest = pulled - z @ W
    noise = noise2(rest, z, [0], [2]) + noise2(rest, z, [1], [2]) + noise2(rest, z, [2])
    e = E.SampleAverage(draws)(q, log_joint(whole, gamma))
    yield from ((e.value, value), (e.derivative.a, a), (pattern.full(e.derivative.W), W), (e.noise2, noise))

    # term by term, each on its clique: a = Σ_c a_c, W = Σ_c W_c and noise² = Σ_c noise²_c
    terms = [(0, lambda theta: -group(theta[..., 0], theta[..., 1], y)), (-1, lambda theta: -(theta[..., 0] ** 4))]
    draws = Fixed(6, apart=True)
    e, value, a, W, noise = (
        E.PerFactor(E.SampleAverage(draws))(q, FactorTarget(pattern, terms, gamma)),
        0,
        0 * m,
        0 * W,
        0,
    )
    for n, place in enumerate(([0, 2], [1, 2], [2])):
        C, k = T[place][:, place].inverse().mT, len(place)
        z = draws(torch.zeros(k, k, dtype=DTYPE))[:, n % k]
        ell = (lambda x, n=n: group(*x, y[n])) if k == 2 else (lambda x: x[0] ** 4)
        values, pulled = seen(ell, m[place] + z @ C.mT, C)
        one, own, M = mean_of(values, pulled - gamma * z, z)
        own_W, into = gamma * eye[:k, :k] + sym(M), eye[place]
        value, a, W = value + one, a + own @ into, W + into.mT @ own_W @ into
        noise = noise + noise2(pulled - z @ own_W, z, list(range(k)))
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


@row("estimator: ScoreFunction", "estimator: ControlVariate", "estimator: Pathwise", "estimator: ClosedForm")
def of_flat_vectors():
    """Of q = N(μ, σ²) over λ = (μ, log σ), with h = sin θ - θ² - γ log q and φ = ((θ - μ)/σ², (θ - μ)²/σ² - 1)."""
    (mu, log_sd), gamma, generator = (0.4, -0.3), 0.6, seeded()
    q, sd = laws.MeanFieldGaussian(t(mu, log_sd)), math.exp(log_sd)
    target = LogJoint(lambda theta: (theta.sin() - theta**2)[..., 0], gamma)
    (z, first), (theta, h, phi) = ((q.sample(5, generator)[:, 0] - mu) / sd for _ in range(2)), ([], [], [])
    for x in (z, first):
        theta.append(mu + sd * x)
        h.append(theta[-1].sin() - theta[-1] ** 2 + gamma * (0.5 * x**2 + log_sd + 0.5 * math.log(2 * math.pi)))
        phi.append(torch.stack([x / sd, x**2 - 1], -1))
    # (GNT, Eq 2.4) -∇L is the mean of φh
    e = flat.ScoreFunction(5, seeded())(q, target)
    yield from ((e.value, -h[0].mean()), (e.derivative.a, -(phi[0] * h[0][:, None]).mean(0)), (list(e.cost), [0, 0, 5]))
    # of φ_i(h - c_i), c_i = Cov(φ_i h, φ_i)/Var(φ_i) of the batch before
    away = phi[0] - phi[0].mean(0)
    c = (phi[0] * h[0][:, None] * away).sum(0) / (away**2).sum(0)
    e = flat.ControlVariate(5, seeded())(q, target)
    yield from ((e.value, -h[1].mean()), (e.derivative.a, -(phi[1] * (h[1][:, None] - c)).mean(0)))
    # of ∇_λ h(μ + σz), λ inside log q held fixed: (h', h'σz), h' = cos θ - 2θ + γz/σ
    slope = theta[0].cos() - 2 * theta[0] + gamma * z / sd
    e = flat.Pathwise(5, seeded())(q, target)
    yield from ((e.value, -h[0].mean()), (e.derivative.a, -torch.stack([slope, slope * sd * z]).mean(-1)))
    yield list(e.cost), [5, 0, 0]
    with pytest.raises(PairError, match="Beta has no map from noise to draws"):
        flat.Pathwise(5).check(laws.Beta(t(2.0, 3.0)))
    # of a bound that is known, here μ² log σ
    part = flat.ClosedForm()
    e = part(q, part.prepared(lambda lam: lam[..., 0] ** 2 * lam[..., 1]))
    yield from ((e.value, -(mu**2) * log_sd), (e.derivative.a, [-2 * mu * log_sd, -(mu**2)]), (part.draws, 0))
    yield list(e.cost), [0, 0, 0]
    # and the estimator of the name ScoreFunction that works in the frame
    yield from estimated(
        *next(rest for rest in printed_estimators() if isinstance(rest[0], expectations.ScoreFunction))
    )


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
    """(Armijo 1966) Kept where L - L' ≥ cρs up to 64ε max(|L|, 1); else ρ' = ½ρ²s/(ρs - L + L') in [ρ/10, ρ/2]."""
    control, rounding = stepsizes.Backtracking(0.2), 64 * torch.finfo(DTYPE).eps
    yield control.propose(path_of((1.0,)), 0.8, t(0.0), {"share": t(0.25, 0.25)}), [0.2, 0.2]
    trials = [[3.0, after, 1.0, 1.0, 2.0] for after in (2.0, 2.7, 3.4, 30.0)]
    trials += [[0.0, share * rounding, 1e-300, 1.0, 1.0] for share in (1.1, 0.9)]
    kept, new = judged(control, {"share": t(1.0, 1.0, 1.0, 0.5, 1.0, 1.0)}, *trials)
    yield from ((kept.double(), [1, 0, 0, 0, 0, 1]), (new["share"], [1.0, 0.5, 0.5 * 2 / 2.4, 0.1 * 0.5, 0.1, 1.0]))


@row("step_size: SufficientDecrease")
def sufficient():
    """ρ = min(lr, reach/|∇L|, cap); a trial lets the reach grow by 4 or shrink by ¼; the cap is by the parabola."""
    control, wide = stepsizes.SufficientDecrease(2.0), t(0.0, 0.0)
    state = control.init(wide)
    yield from ((state["reach"], [2.0, 2.0]), (control.propose(path_of((16.0, 4.0)), 0.7, wide, state), [0.5, 0.7]))
    state["cap"] = t(math.inf, 0.05)
    yield control.propose(path_of((0.0, 4.0)), 0.5, wide, state), [0.5, 0.05]
    many = control.propose(path_of((16.0, 400.0), leaves=100), 9.0, wide, control.init(wide))
    yield many, [math.sqrt(2 * 0.1 * 100) / 4, 2 / 20]
    state = {"reach": t(2.0, 2.0, 2.0, 2.0), "cap": t(math.inf, 0.9, 0.9, math.inf)}
    kept, new = judged(control, state, *([3.0, after, 1.0, 1.5, 2.0] for after in (1.5, 2.6, 3.4, 2.9)))
    yield from ((kept.double(), [1, 1, 0, 0]), (new["reach"], [6.0, 2.0, 0.25 * 1.5, 0.25 * 1.5]))
    yield from ((new["cap"][1:], [2 * 0.7, 2 / 2.4, 0.5 * 2]), (new["cap"].isinf().double(), [1, 0, 0, 0]))


@row("momentum: ExponentialAverage", "momentum: NormalizedMomentum", "momentum: Adam", "metric: Adam")
def momenta():
    """What two changes of (m, C) become, as flat vectors of their own entries."""
    first, second = x = t(0.6, -0.2, 0.9, 0.4, -0.5), t(-0.3, 0.7, 0.2, -0.6, 0.8)
    units = 0.8 * first / first.norm() + second / second.norm()
    # (Kingma and Ba 2015, Algorithm 1) m = β₁m + (1 - β₁)g, v = β₂v + (1 - β₂)g², then m̂/(√v̂ + ε)
    mean, square = 0.8 * 0.2 * first + 0.2 * second, 0.95 * 0.05 * first**2 + 0.05 * second**2
    adam = first / (first.abs() + 0.1), mean / (1 - 0.8**2) / ((square / (1 - 0.95**2)).sqrt() + 0.1)
    Normalized, q = momentum.NormalizedMomentum, CholeskyGaussian(2, dtype=DTYPE)
    for part, printed in (
        (momentum.ExponentialAverage(0.6), (0.4 * first, 0.6 * 0.4 * first + 0.4 * second)),  # M ← ωM + (1 - ω)d
        # (T, section 4) m ← βm + (1 - β)g/|g|, and the step m/(1 - βᵗ); or g/‖g‖_F, here 3, and no correction
        (Normalized(beta=0.8), (first / first.norm(), 0.2 * units / (1 - 0.8**2))),
        (
            Normalized("riemannian", beta=0.8, bias_correction=False),
            (0.2 * first / 3, 0.2 * (0.8 * first + second) / 3),
        ),
        (momentum.Adam((0.8, 0.95), 0.1), adam),
    ):
        state = part.init(q)
        for change, expected in zip(x, printed, strict=True):
            new, state = part(q, Coordinates(change[:2], root_of(change[2:])), lambda: t([9.0])[0], state)
            yield torch.cat([new.vector, new.matrix[[0, 1, 1], [0, 0, 1]]]), expected
    metric, q = metrics.Adam((0.8, 0.95), 0.1), laws.Dirichlet(t(1.0, 1.0, 1.0, 1.0, 1.0))
    state = metric.fresh(q)
    for gradient, expected in zip(x, adam, strict=True):
        state = metric.noticed(state, gradient, q)
        yield metric.direction(state, gradient, q), expected


@row("acceleration: QuasiNewton")
def bfgs():
    """(Nocedal and Wright 2006, Eq 6.17) B = (I - syᵀ/sᵀy)(I - ysᵀ/sᵀy) + ssᵀ/sᵀy in x = (a, P/√2), from B = I."""
    q, part, B = CholeskyGaussian(1, dtype=DTYPE), metrics.QuasiNewton(), torch.eye(2, dtype=DTYPE)
    state, old, bent = part.init(q), None, None
    for x, rho in ((t(0.9, 0.4), 0.0), (t(0.5, 0.3), 0.5), (t(0.3, 0.1), 0.8)):
        if old is not None:
            s, y = -rho * B @ old, x - old
            left = torch.eye(2, dtype=DTYPE) - outer(s, y) / (s @ y)
            B = left @ B @ left.mT + outer(s, s) / (s @ y)
        (bent, slope), state = part(q, Local(x[:1], math.sqrt(2) * x[1:, None]), t([rho])[0], state)
        yield from ((torch.cat([bent.a, bent.P[0] / math.sqrt(2)]), B @ x), (slope, x @ B @ x))
        old = x


@row("acceleration: SiteNewton")
def site_newton():
    """Wδ = -a - ½Aβ_eδv, D = P + A²(β_eAδ + β_vδv), δv = -A²D, W = 1 + P, of one row with β_e = 2β_v = e^(e + v/2)."""
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


@row("metric: BatchFisher", "metric: Window", "metric: Exact", "metric: Identity")
def empirical():
    """(GNT, Eq 4.1, damped) Of the last batch, or of the last scores; fewer and more than D.  And I_F⁻¹g, and g."""
    q, old, new = mean_field(4), scores(2, 4), 0.7 * scores(5, 4).flip(0)
    yield learned(metrics.BatchFisher(5, rho=0.0), q, old, new), damped(new, 0.0)
    yield learned(metrics.BatchFisher(2, rho=0.3), q, new, old), damped(old, 0.3)
    yield learned(metrics.BatchFisher(5, rho=0.3), q, old, new), damped(new, 0.3)
    yield learned(metrics.Window(6, 2, rho=0.3), q, old, new), damped(torch.cat([old[1:], new]), 0.3)
    yield learned(metrics.Window(3, 2, rho=0.3), q, new, old), damped(torch.cat([new[-1:], old]), 0.3)
    yield from ((learned(metrics.Exact(), q), [1, 1, 0.5, 0.5]), (learned(metrics.Identity(), q), [1, 1, 1, 1]))


@row("metric: Recursive", "metric: MatrixFree", "metric: Blocks", "metric: Preconditioner")
def recursive():
    """(GNT, Eqs 4.3-4.5) t(εI + Σφφᵀ + Σβ_jZ_jZ_jᵀ)⁻¹1, β_j = ½ j^{-β}; in blocks; and the draws of a first step."""

    def recursion(phi, eps, Z=0.0):
        return len(phi) * (eps * torch.eye(phi.shape[-1], dtype=DTYPE) + phi.mT @ phi + Z).inverse().sum(-1)

    phi, q, same = scores(6, 16), mean_field(16), seeded()
    Z = torch.cat([torch.randn(3, 16, generator=same, dtype=DTYPE) for _ in range(2)])
    terms = (Z.mT * (0.5 * torch.arange(1.0, 7.0, dtype=DTYPE) ** -0.2)) @ Z
    for kind in (metrics.Recursive, metrics.MatrixFree):
        yield from ((learned(kind(n, eps=0.4, c_beta=0.0), q, *phi.split(n)), recursion(phi, 0.4)) for n in (1, 2))
        yield learned(kind(6, c_beta=0.0), q, phi), recursion(phi, (phi**2).mean())  # ε of the scores
        found = learned(kind(3, eps=0.4, c_beta=0.5, beta=0.2), q, *phi.split(3), generator=seeded())
        yield found, recursion(phi, 0.4, terms)
    found = learned(metrics.Blocks(metrics.Recursive(1, eps=0.4, c_beta=0.0), [9, 7]), q, *phi.split(1))
    yield found, torch.cat([recursion(phi[:, :9], 0.4), recursion(phi[:, 9:], 0.4)])
    metric = metrics.Recursive(5, warmup=20)
    _, state = metric(q, Local(torch.ones_like(q.vector), q.no_matrix), t([0.0])[0], metric.init(q))
    yield from ((state["fisher_draws"], 25), (state["count"], 25.0))
    yield downdate(phi[:1], lambda rows: -rows), 0 * phi[:1]  # nothing is taken from a P that has no positive form


@row("posterior: CholeskyGaussian", "posterior: NaturalGaussian", "posterior: PrecisionCholeskyGaussian")
def gaussians():
    """N(m, V) in (m, C), (Sm, S) and (m, T): density, entropy, divergence, loss, gradients, a move by a congruence."""
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
    """KL(p‖q) keeps the marginal variances c²; natural gradient (c²g, ½c(c²h - γ)), plain one (g, ch - γ/c)."""
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


def family(q, theta, parts, F, A, T, b):
    """log q = ⟨η + b, T⟩ - A, ω = ∇A, F = ∇²A, entropy A - ⟨η + b, ω⟩ (Wainwright and Jordan 2008, section 3)."""
    eta, change = q.vector, torch.linspace(0.5, -0.7, q.size, dtype=DTYPE)
    omega, F, other = torch.func.grad(A)(eta), torch.as_tensor(F, dtype=DTYPE), eta + 0.1
    yield from zip((q.mean, q.variance), parts, strict=True)
    yield from ((q.log_prob(theta), (eta + b) @ T - A(eta)), (q.score(theta), T - omega), (q.expectation(), omega))
    yield from ((q.fisher_product(change), F @ change), (q.exact_fisher_solve(F @ change), change))
    yield from ((q.norm2(Local(F @ change, q.no_matrix)), change @ F @ change), (q.natural(omega), eta))
    yield q.kl(q.at(other)), A(other) - A(eta) - (other - eta) @ omega
    if type(q) not in (laws.Poisson, laws.Wishart):
        yield q.reference_vector(), torch.full_like(eta, 0.0 if isinstance(q, laws.Categorical) else 2.0)
    if type(q) is not laws.Poisson:  # whose entropy has no closed form
        yield q.entropy(), A(eta) - (eta + b) @ omega


def printed_families():
    """(q, x, its mean and variance, F, A, T, b with log h = ⟨b, T⟩)."""

    # A = Σ lnΓ(α_k) - lnΓ(α_0), F = diag ψ'(α) - ψ'(α_0)11ᵀ, T = log x_k, h = Π 1/x_k
    def of_shares(alpha):
        return torch.lgamma(alpha).sum() - torch.lgamma(alpha.sum())

    alpha, x = t(1.0, 3.0, 5.0), t(0.2, 0.5, 0.3)
    F, parts = t(*map(psi1, (1, 3, 5))).diag() - psi1(9), (alpha / 9, alpha * (9 - alpha) / (81 * 10))
    yield laws.Dirichlet(alpha), x, parts, F, of_shares, x.log(), -torch.ones_like(x)
    alpha, x = t(32.0, 47.0), t(0.4, 0.6)
    F, parts = t(*map(psi1, (32, 47))).diag() - psi1(79), (t([32 / 79]), t([32 * 47 / (79**2 * 80)]))
    yield laws.Beta(alpha), x[:1], parts, F, of_shares, x.log(), -torch.ones_like(x)

    # A = lnΓ(a) - a log b, F = [[ψ'(a), -1/b], [-1/b, a/b²]], T = (log u, -u) of u and of 1/u, h = 1/x
    def of_rate(eta):
        return torch.lgamma(eta[0]) - eta[0] * eta[1].log()

    (a, b), u = (7.0, 2.0), 0.4
    F, T = [[psi1(a), -1 / b], [-1 / b, a / b**2]], t(math.log(u), -u)
    yield laws.Gamma(t(a, b)), t([u]), (t([a / b]), t([a / b**2])), F, of_rate, T, t(-1.0, 0.0)
    parts = t([b / (a - 1)]), t([b**2 / ((a - 1) ** 2 * (a - 2))])
    yield laws.InverseGamma(t(a, b)), t([1 / u]), parts, F, of_rate, T, t(1.0, 0.0)
    # A = e^η, T = x, h = 1/x!, which is ½ at x = 2
    q, rate = laws.Poisson(t([math.log(3.5)])), t([3.5])
    yield q, t([2.0]), (rate, rate), [[3.5]], lambda eta: eta.exp().sum(), t([2.0]), t([-0.5 * math.log(2)])
    # A = log(1 + Σe^η), F = diag(ω) - ωωᵀ, T_k = 1[x = k]
    p, parts = t(0.2, 0.5, 0.3), (t([0.5 + 0.6]), t([0.5 + 4 * 0.3 - 1.1**2]))
    F, q = p[:2].diag() - outer(p[:2], p[:2]), laws.Categorical.of(2 * p)
    yield q, t([1.0]), parts, F, lambda eta: eta.exp().sum().log1p(), t(0.0, 1.0), t(0.0, 0.0)

    # A = lnΓ_d(a) - a log|B|, T = (log|X|, -X_ii, -2X_ij), h = |X|^-(d+1)/2; E X = aB⁻¹, Var X_ij = ν(V_ij² + V_iiV_jj)
    def wishart(x):
        gamma_d = torch.lgamma(x[0]) + torch.lgamma(x[0] - 0.5) + 0.5 * math.log(math.pi)
        return gamma_d - x[0] * (x[1] * x[3] - x[2] ** 2).log()

    a, B, X, lower = 3.5, t([0.8, -0.3], [-0.3, 1.2]), t([2.0, 0.4], [0.4, 1.5]), ([0, 1, 1], [0, 0, 1])
    V, F = 0.5 * B.inverse(), torch.func.hessian(wishart)(t(a, 0.8, -0.3, 1.2))
    F[0, 0] = psi1(a) + psi1(a - 0.5)  # with all digits
    parts = (2 * a * V)[lower], (2 * a * (V**2 + outer(V.diagonal(), V.diagonal())))[lower]
    T, q = t(X.logdet().item(), -2.0, -2 * 0.4, -1.5), laws.Wishart.of(t([2 * a])[0], V)
    yield q, X[lower], parts, F, wishart, T, t(-1.5, 0.0, 0.0, 0.0)


enter("flat_posterior", printed_families, family)


def density(q, theta, log_q, moments=None, F=None):
    """log q and its score by autograd of the formula; of N(μ(λ), Σ(λ)) I_F = ∂μᵀΣ⁻¹∂μ + ½tr(Σ⁻¹∂ΣΣ⁻¹∂Σ)."""
    lam = q.vector
    if moments is not None:

        def log_q(lam):
            mean, V = moments(lam)
            return -0.5 * ((theta - mean) @ V.inverse() @ (theta - mean) + (2 * math.pi * V).logdet())

        (mean, V), (dm, dV) = moments(lam), torch.func.jacrev(moments)(lam)
        bent = torch.einsum("ij,jka->ika", V.inverse(), dV)
        F = dm.mT @ V.inverse() @ dm + 0.5 * torch.einsum("ija,jib->ab", bent, bent)
        yield from ((q.mean, mean), (q.variance, V.diagonal()))
    yield from ((q.log_prob(theta), log_q(lam)), (q.score(theta), torch.func.grad(log_q)(lam)))
    if F is not None and torch.linalg.matrix_rank(F) == len(F):
        change = torch.linspace(0.5, -0.7, len(F), dtype=DTYPE)
        yield q.exact_fisher_solve(F @ change), change


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
    lower = laws.VechGaussian(p.m, p.V)
    yield from density(lower, theta, None, lambda lam: (lam[:2], root_of(lam[2:]) + root_of(lam[2:]).tril(-1).mT))
    own = laws.MeanFieldGaussian(t(0.3, -0.2, -0.5, 0.4))
    yield from density(own, theta, None, lambda lam: (lam[:2], (2 * lam[2:]).exp().diag()))
    yield own.norm2(Local(t(1.0, 0.0, 2.0, 0.0), own.no_matrix)), math.exp(-1.0) + 0.5 * 4
    same = laws.MeanFieldGaussian.standard(2, mean=t(0.3, -0.2), scale=t(0.5, 2.0))
    yield same.vector, [0.3, -0.2, math.log(0.5), math.log(2.0)]


@row("flat_posterior: LowRankGaussian", "flat_posterior: RankOneGaussian")
def factors():
    """Σ = BBᵀ + diag c² over (μ, B, c), and its starts, whose factors have a tenth of each scale."""
    m, c, theta = t(0.4, -0.1, 0.2), t(1.1, 0.8, 1.4), t(0.9, 0.1, -0.6)

    def moments(lam):
        B = lam[3:-3].reshape(3, -1)
        return lam[:3], B @ B.mT + lam[-3:].square().diag()

    yield from density(laws.LowRankGaussian(m, t([0.5, 0.2], [0.1, -0.4], [0.3, 0.3]), c), theta, None, moments)
    yield from density(laws.RankOneGaussian(m, t(0.6, -0.3, 0.8), c), theta, None, moments)
    wave = [[1.0 if math.cos(math.pi / 6 * (i + 0.5) * k) >= 0 else -1.0 for k in range(6)] for i in range(6)]
    standard = laws.LowRankGaussian.standard(6, rank=6, scale=2.0, dtype=DTYPE).parts()
    yield from zip(standard, ([0.0] * 6, 0.2 / math.sqrt(6) * t(*wave), [2 * math.sqrt(0.99)] * 6), strict=True)
    standard = laws.RankOneGaussian.standard(3, scale=2.0, dtype=DTYPE).vector
    yield standard, [0.0] * 3 + [0.2] * 3 + [2 * math.sqrt(0.99)] * 3


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


def printed_likelihoods():
    """(likelihood, the smallest and the largest y, -log p)."""
    log_2pi, lgamma = math.log(2 * math.pi), torch.lgamma
    # p = 1/(1 + e^{-yη}); Φ(yη)
    yield models.BernoulliLogit(), -1, 1, lambda eta, y: torch.logaddexp(0 * eta, -y * eta)
    yield models.BernoulliProbit(), -1, 1, lambda eta, y: -(0.5 * torch.erfc(-y * eta / math.sqrt(2))).log()
    # e^{yη - exp η}/y!; N(η, ½²)
    yield models.PoissonLog(), 0, 9, lambda eta, y: eta.exp() - y * eta + lgamma(y + 1)
    yield models.GaussianNoise(0.5), -2, 2, lambda eta, y: 2 * (y - eta) ** 2 + 0.5 * log_2pi - math.log(2)

    # (Hilbe 2011, NB2) Γ(y + r)/(Γ(r)y!) (r/(r + μ))^r (μ/(r + μ))^y, μ = e^η, r = 3
    def negative_binomial(eta, y):
        return (3 + y) * (3 + eta.exp()).log() - 3 * math.log(3) - y * eta + math.log(2) + lgamma(y + 1) - lgamma(y + 3)

    yield models.NegativeBinomial(3.0), 0, 9, negative_binomial
    # Γ((ν + 1)/2)/(Γ(ν/2) √(νπ) σ) (1 + (y - η)²/(νσ²))^{-(ν + 1)/2}, ν = 3, Γ(3/2) = √π/2
    constant = math.log(0.5 * math.pi * math.sqrt(3) * 1.6)
    yield models.StudentT(1.6, 3.0), -2, 2, lambda eta, y: 2 * (1 + (y - eta) ** 2 / (3 * 1.6**2)).log() + constant


def observed(likelihood, low, high, energy):
    """-log p(y | η), and under η ~ N(e, v) its mean and those of its derivatives in η, by a trapezoid rule."""
    index = torch.arange(40, dtype=DTYPE)
    mean, variance = 3 * (index + 1).square().sin(), 0.05 + 3 * index.cos().square()
    y = index % (high + 1) if low == 0 else torch.where(index % 3 == 0, 1.0 * low, 1.0 * high)
    yield likelihood.energy(mean, y), energy(mean, y)
    slope = torch.func.grad(lambda eta: energy(eta, y[:, None]).sum())
    curvature = torch.func.grad(lambda eta: slope(eta).sum())
    parts = [normal_mean(f, mean, variance) for f in (lambda eta: energy(eta, y[:, None]), slope, curvature)]
    yield from zip(likelihood.expected(mean, variance, y), parts, strict=True)
    if likelihood.two_classes:
        codings = ([0.0, 1.0, 1.0], [-1.0, 1.0, 1.0], [2.0, 4.0, 4.0])
        yield from ((likelihood.checked(t(*coding)), [-1, 1, 1]) for coding in codings)


enter("likelihood", printed_likelihoods, observed)


ELSEWHERE = {  # parts whose formula has tests of its own
    "estimator: GaussNewton": "optim/test_gauss_newton.py",
    "estimator: PiecewiseBound": "models/test_models_piecewise.py",
    "metric: NAGVAC": "papers/test_ifvb_families.py",
    "metric: PublishedNAGVAC": "papers/test_ifvb_families.py",
    "flat_posterior: ModuleFlow": "papers/test_ifvb_families.py",
    "flat_posterior: OrthogonalFlow": "papers/test_ifvb_families.py",
}


def test_every_part_has_a_row():
    """All but the structures, whose check compares with dense matrices."""
    kinds = {check: check.__name__.removeprefix("check_").partition("_of")[0] for check, *_ in conformance.PRODUCT}
    parts = {f"{kinds[check]}: {part.__name__}" for check, table, _ in conformance.PRODUCT for part in table}
    missing = {part for part in parts if not part.startswith("structure")} - {*ROWS, *ELSEWHERE}
    assert not missing, f"{sorted(missing)}: a row says what the printed formula gives at a small input"
    assert not ROWS.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("part", ROWS)
def test_the_printed_values_of_a_part(part):
    check_values(part)
