"""IFVB, AIFVB and rivals from the letters of the paper: α, c', ε, c_β, β, S, ω and one source of all draws."""

import copy

import torch
from torch.optim.lr_scheduler import LambdaLR

from torchngvi import ifvb
from torchngvi.methods import usual_estimator
from torchngvi.rules import ExponentialAverage
from torchngvi.stepsizes import Clip, Constant, KLRadius, PowerSchedule, Shortest

LEARNT = ("samples", "eps", "c_beta", "beta", "warmup")


def PreconditionedVI(q, metric, lr=1.0, *, averaging=None, **settings):  # noqa: N802  in the place of a constructor
    """The metric and the estimator with these settings, and a schedule that moves on with each step."""
    draws = settings.pop("generator", None)
    if draws is None:
        draws = torch.Generator(q.vector.device).manual_seed(int(torch.randint(2**62, ())))
    alpha, offset = settings.pop("alpha", 0.75), settings.pop("offset", 100.0)
    metric = copy.copy(metric)
    metric.generator, metric.warmup = draws, settings.pop("warmup", metric.warmup)
    estimator = copy.copy(settings.pop("estimator", None)) or usual_estimator([q])
    estimator.generator = draws
    radius, clip, weight = settings.pop("radius", 0.1), settings.pop("clip", None), settings.pop("momentum", 0.0)
    limits = [KLRadius(radius)] if radius and metric.natural else []
    limits += [Clip(clip)] if clip else []
    parts = {
        "estimator": estimator,
        "step_size": Shortest(*limits) if limits else Constant(),
        "momentum": ExponentialAverage(weight) if weight else None,
    }
    assert not settings, f"{settings} are not handed on"
    if averaging is None:
        opt = ifvb.PreconditionedVI(q, metric, lr, **parts)
    else:
        opt = ifvb.AIFVB(q, lr, metric=metric, averaging=averaging, **parts)
    opt.schedule = schedule = LambdaLR(opt, PowerSchedule(alpha, offset))
    opt.register_step_post_hook(lambda *_: schedule.step())
    return opt


def IFVB(q, lr=1.0, **settings):  # noqa: N802
    """Algorithm 1."""
    learnt = {"beta": (settings.get("alpha", 0.75) - 0.5) / 2}
    learnt |= {name: settings.pop(name) for name in LEARNT if name in settings}
    return PreconditionedVI(q, ifvb.Recursive(**learnt), lr, **settings)


def AIFVB(q, lr=1.0, *, w=2.0, burn_in=0, fisher_at_average=True, **settings):  # noqa: N802
    """Algorithm 2."""
    return IFVB(q, lr, averaging=ifvb.Averaging(w, burn_in, metric_at_average=fisher_at_average), **settings)
