"""Families: densities of other libraries, closed derivatives, far tails, draws, checks of outcomes.

The log likelihoods of statsmodels 0.15.0 at its estimates are stored with the recipe of their data (`_table`); other
densities are those of SciPy, and of mpmath where float64 cancels.
"""

import math

import mpmath
import pytest
import scipy.stats
import torch
from helpers import check_refusal, close
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchngvi.tables.families import (
    FAMILIES,
    Bernoulli,
    Binomial,
    Family,
    Gaussian,
    Held,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Weibull,
    family_of,
)
from torchngvi.tables.family_checks import check_family

NAMES = [name for name, kind in FAMILIES.items() if not kind.nominal]  # of one linear predictor
LABELS = ("a", "b", "c", "d")
BESIDE = {"trials": 7.0, "event": 1.0}


def tensor(values) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def family_named(name: str) -> Family:
    return FAMILIES[name](LABELS) if "ordinal" in name else FAMILIES[name]()


def outcomes(family: Family) -> Tensor:
    """Some of each kind: at the ends, in the middle, large."""
    low, high = family.bounds
    if family.outcomes is not None or family.extra == ("trials",) or high == 1 and family.discrete:
        return torch.arange(min(high, 7) + 1, dtype=torch.float64)
    if family.discrete:
        return tensor([0, 1, 2, 50, 1e5])
    return tensor([1e-9, 0.3, 1 - 1e-9] if high == 1 else [1e-6, 0.5, 1e7] if low == 0 else [-1e6, 0.0, 2.0])


def beside(family: Family, like: Tensor, value: float | None = None) -> tuple[Tensor, ...]:
    return tuple(torch.full_like(like, BESIDE[name] if value is None else value) for name in family.extra)


# Against other libraries


def _table() -> dict[str, Tensor]:
    """The data of the stored log likelihoods: 300 rows of one covariate and four kinds of outcomes."""
    generator = torch.Generator().manual_seed(46)
    x = torch.randn(300, generator=generator, dtype=torch.float64)
    u = torch.rand(300, 3, generator=generator, dtype=torch.float64)
    eta, noise = 0.4 + 0.6 * x, torch.special.ndtri(u[:, 0])
    count = torch.exp(eta + 0.7 * noise).floor()
    latent = eta + torch.logit(u[:, 0])
    category = (latent[:, None] > tensor([-1.0, 0.3, 1.5])).sum(1).double()
    return {
        "x": x,
        "count": count,
        "zeros": torch.where(u[:, 1] < 0.3, 0.0, count),
        "category": category,
        "above": (category > 1).double(),
    }


def thresholds(*c: float) -> list[float]:
    return [c[0], *(math.log(after - before) for before, after in zip(c, c[1:], strict=False))]


# family, column, (intercept, slope), phi, the log likelihood of statsmodels; GLM, Logit, Probit, OrderedModel,
# ZeroInflatedPoisson, ZeroInflatedNegativeBinomialP; densities that SciPy has are in test_scipy
STATSMODELS = [
    ("bernoulli", "above", (0.22270951902820355, 0.6348634379284029), [], -193.47285106090214),
    ("probit", "above", (0.13612155654597563, 0.39001708254601813), [], -193.50045035949904),
    ("poisson", "count", (0.34134520816633057, 0.7490993025463507), [], -508.47957300494164),
    (
        "zero_inflated_poisson",
        "zeros",
        (0.3205002498393389, 0.680449562598858),
        [-0.656337990300922],
        -414.34340154457146,
    ),
    (
        "zero_inflated_negative_binomial",
        "zeros",
        (0.08638201823939093, 0.7977065114161795),
        [-1.4740050068724533, -math.log(0.556097247910692)],
        -404.08799098898584,
    ),
    (
        "ordinal",
        "category",
        (0.0, 0.5859949714473021),
        thresholds(-1.4448100651562241, -0.2122116296232528, 0.9136003041661462),
        -397.9078525972716,
    ),
    (
        "ordinal_probit",
        "category",
        (0.0, 0.36557903818429105),
        thresholds(-0.8750322014240833, -0.132883283865322, 0.5588563379700274),
        -397.27877849212166,
    ),
]


