"""Series: coal disasters, influenza in a boarding school, ARCH(1), and the level of the Nile."""

import functools
import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from benchmarks.truths.target import Conditional, Truth, by_quadrature, normal, normals

from .model import Model, boxed, numbered, vectors

COAL = """4 5 4 1 0 4 3 4 0 6 3 3 4 0 2 6 3 3 5 4 5 3 1 4 4 1 5 5 3 4 2 5 2 2 3 4 2 1 3 2 2 1 1 1 1 3 0 0 1 0 1 1 0 0 3
 1 0 3 2 2 0 1 1 1 0 1 0 1 0 0 0 2 1 0 0 0 1 1 0 2 3 3 1 1 2 1 1 1 1 2 3 3 0 0 0 1 4 0 0 0 1 0 0 0 0 0 1 0 0 1 0 1"""
ILL = "3 8 26 76 225 298 258 233 189 128 68 29 14 4"  # boys in bed on each of 14 days, of 763
NILE = """1120 1160 963 1210 1160 1160 813 1230 1370 1140 995 935 1110 994 1020 960 1180 799 958 1140 1100 1210 1150
 1250 1260 1220 1030 1100 774 840 874 694 940 833 701 916 692 1020 1050 969 831 726 456 824 702 1120 1100 832 764 821
 768 845 864 862 698 845 744 796 1040 759 781 865 845 944 984 897 822 1010 771 676 649 846 812 742 801 1040 860 874
 848 890 744 749 838 1050 918 986 797 923 975 815 1020 906 901 1170 912 746 919 718 714 740"""  # 1871 to 1970
BOYS = 763
STEP, STEPS = 0.05, 20  # of Runge and Kutta's method, in days, and a day


def coal() -> Model:
    """Yearly disasters, Poisson(e) before a year s, Poisson(l) from it on; e, l ~ Exp(1), s uniform and summed over."""
    y = vectors(COAL.replace("\n", " "))
    years = torch.arange(len(y)).double()
    before = torch.cat([torch.zeros(1).double(), y.cumsum(0)[:-1]])

    def log_joint(theta: Tensor) -> Tensor:
        early, late = theta.split(1, -1)
        of_s = before * early - years * early.exp() + (y.sum() - before) * late - (len(y) - years) * late.exp()
        return of_s.logsumexp(-1) + (theta - theta.exp()).sum(-1)

    source = "Jarrett 1979; Stan User's Guide, change points; PyMC's introduction"
    return Model(
        "coal disasters", source, ("log early", "log late"), log_joint, boxed(log_joint, [0.0, -2.0], [3.0, 2.0])
    )


