"""Warped Gaussians on densities whose truth is known: what a curve around each coordinate mends, and what it costs.

    python -m benchmarks.warps [--half held] [--only NAMES] [--widest 20] [--warps SinhArcsinh YeoJohnson]
                               [--places around inside] [--flow [STEPS ...]] [--fan]

One line a target whose log sds the best Gaussian misses by 0.1 (``--all`` has the others too): the worst error of a log
sd; the worst error of a 5 % or 95 % quantile, in true sds, where the quantiles are known; k-hat of the draws of q; the
gain of the ELBO in nats on fresh draws; gradients and their ratio.  An arrow goes from the Gaussian to the warped one.
Last are counts: where a warp gains 0.05 nats, where it halves the error of an sd, and where the verdict offers it.

Most truths are means and standard deviations alone: quantiles come from weighted draws around the warped q, where these
are worth two thousand and have the true means and standard deviations to 0.05.  ``--fan`` refines the Gaussian by the
fan of `torchngvi.refine`, and ``--flow`` fits Pyro's AutoIAFNormal, by Adam on 16 draws a step, with as many gradients
as the dearest of the warps took in all and with ten times as many, or after the numbers of steps that are given.
"""

import argparse
import math
import re
import time
from statistics import median

import torch

from benchmarks.truths import targets
from torchngvi import CholeskyGaussian, fit, refine
from torchngvi.diagnostics.importance import smoothed
from torchngvi.posteriors import warps

LEVELS = (0.05, 0.95)
DRAWS, ENOUGH, NEAR = 40_000, 2000.0, 0.05  # of the quantiles; sds by which weighted moments may be off
AT_ONCE, RATE = 16, 0.005  # draws a step of a flow, and its learning rate


def fitted(target, warp=None, inside=False):
    """q and the result of its fit, with a verdict on a Gaussian only."""
    torch.manual_seed(0)
    q = CholeskyGaussian(target.dim, dtype=torch.float64)
    q = q if warp is None else q.warped(warp, inside=inside)
    return q, fit(q, target.log_joint, progress=False, examine=warp is None)


@torch.no_grad()
def k_hat_of(target, q):
    """The k-hat of draws of q."""
    theta = q.sample(DRAWS, torch.Generator().manual_seed(1))
    log_weights = target.log_joint(theta) - q.log_prob(theta)
    return float(smoothed(log_weights.nan_to_num(-math.inf)).k_hat)


