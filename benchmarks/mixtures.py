"""Mixtures of Gaussians on targets with several modes: the steps of `torchngvi.fit` beside others.

    python -m benchmarks.mixtures [--starts 5] [--shift 1] [--scale 1] [--draws 256] [--only NAMES]

Every run of a target has the same starts, components of scale 1 at a distance of 1 from the modes with equal weights,
and the same draws, 256 of each component at all steps.  One line a target and method: starts from which all modes were
kept; the gap between log Z and the ELBO at the end, the worst error of a weight, steps until the ELBO over the draws
stays within 1e-3 nats of its end, all steps, and steps of components that left the cone; least and largest of the
starts.  Gaps are sums over a grid in two dimensions, and of 40,000 fresh draws in ten or where q is not on the grid.
A run ends where all gradients
and all gaps between the E_k h are below 0.01, or after 200 steps.

    fit          the curve T(I + ρK + ½ρ²K²), trust 0.7 in Fisher length, weights at rest for five steps, ρ halved where
                 the ELBO falls again and again: what `torchngvi.fit` does
    curve        the same curve with ρ = 1, and nothing else
    VN           S' = S + ρ T P Tᵀ with ρ = 1; a step that leaves the cone is not taken
    VN, trust    the same with the trust and the rest
    geodesic     S' = T exp(ρP) Tᵀ with the trust and the rest
    exponential  the integrator of arXiv 2601.14855: V' = C exp(-ρP) Cᵀ, m' = m - ρCa, one ρ for all components and the
                 weights, 0.9 min(1, 1/max_k ‖P_k‖₂); here with gradients in the place of values, the same draws at all
                 steps, and without its annealing and its decay of ρ

The last table is of `mixture_at_modes` with default starts and with 64, and of `torchngvi.fit` from there.
"""

import argparse
import math
import warnings

import torch

from torchngvi import CholeskyGaussian, LogJoint, NaturalGradientVI, PrecisionCholeskyGaussian, Stein, fit
from torchngvi.errors import RejectedStepWarning
from torchngvi.expectations import Fixed
from torchngvi.fitting import mixture_at_modes
from torchngvi.fitting.mixtures import MixtureSettings, MixtureSteps
from torchngvi.models import MixtureIntegrand
from torchngvi.posteriors import Mixture
from torchngvi.rules import Geodesic, LocalExponential, VariationalNewton
from torchngvi.stepsizes import Constant, KLRadius

DTYPE = torch.float64
STEPS, SMALL, NEAR = 200, 0.01, 1e-3


def vec(*numbers):
    """A vector in double precision."""
    return torch.tensor(numbers, dtype=DTYPE)


class Target:
    """A log joint with its log Z, the modes and the weights of a mixture that fits it."""

    def __init__(self, name, log_joint, modes, weights, log_z=0.0, wide=9.0):
        self.name, self.log_joint, self.modes, self.weights = name, log_joint, modes, weights
        self.log_z, self.wide = log_z, wide

    @torch.no_grad()
    def gap(self, q):
        """log Z - ELBO."""
        if q.dim == 2:
            x = torch.linspace(-self.wide, self.wide, 601, dtype=DTYPE)
            theta = torch.stack(torch.meshgrid(x, x, indexing="ij"), -1)
            log_q = q.log_prob(theta)
            area = (self.wide / 300) ** 2
            if abs(float(log_q.exp().sum()) * area - 1) < 1e-4:
                return float((log_q.exp() * (log_q - self.log_joint(theta))).sum()) * area + self.log_z
        theta = q.sample(40_000, torch.Generator().manual_seed(9))
        return float((q.log_prob(theta) - self.log_joint(theta)).mean()) + self.log_z

    def kept(self, q):
        """Whether each mode has a component with a weight nearest to it, within a standard deviation or so."""
        alive = q.components.mean[q.weights > 1e-3]
        return bool((torch.cdist(self.modes, alive).amin(1) < 1.5).all())

    def start(self, seed, shift, scale):
        """Components of one scale, each as far off its mode."""
        away = torch.randn(self.modes.shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)
        mean = self.modes + shift * away / away.norm(dim=-1, keepdim=True)
        return Mixture(PrecisionCholeskyGaussian(mean.shape[-1], mean.shape[:1], mean=mean, scale=scale))