@pytest.mark.parametrize(("name", "column", "coefficients", "phi", "expected"), STATSMODELS)
def test_statsmodels(name, column, coefficients, phi, expected):
    """The log likelihood at the estimates of statsmodels is the one that it reports."""
    table, family = _table(), family_named(name)
    y = (table[column], *(torch.full_like(table["x"], 3.0) for _ in family.extra))
    eta = coefficients[0] + coefficients[1] * table["x"]
    found = family.log_prob(eta, family.checked(y), tensor(phi)).sum()
    assert abs(float(found) - expected) < 1e-9 * abs(expected)


def test_hurdles_as_statsmodels():
    """The counts above 0 of the two hurdles: TruncatedLFPoisson and TruncatedLFNegativeBinomialP of 139 rows."""
    table = _table()
    y, x = table["zeros"], table["x"]
    there = y > 0
    assert int(there.sum()) == 139
    share = math.log(161 / 139)
    zero = 161 * math.log(161 / 300) + 139 * math.log(139 / 300)
    for name, (a, b), phi, some in (
        ("hurdle_poisson", (0.45512357285957, 0.5414033433479579), [share], -225.94087857395198),
        (
            "hurdle_negative_binomial",
            (0.13209174534161097, 0.6721990821153838),
            [share, -math.log(0.5977577986201463)],
            -217.21862461513587,
        ),
    ):
        found = float(family_named(name).log_prob(a + b * x, (y,), tensor(phi)).sum())
        assert abs(found - (zero + some)) < 1e-9 * abs(found)


ETA = tensor([-1.5, -0.2, 0.7, 2.0])


def _scipy(name: str, y: float, eta: float, phi: float) -> float:
    s, mu, p, size = scipy.stats, math.exp(eta), 1 / (1 + math.exp(-eta)), math.exp(phi)
    scale = mu / math.gamma(1 + 1 / size)
    return float(
        {
            "student_t": lambda: s.t.logpdf(y, 4, eta, size),
            "gaussian": lambda: s.norm.logpdf(y, eta, size),
            "beta_binomial": lambda: s.betabinom.logpmf(y, 7, p * size, (1 - p) * size),
            "binomial": lambda: s.binom.logpmf(y, 7, p),
            "negative_binomial": lambda: s.nbinom.logpmf(y, size, size / (size + mu)),
            "weibull": lambda: s.weibull_min.logpdf(y, size, scale=scale),
            "weibull censored": lambda: s.weibull_min.logsf(y, size, scale=scale),
            "lognormal": lambda: s.lognorm.logpdf(y, size, scale=mu),
            "lognormal censored": lambda: s.lognorm.logsf(y, size, scale=mu),
            "beta": lambda: s.beta.logpdf(y, p * size, (1 - p) * size),
            "gamma": lambda: s.gamma.logpdf(y, size, scale=mu / size),
        }[name]()
    )


@pytest.mark.parametrize(
    ("name", "y"),
    [
        ("student_t", -2.0),
        ("gaussian", 0.4),
        ("beta_binomial", 0.0),
        ("beta_binomial", 3.0),
        ("beta_binomial", 7.0),
        ("binomial", 2.0),
        ("negative_binomial", 4.0),
        ("weibull", 0.7),
        ("weibull censored", 1.7),
        ("lognormal", 0.7),
        ("lognormal censored", 1.7),
        ("beta", 0.2),
        ("gamma", 3.0),
    ],
)
def test_scipy(name, y):
    """The log density of SciPy, and the log survival of times that are censored."""
    word, _, censored = name.partition(" ")
    family = family_of(word)
    for phi in (-0.7, 0.0, 1.3):
        at = torch.full_like(ETA, y)
        found = family.log_prob(ETA, (at, *beside(family, at, 0.0 if censored else None)), tensor([phi]))
        expected = tensor([_scipy(name, y, float(eta), phi) for eta in ETA])
        close(found, expected, 1e-12)


