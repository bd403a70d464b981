"""The constants of `torchngvi.networks.StepLength`: many settings of the rule of a step, trained at once.

    python benchmarks/network_steps.py [--tasks power bike energy digits] [--hidden 50] [--norm] [--steps 2000]
        [--seeds 0 1 2] [--units 0.35 0.7 1.4 2.8] [--nats 0.12]

A copy of the rule of `attach(AdamW)` in which every tensor has one more dimension, that of the settings, so that a
grid over k, the constant of the limit of a unit, costs little more than one training; AdamW with four learning rates
trains in the same tensors.  A row has the test NLL of AdamW with the rate that is best on validation data, and for
each k how much the rule differs from it, both as means over the seeds.  Temperature and noise of the predictions are
chosen on validation data, as in `benchmarks/networks.py`, whose tasks these are.
"""

import argparse
import math

import networks
import torch
import torch.nn.functional as F

import torchngvi

RATES = (1e-3, 3e-3, 1e-2, 3e-2)
TEMPERATURES = (0.0, 0.002, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0)
DRAWS, EVERY = 16, 10


class Replicas:
    """Networks of the same shape and the same start, one for each setting, in lists of tensors (R, ...)."""

    def __init__(self, sizes, count, norm, seed):
        torch.manual_seed(seed)
        self.depth, self.norm, self.mean, self.fan_in = len(sizes) - 1, norm, [], []
        for layer, (i, o) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            linear = torch.nn.Linear(i, o)
            self.mean += [linear.weight.detach(), linear.bias.detach()]
            self.fan_in += [i, i]
            if norm and layer < self.depth - 1:
                self.mean += [torch.ones(o), torch.zeros(o)]
                self.fan_in += [o, o]
        self.scales = [  # of the units of each pair (weight, bias)
            ((w.square().sum() + b.square().sum()) / len(w)).sqrt() if w.ndim > 1 else torch.tensor(1.0)
            for w, b in zip(self.mean[::2], self.mean[1::2], strict=True)
        ]
        self.mean = [m.expand(count, *m.shape).clone() for m in self.mean]

    def outputs(self, parameters, x):
        """The outputs (R, rows, columns) of all networks on a batch."""
        pairs, a = list(zip(parameters[::2], parameters[1::2], strict=True)), x.expand(len(parameters[0]), *x.shape)
        for layer in range(self.depth):
            w, b = pairs.pop(0)
            a = torch.baddbmm(b[:, None], a, w.mT)
            if layer < self.depth - 1:
                if self.norm:
                    gain, shift = pairs.pop(0)
                    a = F.layer_norm(a, a.shape[-1:]) * gain[:, None] + shift[:, None]
                a = a.relu()
        return a


def like(values, p):
    """Numbers of the settings in the shape of a parameter."""
    return values.view(-1, *[1] * (p.ndim - 1))


def losses(outputs, y, log_scale):
    """The mean loss of each network."""
    if log_scale is None:
        each = F.cross_entropy(outputs.flatten(0, 1), y.repeat(len(outputs)), reduction="none")
        return each.view(len(outputs), -1).mean(1)
    return (0.5 * ((y - outputs) / log_scale.exp()[:, None, None]) ** 2).mean((1, 2)) + log_scale


def sampled(outputs, log_scale):
    """Labels that the networks draw for themselves: their mean losses."""
    held = outputs.detach()
    if log_scale is None:
        labels = torch.multinomial(held.softmax(-1).flatten(0, 1), 1)[:, 0]
        return F.cross_entropy(outputs.flatten(0, 1), labels, reduction="none").view(len(held), -1).mean(1)
    scale = log_scale.detach().exp()[:, None, None]
    return (0.5 * ((held + scale * torch.randn_like(held) - outputs) / scale) ** 2).mean((1, 2))