def normals(name, weights, mean, sd):
    """A mixture of Gaussians with independent coordinates."""
    each = torch.distributions.Independent(torch.distributions.Normal(mean, sd), 1)
    p = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(weights), each)
    return Target(name, p.log_prob, mean, weights)


def label_switching():
    """The means of a mixture of two normals at -1.5 and 1.5, given 60 rows and N(0, 5²) priors."""
    generator = torch.Generator().manual_seed(4)
    y = torch.randn(60, generator=generator, dtype=DTYPE) + vec(-1.5, 1.5).repeat(30)

    def log_joint(theta):
        each = torch.logaddexp(*(-0.5 * (y - theta[..., k, None]).square() for k in (0, 1)))
        prior = torch.distributions.Normal(0.0, 5.0).log_prob(theta).sum(-1)
        return each.sum(-1) - 60 * math.log(2) - 30 * math.log(2 * math.pi) + prior

    x = torch.linspace(-5, 5, 401, dtype=DTYPE)
    values = log_joint(torch.stack(torch.meshgrid(x, x, indexing="ij"), -1))
    log_z = float(values.logsumexp((0, 1))) + 2 * math.log(10 / 400)
    modes = torch.tensor([[-1.5, 1.5], [1.5, -1.5]], dtype=DTYPE)
    return Target("label switching", log_joint, modes, vec(0.5, 0.5), log_z, 5.0)


def targets():
    """The four of the table."""
    apart = [vec(-0.5, 0.0), vec(0.5, 0.0)]
    pair, one = vec(0.3, 0.7), torch.ones(2, 2, dtype=DTYPE)
    generator = torch.Generator().manual_seed(0)
    mean = 6 * torch.randn(10, 10, generator=generator, dtype=DTYPE)
    sd = 0.5 + torch.rand(10, 10, generator=generator, dtype=DTYPE)
    weights = 0.2 + torch.rand(10, generator=generator, dtype=DTYPE)
    return [
        label_switching(),
        normals("6 sds apart", pair, 6.0 * torch.stack(apart), one),
        normals("1.5 sds apart", pair, 1.5 * torch.stack(apart), one),
        normals("ten modes, d = 10", weights / weights.sum(), mean, sd),
    ]


class Steps:
    """A loop of steps of one rule: what `torchngvi.fit` does without its trust, or with another curve."""

    def __init__(self, q, log_joint, draws, rule, trust=None, rest=0, published=False):
        self.q, self.integrand, self.trust, self.rest = q, MixtureIntegrand(q, LogJoint(log_joint)), trust, rest
        self.estimator, self.published, self.taken = Stein(Fixed(draws, seed=1)), published, 0
        step_size = Constant() if trust is None else KLRadius(0.5 * trust**2)
        self.optimizer = NaturalGradientVI(q.components, rule, 1.0, step_size=step_size, estimator=self.estimator)

    def look(self):
        """The ELBO over the draws, and the largest gradient or gap."""
        status = self.optimizer.evaluate(self.integrand)
        self.gains = -status.loss
        elbo = self.q.weights @ self.gains
        return float(elbo), float((status.norm2 + (self.gains - elbo).square()).max().sqrt())

    def step(self):
        """Of the components and of the weights."""
        rho = 1.0
        if self.published:
            P = self.q.components.local(self.estimator(self.q.components, self.integrand)).P
            dense = self.q.components.structure.to_dense(P)
            rho = 0.9 / max(1.0, float(torch.linalg.matrix_norm(dense, 2).max()))
            self.optimizer.param_groups[0]["lr"] = rho
        self.optimizer.step(self.integrand)
        self.taken += 1
        if self.taken > self.rest:
            self.q.reweigh_(self.gains, rho, math.inf if self.trust is None else self.trust)

    @property
    def rejections(self):
        """Steps of a component that left the cone."""
        return self.optimizer.rejections