def wider(q):
    """Draws, half of q and half with a t distribution of four degrees in the place of its normal one; log density."""
    generator, dim = torch.Generator().manual_seed(2), q.dim
    frame = q.base.frame()
    z = torch.randn(DRAWS, dim, generator=generator, dtype=torch.float64)
    chi = torch._standard_gamma(torch.full((DRAWS, 1), 2.0, dtype=torch.float64), generator=generator)
    z[DRAWS // 2 :] *= (2.0 / chi[DRAWS // 2 :]).sqrt()
    theta, volume = q.bent(frame.mean + frame.push(z))
    square = z.square().sum(-1)
    student = math.lgamma(2 + dim / 2) - math.lgamma(2) - 0.5 * dim * math.log(4 * math.pi)
    both = torch.stack(
        [
            -0.5 * square - 0.5 * dim * math.log(2 * math.pi),
            student - 0.5 * (4 + dim) * torch.log1p(square / 4),
        ]
    )
    return theta, both.logsumexp(0) - math.log(2) - q.base.log_det_root() - volume


@torch.no_grad()
def quantiles(target, q):
    """Those of the target, (2, D), by weighted draws; None where these are few, or miss its means or its sds."""
    theta, log_q = wider(q)
    smooth = smoothed((target.log_joint(theta) - log_q).nan_to_num(-math.inf))
    w = smooth.log_weights.exp()
    mean = w @ theta
    apart = ((mean - target.mean) / target.sd).abs().max()
    wide = ((w @ (theta - mean).square()).sqrt() / target.sd).log().abs().max()
    if not (float(smooth.effective) >= ENOUGH and float(apart) < NEAR and float(wide) < NEAR):
        return None
    ordered, order = theta.sort(0)
    mass = smooth.log_weights.exp()[order].cumsum(0)
    at = (mass < torch.tensor(LEVELS, dtype=torch.float64)[:, None, None]).sum(1).clamp_max(DRAWS - 1)
    return ordered.gather(0, at)


def of_gaussian(q):
    """Quantiles of a Gaussian, (2, D)."""
    return q.mean + q.stddev * torch.special.ndtri(torch.tensor(LEVELS, dtype=torch.float64))[:, None]


def worst(target, stddev):
    """The largest error of a log sd."""
    return float((stddev / target.sd).log().abs().max())


def flow(target, steps):
    """An inverse autoregressive flow by Pyro: the worst error of a log sd, and its ELBO; NaN where it fails."""
    import pyro  # noqa: PLC0415
    from pyro.infer.autoguide import AutoIAFNormal  # noqa: PLC0415

    pyro.clear_param_store()
    pyro.set_rng_seed(0)

    def model():
        theta = pyro.sample("theta", pyro.distributions.Normal(0.0, 1.0).expand([target.dim]).to_event(1).mask(False))
        pyro.factor("joint", target.log_joint(theta.double()).float())

    guide = AutoIAFNormal(model, hidden_dim=[max(16, 4 * target.dim)], num_transforms=2)
    loss = pyro.infer.Trace_ELBO(num_particles=AT_ONCE, vectorize_particles=True, max_plate_nesting=1)
    svi = pyro.infer.SVI(model, guide, pyro.optim.ClippedAdam({"lr": RATE}), loss)
    for _ in range(steps):
        svi.step()
    with torch.no_grad():
        posterior = guide.get_posterior()
        draws = posterior.sample((DRAWS,))
        elbo = (target.log_joint(draws.double()) - posterior.log_prob(draws).double()).mean()
    return worst(target, draws.double().std(0)), float(elbo)


@torch.no_grad()
def elbo_of(target, q):
    """The ELBO on draws of q."""
    theta = q.sample(DRAWS, torch.Generator().manual_seed(3))
    return float((target.log_joint(theta) - q.log_prob(theta)).mean())


def beside(target, q, plain, fits, flow_steps, with_fan):
    """The lines of other families: the fan of `refine`, and a flow at equal gradients and at ten times as many."""
    before, elbo = worst(target, q.stddev), elbo_of(target, q)

    def told(name, error, gained, gradients):
        print(f"{target.name[:38]:38}{target.dim:3} {name:9}{before:6.2f} -> {error:.2f}{gained:41.3f}{gradients:17}")

    if with_fan:
        refined = refine(plain, target.log_joint, "fan")
        spent = plain.trace[-1].gradients + refined.gradients
        told("fan", worst(target, refined.posterior.stddev), refined.after.elbo - refined.before.elbo, spent)
    if flow_steps is not None:
        most = max(result.trace[-1].gradients for _, result in fits.values())
        for steps in flow_steps or [max(times * most // AT_ONCE, 1) for times in (1, 10)]:
            error, reached = flow(target, steps)
            told("AutoIAF", error, reached - elbo, steps * AT_ONCE)


def gain(result):
    """Nats that the warp gains by what the fit says."""
    found = re.search(r"warp (?:gains|changes the ELBO on \d+ fresh draws by) (-?[\d.e+-]+)", result.reason)
    return float(found[1]) if found else math.nan


def row(target, families, flow_steps, with_fan):
    """The lines of a target, and what is counted: (family, gain, errors of an sd, of a quantile, gradients, offer)."""
    start = time.process_time()
    q, plain = fitted(target)
    offer = "q.warped()" in plain.verdict.next
    before = worst(target, q.stddev), k_hat_of(target, q)
    fits = {name: fitted(target, getattr(warps, name.split()[0])(), "inside" in name) for name in families}
    truth = next((known for warped, _ in fits.values() if (known := quantiles(target, warped)) is not None), None)
    found = []
    for name, (warped, result) in fits.items():
        off = [math.nan] * 2
        if truth is not None:
            both = of_gaussian(q), warped.quantile(LEVELS)
            off = [float(((one - truth) / target.sd).abs().max()) for one in both]
        error, k_hat = worst(target, warped.stddev), k_hat_of(target, warped)
        spent = [one.trace[-1].gradients for one in (plain, result)]  # without what the checks take
        print(
            f"{target.name[:38]:38}{target.dim:3} {name[:5] + name[-3:]:9}{before[0]:6.2f} -> {error:.2f}"
            f"{off[0]:7.2f} -> {off[1]:.2f}{before[1]:8.2f} -> {k_hat:5.2f}{gain(result):9.3f}"
            f"{spent[0]:8} {spent[1]:8} {spent[1] / spent[0]:6.1f} {'offered' if offer else ''}",
            flush=True,
        )
        found.append((name, gain(result), (before[0], error), off, spent, offer))
    beside(target, q, plain, fits, flow_steps, with_fan)
    return found, time.process_time() - start


def counted(found, family):
    """The counts of a family of curves."""
    rows = [one for one in found if one[0] == family]
    gained = [one for one in rows if one[1] >= 0.05]
    halved = [one for one in gained if one[2][1] <= 0.5 * one[2][0]]
    known = [one for one in gained if not math.isnan(one[3][1])]
    near = [one for one in known if one[3][1] <= 0.1]
    offers = [one for one in rows if one[5]]
    right = [one for one in offers if one[1] >= 0.05]
    cheap = [one for one in rows if one[4][1] <= 2 * one[4][0]]
    ratio, number = median(one[4][1] / max(one[4][0], 1) for one in rows), median(one[4][1] for one in rows)
    print(
        f"{family}: of {len(rows)} targets a warp gains 0.05 nats on {len(gained)}, and halves the worst error of an "
        f"sd on {len(halved)} of these; quantiles within 0.1 sd on {len(near)} of {len(known)} where they are known; "
        f"offered {len(offers)} times, {len(right)} of them with a gain; at most twice the gradients on {len(cheap)}, "
        f"the median ratio is {ratio:.1f}, the median number {number:.0f}"
    )


def main():
    """Print the table and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", default="tune", choices=["tune", "held", "fresh", "fresh 1", "fresh 2"])
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--widest", type=int, default=20, help="coordinates of the largest target")
    parser.add_argument("--warps", nargs="+", default=["SinhArcsinh"], choices=["SinhArcsinh", "YeoJohnson"])
    parser.add_argument("--places", nargs="+", default=["around"], choices=["around", "inside"], help="of the curves")
    parser.add_argument("--all", action="store_true", help="targets that the Gaussian fits too")
    parser.add_argument("--flow", type=int, nargs="*", help="Pyro's AutoIAFNormal beside them; numbers of steps")
    parser.add_argument("--fan", action="store_true", help="the fan of torchngvi.refine beside them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    families = [f"{name}{' inside' if place == 'inside' else ''}" for name in options.warps for place in options.places]
    print(
        f"{'target':38}{'D':>3} {'warp':9}{'log sd':>14}{'quantile':>15}{'k-hat':>17}{'gain':>9}"
        f"{'Gaussian':>8} {'warped':>8} {'ratio':>6}"
    )
    found, seconds = [], 0.0
    for target in targets(options.half):
        named = not options.only or any(part in target.name for part in options.only)
        if not named or target.dim > options.widest:
            continue
        if not options.all and worst(target, fitted(target)[0].stddev) < 0.1:
            continue
        rows, took = row(target, families, options.flow, options.fan)
        found, seconds = found + rows, seconds + took
    for family in families:
        counted(found, family)
    print(f"{seconds:.0f} seconds of the processor")


if __name__ == "__main__":
    main()
