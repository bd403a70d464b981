"""Pyro models of public threads, examples and manuals, rebuilt on simulated data; `MODELS` has them by name.

Each function simulates its data and returns a model without arguments.  What is known of it stands in its decorator:
the address of the thread or example, the sites that are scales of groups (a model with some is a hierarchy), and the
location-scale sites that a long chain sees non-centred (`benchmarks.pyro_truths`).  Models are written as users write
them, with plates where there are members of something.
"""

from collections.abc import Callable
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import config_enumerate
from pyro.nn import PyroModule, PyroSample
from torch import Tensor

Model = Callable[[], object]


class Public(NamedTuple):
    """A model of the table."""

    simulate: Callable[[], Model]
    source: str
    scales: tuple[str, ...]
    non_centred: tuple[str, ...]
    mixes: bool

    def make(self) -> Model:
        """The model on its own data, the same each time."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.simulate()


MODELS: dict[str, Public] = {}


def public(
    source: str, scales: str = "", non_centred: str = "", mixes: bool = True
) -> Callable[[Callable[[], Model]], Callable[[], Model]]:
    """Register a model under the name of its function; the names of sites are separated by blanks."""

    def register(simulate: Callable[[], Model]) -> Callable[[], Model]:
        MODELS[simulate.__name__] = Public(simulate, source, tuple(scales.split()), tuple(non_centred.split()), mixes)
        return simulate

    return register


# ------------------------------------------------------------------------------------ hierarchies

EFFECT = (28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0)
ERROR = (15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0)


@public("github.com/pyro-ppl/numpyro/pull/427", "tau", "theta")
def schools_centred() -> Model:
    effect, error = torch.tensor(EFFECT), torch.tensor(ERROR)

    def model() -> None:
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", 8):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, error), obs=effect)

    return model


@public("github.com/stan-dev/rstan/issues/387", "tau")
def schools() -> Model:
    effect, error = torch.tensor(EFFECT), torch.tensor(ERROR)

    def model() -> None:
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", 8):
            eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(mu + tau * eta, error), obs=effect)

    return model


@public("pyro.ai/examples/baseball.html", "sigma", "skill")
def baseball() -> Model:
    hits = dist.Binomial(45, torch.sigmoid(-1.0 + 0.2 * torch.randn(18))).sample()

    def model() -> None:
        mu, sigma = pyro.sample("mu", dist.Normal(-1.0, 1.0)), pyro.sample("sigma", dist.HalfCauchy(1.0))
        with pyro.plate("players", 18):
            skill = pyro.sample("skill", dist.Normal(mu, sigma))
            pyro.sample("hits", dist.Binomial(45, logits=skill), obs=hits)

    return model


def houses(counties: int, more: float) -> tuple[Tensor, Tensor]:
    """The county of each house, one and some more in each, and whether it was measured on the ground floor."""
    county = torch.arange(counties).repeat_interleave(1 + torch.poisson(torch.full((counties,), more)).long())
    return county, torch.bernoulli(torch.full((len(county),), 0.2))


@public("github.com/pymc-devs/pymc/pull/775", "tau", "a")
def radon() -> Model:
    county, floor = houses(85, 10.0)
    y = 1.5 + 0.3 * torch.randn(85)[county] - 0.7 * floor + 0.75 * torch.randn(len(county))

    def model() -> None:
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 10.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
        slope, sigma = pyro.sample("slope", dist.Normal(0.0, 10.0)), pyro.sample("sigma", dist.HalfCauchy(5.0))
        with pyro.plate("counties", 85):
            a = pyro.sample("a", dist.Normal(mu, tau))
        with pyro.plate("houses", len(county)):
            pyro.sample("y", dist.Normal(a[county] + slope * floor, sigma), obs=y)

    return model


@public("github.com/pyro-ppl/numpyro/pull/720", "tau_a tau_b", "a b")
def radon_slopes() -> Model:
    county, floor = houses(30, 4.0)
    y = 1.5 + 0.4 * torch.randn(30)[county] + (0.3 * torch.randn(30)[county] - 0.7) * floor
    y = y + 0.6 * torch.randn(len(county))

    def model() -> None:
        mean_a, tau_a = pyro.sample("mean_a", dist.Normal(0.0, 5.0)), pyro.sample("tau_a", dist.HalfCauchy(1.0))
        mean_b, tau_b = pyro.sample("mean_b", dist.Normal(0.0, 5.0)), pyro.sample("tau_b", dist.HalfCauchy(1.0))
        sigma = pyro.sample("sigma", dist.HalfCauchy(2.0))
        with pyro.plate("counties", 30):
            a, b = pyro.sample("a", dist.Normal(mean_a, tau_a)), pyro.sample("b", dist.Normal(mean_b, tau_b))
        with pyro.plate("houses", len(county)):
            pyro.sample("y", dist.Normal(a[county] + b[county] * floor, sigma), obs=y)

    return model


@public("github.com/pyro-ppl/numpyro/issues/1336", "between within", "school room")
def classes() -> Model:
    y = 0.6 * torch.randn(10) + 0.4 * torch.randn(4, 10) + torch.randn(6, 4, 10)

    def model() -> None:
        mu, sigma = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("sigma", dist.HalfNormal(2.0))
        between, within = (pyro.sample(name, dist.HalfNormal(1.0)) for name in ("between", "within"))
        with pyro.plate("schools", 10):
            school = pyro.sample("school", dist.Normal(mu, between))
            with pyro.plate("classes", 4):
                room = pyro.sample("room", dist.Normal(school, within))
                with pyro.plate("pupils", 6):
                    pyro.sample("y", dist.Normal(room, sigma), obs=y)

    return model


@public("pymc.io/projects/examples/en/latest/generalized_linear_models/GLM-ordinal-regression.html", "tau", "b")
def ordinal_groups() -> Model:
    group, x = torch.arange(12).repeat_interleave(15), torch.randn(180)
    noise = dist.Logistic(0.0, 1.0).sample((180,))
    y = torch.bucketize(0.8 * x + 0.7 * torch.randn(12)[group] + noise, torch.tensor([-1.0, 0.0, 1.5]))

    def model() -> None:
        w, tau = pyro.sample("w", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.HalfNormal(1.0))
        first = pyro.sample("first", dist.Normal(0.0, 2.0))
        gaps = pyro.sample("gaps", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
        cuts = torch.cat([first[..., None], first[..., None] + gaps.cumsum(-1)], -1)
        with pyro.plate("groups", 12):
            b = pyro.sample("b", dist.Normal(0.0, tau))
        with pyro.plate("rows", 180):
            pyro.sample("y", dist.OrderedLogistic(w * x + b[group], cuts), obs=y)

    return model


def item_response(people: int, items: int, spread: float | None = None) -> Model:
    """Item response with two parameters, whose difficulties have this sd, or one of their own."""
    logits = torch.exp(0.3 * torch.randn(items)) * (torch.randn(people, 1) - torch.randn(items))
    y = torch.bernoulli(torch.sigmoid(logits))

    def model() -> None:
        scale = pyro.sample("scale", dist.HalfNormal(2.0)) if spread is None else spread
        with pyro.plate("items", items, dim=-1):
            a = pyro.sample("a", dist.LogNormal(torch.zeros(items), 0.5))
            b = pyro.sample("b", dist.Normal(0.0, scale))
        with pyro.plate("people", people, dim=-2):
            skill = pyro.sample("skill", dist.Normal(torch.zeros(people, 1), 1.0))
        with pyro.plate("all people", people, dim=-2), pyro.plate("all items", items, dim=-1):
            pyro.sample("y", dist.Bernoulli(logits=a * (skill - b)), obs=y)

    return model


@public("factslab.io", "scale")
def irt2() -> Model:
    return item_response(60, 15)


@public("mc-stan.org/docs/2_20/stan-users-guide/item-response-models-section.html", "scale")
def irt1() -> Model:
    y = torch.bernoulli(torch.sigmoid(0.75 + 1.2 * torch.randn(80, 1) - torch.randn(12)))

    def model() -> None:
        mean, scale = pyro.sample("mean", dist.Normal(0.75, 1.0)), pyro.sample("scale", dist.HalfCauchy(2.0))
        with pyro.plate("questions", 12, dim=-1):
            difficulty = pyro.sample("difficulty", dist.Normal(torch.zeros(12), 1.0))
        with pyro.plate("students", 80, dim=-2):
            skill = pyro.sample("skill", dist.Normal(torch.zeros(80, 1), scale))
            with pyro.plate("answers", 12, dim=-1):
                pyro.sample("y", dist.Bernoulli(logits=skill + mean - difficulty), obs=y)

    return model


@public("github.com/pyro-ppl/numpyro/issues/154", "tau_rows tau_columns tau_treatments", "rows columns treatments")
def latin() -> Model:
    row, column = torch.arange(6).repeat_interleave(6), torch.arange(6).repeat(6)
    treatment = (row + column) % 6
    y = 0.8 * torch.randn(6)[row] + 0.5 * torch.randn(6)[column] + torch.randn(6)[treatment] + 0.5 * torch.randn(36)
    index = {"rows": row, "columns": column, "treatments": treatment}

    def model() -> None:
        mean = pyro.sample("mu", dist.Normal(0.0, 5.0))
        sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
        for name, which in index.items():
            tau = pyro.sample(f"tau_{name}", dist.HalfCauchy(1.0))
            with pyro.plate(f"plate_{name}", 6):
                mean = mean + pyro.sample(name, dist.Normal(0.0, tau))[which]
        with pyro.plate("plots", 36):
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    return model


@public("forum.pyro.ai/t/3011", "tau")
def lkj_slopes() -> Model:
    group, x = torch.arange(20).repeat_interleave(8), torch.randn(160)
    effects = torch.randn(20, 2) @ torch.tensor([[1.0, 0.5], [0.0, 0.6]])
    y = 1 + 0.5 * x + effects[group, 0] + effects[group, 1] * x + 0.5 * torch.randn(160)

    def model() -> None:
        beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(torch.ones(2)).to_event(1))
        root = pyro.sample("root", dist.LKJCholesky(2, torch.tensor(2.0)))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with pyro.plate("groups", 20):
            b = pyro.sample("b", dist.MultivariateNormal(beta, scale_tril=tau[..., None] * root))
        with pyro.plate("rows", 160):
            pyro.sample("y", dist.Normal(b[group, 0] + b[group, 1] * x, sigma), obs=y)

    return model


@public("pymc.io/projects/examples/en/latest/generalized_linear_models/GLM-hierarchical-binomial-model.html", "kappa")
def tumours() -> Model:
    trials = torch.randint(10, 50, (40,)).double()
    y = dist.Binomial(trials, dist.Beta(2.0, 12.0).sample((40,))).sample()

    def model() -> None:
        mean, kappa = pyro.sample("mean", dist.Beta(1.0, 1.0)), pyro.sample("kappa", dist.LogNormal(3.0, 1.0))
        with pyro.plate("trials", 40):
            p = pyro.sample("p", dist.Beta(mean * kappa, (1 - mean) * kappa))
            pyro.sample("y", dist.Binomial(trials, p), obs=y)

    return model


@public("github.com/pymc-devs/pymc/issues/798", "tau")
def binomial() -> Model:
    trials = torch.randint(10, 40, (40,)).double()
    y = dist.Binomial(trials, torch.sigmoid(-1.5 + 0.7 * torch.randn(40))).sample()

    def model() -> None:
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("groups", 40):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Binomial(trials, logits=mu + tau * z), obs=y)

    return model


@public("github.com/stan-dev/example-models/wiki/BUGS-Examples-Sorted-by-Volume", "alpha")
def pumps() -> Model:
    time = torch.tensor([94.3, 15.7, 62.9, 126.0, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5])
    y = torch.poisson(time * dist.Gamma(0.8, 1.2).sample((10,)))

    def model() -> None:
        alpha, beta = pyro.sample("alpha", dist.Exponential(1.0)), pyro.sample("beta", dist.Gamma(0.1, 1.0))
        with pyro.plate("pumps", 10):
            rate = pyro.sample("rate", dist.Gamma(alpha, beta))
            pyro.sample("y", dist.Poisson(rate * time), obs=y)

    return model


@public("www.openbugs.info/Examples/Seeds.html", "sigma", "b")
def seeds() -> Model:
    n = torch.randint(5, 60, (21,)).double()
    X = torch.stack([torch.ones(21), (torch.arange(21) % 2).double(), (torch.arange(21) > 10).double()], -1)
    y = dist.Binomial(n, torch.sigmoid(X @ torch.tensor([-0.5, 1.2, -0.6]) + 0.3 * torch.randn(21))).sample()

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 10.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
        with pyro.plate("plates", 21):
            b = pyro.sample("b", dist.Normal(0.0, sigma))
            pyro.sample("y", dist.Binomial(n, logits=(X * w).sum(-1) + b), obs=y)

    return model


@public("github.com/stan-dev/example-models/wiki/BUGS-Examples-Sorted-by-Volume", "tau_a tau_b")
def rats() -> Model:
    age = torch.tensor([-14.0, -7.0, 0.0, 7.0, 14.0])[:, None] / 7
    y = 24.2 + 1.4 * torch.randn(30) + (4.3 + 0.4 * torch.randn(30)) * age + 0.6 * torch.randn(5, 30)

    def model() -> None:
        mean_a, tau_a = pyro.sample("mean_a", dist.Normal(20.0, 20.0)), pyro.sample("tau_a", dist.HalfCauchy(2.0))
        mean_b, tau_b = pyro.sample("mean_b", dist.Normal(0.0, 10.0)), pyro.sample("tau_b", dist.HalfCauchy(2.0))
        sigma = pyro.sample("sigma", dist.HalfCauchy(2.0))
        with pyro.plate("rats", 30):
            a, b = pyro.sample("a", dist.Normal(mean_a, tau_a)), pyro.sample("b", dist.Normal(mean_b, tau_b))
            with pyro.plate("ages", 5):
                pyro.sample("y", dist.Normal(a + b * age, sigma), obs=y)

    return model


def stochastic_volatility(T: int = 200) -> Model:
    """Log variances that are an autoregression, non-centred."""
    h = torch.zeros(T)
    for t in range(1, T):
        h[t] = 0.95 * h[t - 1] + 0.25 * torch.randn(())
    y, lag = torch.exp(0.5 * h - 0.5) * torch.randn(T), torch.arange(T)
    lags = (lag[:, None] - lag).clamp_min(0)

    def model() -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        phi, sigma = pyro.sample("phi", dist.Beta(20.0, 1.5)), pyro.sample("sigma", dist.HalfNormal(0.5))
        z = pyro.sample("z", dist.Normal(torch.zeros(T), 1.0).to_event(1))
        powers = (phi[..., None, None] ** lags).tril()
        h = mu[..., None] + sigma[..., None] * (powers @ z[..., None])[..., 0]
        pyro.sample("y", dist.Normal(0.0, torch.exp(0.5 * h)).to_event(1), obs=y)

    return model


@public("num.pyro.ai/en/stable/examples/stochastic_volatility.html", "sigma")
def volatility() -> Model:
    return stochastic_volatility(100)


@public("mc-stan.org/docs/stan-users-guide/survival.html", "tau", "frailty")
def frailty() -> Model:
    clinic, x = torch.arange(20).repeat_interleave(8), torch.randn(160)
    time = dist.Weibull(torch.exp(1.0 - 0.5 * x + 0.5 * torch.randn(20)[clinic]), torch.tensor(1.4)).sample()
    seen, time = time < 5.0, time.clamp_max(5.0)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        shape, tau = pyro.sample("shape", dist.LogNormal(0.0, 1.0)), pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("clinics", 20):
            frailty = pyro.sample("frailty", dist.Normal(0.0, tau))
        scale = torch.exp(w[0] + w[1] * x + frailty[clinic])
        with pyro.plate("patients", 160):
            with pyro.poutine.mask(mask=seen):
                pyro.sample("time", dist.Weibull(scale, shape), obs=time)
            pyro.factor("beyond", torch.where(seen, 0.0, -((time / scale) ** shape)))

    return model


@public("mc-stan.org/rstanarm/articles/count.html", "tau", "b")
def roaches() -> Model:
    building, x = torch.arange(15).repeat_interleave(8), torch.randn(120)
    mean = torch.exp(1.5 + 0.5 * x + 0.6 * torch.randn(15)[building])
    y = dist.GammaPoisson(torch.tensor(2.0), 2.0 / mean).sample()

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.5).to_event(1))
        tau, size = pyro.sample("tau", dist.HalfNormal(1.0)), pyro.sample("size", dist.LogNormal(0.0, 1.0))
        with pyro.plate("buildings", 15):
            b = pyro.sample("b", dist.Normal(0.0, tau))
        with pyro.plate("traps", 120):
            pyro.sample("y", dist.GammaPoisson(size, size / torch.exp(w[0] + w[1] * x + b[building])), obs=y)

    return model


@public("www.multibugs.org/examples/latest/Blockers.html", "tau", "delta")
def blockers() -> Model:
    n = torch.randint(40, 800, (22,)).double()
    base = -2.2 + 0.4 * torch.randn(22)
    control = dist.Binomial(n, torch.sigmoid(base)).sample()
    treated = dist.Binomial(n, torch.sigmoid(base - 0.25 + 0.15 * torch.randn(22))).sample()

    def model() -> None:
        d, tau = pyro.sample("d", dist.Normal(0.0, 10.0)), pyro.sample("tau", dist.HalfCauchy(0.5))
        with pyro.plate("trials", 22):
            base = pyro.sample("base", dist.Normal(0.0, 10.0))
            delta = pyro.sample("delta", dist.Normal(d, tau))
            pyro.sample("control", dist.Binomial(n, logits=base), obs=control)
            pyro.sample("treated", dist.Binomial(n, logits=base + delta), obs=treated)

    return model


@public("mc-stan.org/docs/2_26/stan-users-guide/meta-analysis.html", "tau", "theta")
def meta() -> Model:
    error = 0.1 + 0.5 * torch.rand(12)
    effect = 0.3 + 0.2 * torch.randn(12) + error * torch.randn(12)

    def model() -> None:
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 10.0)), pyro.sample("tau", dist.HalfCauchy(0.5))
        with pyro.plate("studies", 12):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, error), obs=effect)

    return model


@public("opisthokonta.net/?p=1589", "tau", "skill")
def bradley_terry() -> Model:
    first, second = torch.randint(0, 14, (150,)), torch.randint(1, 14, (150,))
    second = (first + second) % 14
    skill = 0.8 * torch.randn(14)
    y = torch.bernoulli(torch.sigmoid(0.3 + skill[first] - skill[second]))

    def model() -> None:
        home, tau = pyro.sample("home", dist.Normal(0.0, 1.0)), pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("teams", 14):
            skill = pyro.sample("skill", dist.Normal(0.0, tau))
        with pyro.plate("games", 150):
            pyro.sample("y", dist.Bernoulli(logits=home + skill[first] - skill[second]), obs=y)

    return model


@public("austinrochford.com/posts/2017-07-09-mrpymc3.html", "tau_state tau_age tau_education", "state age education")
def mrp() -> Model:
    sizes, sds = {"state": 25, "age": 4, "education": 4}, {"state": 0.5, "age": 0.4, "education": 0.3}
    index = {name: torch.randint(0, size, (200,)) for name, size in sizes.items()}
    n = torch.randint(1, 12, (200,)).double()
    logits = 0.2 + sum(sds[name] * torch.randn(size)[index[name]] for name, size in sizes.items())
    y = dist.Binomial(n, logits=logits).sample()

    def model() -> None:
        mean = pyro.sample("mu", dist.Normal(0.0, 5.0))
        for name, size in sizes.items():
            tau = pyro.sample(f"tau_{name}", dist.HalfCauchy(1.0))
            with pyro.plate(f"plate_{name}", size):
                mean = mean + pyro.sample(name, dist.Normal(0.0, tau))[index[name]]
        with pyro.plate("cells", 200):
            pyro.sample("y", dist.Binomial(n, logits=mean), obs=y)

    return model


@public("github.com/pyro-ppl/numpyro/issues/1635", "sa sb")
def crossed() -> Model:
    a, b = torch.arange(20).repeat_interleave(10), torch.arange(10).repeat(20)
    y = torch.bernoulli(torch.sigmoid(0.3 + torch.randn(20)[a] + 0.7 * torch.randn(10)[b]))

    def model() -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        sa, sb = pyro.sample("sa", dist.HalfNormal(1.0)), pyro.sample("sb", dist.HalfNormal(1.0))
        za = pyro.sample("za", dist.Normal(torch.zeros(20), 1.0).to_event(1))
        zb = pyro.sample("zb", dist.Normal(torch.zeros(10), 1.0).to_event(1))
        with pyro.plate("rows", 200):
            pyro.sample("y", dist.Bernoulli(logits=mu + sa * za[a] + sb * zb[b]), obs=y)

    return model


@public("forum.pyro.ai/t/1715", "alpha")
def growth() -> Model:
    t = torch.linspace(0.1, 1.0, 6)[:, None]
    y = dist.Gamma(4.0, 2.0).sample((50,)) * t + 1e-3 * torch.randn(6, 50)

    def model() -> None:
        alpha, beta = pyro.sample("alpha", dist.LogNormal(1.0, 1.0)), pyro.sample("beta", dist.LogNormal(0.0, 1.0))
        with pyro.plate("plants", 50):
            rate = pyro.sample("rate", dist.Gamma(alpha, beta))
            with pyro.plate("times", 6):
                pyro.sample("y", dist.Normal(rate * t, 1e-3), obs=y)

    return model


@public("discourse.pymc.io/t/11219", "step")
def dynamic_covariates() -> Model:
    T = 26
    week, x = torch.arange(T).repeat_interleave(6), torch.randn(6 * T)
    y = 1 + (0.5 + 0.15 * torch.randn(T).cumsum(0))[week] * x + 0.3 * torch.randn(6 * T)

    def model() -> None:
        a, start = pyro.sample("a", dist.Normal(0.0, 2.0)), pyro.sample("start", dist.Normal(0.0, 1.0))
        step, sigma = pyro.sample("step", dist.HalfNormal(0.5)), pyro.sample("sigma", dist.HalfNormal(1.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(T), 1.0).to_event(1))
        slope = start + step * z.cumsum(-1)
        with pyro.plate("rows", 6 * T):
            pyro.sample("y", dist.Normal(a + slope[week] * x, sigma), obs=y)

    return model


# ------------------------------------------------------------------------------------ others


@public("forum.pyro.ai/t/3677")
def cubic() -> Model:
    x = torch.linspace(-2.0, 2.0, 60)
    X = torch.stack([x**power for power in range(4)], -1)
    y = X @ torch.tensor([1.0, -1.0, 0.5, 0.3]) + 0.5 * torch.randn(60)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 10.0).to_event(1))
        with pyro.plate("rows", 60):
            pyro.sample("y", dist.Normal((X * w).sum(-1), 0.5), obs=y)

    return model


@public("forum.pyro.ai/t/5559")
def outliers() -> Model:
    x = torch.linspace(-2.0, 2.0, 60)
    y = 1 + 0.7 * x + 0.3 * torch.randn(60)
    y[::10] += 4 * torch.randn(6)

    def model() -> None:
        a, b = pyro.sample("a", dist.Normal(0.0, 5.0)), pyro.sample("b", dist.Normal(0.0, 5.0))
        sigma, share = pyro.sample("sigma", dist.HalfNormal(1.0)), pyro.sample("share", dist.Beta(1.0, 5.0))
        wide = pyro.sample("wide", dist.LogNormal(1.0, 0.5))
        mean = a + b * x
        with pyro.plate("rows", 60):
            inner, outer = dist.Normal(mean, sigma).log_prob(y), dist.Normal(mean, sigma + wide).log_prob(y)
            pyro.factor("y", torch.logaddexp((1 - share).log() + inner, share.log() + outer))

    return model


@public("koaning.io/posts/vi-drives-me-nuts")
def chick() -> Model:
    diet, t = torch.arange(4).repeat_interleave(60), torch.rand(240) * 21
    y = 35 + 5 * torch.randn(4)[diet] + (6 + torch.randn(4))[diet] * t + 15 * torch.randn(240)

    def model() -> None:
        with pyro.plate("diets", 4):
            a, b = pyro.sample("a", dist.Normal(40.0, 20.0)), pyro.sample("b", dist.Normal(0.0, 10.0))
        sigma, power = pyro.sample("sigma", dist.HalfNormal(20.0)), pyro.sample("power", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 240):
            pyro.sample("y", dist.Normal(a[diet] + b[diet] * t, sigma * (1 + t / 21) ** power), obs=y)

    return model


@public("stackoverflow.com/questions/52558826")
def collinear() -> Model:
    x = torch.randn(80)
    X = torch.stack([x, x + 0.05 * torch.randn(80)], -1)
    y = X.sum(-1) + torch.randn(80)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 10.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(5.0))
        with pyro.plate("rows", 80):
            pyro.sample("y", dist.Normal((X * w).sum(-1), sigma), obs=y)

    return model


@public("pyro.ai/examples/capture_recapture.html")
def recapture() -> Model:
    alive, caught = torch.ones(40), [torch.ones(40)]
    for _ in range(6):
        alive = alive * torch.bernoulli(torch.full((40,), 0.8))
        caught.append(alive * torch.bernoulli(torch.full((40,), 0.5)))
    y = torch.stack(caught)

    @config_enumerate
    def model() -> None:
        survive, catch = pyro.sample("survive", dist.Beta(1.0, 1.0)), pyro.sample("catch", dist.Beta(1.0, 1.0))
        with pyro.plate("animals", 40):
            z = torch.ones(40)
            for t in pyro.markov(range(1, 7)):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(survive * z))
                pyro.sample(f"y_{t}", dist.Bernoulli(catch * z), obs=y[t])

    return model


@public("eng.uber.com/modeling-censored-time-to-event-data-using-pyro")
def weibull() -> Model:
    X = torch.randn(120, 2)
    time = dist.Weibull(torch.exp(1 + X @ torch.tensor([0.5, -0.3])), torch.tensor(1.5)).sample()
    seen, time = time < 4.0, time.clamp_max(4.0)

    def model() -> None:
        a, shape = pyro.sample("a", dist.Normal(0.0, 2.0)), pyro.sample("shape", dist.LogNormal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        hazard = (time / torch.exp(a + (X * w).sum(-1))) ** shape
        with pyro.plate("rows", 120):
            pyro.factor("time", torch.where(seen, shape.log() + hazard.log() - time.log(), 0.0) - hazard)

    return model


@public("github.com/pyro-ppl/pyro/pull/2772")
def impute() -> Model:
    x = 1 + 0.5 * torch.randn(60)
    y, known = 0.5 - 0.8 * x + 0.4 * torch.randn(60), torch.rand(60) > 0.3

    def model() -> None:
        mu, spread = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("spread", dist.HalfNormal(1.0))
        a, b = pyro.sample("a", dist.Normal(0.0, 2.0)), pyro.sample("b", dist.Normal(0.0, 2.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with pyro.plate("rows", 60):
            full = pyro.sample("x", dist.Normal(mu, spread), obs=x, obs_mask=known)
            pyro.sample("y", dist.Normal(a + b * full, sigma), obs=y)

    return model


@public("pymc.io/projects/examples/en/latest/generalized_linear_models/GLM-robust.html")
def student() -> Model:
    x = torch.linspace(-1.0, 1.0, 15)
    y = 0.5 + x + 0.3 * dist.StudentT(3.0).sample((15,))

    def model() -> None:
        a, b = pyro.sample("a", dist.Normal(0.0, 5.0)), pyro.sample("b", dist.Normal(0.0, 5.0))
        sigma, df = pyro.sample("sigma", dist.HalfCauchy(1.0)), pyro.sample("df", dist.Gamma(2.0, 0.1))
        with pyro.plate("rows", 15):
            pyro.sample("y", dist.StudentT(df, a + b * x, sigma), obs=y)

    return model


@public("mc-stan.org/docs/2_20/stan-users-guide/zero-inflated-section.html")
def zinb() -> Model:
    x = torch.randn(150)
    y = dist.GammaPoisson(torch.tensor(2.0), 2.0 / torch.exp(1 + 0.5 * x)).sample()
    y = y * torch.bernoulli(torch.full((150,), 0.7))

    @config_enumerate
    def model() -> None:
        a, b = pyro.sample("a", dist.Normal(0.0, 2.0)), pyro.sample("b", dist.Normal(0.0, 2.0))
        size, share = pyro.sample("size", dist.LogNormal(0.0, 1.0)), pyro.sample("share", dist.Beta(1.0, 1.0))
        with pyro.plate("rows", 150):
            on = pyro.sample("on", dist.Bernoulli(share))
            mean = on * torch.exp(a + b * x) + (1 - on) * 1e-8
            pyro.sample("y", dist.GammaPoisson(size, size / mean), obs=y)

    return model


@public("num.pyro.ai/en/stable/examples/zero_inflated_poisson.html")
def zip_poisson() -> Model:
    X = torch.randn(200, 2)
    y = torch.poisson(torch.exp(1 + X @ torch.tensor([0.5, -0.3]))) * torch.bernoulli(torch.full((200,), 0.7))

    @config_enumerate
    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
        open_ = pyro.sample("open", dist.Beta(1.0, 1.0))
        with pyro.plate("rows", 200):
            on = pyro.sample("on", dist.Bernoulli(open_))
            rate = torch.exp(w[..., :1] + w[..., 1:2] * X[:, 0] + w[..., 2:] * X[:, 1])
            pyro.sample("y", dist.Poisson(on * rate + (1 - on) * 1e-8), obs=y)

    return model


@public("pymc.io/projects/examples/en/latest/mixture_models/dirichlet_mixture_of_multinomials.html")
def dirichlet() -> Model:
    y = dist.DirichletMultinomial(6.0 * torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor(30.0)).sample((20,))

    def model() -> None:
        share = pyro.sample("share", dist.Dirichlet(torch.ones(4)))
        size = pyro.sample("size", dist.LogNormal(1.0, 1.0))
        with pyro.plate("forests", 20):
            p = pyro.sample("p", dist.Dirichlet(size * share))
            pyro.sample("y", dist.Multinomial(30, p), obs=y)

    return model


@public("arxiv.org/abs/1903.00423")
def sir() -> Model:
    days, people = 60, 1000.0

    def curve(beta: Tensor, gamma: Tensor) -> Tensor:
        s, i, new = torch.full_like(beta, people - 5), torch.full_like(beta, 5.0), []
        for _ in range(days):
            infected = s * (1 - torch.exp(-beta * i / people))
            s, i = s - infected, i + infected - gamma * i
            new.append(infected)
        return torch.stack(new, -1)

    mean = curve(torch.tensor(0.4), torch.tensor(0.15))
    y = dist.GammaPoisson(10.0, 10.0 / (0.5 * mean + 1e-3)).sample()

    def model() -> None:
        beta, gamma = pyro.sample("beta", dist.LogNormal(-1.0, 0.5)), pyro.sample("gamma", dist.LogNormal(-2.0, 0.5))
        rho, size = pyro.sample("rho", dist.Beta(5.0, 5.0)), pyro.sample("size", dist.LogNormal(2.0, 1.0))
        mean = rho[..., None] * curve(beta, gamma) + 1e-3
        pyro.sample("y", dist.GammaPoisson(size[..., None], size[..., None] / mean).to_event(1), obs=y)

    return model


@public("forum.pyro.ai/t/4535")
def hmm() -> Model:
    P, states = torch.tensor([[0.85, 0.1, 0.05], [0.1, 0.8, 0.1], [0.05, 0.15, 0.8]]), [0]
    for _ in range(39):
        states.append(int(torch.multinomial(P[states[-1]], 1)))
    y = torch.tensor([-2.0, 0.0, 2.0])[states] + 0.6 * torch.randn(40)

    @config_enumerate
    def model() -> None:
        P = pyro.sample("P", dist.Dirichlet(torch.eye(3) + 1).to_event(1))
        mean = pyro.sample("mean", dist.Normal(torch.tensor([-2.0, 0.0, 2.0]), 1.0).to_event(1))
        sigma, z = pyro.sample("sigma", dist.LogNormal(-0.5, 0.5)), torch.tensor(0)
        for t in pyro.markov(range(40)):
            z = pyro.sample(f"z_{t}", dist.Categorical(P[z]))
            pyro.sample(f"y_{t}", dist.Normal(mean[z], sigma), obs=y[t])

    return model


@public("github.com/pyro-ppl/pyro/issues/1470", non_centred="delta")
def prophet() -> Model:
    t = torch.linspace(0.0, 1.0, 100)
    knots = torch.linspace(0.05, 0.8, 25)
    bend = (t[:, None] - knots).clamp_min(0.0)
    y = 1 + 2 * t - 4 * (t - 0.45).clamp_min(0.0) + 0.1 * torch.randn(100)

    def model() -> None:
        k, m = pyro.sample("k", dist.Normal(0.0, 5.0)), pyro.sample("m", dist.Normal(0.0, 5.0))
        tau, sigma = pyro.sample("tau", dist.HalfNormal(0.5)), pyro.sample("sigma", dist.HalfNormal(0.5))
        with pyro.plate("knots", 25):
            delta = pyro.sample("delta", dist.Laplace(0.0, tau))
        with pyro.plate("days", 100):
            pyro.sample("y", dist.Normal(m + k * t + (bend * delta).sum(-1), sigma), obs=y)

    return model


@public("num.pyro.ai/en/stable/examples/horseshoe_regression.html")
def horseshoe() -> Model:
    X = torch.randn(80, 20)
    y = X[:, :3] @ torch.tensor([2.0, -1.5, 1.0]) + torch.randn(80)

    def model() -> None:
        tau, sigma = pyro.sample("tau", dist.HalfCauchy(0.2)), pyro.sample("sigma", dist.HalfNormal(2.0))
        scale = pyro.sample("scale", dist.HalfCauchy(torch.ones(20)).to_event(1))
        z = pyro.sample("z", dist.Normal(torch.zeros(20), 1.0).to_event(1))
        with pyro.plate("rows", 80):
            pyro.sample("y", dist.Normal((X * (tau * scale * z)).sum(-1), sigma), obs=y)

    return model


@public("forum.pyro.ai/t/1691")
def two_processes() -> Model:
    x = torch.linspace(0.0, 4.0, 40)
    square = (x[:, None] - x).square()
    y = torch.sin(2 * x) + torch.exp(-2 + x / 2) * torch.randn(40)

    def model() -> None:
        mean = pyro.sample("mean", dist.Normal(-1.0, 1.0))
        drawn = []
        for name in ("f", "g"):
            length = pyro.sample(f"length_{name}", dist.LogNormal(0.0, 0.5))
            scale = pyro.sample(f"scale_{name}", dist.HalfNormal(1.0))
            z = pyro.sample(f"z_{name}", dist.Normal(torch.zeros(40), 1.0).to_event(1))
            kernel = torch.exp(-0.5 * square / length.square()) + 1e-4 * torch.eye(40)
            drawn.append(scale * (torch.linalg.cholesky(kernel) @ z))
        pyro.sample("y", dist.Normal(drawn[0], (mean + drawn[1]).exp()).to_event(1), obs=y)

    return model


def gaussian_process(n: int = 50) -> Model:
    """A Poisson process whose log rate is a Gaussian process."""
    x = torch.linspace(0, 5, n)
    y = torch.poisson(torch.exp(1 + torch.sin(2 * x)))
    square = (x[:, None] - x).square()

    def model() -> None:
        length, scale = pyro.sample("length", dist.LogNormal(0.0, 0.5)), pyro.sample("scale", dist.HalfNormal(1.0))
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(n), 1.0).to_event(1))
        kernel = torch.exp(-0.5 * square / length[..., None, None].square()) + 1e-6 * torch.eye(n)
        f = mean[..., None] + scale[..., None] * (torch.linalg.cholesky(kernel) @ z[..., None])[..., 0]
        pyro.sample("y", dist.Poisson(f.exp()).to_event(1), obs=y)

    return model


@public("num.pyro.ai/en/stable/examples/gp.html")
def gp() -> Model:
    return gaussian_process()


@public("num.pyro.ai/en/stable/examples/ar2.html")
def ar2() -> Model:
    y = [torch.zeros(()), torch.zeros(())]
    for _ in range(150):
        y.append(0.5 + 0.6 * y[-1] - 0.3 * y[-2] + torch.randn(()))
    series = torch.stack(y)

    def model() -> None:
        c = pyro.sample("c", dist.Normal(0.0, 2.0))
        phi = pyro.sample("phi", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
        with pyro.plate("times", 150):
            mean = c + phi[..., :1] * series[1:-1] + phi[..., 1:] * series[:-2]
            pyro.sample("y", dist.Normal(mean, sigma), obs=series[2:])

    return model


class Network(PyroModule):
    """A hidden layer of five units with normal priors on all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.linspace(-2, 2, 60)[:, None]
        self.y = torch.sin(2 * self.x[:, 0]) + 0.2 * torch.randn(60)
        self.hidden, self.out = PyroModule[torch.nn.Linear](1, 5), PyroModule[torch.nn.Linear](5, 1)
        self.hidden.weight = PyroSample(dist.Normal(0.0, 2.0).expand([5, 1]).to_event(2))
        self.hidden.bias = PyroSample(dist.Normal(0.0, 2.0).expand([5]).to_event(1))
        self.out.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 5]).to_event(2))
        self.out.bias = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def forward(self) -> None:
        """Observe the rows."""
        mean = self.out(torch.tanh(self.hidden(self.x)))[..., 0]
        with pyro.plate("rows", 60):
            pyro.sample("y", dist.Normal(mean, 0.2), obs=self.y)


@public("num.pyro.ai/en/stable/examples/bnn.html", mixes=False)
def network() -> Model:
    return Network()