class OfFit:
    """The engine of `torchngvi.fit`, over the same draws, which do not grow."""

    def __init__(self, q, log_joint, draws):
        self.q, self.engine = q, MixtureSteps(q, LogJoint(log_joint), 1e-12, MixtureSettings(draws=(draws, 4096)))
        self.engine.seed = 1
        self.engine.optimizer.resample(self.engine._estimator())

    def look(self):
        """As of the others; the step was taken before."""
        self.engine.advance()
        return self.engine._seen.elbo, self.engine._seen.norm

    def step(self):
        """Nothing: it goes with the next look."""

    @property
    def rejections(self):
        """Steps of a component that left the cone."""
        return self.engine.optimizer.rejections


METHODS = {
    "fit": OfFit,
    "curve": lambda q, p, n: Steps(q, p, n, LocalExponential()),
    "VN": lambda q, p, n: Steps(q, p, n, VariationalNewton()),
    "VN, trust": lambda q, p, n: Steps(q, p, n, VariationalNewton(), 0.7, 5),
    "geodesic": lambda q, p, n: Steps(q, p, n, Geodesic(), 0.7, 5),
    "exponential": lambda q, p, n: Steps(q, p, n, Geodesic(), published=True),
}


def run(target, method, seed, arguments):
    """Numbers of one run."""
    torch.manual_seed(seed)
    q = target.start(seed, arguments.shift, arguments.scale)
    steps, elbos = METHODS[method](q, target.log_joint, arguments.draws), []
    for _ in range(STEPS + 1):
        elbo, norm = steps.look()
        elbos.append(elbo)
        if norm < SMALL or not math.isfinite(elbo):
            break
        steps.step()
    near = next(k for k in range(len(elbos)) if all(abs(elbo - elbos[-1]) < NEAR for elbo in elbos[k:]))
    order = torch.cdist(target.modes, q.components.mean).argmin(1)
    error = float((q.weights[order] - target.weights).abs().max())
    return target.kept(q), target.gap(q), error, near, len(elbos) - 1, steps.rejections


def spread(values, form):
    """Best and worst, or the one number that they are."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} .. {high}"


def from_modes(target):
    """Modes found, gradients of the search, and the fit from there."""
    cells = [target.name]
    for many in (False, True):
        torch.manual_seed(0)
        calls = [0]

        def counted(theta, calls=calls):
            calls[0] += len(theta) if theta.requires_grad else 0
            return target.log_joint(theta)

        wide = 6.0 * torch.randn(64, target.modes.shape[-1], dtype=DTYPE) if many else None
        q = mixture_at_modes(CholeskyGaussian(target.modes.shape[-1], dtype=DTYPE), counted, starts=wide)
        before = target.gap(q)
        result = fit(q, target.log_joint, progress=False)
        cells += [
            f"{len(q)} of {len(target.modes)}",
            f"{calls[0]}",
            f"{before:.4f}",
            f"{target.gap(q):.4f}",
            f"{len(result.trace) - 1}",
            f"{result.gradients}",
            "yes" if result.converged else "no",
        ]
    return "| " + " | ".join(cells) + " |"


def main():
    """Print both tables."""
    warnings.simplefilter("ignore", RejectedStepWarning)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--draws", type=int, default=256)
    parser.add_argument("--shift", type=float, default=1.0)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="+", default=None)
    arguments = parser.parse_args()
    wanted = [target for target in targets() if not arguments.only or target.name in arguments.only]
    print("| target | method | modes kept | gap | weights | steps to 1e-3 | steps | rejected |")
    print("|---" * 8 + "|")
    for target in wanted:
        for method in METHODS:
            kept, gaps, errors, near, taken, rejected = zip(
                *(run(target, method, seed, arguments) for seed in range(arguments.starts)), strict=True
            )
            cells = [f"{sum(kept)} of {len(kept)}", spread(gaps, ".4f"), spread(errors, ".3f")]
            cells += [spread(near, "d"), spread(taken, "d"), spread(rejected, "d")]
            print(f"| {target.name} | {method} | {' | '.join(cells)} |", flush=True)
    each = " modes | search | gap before | gap | steps | gradients | converged |"
    print(f"\nFrom the modes that were found: by default starts, and by 64 of N(0, 6²).\n\n| target |{each}{each}")
    print("|---" * 15 + "|")
    for target in wanted:
        print(from_modes(target), flush=True)


if __name__ == "__main__":
    main()