def test_limits():
    """Beta-binomial, negative binomial and zero-inflated densities become those that they extend."""
    eta, y = ETA[:, None], torch.arange(8, dtype=torch.float64)
    none = tensor([])
    seven = torch.full_like(y, 7.0)
    wide = Binomial().log_prob(eta, (y, seven), none)
    close(family_of("beta_binomial").log_prob(eta, (y, seven), tensor([25.0])), wide, 1e-9)
    rate = Poisson().log_prob(eta, (y,), none)
    assert family_of("nbinom").name == family_of("negbinomial").name == family_of("negbin").name
    close(family_of("negbin").log_prob(eta, (y,), tensor([25.0])), rate, 1e-9)
    close(family_of("zip").log_prob(eta, (y,), tensor([-50.0])), rate, 1e-12)
    two = Ordinal(("no", "yes")).log_prob(eta, (y[:2],), tensor([0.3]))
    close(two, Bernoulli().log_prob(eta - 0.3, (y[:2],), none), 1e-14)
    only = Held(Weibull(), {"shape": 1.0}).log_prob(ETA, (torch.full_like(ETA, 2.0), torch.ones_like(ETA)), none)
    close(only, -ETA - 2 * torch.exp(-ETA), 1e-14)


# Where float64 cancels: mpmath with as many digits as it takes


def _reference(name: str, y: float, eta, phi):
    mp = mpmath
    exp, log, log1p = mp.exp, mp.log, mp.log1p

    def rise(a, n):
        return mp.loggamma(a + n) - mp.loggamma(a)

    if name.startswith("ordinal"):
        c = [phi[0]]
        for gap in phi[1:]:
            c.append(c[-1] + exp(gap))
        cdf = mp.ncdf if name == "ordinal_probit" else lambda x: 1 / (1 + exp(-x))
        k = int(y)
        return log((cdf(c[k] - eta) if k < len(c) else 1) - (cdf(c[k - 1] - eta) if k else 0))
    if name == "beta_binomial":
        size, p = exp(phi[0]), 1 / (1 + exp(-eta))
        choose = mp.loggamma(8) - mp.loggamma(y + 1) - mp.loggamma(8 - y)
        return choose + rise(size * p, y) + rise(size * (1 - p), 7 - y) - rise(size, 7)
    if name == "gamma":
        k = exp(phi[0])
        return k * log(k) - mp.loggamma(k) + (k - 1) * log(y) - k * eta - k * y * exp(-eta)
    if name == "beta":
        size, p = exp(phi[0]), 1 / (1 + exp(-eta))
        a, b = size * p, size * (1 - p)
        constant = mp.loggamma(size) - mp.loggamma(a) - mp.loggamma(b)
        return constant + (a - 1) * log(y) + (b - 1) * log1p(-mp.mpf(y))
    mu = exp(eta)
    if name.endswith("poisson"):
        count, zero = y * eta - mu - mp.loggamma(y + 1), exp(-mu)
    else:
        size = exp(phi[-1])
        tell = rise(size, y) - mp.loggamma(y + 1)
        count = tell + y * (eta - log(size + mu)) - size * log1p(mu / size)
        zero = exp(-size * log1p(mu / size))
    if name == "negative_binomial":
        return count
    share = 1 / (1 + exp(-phi[0]))
    if name.startswith("hurdle"):
        return log(share) if y == 0 else log(1 - share) + count - log(1 - zero)
    return log(share + (1 - share) * zero) if y == 0 else log(1 - share) + count