def _ill(beta: Tensor, gamma: Tensor) -> Tensor:
    """The number infected at the end of each day, (*batch, 14), from one boy ill: SIR by Runge and Kutta's method."""

    def slope(S: Tensor, I: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
        new = beta * S * I / BOYS
        return -new, new - gamma * I

    state, days = (torch.full_like(beta, BOYS - 1.0), torch.ones_like(beta)), []
    for _ in range(14):
        for _ in range(STEPS):
            a = slope(*state)
            b = slope(*(x + 0.5 * STEP * d for x, d in zip(state, a, strict=True)))
            c = slope(*(x + 0.5 * STEP * d for x, d in zip(state, b, strict=True)))
            d = slope(*(x + STEP * d for x, d in zip(state, c, strict=True)))
            moves = (STEP / 6 * (p + 2 * q + 2 * r + s) for p, q, r, s in zip(a, b, c, d, strict=True))
            state = tuple(x + move for x, move in zip(state, moves, strict=True))
        days.append(state[1])
    return torch.stack(days, -1)


def influenza() -> Model:
    """Boys in bed ~ NegBin(I(t), φ) of an SIR model: β ~ N⁺(2, 1), γ ~ N⁺(0.4, 0.5²), 1/φ ~ Exp(5)."""
    y = vectors(ILL)

    def log_joint(theta: Tensor) -> Tensor:
        beta, gamma, inverse = theta.exp().unbind(-1)
        mean, phi = _ill(beta, gamma).clamp_min(1e-9), 1 / inverse[..., None]
        choices = torch.lgamma(y + phi) - torch.lgamma(phi)
        counts = choices + phi * (phi.log() - (phi + mean).log()) + y * (mean.log() - (phi + mean).log())
        return counts.sum(-1) + normal(beta, 2.0, 1.0) + normal(gamma, 0.4, 0.5) - 5 * inverse + theta.sum(-1)

    source = "Grinsztajn, Semenova, Margossian and Riou 2021, Stan case study; boarding school, 1978"
    truth = boxed(log_joint, [0.1, -1.5, -6.0], [1.0, 0.2, 2.0], 41)
    return Model("influenza", source, ("log beta", "log gamma", "log 1/phi"), log_joint, truth)


def arch() -> Model:
    """100 simulated y_t ~ N(μ, α0 + α1 (y_{t-1} - μ)²), μ ~ N(0, 5²), α0 ~ Exp(1), α1 uniform in (0, 1)."""
    draw, values = normals(1), [0.0]
    for _ in range(100):
        values.append(0.3 + math.sqrt(0.5 + 0.6 * (values[-1] - 0.3) ** 2) * float(draw(1)))
    y = torch.tensor(values, dtype=torch.float64)

    def log_joint(theta: Tensor) -> Tensor:
        mu, log_level, logit = theta.split(1, -1)
        square = (y - mu).square()
        variance = log_level.exp() + torch.sigmoid(logit) * square[..., :-1]
        prior = normal(mu, 0.0, 5.0) - log_level.exp() + log_level + logsigmoid(logit) + logsigmoid(-logit)
        return prior[..., 0] - 0.5 * (variance.log() + square[..., 1:] / variance).sum(-1)

    source = "Engle 1982; Stan User's Guide, time series; weak priors"
    truth = boxed(log_joint, [-0.6, -2.5, -9.0], [1.2, 1.5, 7.0], 41)
    return Model("ARCH(1)", source, ("mu", "log alpha0", "logit alpha1"), log_joint, truth)


# -------------------------------------------------------------------------------------------- the level of the Nile


def _flow() -> Tensor:
    """The flow in hundreds above 900."""
    return (vectors(NILE.replace("\n", " ")) - 900) / 100


def _prior(hyper: Tensor) -> Tensor:
    """Half-normal priors of both sds, of scale 1."""
    return (hyper - 0.5 * (2 * hyper).exp()).sum(-1)


def smoothed(hyper: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log evidence (G,), means and variances of the levels (G, T), and covariances of neighbours (G, T - 1).

    Kalman's filter and Rauch, Tung and Striebel's smoother (Durbin and Koopman 2012, 4.3 and 4.4).
    """
    noise, step = (2 * hyper).exp().unbind(-1)
    evidence, mean, variance = torch.zeros_like(noise), torch.zeros_like(noise), torch.full_like(noise, 25.0)
    means, variances = [], []
    for t, y in enumerate(_flow()):
        variance = variance + (step if t else 0.0)
        total = variance + noise
        evidence = evidence - 0.5 * ((y - mean).square() / total + total.log() + math.log(2 * math.pi))
        mean, variance = mean + variance / total * (y - mean), variance * noise / total
        means.append(mean)
        variances.append(variance)
    neighbours: list[Tensor] = []
    for t in range(len(means) - 2, -1, -1):
        gain = variances[t] / (variances[t] + step)
        neighbours.insert(0, gain * variances[t + 1])
        means[t] = means[t] + gain * (means[t + 1] - means[t])
        variances[t] = variances[t] + gain.square() * (variances[t + 1] - variances[t] - step)
    return evidence, torch.stack(means, -1), torch.stack(variances, -1), torch.stack(neighbours, -1)


def _nile_truth(form: str) -> Truth:
    """The two log sds on a grid, the rest smoothed given them."""

    def conditional(hyper: Tensor, level: int) -> Conditional:
        evidence, mean, variance, neighbours = smoothed(hyper)
        if form == "steps":
            sd = hyper[:, 1:].exp()
            spread = variance[:, 1:] + variance[:, :-1] - 2 * neighbours
            mean = torch.cat([mean[:, :1], mean.diff() / sd], -1)
            variance = torch.cat([variance[:, :1], spread / sd.square()], -1)
        if form == "none":
            mean, variance = mean[:, :0], variance[:, :0]
        means = torch.cat([hyper, mean], -1)
        return Conditional(evidence + _prior(hyper), means, torch.cat([0 * hyper, variance], -1))

    return by_quadrature(conditional, [-1.0, -6.0], [1.0, 1.0])


def nile(centred: bool) -> Model:
    """Flow ~ N(μ_t, σ_ε²), μ_t ~ N(μ_{t-1}, σ_η²), μ_1 ~ N(0, 5²): theta has the levels, or their steps in σ_η."""
    y = _flow()

    def log_joint(theta: Tensor) -> Tensor:
        hyper, rest = theta[..., :2], theta[..., 2:]
        log_noise, log_step = hyper.split(1, -1)
        first = rest[..., :1]
        if centred:
            levels, steps = rest, rest.diff() / log_step.exp()
            log_det = steps.shape[-1] * log_step[..., 0]
        else:
            steps = rest[..., 1:]
            levels = torch.cat([first, first + log_step.exp() * steps.cumsum(-1)], -1)
            log_det = 0.0
        likelihood = normal((y - levels) / log_noise.exp()) - log_noise
        return _prior(hyper) + normal(first, 0.0, 5.0)[..., 0] + normal(steps).sum(-1) - log_det + likelihood.sum(-1)

    names = ("log sigma_eps", "log sigma_eta", "mu[1]", *numbered("mu" if centred else "step", len(y) - 1, 2))
    truth = functools.partial(_nile_truth, "levels" if centred else "steps")
    source = "Durbin and Koopman 2012, chapter 2; in hundreds, half-normal priors of the sds"
    return Model(f"Nile, {'' if centred else 'non-'}centred", source, names, log_joint, truth)


def nile_marginal() -> Model:
    """The same with the levels integrated out: two log sds."""

    def log_joint(theta: Tensor) -> Tensor:
        return smoothed(theta)[0] + _prior(theta)

    source = "Durbin and Koopman 2012, chapter 2; levels integrated out by Kalman's filter"
    names = ("log sigma_eps", "log sigma_eta")
    return Model("Nile, marginal", source, names, log_joint, functools.partial(_nile_truth, "none"))


def models() -> list[Model]:
    """All of them."""
    return [coal(), influenza(), arch(), nile(False), nile(True), nile_marginal()]
