"""Fresh models with latent variables, which are integrated out given one to three hyper-parameters on a grid."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..posteriors_hierarchical import half_cauchy, half_normal
from .curves import linear_given
from .target import Conditional, Target, by_quadrature, normal, normals, uniforms, vector

ROUGH = 45  # nodes of a grid of two


def gaussian_latents(
    name: str,
    y: Tensor,  # (N,)
    loadings: Callable[[Tensor], Tensor],  # hyper-parameters (*batch, d) -> X (*batch, N, K), y ~ N(X z, sd²)
    log_sd: Callable[[Tensor], Tensor],  # -> (*batch, 1)
    log_prior: Callable[[Tensor], Tensor],  # -> (*batch,)
    box: tuple[list[float], list[float]],
    states: Callable[[Tensor], Tensor] | None = None,  # -> B (*batch, K, K) lower triangular, or z themselves
) -> Target:
    """theta = (hyper-parameters, z), z ~ N(0, I), or (hyper-parameters, B z): the non-centred and the centred form."""
    count = len(box[0])

    def log_joint(theta: Tensor) -> Tensor:
        hyper, latent = theta[..., :count], theta[..., count:]
        if states is None:
            z, log_det = latent, 0.0
        else:
            B = states(hyper)
            z = torch.linalg.solve_triangular(B, latent[..., None], upper=False)[..., 0]
            log_det = B.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        mean, log_s = (loadings(hyper) @ z[..., None])[..., 0], log_sd(hyper)
        likelihood = normal((y.to(theta) - mean) * torch.exp(-log_s)) - log_s
        return log_prior(hyper) + normal(z).sum(-1) - log_det + likelihood.sum(-1)

    def conditional(hyper: Tensor, level: int) -> Conditional:
        evidence, mean, covariance = linear_given(loadings(hyper), y, log_sd(hyper).exp())
        if states is not None:
            B = states(hyper)
            mean, covariance = (B @ mean[..., None])[..., 0], B @ covariance @ B.mT
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        means = torch.cat([hyper, mean], -1)
        return Conditional(log_prior(hyper) + evidence, means, torch.cat([0 * hyper, variance], -1))

    truth = by_quadrature(conditional, *box, nodes=ROUGH)
    how = f"Trapezoidal rule in {count} hyper-parameters, all others Gaussian given them; checked twice as fine."
    return Target(name, len(truth.mean), log_joint, truth.mean, truth.sd, how, truth.error, truth.log_evidence)


def local_levels() -> list[Target]:
    """A random walk seen with noise: theta = (log sd of a step, log sd of the noise, the path or its steps)."""
    found = []
    for n, step, noise, centred in ((12, 0.3, 1.0, False), (12, 0.3, 1.0, True), (40, 1.0, 0.7, True)):
        draw = normals(600 + n)
        y = (step * draw(n)).cumsum(0) + noise * draw(n)
        sums = torch.ones(n, n, dtype=torch.float64).tril()

        def path(hyper: Tensor, sums: Tensor = sums) -> Tensor:
            scale = hyper[..., :1].exp().expand(*hyper.shape[:-1], len(sums) - 1)
            first = torch.full_like(scale[..., :1], 2.0)
            return sums.to(hyper) * torch.cat([first, scale], -1)[..., None, :]

        name = f"local level of {n}, {'' if centred else 'non-'}centred"
        prior = lambda hyper: normal(hyper, -0.5, 1.0).sum(-1)  # noqa: E731
        box = ([-7.0, -7.0], [6.0, 6.0])
        found.append(gaussian_latents(name, y, path, lambda h: h[..., 1:2], prior, box, path if centred else None))
    return found


def process_latents() -> list[Target]:
    """A Gaussian process seen with known noise: theta = (log length, log amplitude, whitened values)."""
    found = []
    for n, noise in ((8, 0.6), (20, 0.2)):
        x = torch.linspace(0, 1, n, dtype=torch.float64)
        y = torch.sin(5 * x) + noise * normals(610 + n)(n)
        square = (x[:, None] - x).square()

        def root(hyper: Tensor, square: Tensor = square) -> Tensor:
            log_l, log_a = hyper[..., None, None, :].unbind(-1)
            near = torch.exp(-0.5 * square.to(hyper) * torch.exp(-2 * log_l))
            return log_a.exp() * torch.linalg.cholesky(near + 1e-4 * torch.eye(len(square)).to(hyper))

        def prior(hyper: Tensor) -> Tensor:
            return normal(hyper[..., 0], -1.0, 0.7) + normal(hyper[..., 1], 0.0, 1.0)

        def log_noise(hyper: Tensor, noise: float = noise) -> Tensor:
            return torch.full_like(hyper[..., :1], math.log(noise))

        found.append(gaussian_latents(f"latent process of {n}", y, root, log_noise, prior, ([-6.0, -7.0], [4.0, 7.0])))
    return found


def one_way() -> list[Target]:
    """Groups with an unknown error: theta = (log sd of the groups, log sd of the errors, mean, effects)."""
    found = []
    for groups, each, sd, centred in ((4, 2, 0.5, False), (8, 4, 1.0, True), (15, 10, 1.5, True)):
        draw = normals(620 + groups)
        member = torch.arange(groups).repeat_interleave(each)
        y = 1 + (sd * draw(groups))[member] + draw(groups * each)
        chosen = torch.nn.functional.one_hot(member, groups).double()

        def states(hyper: Tensor, groups: int = groups) -> Tensor:  # of (mean, effects of mean + tau z)
            tau = hyper[..., :1].exp()
            diagonal = torch.cat([torch.full_like(tau, 5.0), tau.expand(*tau.shape[:-1], groups)], -1)
            B = torch.diag_embed(diagonal)
            mean = torch.zeros_like(B)
            mean[..., 1:, 0] = 5.0
            return B + mean

        def loadings(hyper: Tensor, chosen: Tensor = chosen, states: Callable[[Tensor], Tensor] = states) -> Tensor:
            effects = torch.cat([torch.zeros_like(chosen[:, :1]), chosen], -1)
            return effects.to(hyper) @ states(hyper)

        def prior(hyper: Tensor) -> Tensor:
            return half_normal(hyper[..., 0], 2.0) + normal(hyper[..., 1], 0.0, 1.0)

        name = f"one way {groups} x {each}, {'' if centred else 'non-'}centred"
        box = ([-20.0, -5.0], [6.0, 5.0])
        found.append(
            gaussian_latents(name, y, loadings, lambda h: h[..., 1:2], prior, box, states if centred else None)
        )
    return found


def horseshoe_means() -> list[Target]:
    """y_j ~ N(tau λ_j z_j, s²), λ_j, tau ~ C⁺(0, 1): theta = (log tau, log λ, z); the horseshoe on J means."""
    found = []
    for name, y, s in (
        ("sparse", (0.1, -0.4, 4.0, 0.2, -0.3), 0.5),
        ("vague", (0.6, -1.0, 1.5), 1.0),
        ("25", tuple(5.0 * (k % 5 == 0) + 0.3 * ((k * 7) % 5 - 2) for k in range(25)), 0.5),
    ):
        data, count = vector(*y), len(y)

        def log_joint(theta: Tensor, data: Tensor = data, s: float = s, count: int = count) -> Tensor:
            log_tau, log_scale, z = theta[..., :1], theta[..., 1 : count + 1], theta[..., count + 1 :]
            prior = half_cauchy(log_tau)[..., 0] + half_cauchy(log_scale).sum(-1) + normal(z).sum(-1)
            return prior + normal(data.to(theta), (log_tau + log_scale).exp() * z, s).sum(-1)

        def conditional(log_tau: Tensor, level: int, data: Tensor = data, s: float = s) -> Conditional:
            log_scale = torch.linspace(-24, 24, 160 * level + 1, dtype=torch.float64)
            root = (log_tau + log_scale).exp()[..., None]  # (G, K, 1)
            total = root.square() + s**2
            weight = half_cauchy(log_scale)[:, None] - 0.5 * (total.log() + data.square() / total)  # (G, K, J)
            evidence = torch.logsumexp(weight, 1)
            weight = torch.exp(weight - evidence[:, None])
            mean = root * data / total

            def over(values: Tensor) -> Tensor:
                return (weight * values).sum(1)

            first = torch.cat([log_tau, over(log_scale[:, None]), over(mean)], -1)
            second = torch.cat(
                [log_tau.square(), over(log_scale[:, None].square()), over(mean.square() + s**2 / total)], -1
            )
            constant = math.log(float(log_scale[1] - log_scale[0])) - 0.5 * math.log(2 * math.pi)
            density = half_cauchy(log_tau)[:, 0] + (evidence + constant).sum(-1)
            return Conditional(density, first, second - first.square())

        truth = by_quadrature(conditional, [-25.0], [15.0], nodes=151)
        how = "Trapezoidal rule in log tau, in each log λ given it, z Gaussian given both; checked twice as fine."
        moments = truth.mean, truth.sd
        found.append(
            Target(f"horseshoe of {name}", 2 * count + 1, log_joint, *moments, how, truth.error, truth.log_evidence)
        )
    return found


def item_responses() -> list[Target]:
    """Rasch's model, three items: theta = (difficulties, abilities), y ~ Bernoulli(sigmoid(ability - difficulty))."""
    found = []
    for persons, spread in ((6, 4.0), (25, 1.0)):
        u = uniforms(630 + persons)
        chance = torch.sigmoid(spread * (u(persons, 1) - 0.5) * 2 - vector(-2.5, 0.0, 1.0) * (spread > 2) * 1.5)
        y = (u(persons, 3) < chance).double()
        patterns, kind, many = torch.unique(y, dim=0, return_inverse=True, return_counts=True)

        def log_joint(theta: Tensor, y: Tensor = y) -> Tensor:
            difficulty, ability = theta[..., :3], theta[..., 3:]
            eta = ability[..., None] - difficulty[..., None, :]
            likelihood = logsigmoid(torch.where(y > 0.5, eta, -eta)).sum((-2, -1))
            return normal(difficulty, 0.0, 2.0).sum(-1) + normal(ability).sum(-1) + likelihood

        def conditional(
            difficulty: Tensor, level: int, patterns: Tensor = patterns, kind: Tensor = kind, many: Tensor = many
        ) -> Conditional:
            z = torch.linspace(-7, 7, 30 * level + 1, dtype=torch.float64)
            eta = z[:, None] - difficulty[:, None, :]  # (G, K, 3)
            yes, no = logsigmoid(eta), logsigmoid(-eta)
            value = normal(z)[:, None] + yes @ patterns.mT + no @ (1 - patterns).mT  # (G, K, patterns)
            evidence = torch.logsumexp(value, 1)
            weight = torch.exp(value - evidence[:, None])
            mean = (weight * z[:, None]).sum(1)
            variance = (weight * z[:, None].square()).sum(1) - mean.square()
            step = math.log(float(z[1] - z[0]))
            density = normal(difficulty, 0.0, 2.0).sum(-1) + ((evidence + step) * many).sum(-1)
            means = torch.cat([difficulty, mean[:, kind]], -1)
            return Conditional(density, means, torch.cat([0 * difficulty, variance[:, kind]], -1))

        truth = by_quadrature(conditional, [-14.0] * 3, [14.0] * 3, nodes=21)
        how = "Trapezoidal rule in three difficulties, each ability by a rule of its own; checked twice as fine."
        moments = truth.mean, truth.sd
        found.append(
            Target(f"Rasch, {persons} persons", 3 + persons, log_joint, *moments, how, truth.error, truth.log_evidence)
        )
    return found
