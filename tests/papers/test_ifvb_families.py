"""Families over a flat vector: densities, scores, Fisher matrices, and the corrected formulas of the flow."""

import math

import pytest
import torch
from helpers import randn, seeded

from torchngvi.errors import PairError
from torchngvi.ifvb import (
    AffineCoupling,
    Beta,
    FlatCholesky,
    LowRankGaussian,
    MeanFieldGaussian,
    ModuleFlow,
    NormalInverseGamma,
    OrthogonalFlow,
    RankOneGaussian,
    VecGaussian,
    VechGaussian,
)

FLOAT = torch.float64
Z_LIMIT = 4.5  # of a z-test


def covariance(*shape, seed=0):
    A = randn(*shape, shape[-1], seed=seed)
    return A @ A.mT / shape[-1] + 0.5 * torch.eye(shape[-1], dtype=FLOAT)


def orthogonal(d, seed=0):
    Q, R = torch.linalg.qr(randn(d, d, seed=seed))
    return Q * R.diagonal().sign()


def coupling(seed=0):
    torch.manual_seed(seed)
    flow = AffineCoupling(3, layers=3, hidden=4, mean=0.5, scale=1.5).double()
    q = ModuleFlow(flow, 3)
    return q.at(q.vector + 0.3 * randn(q.size, seed=seed))


# each with a seed, so that a second member of a batch differs
FAMILIES = {
    "beta": lambda seed=0: Beta(torch.tensor([2.0 + seed, 3.5], dtype=FLOAT)),
    "normal inverse gamma": lambda seed=0: NormalInverseGamma(torch.tensor([0.5 + seed, 0.7, 5.0, 6.0], dtype=FLOAT)),
    "mean field": lambda seed=0: MeanFieldGaussian(0.5 * randn(6, seed=seed)),
    "vec": lambda seed=0: VecGaussian(randn(3, seed=seed), covariance(3, seed=seed)),
    "vech": lambda seed=0: VechGaussian(randn(3, seed=seed), covariance(3, seed=seed)),
    "cholesky": lambda seed=0: FlatCholesky(randn(3, seed=seed), covariance(3, seed=seed)),
    "rank one": lambda seed=0: RankOneGaussian(randn(4, seed=seed), randn(4, seed=9), 0.5 + randn(4, seed=7).abs()),
    "low rank": lambda seed=0: LowRankGaussian(randn(4, seed=seed), randn(4, 2, seed=9), 0.5 + randn(4, seed=7).abs()),
    "orthogonal flow": lambda seed=0: OrthogonalFlow(
        0.5 * randn(3, seed=seed), orthogonal(3, 1), randn(3, seed=5), orthogonal(3, 2)
    ),
    "coupling flow": coupling,
}
GAUSSIANS = {
    "mean field": lambda lam: (lam[:3], (2 * lam[3:]).exp().diag()),
    "vech": lambda lam: FAMILIES["vech"]().parts(lam),
    "vec": lambda lam: FAMILIES["vec"]().parts(lam),
    "cholesky": lambda lam: (lambda m, T: (m, T @ T.mT))(*FAMILIES["cholesky"]().parts(lam)),
    "rank one": lambda lam: (lam[:4], torch.outer(lam[4:8], lam[4:8]) + lam[8:].square().diag()),
    "low rank": lambda lam: (lambda m, B, c: (m, B @ B.mT + c.square().diag()))(*FAMILIES["low rank"]().parts(lam)),
}


def gaussian_fisher(name, lam):
    """F_ij = dμᵀΣ⁻¹dμ + ½ tr(Σ⁻¹dΣ Σ⁻¹dΣ), from Jacobians: imports nothing of the library's scores."""
    to = GAUSSIANS[name]
    mean, V = to(lam)
    J, K = (torch.autograd.functional.jacobian(lambda lam, i=i: to(lam)[i], lam) for i in (0, 1))
    S = torch.linalg.inv(V)
    SK = torch.einsum("ab,bci->iac", S, K)
    return J.mT @ S @ J + 0.5 * torch.einsum("iab,jba->ij", SK, SK)


@pytest.fixture(params=FAMILIES)
def name(request):
    return request.param