FAR = [
    ("ordinal", (0, 1, 2), [-1.0, 0.2], (-60.0, -5.0, 0.3, 60.0)),
    ("ordinal", (0, 1, 2), [-1.0, -25.0], (-60.0, 0.3, 60.0)),
    ("ordinal_probit", (0, 1, 2), [-1.0, 0.2], (-25.0, -5.0, 0.3, 25.0)),
    ("ordinal_probit", (1,), [-1.0, -11.0], (-25.0, 0.3, 25.0)),
    ("ordinal_probit", (1,), [-1.0, -5.7], (-25.0, 0.3, 25.0)),
    ("ordinal_probit", (1,), [-1.0, -5.9], (-25.0, 0.3, 25.0)),
    ("ordinal_probit", (1,), [-1.0, -25.0], (-25.0, 0.3, 25.0)),
    ("beta_binomial", (0, 3, 7), [0.5], (-60.0, -3.0, 60.0)),
    ("beta_binomial", (0, 3, 7), [16.0], (-60.0, -3.0, 2.0)),
    ("beta", (1e-9, 0.3), [1.0], (-60.0, 2.0, 60.0)),
    ("gamma", (1e-6, 3.0), [12.0], (-2.0, 1.1, 20.0)),
    ("gamma", (1e-6, 3.0), [-6.0], (-20.0, 1.1, 60.0)),
    ("negative_binomial", (0, 3, 200), [18.0], (-60.0, 1.0, 5.0)),
    ("negative_binomial", (0, 3, 200), [-9.0], (-60.0, 1.0, 60.0)),
    ("zero_inflated_poisson", (0, 3), [-2.0], (-60.0, 1.0, 20.0)),
    ("zero_inflated_negative_binomial", (0, 3), [-40.0, 1.0], (-60.0, 1.0, 20.0)),
    ("hurdle_poisson", (0, 1, 3), [0.5], (-60.0, -2.31, -2.29, 3.0)),
    ("hurdle_negative_binomial", (0, 1, 3), [0.5, 16.0], (-60.0, -2.31, -2.29, 3.0)),
    ("hurdle_negative_binomial", (0, 1, 3), [0.5, -3.0], (-60.0, -23.1, -22.9, 3.0)),
]


@pytest.mark.sparse(3)
@pytest.mark.parametrize(("name", "ys", "phi", "etas"), FAR)
def test_far(name, ys, phi, etas):
    """Value, slope and curvature in η, and the slopes in φ, are right to 1e-8 where differences of numbers cancel."""
    family = FAMILIES[name](("a", "b", "c")) if "ordinal" in name else FAMILIES[name]()
    with mpmath.workdps(420):
        for y in ys:
            for eta in etas:
                at, phis = tensor([eta]).requires_grad_(), tensor(phi).requires_grad_()
                value = family.log_prob(at, (tensor([y]), *beside(family, at.detach())), phis)
                slope, own = torch.autograd.grad(value.sum(), (at, phis), create_graph=True, materialize_grads=True)
                curvature = torch.zeros(1)
                if slope.requires_grad:
                    (curvature,) = torch.autograd.grad(slope.sum(), at, materialize_grads=True)
                h, middle, mp_phi = mpmath.mpf(10) ** -40, mpmath.mpf(eta), [mpmath.mpf(x) for x in phi]
                low, here, high = (_reference(name, y, middle + k * h, mp_phi) for k in (-1, 0, 1))
                pairs = [(value, here), (slope, (high - low) / (2 * h)), (curvature, (high - 2 * here + low) / h**2)]
                for j in range(len(phi)):
                    ends = [
                        _reference(name, y, middle, [x + k * h * (i == j) for i, x in enumerate(mp_phi)])
                        for k in (-1, 1)
                    ]
                    pairs.append((own[j], (ends[1] - ends[0]) / (2 * h)))
                for what, (found, expected) in enumerate(pairs):
                    expected = float(expected)
                    assert abs(float(found.detach()) - expected) < 1e-8 * (1 + abs(expected)), (y, eta, what, expected)


@pytest.mark.parametrize("name", NAMES)
def test_finite(name):
    """Values and two derivatives in η and φ are finite up to |η| = 700."""
    family = family_named(name)
    y = outcomes(family)
    etas = tensor([-700, -300, -40, -20, -2, 0, 2, 20, 40, 300, 700])[:, None].expand(-1, len(y))
    for level in (-8.0, -3.0, 0.0, 3.0, 8.0):
        for value in (0.0, 1.0) if family.extra == ("event",) else (None,):
            eta = etas.clone().requires_grad_()
            phi = torch.full((*eta.shape, len(family.parameters)), level, dtype=torch.float64, requires_grad=True)
            found = family.log_prob(eta, (y, *beside(family, y, value)), phi)
            first = torch.autograd.grad(found.sum(), (eta, phi), create_graph=True, materialize_grads=True)
            assert found.isfinite().all()
            assert not (family.discrete and bool((found > 1e-12).any()))
            for slope in first:
                assert slope.isfinite().all()
                if slope.requires_grad:
                    second = torch.autograd.grad(slope.sum(), (eta, phi), retain_graph=True, materialize_grads=True)
                    assert all(one.isfinite().all() for one in second)


