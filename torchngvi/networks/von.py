"""Named optimizers, which need no hooks in sight: variational online Newton, IVON and VOGN."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchngvi.arguments import is_number, read_count, read_instance, read_list, read_number, shown
from torchngvi.errors import InputError
from torchngvi.networks.attached import Attachment, radius_of
from torchngvi.networks.curvatures import Curvature, ExampleGradients, Reparametrized, SampledLabels
from torchngvi.networks.layout import StepLength, matched, trainable, unwrapped
from torchngvi.networks.posterior import NetworkGaussian
from torchngvi.networks.weights import NUM_DATA


class NaturalMomentum(Optimizer):
    """What the named optimizers are made of: the natural gradient of the mean with momentum, and all state in one.

    ḡ ← β ḡ + (1 - β) g,   m ← m - lr clip((ḡ/(1 - βᵗ) + δm)/(h + δ))
    """

    def __init__(
        self,
        q: NetworkGaussian,
        lr: float,
        beta: float,
        curvature: Curvature,
        radius: float = math.inf,
        steps: int | None = None,
    ) -> None:
        lr = read_number("lr", lr, "is the length of a step", at_least=0)
        beta = read_number("beta", beta, at_least=0, below=1)
        self.q, self.clip, self.factor = q, math.inf, 1.0
        super().__init__(q.parameters_of_network, {"lr": lr, "momentum": beta})  # as schedulers that cycle it call it
        self.attachment = Attachment([self], q, radius, curvature, prior_in_gradient=False, steps=steps)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state up; torch calls it when one is loaded, which may be of the release that said beta."""
        super().__setstate__(state)
        for group in self.param_groups:
            if "beta" in group:
                group["momentum"] = group.pop("beta")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the mean by one step, and return what a closure returned that evaluates the loss at the draw."""
        if not hasattr(self, "q"):
            raise InputError(
                f"A copy of {type(self).__name__} has no posterior; copy q (copy.deepcopy(optimizer.q)), and make "
                "another optimizer of the copy."
            )
        loss = None if closure is None else closure()
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        for family in self.q.each():
            parameters, each = family.parameters_of_network, zip(family.parameters_of_network, family.mean, strict=True)
            forces = [self._average(p, m, group_of[p]["momentum"]) for p, m in each]
            named = zip(family.names, forces, parameters, strict=True)
            family.add_prior_({name: force for name, force, p in named if p.grad is not None}, family.mean)
            steps = family.natural(forces)
            if math.isfinite(self.clip):
                torch._foreach_clamp_min_(steps, -self.clip)
                torch._foreach_clamp_max_(steps, self.clip)
            torch._foreach_mul_(steps, [-self.factor * float(group_of[p]["lr"]) for p in parameters])
            torch._foreach_add_([p.detach() for p in parameters], steps)
        return loss

    def _average(self, p: Tensor, mean: Tensor, beta: float) -> Tensor:
        """The averaged gradient; nothing for a parameter that was not used."""
        if p.grad is None:
            return torch.zeros_like(mean)
        state = self.state[p]
        if not state:
            state["step"], state["momentum"] = 0, torch.zeros_like(mean)
        state["step"] += 1
        state["momentum"].mul_(beta).add_(p.grad.to(mean), alpha=1 - beta)
        return state["momentum"] / (1 - beta ** state["step"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer with that of the posterior, all but the network's."""
        return {**super().state_dict(), "posterior": self.q.state_dict(), "attachment": self.attachment.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state up again, and the posterior with it."""
        own = dict(state_dict)
        self.q.load_state_dict(own.pop("posterior"))
        self.attachment.load_state_dict(own.pop("attachment"))
        super().load_state_dict(own)


class VON(NaturalMomentum):
    """Variational online Newton for a network in one line: natural steps of mean and precision, two rates.

    The mean moves along the natural gradient with momentum, no further than a radius (see :func:`attach`); AdamW with
    `attach` moves it as well and costs less.

    Args:
        model: the network, or its posterior from :func:`torchngvi.network` where its defaults are not wanted.
        num_data: the number of independent labels in the training data; None with a posterior.
        lr: the length of the step before the radius shortens it, which a scheduler may change.
        beta: of the momentum.
        steps, radius, curvature: as in :func:`attach`.
        bayesian: a pattern of names, ``"head.*"``, of the parameters that are uncertain and that VON moves, of a last
            layer of 2,000 weights at most: one block with a full covariance.  The others need an optimizer of their
            own.  By default all parameters, each weight by itself.

    Raises:
        InputError: as :func:`torchngvi.network` and :func:`attach` do.

    >>> model = nn.Linear(2, 3)
    >>> optimizer = VON(model, num_data=100, steps=10)
    >>> x, y = torch.randn(20, 2), torch.randint(3, (20,))
    >>> for _ in range(10):
    ...     optimizer.zero_grad()
    ...     nn.functional.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    >>> optimizer.q.draw
    10
    """

    def __init__(
        self,
        model: nn.Module | NetworkGaussian,
        num_data: int | None = None,
        lr: float = 1.0,
        beta: float = 0.9,
        steps: int | None = None,
        radius: float | None = None,
        curvature: Curvature | None = None,
        bayesian: str | None = None,
    ) -> None:
        length, q = radius_of(steps, radius, StepLength()), _posterior(model, num_data, bayesian)
        curvature = SampledLabels() if curvature is None else curvature
        read_instance("curvature", curvature, Curvature, "is a way to observe it, such as SampledLabels(), or None")
        super().__init__(q, lr, beta, curvature, length, steps)


class IVON(NaturalMomentum):
    """The improved variational online Newton optimizer by its published steps (Shen et al. 2024), for comparison.

    The curvature is the reparametrised one, ĥ = g ε/σ, and the steps equal those of the package ivon-opt 0.1.3 with one
    draw a step, but for the noise itself.  `VON` and `attach` leave less to choose.

    Args:
        model: the network.
        num_data: the effective sample size N.
        lr: the learning rate, multiplied by h₀ + δ as there.
        hess_init: the curvature h₀ to begin with.
        betas: of the momentum and of the curvature.
        weight_decay: δ; the precision of the prior is N δ.
        clip_radius: the largest change of a weight, over the learning rate.

    Raises:
        InputError: as :func:`torchngvi.network` does.

    >>> model = nn.Linear(2, 3)
    >>> IVON(model, num_data=100, lr=0.1).q.draw
    0
    """

    def __init__(
        self,
        model: nn.Module,
        num_data: int,
        lr: float,
        hess_init: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.99999),
        weight_decay: float = 1e-4,
        clip_radius: float = math.inf,
    ) -> None:
        q = _published(model, num_data, hess_init, betas, weight_decay)
        clip_radius = read_number("clip_radius", clip_radius, "bounds the change of a weight", above=0, infinite=True)
        super().__init__(q, lr, betas[0], Reparametrized(1 - betas[1]))
        self.clip, self.factor = clip_radius, hess_init + weight_decay


class VOGN(NaturalMomentum):
    """Variational online Gauss-Newton by its published steps (Khan et al. 2018), for comparison.

        h ← (1 - β₂)h + β₂ Σᵢ gᵢ²/B,   m ← m - lr (g + δm)/(h + δ),   σ² = 1/(N(h + δ))

    The curvature is that of single examples, which `backward` takes in the place of ``loss.backward()``.  Sampled
    labels (`VON`) cost less, and are the Fisher information where this is the empirical one.

    Args:
        model, num_data, weight_decay: as in `IVON`.
        lr: the learning rate.
        hess_init: the curvature h to begin with.
        betas: of the momentum, 0 for the steps above, and 1 - β₂ of the curvature.

    Raises:
        InputError: as :func:`torchngvi.network` does.

    >>> model = nn.Linear(2, 3)
    >>> optimizer = VOGN(model, num_data=100, lr=0.01)
    >>> x, y = torch.randn(20, 2), torch.randint(3, (20,))
    >>> optimizer.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
    >>> optimizer.step()
    >>> optimizer.q.draw
    1
    """

    def __init__(
        self,
        model: nn.Module,
        num_data: int,
        lr: float,
        hess_init: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-4,
    ) -> None:
        q = _published(model, num_data, hess_init, betas, weight_decay)
        self.examples = ExampleGradients(1 - betas[1])
        super().__init__(q, lr, betas[0], self.examples)

    def backward(self, losses: Tensor) -> None:
        """Compute the gradients of single examples, in the place of ``loss.backward()``, from their losses, (B,)."""
        self.examples.backward(self.q, losses)


def _published(
    model: nn.Module, num_data: int, hess_init: float, betas: tuple[float, float], weight_decay: float
) -> NetworkGaussian:
    """The posterior of a published method, at T = 1, with a curvature to begin with."""
    hess_init = read_number("hess_init", hess_init, "is the curvature to begin with", at_least=0)
    what = "are two numbers, of the momentum and of the curvature, in [0, 1)"
    pair = read_list("betas", betas, what)
    if len(pair) != 2 or not all(is_number(beta, at_least=0, below=1) for beta in pair):
        raise InputError(f"betas {what}; got {shown(betas)}.")
    weight_decay = read_number("weight_decay", weight_decay, "is δ, the precision of the prior a datum,", above=0)
    num_data = read_count("num_data", num_data, NUM_DATA)
    q = NetworkGaussian(model, num_data, prior_precision=weight_decay * num_data, temperature=1.0)
    for family in q.each():
        family.start = [hess_init] * len(family.names)
    return q


def _posterior(model: nn.Module | NetworkGaussian, num_data: int | None, bayesian: str | None) -> NetworkGaussian:
    """The posterior that was given, or a new one."""
    if isinstance(model, NetworkGaussian):
        for name, value in {"num_data": num_data, "bayesian": bayesian}.items():
            if value is not None:
                raise InputError(
                    f"{name} is a part of the posterior already; leave it out, or give the network itself."
                )
        return model
    if num_data is None:
        raise InputError("num_data, the number of labels in the training data, is missing.")
    if bayesian is None:
        return NetworkGaussian(model, num_data)
    if not isinstance(bayesian, str):
        raise InputError(f"bayesian is a pattern of names of parameters, such as 'head.*'; got {bayesian!r}.")
    matched(list(trainable(unwrapped(model))), {bayesian: "dense"}, "bayesian")
    return NetworkGaussian(model, num_data, {bayesian: "dense"})