def test_scores_are_the_gradient_of_the_density(name):
    """Against autograd of log_prob; on a manifold its tangent part."""
    q = FAMILIES[name]()
    theta = q.sample(5, seeded())
    for draw, score in zip(theta, q.score(theta), strict=True):
        lam = q.vector.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(q.log_prob(draw[None], lam).sum(), lam)
        assert torch.allclose(score, q.projected(lam.detach(), gradient), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["vec", "vech", "cholesky", "low rank", "rank one", "orthogonal flow"])
def test_parts_are_those_given(name):
    """Mean, covariance, factors and scale of the start, each by itself: nothing of λ is lost or exchanged."""
    mean, V, B, c = randn(3, seed=1), covariance(3, seed=2), randn(3, 2, seed=3), 0.5 + randn(3, seed=4).abs()
    W, corner = orthogonal(3, 5), randn(3, seed=6)
    given, q = {
        "vec": ((mean, V), VecGaussian(mean, V)),
        "vech": ((mean, V), VechGaussian(mean, V)),
        "cholesky": ((mean, torch.linalg.cholesky(V)), FlatCholesky(mean, V)),
        "low rank": ((mean, B, c), LowRankGaussian(mean, B, c)),
        "rank one": ((mean, B[:, 0], c), RankOneGaussian(mean, B[:, 0], c)),
        "orthogonal flow": ((mean, W, corner), OrthogonalFlow(mean, W, corner)),
    }[name]
    parts = q.vector.chunk(3) if name == "rank one" else q.parts()
    assert all(torch.allclose(part, value, rtol=1e-12) for part, value in zip(parts, given, strict=True))


def test_scores_have_mean_zero(name):
    q = FAMILIES[name]()
    scores = q.score(q.sample(20_000, seeded(1))).detach()
    error = scores.std(0) / math.sqrt(len(scores))
    assert (scores.mean(0).abs() <= Z_LIMIT * error + 1e-12).all()
    assert (error > 0).any()


def test_density_is_normalised(name):
    """Against torch.distributions or the formula of a Gaussian."""
    q = FAMILIES[name]()
    theta = q.sample(4, seeded())
    if name == "beta":
        expected = torch.distributions.Beta(*q.vector).log_prob(theta[:, 0])
    elif name == "normal inverse gamma":
        m, v, a, b = q.vector
        gamma = torch.distributions.Gamma(a, b).log_prob(1 / theta[:, 1]) - 2 * theta[:, 1].log()
        expected = torch.distributions.Normal(m, v.sqrt()).log_prob(theta[:, 0]) + gamma
    elif name in GAUSSIANS:
        expected = torch.distributions.MultivariateNormal(*GAUSSIANS[name](q.vector)).log_prob(theta)
    else:  # a flow: log N(ε) - log|∂θ/∂ε|
        noise = randn(1, 3, seed=3)
        theta, jacobian = _pushed(q, noise[0])
        expected = torch.distributions.Normal(0, 1).log_prob(noise).sum(-1) - torch.linalg.slogdet(jacobian)[1]
        theta = theta[None]
    assert torch.allclose(q.log_prob(theta), expected, rtol=1e-9)


def _pushed(q, noise):
    """T(ε) of a flow and its Jacobian."""

    def push(e):
        if isinstance(q, ModuleFlow):
            return q._apply_flow(e, q.vector.detach(), False)[0]
        b1, W2, b2 = q.parts(q.vector.detach())
        return W2 @ torch.sigmoid(q.W1 @ e + b1) + b2

    return push(noise), torch.autograd.functional.jacobian(push, noise)