# Derivatives


@pytest.mark.parametrize("name", NAMES)
def test_jets(name):
    """Closed derivatives are those of autograd, and those of autograd may be differentiated again."""
    family = family_named(name)
    y = outcomes(family)
    y = torch.where(y > 100, 20.0, y) if name != "beta" else y
    eta = torch.linspace(-4, 4, 9, dtype=torch.float64)[:, None].expand(-1, len(y))
    phi = 0.4 * torch.ones(len(family.parameters), dtype=torch.float64)
    data = (y, *beside(family, y))
    closed, auto = family.jet(eta, data, phi), Family.jet(family, eta, data, phi)
    for found, expected in zip(closed, auto, strict=True):
        assert found.shape == eta.shape
        assert not found.requires_grad
        assert bool(((found - expected).abs() <= 1e-10 * (1 + expected.abs())).all())
    at = eta.clone().requires_grad_()
    value, slope, curvature = family.jet(at, data, phi)
    (again,) = torch.autograd.grad(value.sum(), at, retain_graph=True)
    close(again, slope.detach(), 1e-10)
    if slope.requires_grad:
        (again,) = torch.autograd.grad(slope.sum(), at, retain_graph=True)
        close(again, curvature.detach(), 1e-10)


class Sizes(TorchFunctionMode):
    """Keeps the numbers of entries that log Γ is taken of."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, given=(), kwargs=None):
        if function in (torch.lgamma, Tensor.lgamma):
            self.found.append(given[0].numel())
        return function(*given, **(kwargs or {}))


@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if name not in ("beta", "beta_binomial")],  # whose arguments have the mean in them
)
def test_once_a_row(name):
    """Log Γ is taken once a row and draw, not once a node."""
    family = family_named(name)
    N, S, K = 6, 3, 11
    y = (torch.arange(N, dtype=torch.float64) % 3)[:, None, None] + (0 if family.discrete else 0.5)
    y = y.clamp_max(1) if name in ("bernoulli", "probit") else y
    phi = torch.zeros(S, 1, len(family.parameters), dtype=torch.float64)
    with Sizes() as sizes:
        family.log_prob(torch.zeros(N, S, K, dtype=torch.float64), (y, *beside(family, y)), phi)
    assert all(size <= N * S for size in sizes.found)


# Every family, as a whole


@pytest.mark.parametrize("name", NAMES)
def test_check_family(name):
    """Sums, derivatives, means of draws, Jacobians, starts and shapes agree."""
    check_family(family_named(name))


@pytest.mark.parametrize("name", NAMES)
def test_checked_outcomes(name):
    """What a family draws it accepts, settled or not, and gives back as it is."""
    family = family_named(name)
    eta, phi = torch.zeros(200, dtype=torch.float64), torch.zeros(len(family.parameters), dtype=torch.float64)
    extra = beside(family, eta)
    y = (family.draw(eta, phi, torch.Generator().manual_seed(1), extra), *extra)
    settled = family.settled(y, torch.ones_like(eta), 0 * eta)
    for found, expected in zip(settled.checked(y), y, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_starts(name):
    """Rows without covariates: at the start the mean log density is within .25 of that at the truth."""
    family = family_named(name)
    eta = torch.full((4000,), 0.4 if family.intercept else 0.0, dtype=torch.float64)
    phi = 0.3 * torch.ones(len(family.parameters), dtype=torch.float64)
    extra = beside(family, eta)
    y = (family.draw(eta, phi, torch.Generator().manual_seed(2), extra), *extra)
    location, start = family.start(y, 0 * eta, torch.ones_like(eta))
    here = family.log_prob(0 * eta + location, y, start).mean()
    assert float(family.log_prob(eta, y, phi).mean() - here) < 0.25


def test_starts_of_offsets_and_weights():
    """An offset is taken out, rows of weight 0 do not count, and an outcome at the end of its range is finite."""
    y = tensor([2.0, 4.0, 100.0])
    offset, weights = tensor([math.log(2.0), math.log(4.0), 0.0]), tensor([1.0, 1.0, 0.0])
    assert abs(Poisson().start((y,), offset, weights)[0]) < 1e-12
    ones = torch.ones(3, dtype=torch.float64)
    for name in NAMES:
        family = family_named(name)
        same = ones if family.discrete else 0.5 * ones
        location, phi = family.start((same, *beside(family, ones)), 0 * ones, ones)
        assert math.isfinite(location)
        assert phi.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_single_precision(name):
    """Float32 in, float32 out, finite, and near the density in float64."""
    family = family_named(name)
    eta = torch.linspace(-40, 40, 7)
    phi = torch.full((len(family.parameters),), 0.3)
    extra = beside(family, eta)
    y = family.draw(eta.clamp(-3, 3), phi, torch.Generator().manual_seed(4), extra)
    found, mean = family.log_prob(eta, (y, *extra), phi), family.mean(eta, phi)
    assert (y.dtype, found.dtype, mean.dtype) == (torch.float32,) * 3
    assert found.isfinite().all()
    expected = family.log_prob(eta.double(), (y.double(), *(part.double() for part in extra)), phi.double())
    assert bool(((found - expected).abs() < 2e-4 * (1 + expected.abs())).all())


def test_survival_is_the_integral():
    """The density of a censored time is the integral of the density beyond it."""
    for name in ("weibull", "lognormal"):
        family = family_of(name)
        u = torch.linspace(math.log(1.7), 12, 20_001, dtype=torch.float64)  # the logarithm of times
        eta, phi = torch.full_like(u, 0.4), tensor([0.3])
        heights = (family.log_prob(eta, (u.exp(), torch.ones_like(u)), phi) + u).exp()
        total = torch.trapezoid(heights, u)
        beyond = family.log_prob(eta[:1], (tensor([1.7]), tensor([0.0])), phi).exp()
        close(total, beyond[0], 1e-7)


def test_draws_far_out():
    """Draws are outcomes where rates overflow and shares are 0."""
    for name in NAMES:
        family = family_named(name)
        eta = tensor([-700.0, -50.0, 50.0, 700.0])
        for level in (-6.0, 6.0):
            phi = torch.full((len(family.parameters),), level, dtype=torch.float64)
            extra = beside(family, eta)
            y = family.draw(eta, phi, torch.Generator().manual_seed(3), extra)
            assert y.isfinite().all()
            if name not in ("bernoulli", "probit"):  # one class
                family.checked((y, *extra))


# Outcomes, categories, held parameters, names


def test_refusals():
    """The first bad cell is named, with the family and what it needs."""
    one = torch.ones(3, dtype=torch.float64)
    for name, y, words in (
        ("poisson", (tensor([1.0, 2.5, -1.0]),), ("poisson", "2.5", "row 2 of 3", "got 2")),
        ("gaussian", (tensor([1.0, math.nan, 0.0]),), ("gaussian", "nan", "row 2")),
        ("beta", (tensor([0.5, 1.0, 0.2]),), ("beta", "0 < y < 1", "row 2")),
        ("gamma", (tensor([0.5, 0.0, 0.2]),), ("gamma", "positive", "row 2")),
        ("bernoulli", (one,), ("two classes", "1 in every row")),
        ("bernoulli", (tensor([0.0, 1.0, 2.0]),), ("two classes", "3 different values")),
        ("binomial", (tensor([0.0, 1.0, 4.0]), 3 * one), ("successes", "row 3")),
        ("binomial", (tensor([0.5, 0.25, 1.0]), 4 * one + tensor([0.0, 1.0, 0.0])), ("proportions", "row 2")),
        ("binomial", (one, 1.5 * one), ("trials", "row 1")),
        ("binomial", (one,), ("trials", "1 column")),
        ("weibull", (one, 2 * one), ("events", "row 1")),
        ("ordinal", (one,), ("2 to 50 categories", "1")),
    ):
        family, ones = family_of(name), torch.ones_like(y[0])
        check_refusal(lambda f=family, y=y, w=ones: f.settled(y, w, 0 * w).checked(y), words)


def test_two_classes():
    """Classes of other numbers, in a fit and in new rows that have one of them."""
    y = tensor([1.0, 2.0, 2.0])
    family = Bernoulli().settled((y,), torch.ones_like(y), 0 * y)
    assert family.checked((y,))[0].tolist() == [0.0, 1.0, 1.0]
    assert family.checked((y[1:],))[0].tolist() == [1.0, 1.0]
    assert Bernoulli().classes is None


def test_categories():
    """Values in their order, or codes of labels; new rows are coded as those of the fit."""
    y = tensor([3.0, 1.0, 2.0, 3.0])
    family = family_of("ordinal").settled((y,), torch.ones_like(y), 0 * y)
    assert family.outcomes == ("1", "2", "3")
    assert family.parameters == ("threshold[1]", "threshold[2]")
    assert family.checked((y,))[0].tolist() == [2.0, 0.0, 1.0, 2.0]
    assert family.checked((y[:1],))[0].tolist() == [2.0]
    check_refusal(lambda: family.checked((y + 1,)), ("categories 1, 2, 3", "4", "row 1"))
    labelled = Ordinal(LABELS)
    assert labelled.settled((y,), torch.ones_like(y), 0 * y) is labelled
    assert labelled.checked((y,))[0].tolist() == y.tolist()


def test_units():
    """The default prior of a residual sd has the unit of y."""
    y = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ones = torch.ones_like(y)
    small, large = (Gaussian().settled((k * y,), ones, 0 * ones).parameter_prior()[0].scale for k in (1, 1e6))
    assert abs(large / small - 1e6) < 1e-3
    assert Gaussian().unit == 1.0


def test_held():
    """A parameter that is held leaves φ, the others stay; each part is that of the family."""
    y = (tensor([0.0, 3.0]),)
    eta = tensor([0.2, 0.4])
    held = Held(NegativeBinomial(), {"size": 2.0})
    expected = NegativeBinomial().log_prob(eta, y, tensor([math.log(2.0)]))
    assert torch.equal(held.log_prob(eta, y, tensor([])), expected)
    some = Held(family_of("zinb"), {"surplus zeros": 0.25})
    assert some.parameters == ("size",)
    both = tensor([math.log(0.25 / 0.75), 0.7])
    assert torch.equal(some.log_prob(eta, y, tensor([0.7])), family_of("zinb").log_prob(eta, y, both))
    check_family(some)
    check_family(Held(Gaussian(), {"residual sd": 0.1}))
    for values, word in (({"size": -1.0}, "positive"), ({"shape": 1.0}, "it has size")):
        check_refusal(lambda v=values: Held(NegativeBinomial(), v), (word,))
    check_refusal(lambda: Held(Ordinal(LABELS), {"threshold[1]": 1.0}), ("cannot be held one by one",))


def test_names():
    """Other words, classes and objects; an unknown word is answered with all names and a question."""
    for word, name in (
        ("Logistic", "bernoulli"),
        ("bernoulli_logit", "bernoulli"),
        ("poisson_log", "poisson"),
        ("normal", "gaussian"),
        ("nb", "negative_binomial"),
        ("zero-inflated poisson", "zero_inflated_poisson"),
        ("t", "student_t"),
        ("cumulative", "ordinal"),
    ):
        assert family_of(word).name == name
    own = Held(Gaussian(), {"residual sd": 1.0})
    assert family_of(own) is own
    assert isinstance(family_of(Poisson), Poisson)
    check_refusal(lambda: family_of("poison"), ("poison", "'poisson'", "beta_binomial"))
    check_refusal(lambda: family_of(3), ("3", "gaussian"))


# Families that are wrong


class Skewed(Gaussian):
    """A mean that draws do not have."""

    def mean(self, eta, phi):
        return super().mean(eta, phi) + 0.1


class Wide(Gaussian):
    """Draws whose spread is not that of the density."""

    def draw(self, eta, phi, generator, extra=()):
        return super().draw(eta, phi + 0.1, generator, extra)


class Unbroadcast(Poisson):
    """The first coordinate of the first axis instead of the last."""

    parameters = ("size",)

    def log_prob(self, eta, y, phi):
        return super().log_prob(eta + phi[0], y, phi)


class Detached(Poisson):
    """A density that autograd does not see."""

    def log_prob(self, eta, y, phi):
        return super().log_prob(eta.detach(), y, phi) + 0 * eta

    def jet(self, eta, y, phi):
        return Family.jet(self, eta, y, phi)


class Trap(Poisson):
    """A gradient that is nan by the other branch."""

    def log_prob(self, eta, y, phi):
        return super().log_prob(eta, y, phi) + torch.where(eta > -9, 0.0, (eta * 0).sqrt())

    def jet(self, eta, y, phi):
        return Family.jet(self, eta, y, phi)


class Overflows(Poisson):
    """A term whose exponential is no number far out."""

    power = 20.0

    def log_prob(self, eta, y, phi):
        return super().log_prob(eta, y, phi) + 0 * torch.exp(self.power * eta)


class OverflowsFurtherOut(Overflows):
    """The same, further out."""

    power = 2.0


class Double(Poisson):
    """A density of another dtype."""

    def log_prob(self, eta, y, phi):
        return super().log_prob(eta, y, phi).double()


class Scaled(NegativeBinomial):
    """A natural value without its Jacobian."""

    def natural(self, phi):
        return torch.exp(-0.5 * phi)


class Peaked(family_of("student_t").__class__):
    """Said to be concave."""

    concave = True


class Few(Gaussian):
    """No prior."""

    def parameter_prior(self):
        return ()


class Odd(Poisson):
    """A link that is none."""

    link = "sqrt"


class Unscaled(Gaussian):
    """A parameter on a scale that is none."""

    scales = ("cube",)


class Raising(Poisson):
    """Draws that end with an error of torch."""

    def draw(self, eta, phi, generator, extra=()):
        return eta @ torch.ones(2, 2)


class Single(Poisson):
    """One draw for all predictors."""

    def draw(self, eta, phi, generator, extra=()):
        return super().draw(eta, phi, generator, extra)[:1]


class Loose(Poisson):
    """An outcome that is no tuple."""

    def checked(self, y):
        return y[0]


class Lost(Gaussian):
    """A start that is nowhere."""

    def start(self, y, offset, weights):
        return math.nan, super().start(y, offset, weights)[1]


class Nameless(Family):
    """No name."""

    def log_prob(self, eta, y, phi):
        return eta

    mean = draw = log_prob


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Skewed, ("mean of the gaussian family", "average of draws")),
        (Wide, ("draw of the gaussian", "φ[0]")),
        (Unbroadcast, ("log_prob", "poisson")),
        (Detached, ("slope in η", "differs")),
        (Trap, ("slope in η", "not finite")),
        (Overflows, ("log_prob of the poisson family", "not finite at |η| = 40")),
        (OverflowsFurtherOut, ("log_prob of the poisson family at |η| = 700 is NaN",)),
        (Double, ("log_prob of the poisson family of float32 is of torch.float64",)),
        (Scaled, ("log_jacobian",)),
        (Peaked, ("concave",)),
        (Few, ("parameter_prior",)),
        (Odd, ("link", "sqrt")),
        (Unscaled, ("('residual sd',)", "one of log, logit and identity")),
        (Raising, ("draw of the poisson family raised RuntimeError for tensors of the shapes (5,)", "broadcasts")),
        (Single, ("draw of the poisson family returns (1,)", "(5,)")),
        (Loose, ("checked of the poisson family must return a tuple",)),
        (Lost, ("start of the gaussian family must be finite",)),
        (Nameless, ("Nameless", "'name'")),
    ],
)
def test_wrong_families(wrong, words):
    """What is wrong is named in a sentence."""
    check_refusal(lambda: check_family(wrong()), words)


def test_wrong_calls():
    """Something else than a family, and a value beside the outcome that the check does not know."""

    class Exposed(Poisson):
        extra = ("exposure",)

    check_refusal(lambda: check_family("poisson"), ("'poisson'",))
    check_refusal(lambda: check_family(Exposed()), ("extra=", "exposure"))
    check_family(Exposed(), extra=(1.0,))
    check_family(family_of("ordinal"), (tensor([1.0, 2.0, 5.0]),))