def train(task, sizes, units, nats, steps, norm, seed, temperature=0.05, prior=1.0):
    """Train AdamW at four rates and the rule at each k; (AdamW's best test NLL, those of the rule)."""
    (x, y), count = task.train, len(RATES) + len(units)
    size, number = len(y), len(RATES)
    q = Replicas(sizes, count, norm, seed)
    m, delta, start = q.mean, prior / size, [12 * i / size for i in q.fan_in]
    rate = torch.tensor([*RATES, *[1.0] * len(units)])
    k = torch.tensor([*[0.0] * number, *units])
    ours = torch.arange(count) >= number
    h = [torch.zeros_like(p) for p in m]
    sd = [torch.full_like(p, (size * (s + delta)) ** -0.5) for p, s in zip(m, start, strict=True)]
    log_scale = torch.zeros(count, requires_grad=True) if task.numbers else None
    moments = [[torch.zeros_like(p) for p in [*m, *([log_scale] if task.numbers else [])]] for _ in range(2)]
    generator = torch.Generator().manual_seed(seed)
    for t in range(steps):
        phi = torchngvi.networks.StepLength().share(t, steps)
        rows = torch.randint(size, (task.batch,), generator=generator)
        spread = temperature**0.5 * ours
        drawn = [(p + like(spread, p) * s * torch.randn_like(p)).requires_grad_() for p, s in zip(m, sd, strict=True)]
        outputs = q.outputs(drawn, x[rows])
        if t % EVERY == 0:
            seen = torch.autograd.grad(sampled(outputs, log_scale).sum(), drawn, retain_graph=True)
            for own, g, s, h0 in zip(h, seen, sd, start, strict=True):
                own.lerp_(task.batch * g * g, max(0.01, 4 / (t // EVERY + 4)))
                s.copy_((size * (own.clamp(min=h0) + delta)).rsqrt())
        wanted = [*drawn, *([log_scale] if task.numbers else [])]
        gradients = list(torch.autograd.grad(losses(outputs, y[rows], log_scale).sum(), wanted))
        for j, p in enumerate(m):
            gradients[j] = gradients[j] + delta * p * like(ours, p)
        moves = []
        for g, first, second in zip(gradients, *moments, strict=True):
            first.lerp_(g, 0.1)
            second.lerp_(g * g, 0.001)
            moves.append(-first / (1 - 0.9 ** (t + 1)) / ((second / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8))
        kl = sum((0.5 * (c + delta) * u * u).flatten(1).sum(1) for c, u in zip(h, moves, strict=False))
        length = torch.where(ours, (nats / steps**0.5 * phi**2 / kl.clamp_min(1e-30)).sqrt(), rate * phi)
        with torch.no_grad():
            if task.numbers:
                log_scale += torch.where(ours, 1e-2, rate * phi) * moves[-1]
            for pair, nu in enumerate(q.scales):
                w, b = moves[2 * pair : 2 * pair + 2]
                norms = (w.square().sum(2) if w.ndim > 2 else w.square()) + b.square()
                longest = like(k, norms) / steps**0.5 * phi * nu * norms.clamp_min(1e-30).rsqrt()
                share = torch.where(like(ours, norms), torch.minimum(longest, like(length, norms)), like(length, norms))
                decay = like(torch.where(ours, 0.0, 0.01 * rate * phi), share)
                for p, u in ((m[2 * pair], w), (m[2 * pair + 1], b)):
                    wide = [each[..., None] if u.ndim > 2 else each for each in (share, decay)]
                    p.mul_(1 - wide[1]).add_(wide[0] * u)
    return judge(task, q, sd, log_scale, number)


@torch.no_grad()
def judge(task, q, sd, log_scale, number):
    """The test NLL with the temperature and the factor of the noise that validation data prefer."""
    factors = [1.0] if log_scale is None else networks.Gaussian.factors
    best, found = torch.full((len(q.mean[0]),), math.inf), torch.zeros(len(q.mean[0]))
    for temperature in TEMPERATURES:
        drawn = [
            [p + temperature**0.5 * s * torch.randn_like(p) for p, s in zip(q.mean, sd, strict=True)]
            for _ in range(DRAWS if temperature else 1)
        ]
        parts = [(torch.stack([q.outputs(each, x) for each in drawn]), y) for x, y in (task.val, task.test)]
        for factor in factors:
            nll, test = (negative_log_likelihood(outputs, y, log_scale, factor) for outputs, y in parts)
            nll = nll.nan_to_num(math.inf)
            if temperature:
                nll[:number] = math.inf  # AdamW is at its mean
            better = nll < best
            best, found = torch.where(better, nll, best), torch.where(better, test, found)
    return found[best[:number].argmin()].item(), found[number:]


def negative_log_likelihood(outputs, y, log_scale, factor):
    """Of each network, of the mean density over draws."""
    if log_scale is None:
        each = outputs.log_softmax(-1).gather(-1, y[None, None, :, None].expand(*outputs.shape[:3], 1))[..., 0]
    else:
        each = torch.distributions.Normal(outputs, factor * log_scale.exp()[:, None, None]).log_prob(y)[..., 0]
    return math.log(len(each)) - each.logsumexp(0).mean(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["power", "bike", "energy", "digits"])
    parser.add_argument("--hidden", type=int, nargs="+", default=[50])
    parser.add_argument("--norm", action="store_true", help="LayerNorm after each hidden layer")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--units", type=float, nargs="+", default=[0.35, 0.7, 1.0, 1.4, 2.0, 2.8], help="k")
    parser.add_argument("--nats", type=float, default=torchngvi.networks.StepLength().nats, help="c")
    options = parser.parse_args()
    for name in options.tasks:
        found = []
        for seed in options.seeds:
            task = networks.load(name, seed)
            sizes = [task.train[0].shape[1], *options.hidden, 1 if task.numbers else int(task.train[1].max()) + 1]
            found.append(train(task, sizes, options.units, options.nats, options.steps, options.norm, seed))
        adamw = sum(best for best, _ in found) / len(found)
        ours = sum(row for _, row in found) / len(found)
        each = " ".join(f"{k:g}: {nll - adamw:+.3f}" for k, nll in zip(options.units, ours.tolist(), strict=True))
        print(f"{name:12s} AdamW {adamw:.3f}   by k  {each}", flush=True)


if __name__ == "__main__":
    main()