@pytest.mark.parametrize("name", [key for key in FAMILIES if FAMILIES[key]().reparametrised])
def test_pathwise_gradient_of_a_moment(name):
    """d/dλ E[f(θ)] = E[φ f]: two estimates of one thing, and neither with a bias."""
    q, n = FAMILIES[name](), 20_000
    f = lambda theta: (0.5 * theta).sin().sum(-1)  # noqa: E731
    lam = q.vector.detach().requires_grad_()
    parts = torch.stack([
        q.projected(q.vector.detach(), torch.autograd.grad(f(q.rsample(n // 20, seeded(i), lam)).mean(), lam)[0])
        for i in range(20)
    ])  # fmt: skip
    theta = q.sample(n, seeded(50))
    scored = (q.score(theta) * (f(theta) - f(theta).mean())[:, None]).detach()
    error = (parts.var(0) / 20 + scored.var(0) / n).sqrt()
    assert ((parts.mean(0) - scored.mean(0)).abs() <= 5 * error + 1e-10).all()
    assert float(scored.mean(0).abs().max()) > 10 * float(error.max()) / math.sqrt(n)


@pytest.mark.parametrize("name", ["mean field", "vech", "cholesky", "rank one"])
def test_exact_natural_gradient_of_gaussians(name):
    """Against the Fisher matrix from Jacobians."""
    q = FAMILIES[name]()
    F, g = gaussian_fisher(name, q.vector.detach()), randn(q.size, seed=3)
    assert torch.allclose(F @ q.exact_fisher_solve(g), g, rtol=1e-9, atol=1e-9)


def test_exact_natural_gradient_is_that_of_the_scores():
    """Beta and normal-inverse-gamma: I_F = E[φφᵀ], by Monte Carlo, and its golden values."""
    for key in ("beta", "normal inverse gamma"):
        q = FAMILIES[key]()
        scores = q.score(q.sample(100_000, seeded(1)))
        outer = scores[:, :, None] * scores[:, None, :]
        assert ((outer.mean(0) - q.fisher()).abs() <= Z_LIMIT * outer.std(0) / math.sqrt(len(scores)) + 1e-12).all()
        g = randn(q.size, seed=1)
        assert torch.allclose(q.fisher() @ q.exact_fisher_solve(g), g)
    at_optimum = Beta(torch.tensor([58.0, 144.0], dtype=FLOAT)).fisher()
    golden = torch.tensor([[0.0124281, -0.00496277], [-0.00496277, 0.00200584]], dtype=FLOAT)
    assert torch.allclose(at_optimum, golden, rtol=1e-5)
    values = torch.linalg.eigvalsh(at_optimum)
    assert values[0].item() == pytest.approx(2.080e-5, rel=1e-3)
    assert values[1].item() == pytest.approx(1.4413e-2, rel=1e-4)


def test_fisher_of_vec_is_singular():
    """Rank 9 of 12 for d = 3: off-diagonal entries count twice."""
    q = FAMILIES["vec"]()
    assert int(torch.linalg.matrix_rank(gaussian_fisher("vec", q.vector.detach()))) == 9
    with pytest.raises(PairError, match=r"VecGaussian is singular.*Use VechGaussian or FlatCholesky"):
        q.exact_fisher_solve(q.vector)


def test_rank_one_blocks():
    """NAGVAC: each block of the Fisher matrix inverted; and what is usually run differs in the block of b."""
    q = FAMILIES["rank one"]()
    F, g = gaussian_fisher("rank one", q.vector.detach()), randn(12, seed=3)
    blocks = torch.block_diag(*(F[i : i + 4, i : i + 4] for i in (0, 4, 8)))
    assert torch.allclose(blocks @ q.block_fisher_solve(g), g, rtol=1e-9, atol=1e-9)
    published = q.published_block_solve(g)
    same = torch.isclose(published, q.block_fisher_solve(g))
    assert same.tolist() == [True] * 4 + [False] * 4 + [True] * 4
    _, V = GAUSSIANS["rank one"](q.vector)
    b, c = q.vector[4:8], q.vector[8:]
    k = (b / c).square().sum()
    assert torch.allclose(published[4:8], V @ g[4:8] * (1 + k) / (2 * k))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.50001, 0.9])
def test_rank_one_where_one_factor_dominates(share):
    """r_i ≥ k/2: plain Sherman-Morrison divides by g_i ≤ 0; here the Fisher matrix still is inverted."""
    r = torch.tensor([share, *[(1 - share) / 3] * 3], dtype=FLOAT) * 2
    q = RankOneGaussian(torch.zeros(4, dtype=FLOAT), r.sqrt(), torch.ones(4, dtype=FLOAT))
    g = randn(12, seed=2)
    F = gaussian_fisher("rank one", q.vector.detach())
    assert torch.allclose(q.exact_fisher_solve(g), torch.linalg.solve(F, g), rtol=1e-7, atol=1e-8)
    blocks = torch.block_diag(*(F[i : i + 4, i : i + 4] for i in (0, 4, 8)))
    assert torch.allclose(q.block_fisher_solve(g), torch.linalg.solve(blocks, g), rtol=1e-7, atol=1e-8)


def test_rank_one_is_singular_with_two_factors():
    """Nonsingular if and only if three entries of b are not 0."""
    b = torch.tensor([1.0, 0.7, 0.0, 0.0], dtype=FLOAT)
    one = torch.ones(4, dtype=FLOAT)
    q = RankOneGaussian(0 * one, b, one)
    assert int(torch.linalg.matrix_rank(gaussian_fisher("rank one", q.vector.detach()))) < 12
    assert q.exact_fisher_solve(torch.ones(12, dtype=FLOAT)).isnan().any()
    b[2] = 0.5
    assert q.at(torch.cat([0 * one, b, one])).exact_fisher_solve(torch.ones(12, dtype=FLOAT)).isfinite().all()
    with pytest.raises(PairError, match=r"singular for d < 3; got d = 2. Use FlatCholesky"):
        RankOneGaussian(one[:2], one[:2], one[:2]).exact_fisher_solve(torch.ones(6, dtype=FLOAT))


def test_rank_one_sampling_moments():
    q = FAMILIES["rank one"]()
    mean, V = GAUSSIANS["rank one"](q.vector.detach())
    away = q.sample(100_000, seeded(3)) - mean
    outer = away[:, :, None] * away[:, None, :]
    assert (away.mean(0).abs() < Z_LIMIT * away.std(0) / math.sqrt(len(away))).all()
    assert ((outer.mean(0) - V).abs() < Z_LIMIT * outer.std(0) / math.sqrt(len(away))).all()


def free_log_prob(W1, b1, W2, b2, theta):
    """The density of the flow as the function of free matrices whose derivatives Appendix E takes."""
    t = torch.logit(W2.mT @ (theta - b2))
    log_slope = torch.log(torch.sigmoid(t) * torch.sigmoid(-t))
    return -0.5 * (W1.mT @ (t - b1)).square().sum() - log_slope.sum() - 0.5 * len(b1) * math.log(2 * math.pi)


def test_flow_scores_against_finite_differences():
    """All four corrected derivatives, by central differences of the density."""
    q = FAMILIES["orthogonal flow"]()
    theta = q.sample(1, seeded(7))[0]
    b1, W2, b2 = (part.detach() for part in q.parts())
    parts = [q.W1, b1, W2, b2]
    scores = q.ambient_score(theta[None])
    for index, score in enumerate(scores):
        numeric = torch.zeros(parts[index].shape, dtype=FLOAT)
        for entry in range(numeric.numel()):
            step = torch.zeros_like(numeric)
            step.view(-1)[entry] = 1e-6
            high, low = ([*parts[:index], parts[index] + sign * step, *parts[index + 1 :]] for sign in (1, -1))
            numeric.view(-1)[entry] = (free_log_prob(*high, theta) - free_log_prob(*low, theta)) / 2e-6
        assert torch.allclose(score[0].detach(), numeric, rtol=1e-6, atol=1e-6)


def test_printed_flow_scores_are_wrong():
    """Appendix E: δ with h'' has mean -1.688 at d = 1, W₁ = 1, b₁ = 0.5, where the right one has 0."""
    half = torch.tensor([0.5], dtype=FLOAT)
    q = OrthogonalFlow(half, torch.eye(1, dtype=FLOAT), 0 * half)
    z = torch.sigmoid(torch.linspace(-9, 9, 20_001, dtype=FLOAT)[:, None] + half)
    slope = z * (1 - z)
    shifted = torch.logit(z) - half
    weight = torch.softmax(-0.5 * shifted.square(), 0)  # of N(0, 1) on a fine grid
    printed = -shifted / slope - slope * (1 - 2 * z)  # h'' in the place of h''/h'²
    right = q.ambient_score(z).b2 / -1.0  # -W₂δ with W₂ = 1
    assert float((weight * printed).sum()) == pytest.approx(-1.688, abs=5e-4)
    assert float((weight * right).sum().detach()) == pytest.approx(0.0, abs=1e-6)
    # -εεᵀW₁ for the first derivative: equal to the right -W₁εεᵀ only where they commute
    q = FAMILIES["orthogonal flow"]()
    theta = q.sample(1, seeded(7))
    score = q.ambient_score(theta)
    noise = q.W1.mT @ score.b1[0]
    assert torch.allclose(score.W1[0], -q.W1 @ torch.outer(noise, noise))
    assert not torch.allclose(score.W1[0], -torch.outer(noise, noise) @ q.W1, atol=1e-2)


def test_flow_pathwise_gradient_as_corrected():
    """r = h'(W₂ᵀg) + h''/h', dW₁ = rεᵀ, db₁ = r, dW₂ = gzᵀ, db₂ = g, against autograd of the integrand."""
    q = FAMILIES["orthogonal flow"]()
    noise = randn(3, seed=8)
    parts = [part.detach().clone().requires_grad_() for part in (q.W1, *q.parts())]

    def log_joint(theta):
        return -(theta**4).sum() / 4 + theta[0] * theta[1]

    W1, b1, W2, b2 = parts
    z = torch.sigmoid(W1 @ noise + b1)
    theta = W2 @ z + b2
    value = log_joint(theta) + (z * (1 - z)).log().sum()
    expected = torch.autograd.grad(value, parts)
    point = theta.detach().requires_grad_()
    (g,) = torch.autograd.grad(log_joint(point), point)
    slope = (z * (1 - z)).detach()
    r = slope * (W2.detach().mT @ g) + (1 - 2 * z).detach()
    formula = torch.outer(r, noise), r, torch.outer(g, z.detach()), g
    assert all(torch.allclose(a, b) for a, b in zip(formula, expected, strict=True))
    printed = W2.detach().mT @ g + (1 - 2 * z).detach()  # dz/db₁ = I
    assert not torch.allclose(printed, expected[1], atol=1e-2)


def test_flow_needs_tangent_scores():
    """E[W₂ᵀ∂/∂W₂] = -I before the projection; the tangent part of ∂/∂W₁ is 0 whatever is drawn."""
    q = FAMILIES["orthogonal flow"]()
    theta = q.sample(40_000, seeded(9))
    scores = q.ambient_score(theta)
    _, W2, _ = q.parts()
    inner = (W2.mT @ scores.W2).detach()
    error = inner.std(0) / math.sqrt(len(inner))
    assert ((inner.mean(0) + torch.eye(3, dtype=FLOAT)).abs() < Z_LIMIT * error).all()
    of_W1 = q.W1.mT @ scores.W1[:100]
    assert torch.allclose(of_W1, of_W1.mT, atol=1e-10)  # symmetric, so its skew part vanishes
    assert torch.allclose(q.log_prob(theta[:9]), _with_W1(q, orthogonal(3, 30)).log_prob(theta[:9]))


def _with_W1(q, W1):
    b1, W2, b2 = q.parts()
    return OrthogonalFlow(b1, W2, b2, W1)


def test_flow_tangents_in_closed_form():
    """Proj(WA) = W skew(A) for any A, all of it for a skew A and nothing for a symmetric one; b₁ and b₂ are free."""
    q, A = FAMILIES["orthogonal flow"](), randn(3, 3, seed=11)
    b1, b2 = randn(3, seed=12), randn(3, seed=13)
    lam, (_, W, _) = q.vector.detach(), q.parts(q.vector.detach())
    for part, skew in ((A, 0.5 * (A - A.mT)), (A - A.mT, A - A.mT), (A + A.mT, torch.zeros(3, 3))):
        ends = (torch.cat([b1, (W @ matrix).flatten(), b2]) for matrix in (part, skew.double()))
        ambient, tangent = ends
        assert torch.allclose(q.projected(lam, ambient), tangent, atol=1e-13)
    # a score is what q.log_prob rises by along a geodesic W exp(tΩ), Ω skew, and along b₁ and b₂
    theta, step = q.sample(2, seeded(7)), 1e-6
    heading = torch.cat([b1, (W @ (A - A.mT)).flatten(), b2])

    def at(t):
        return torch.cat([lam[:3] + t * b1, (W @ torch.linalg.matrix_exp(t * (A - A.mT))).flatten(), lam[-3:] + t * b2])

    rise = (q.log_prob(theta, at(step)) - q.log_prob(theta, at(-step))) / (2 * step)
    assert torch.allclose(q.score(theta) @ heading, rise, rtol=1e-6)


def test_flow_stays_orthogonal():
    """Projection: tangent, and a projection; retraction: WᵀW = I to 1e-12, first order right."""
    q = FAMILIES["orthogonal flow"]()
    lam, v = q.vector.detach(), randn(q.size, seed=4)
    tangent = q.projected(lam, v)
    _, W, _ = q.parts(lam)
    inner = W.mT @ q.parts(tangent)[1]
    assert torch.allclose(inner, -inner.mT, atol=1e-12)
    assert torch.allclose(q.projected(lam, tangent), tangent)
    moved = lam
    for step in range(100):
        moved = q.retracted(moved, 0.3 * q.projected(moved, randn(q.size, seed=step)))
    W = q.parts(moved)[1]
    assert float((W.mT @ W - torch.eye(3, dtype=FLOAT)).abs().max()) < 1e-12
    small = 1e-5
    assert torch.allclose((q.retracted(lam, small * tangent) - lam) / small, tangent, atol=1e-4)


def test_flow_outside_its_support():
    """A rotated unit cube: no standard deviation above a half."""
    q = FAMILIES["orthogonal flow"]()
    assert q.log_prob(100 + q.sample(2, seeded())).tolist() == [-math.inf] * 2
    # on the faces, and as far off them as a rotation is rounded, the density is finite and the same on both sides
    zero, small = torch.zeros(3, dtype=FLOAT), torch.finfo(FLOAT).eps
    cube = OrthogonalFlow(zero, torch.eye(3, dtype=FLOAT), zero)
    ends = cube.log_prob(torch.tensor([[0.0] * 3, [1.0] * 3, [-small] * 3, [1 + small] * 3], dtype=FLOAT))
    assert ends.isfinite().all()
    assert torch.allclose(ends, ends[0], rtol=1e-2)  # logit(1 - ε) is a difference of rounded numbers
    assert cube.score(torch.tensor([[0.0] * 3, [1.0] * 3], dtype=FLOAT)).isfinite().all()
    assert cube.log_prob(torch.full((1, 3), 1 + 9 * small, dtype=FLOAT)).tolist() == [-math.inf]
    assert float(q.sample(10_000, seeded()).std(0).max()) < 0.5


def test_a_start_is_copied():
    """What is given is not what moves, in a constructor and in `at`."""
    given = torch.ones(2, dtype=FLOAT)
    q = Beta(given)
    other = q.at(given)
    with torch.no_grad():
        q.vector += 1.0
        other.vector += 2.0
    assert (given.tolist(), q.vector.tolist(), other.vector.tolist()) == ([1.0] * 2, [2.0] * 2, [3.0] * 2)


def test_a_coupling_flow_starts_where_it_is_told():
    """Nearly mean + scale ε, whatever the network's first layer is; the determinants are those of the maps."""
    torch.manual_seed(0)
    flow, noise = AffineCoupling(3, layers=4, hidden=16, mean=1.0, scale=2.0).double(), randn(200, 3, seed=1)
    theta, log_det = (part.detach() for part in flow(noise))
    assert float((theta - 1 - 2 * noise).abs().max()) < 0.6
    assert float((theta - 1 - 2 * noise).square().mean().sqrt()) < 0.15
    assert all(not net[2].bias.any() for net in flow.nets)
    jacobian = torch.autograd.functional.jacobian(lambda e: flow(e)[0], noise[0])
    assert log_det[0].item() == pytest.approx(torch.linalg.slogdet(jacobian)[1].item())
    back, inverse_log_det = flow(theta, inverse=True)
    assert torch.allclose(back, noise)
    assert torch.allclose(inverse_log_det, -log_det)


def test_domains():
    """λ outside is told apart, member by member; Beta's steps are clamped at 0.01."""
    q = FAMILIES["beta"]()
    assert q.in_domain(torch.tensor([[1.0, 1.0], [1.0, 0.0], [torch.nan, 1.0]])).tolist() == [True, False, False]
    assert q.retracted(q.vector, torch.tensor([-9.0, 1.0])).tolist() == [0.01, 4.5]
    q = FAMILIES["vech"]()
    bad = q.vector.detach().clone()
    bad[3] = -1.0
    assert q.in_domain(torch.stack([q.vector.detach(), bad])).tolist() == [True, False]
