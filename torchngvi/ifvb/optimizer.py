"""IFVB and AIFVB: stochastic natural gradients over a flat vector λ, the inverse Fisher matrix by recursion.

    1. g = -∇LB at λ⁽ˢ⁾, from B draws
    2. S fresh draws θ ~ q, at λ⁽ˢ⁾ or at the average, and the inverse P of εI + Σ φφᵀ + Σ β_j ZZᵀ takes them in
    3. λ⁽ˢ⁺¹⁾ = λ⁽ˢ⁾ - α_{s+1} t P g,      α_k = c/(c' + k)^α
    4. AIFVB: the average moves towards λ⁽ˢ⁺¹⁾

(Godichon-Baggioni, Nguyen and Tran 2023, Algorithms 1 and 2.)  Draws of 1 and 2 are independent.  With another
preconditioner the same loop is the exact natural gradient, a damped batch Fisher matrix, the ordinary gradient or Adam.
"""

import sys
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import FullPrecision
from torchngvi.errors import InputError, PairError, RejectedStepWarning
from torchngvi.ifvb.averaging import Averaging
from torchngvi.ifvb.estimators import ControlVariate, GradientEstimator, Pathwise
from torchngvi.posteriors.flat import FlatPosterior
from torchngvi.ifvb.preconditioners import Preconditioner, Recursive

_WARM_UP_AT_ONCE = 256  # scores
RADIUS = 0.1  # nats


class Report(NamedTuple):
    """What the last step did."""

    lower_bound: Tensor  # the estimate at λ before the step, (*batch,)
    norm: Tensor  # of the direction before clipping, (*batch,)
    clipped: Tensor  # (*batch,)
    accepted: Tensor  # (*batch,)
    step: float  # α_k


class PreconditionedVI(torch.optim.Optimizer):
    """λ ← λ - α_k (direction), with direction, gradient, schedule and averaging as parts.

    A step whose result is not finite or leaves the family's domain is not taken, member by member; it is
    counted in ``rejections`` and, on the CPU, warned of once.

    Args:
        family: q, whose ``vector`` is updated in place.
        preconditioner: from `torchngvi.ifvb.preconditioners`.
        lr: c of α_k = c/(c' + k)^α.
        alpha: α, in [0, 1]; 0 is a constant step.
        offset: c', not negative.
        estimator: of the gradient; by default `Pathwise(10)` where the family allows it, else `ControlVariate(100)`.
        averaging: of the iterates; None for none.
        fisher_at_average: take the Fisher draws at the average of the iterates.
        warmup: scores at the start before the first step, for preconditioners that remember; by default
            max(2D, 1000).
        clip: largest norm of a direction.
        radius: largest KL divergence of a step, ½ α_k² (direction)ᵀ∇L in the estimated metric; longer ones are
            shortened to it. None for no limit, as in the paper; `Identity` and `Adam` have no such metric and no limit.
        momentum: ω of M ← ωM + (1 - ω) direction, in [0, 1); the step then goes along M.
        generator: of all draws; by default one seeded from torch's.

    Raises:
        InputError: a value out of range.
        PairError: parts that cannot work together.

    >>> from torchngvi.ifvb import Beta, ClosedForm, Exact
    >>> q, target = Beta(torch.tensor([5.0, 45.0]).double()), Beta(torch.tensor([58.0, 144.0]).double())
    >>> opt = PreconditionedVI(q, Exact(), alpha=0.0, offset=0.0, radius=None, estimator=ClosedForm())
    >>> _ = opt.step(lambda lam: -torch.distributions.kl_divergence(
    ...     torch.distributions.Beta(*lam), torch.distributions.Beta(*target.vector)))
    >>> q.vector.round(decimals=6).tolist()  # a full natural step is exact
    [58.0, 144.0]
    """

    def __init__(
        self,
        family: FlatPosterior,
        preconditioner: Preconditioner,
        lr: float = 1.0,
        *,
        alpha: float = 0.75,
        offset: float = 100.0,
        estimator: GradientEstimator | None = None,
        averaging: Averaging | None = None,
        fisher_at_average: bool = False,
        warmup: int | None = None,
        clip: float | None = None,
        radius: float | None = RADIUS,
        momentum: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(family, FlatPosterior):
            raise InputError(
                f"{type(self).__name__} updates a family of torchngvi.ifvb, such as Beta; got {type(family).__name__}. "
                "For a Gaussian posterior use torchngvi.fit, VN or SRVN."
            )
        _check(lr=lr, alpha=alpha, offset=offset, warmup=warmup, clip=clip, radius=radius, momentum=momentum)
        if averaging is not None and not family.flat:
            raise PairError(
                f"the average of points of the manifold of {type(family).__name__} is no point of it. Use IFVB."
            )
        if fisher_at_average and averaging is None:
            raise PairError("fisher_at_average needs an average: give averaging=Averaging().")
        self.family, self.preconditioner, self.averaging = family, preconditioner, averaging
        if estimator is None:
            estimator = Pathwise(10) if family.reparametrised else ControlVariate(100)
        self.estimator, self.fisher_at_average = estimator, fisher_at_average
        self.warmup = max(2 * family.size, 1000) if warmup is None else warmup
        device = family.vector.device
        if generator is None:
            generator = torch.Generator(device).manual_seed(int(torch.randint(2**62, ())))
        self.generator = generator
        self.last: Report | None = None
        self._target: tuple[Any, Any] = (None, None)
        self._warned = False
        group = {"params": [family.vector]}
        defaults = {"lr": lr, "alpha": alpha, "offset": offset, "clip": clip, "radius": radius, "momentum": momentum}
        super().__init__([group], defaults)
        self.state[family.vector] = self._fresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One family, one optimizer.

        Raises:
            InputError: a second group.
        """
        if self.param_groups:
            raise InputError(f"{type(self).__name__} updates one family. Use an optimizer for each.")
        super().add_param_group(param_group)

    def _fresh(self) -> dict[str, Any]:
        lam = self.family.vector.detach()
        members = torch.zeros_like(lam[..., 0])
        return {
            "iterations": 0,
            "fisher_draws": 0,
            "log_joint_draws": 0,
            "rejections": members,
            "clips": members.clone(),
            "momentum": torch.zeros_like(lam),
            "average": lam.clone(),
            "weight": 0.0,
            "preconditioner": self.preconditioner.init(self.family),
            "estimator": self.estimator.init(self.family),
        }

    # -------------------------------------------------------------------------------- step

    @torch.no_grad()
    def step(self, closure: Any = None) -> Tensor:  # type: ignore[override]
        """One iteration.

        Args:
            closure: a `Target` such as `LogJoint` or `DataLogJoint`, or a function of θ (B, *batch, d) -> (B, *batch),
                the log joint, which goes up; with `ClosedForm` the lower bound as a function of λ.

        Returns:
            The estimate of -LB before the step, summed over batch members, 0-d.

        Raises:
            InputError: nothing to step on.
        """
        if closure is None:
            raise InputError(f"{type(self).__name__}.step takes the log joint, a function of theta; got nothing.")
        with FullPrecision(self.family.vector.device.type):
            return self._step(closure)

    def _step(self, source: Any) -> Tensor:
        family, state, group = self.family, self.state[self.family.vector], self.param_groups[0]
        lam, memory = family.vector, state["preconditioner"]
        if self._target[0] is not source:
            self._target = (source, self.estimator.prepared(source))

        # 1. the gradient
        estimate = self.estimator(family, self._target[1], state["estimator"], self.generator)
        gradient = -family.projected(lam, estimate.gradient)
        state["log_joint_draws"] += estimate.draws

        # 2. the Fisher matrix, from draws of their own
        if state["iterations"] == 0 and self.preconditioner.remembers:
            for start in range(0, self.warmup, _WARM_UP_AT_ONCE):
                self._absorb(state, min(_WARM_UP_AT_ONCE, self.warmup - start))
        if self.preconditioner.samples:
            self._absorb(state, self.preconditioner.samples)

        # 3. the step
        direction = family.projected(lam, self.preconditioner.direction(memory, gradient, family))
        norm = torch.linalg.vector_norm(direction, dim=-1)
        alpha_k = group["lr"] * (group["offset"] + state["iterations"] + 1) ** -group["alpha"]
        share = torch.ones_like(norm)
        if group["clip"]:
            share = torch.where(norm > group["clip"], group["clip"] / norm, share)
        if group["radius"] and self.preconditioner.natural:
            divergence = 0.5 * alpha_k**2 * (direction * gradient).sum(-1)
            short = divergence <= group["radius"]  # false for a NaN of overflow, which share then carries: no step
            share = torch.where(short, 1.0, (group["radius"] / divergence).sqrt()).minimum(share)
        clipped = share < 1
        direction = direction * share[..., None]
        omega = group["momentum"]
        heading = omega * family.projected(lam, state["momentum"]) + (1 - omega) * direction if omega else direction
        new = family.retracted(lam, -alpha_k * heading)
        accepted = new.isfinite().all(-1) & heading.isfinite().all(-1) & family.in_domain(new)
        lam.copy_(torch.where(accepted[..., None], new, lam))
        if omega:
            state["momentum"] = torch.where(accepted[..., None], heading, state["momentum"])
        state["rejections"] += ~accepted
        state["clips"] += clipped

        # 4. the average
        if self.averaging is not None:
            self.averaging.update(state, lam, state["iterations"])
        state["iterations"] += 1
        self.last = Report(estimate.lower_bound, norm, clipped, accepted, alpha_k)
        self._warn_if_rejected(accepted)
        return -estimate.lower_bound.sum()

    def _absorb(self, state: dict[str, Any], count: int) -> None:
        """Fresh draws at λ or at the average, and their scores there."""
        at = state["average"] if self.fisher_at_average else self.family.vector
        scores = self.family.score(self.family.sample(count, self.generator, at), at)
        self.preconditioner.absorb(state["preconditioner"], scores, self.generator)
        state["fisher_draws"] += count

    def _warn_if_rejected(self, accepted: Tensor) -> None:
        """Once, and where asking costs nothing."""
        if accepted.device.type != "cpu" or self._warned or bool(accepted.all()):
            return
        self._warned = True
        depth, frame = 1, sys._getframe()
        while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("torchngvi", "torch"):
            depth, frame = depth + 1, frame.f_back
        warnings.warn(
            f"{type(self).__name__}: a step of {type(self.family).__name__} was not finite or left its domain "
            f"({self.family.domain}); lambda was left as it is, and steps like it will be skipped without another "
            "warning. Use a smaller lr, a clip, or a larger eps or warmup.",
            RejectedStepWarning,
            stacklevel=depth,
        )

    # -------------------------------------------------------------------------------- what is known

    @property
    def memory(self) -> dict[str, Any]:
        """The state between two steps: counts, averages, and the preconditioner's."""
        return self.state[self.family.vector]

    @property
    def average(self) -> Tensor:  # (*batch, D)
        """The average of the iterates, the estimate AIFVB reports.

        Raises:
            PairError: an optimizer that does not average.
        """
        if self.averaging is None:
            raise PairError(f"this {type(self).__name__} keeps no average. Use AIFVB, or averaging=Averaging().")
        return self.memory["average"]

    @property
    def rejections(self) -> int:
        """Steps not taken so far, over all batch members."""
        return int(self.memory["rejections"].sum())

    def inverse_fisher(self) -> Tensor:  # (*batch, D, D)
        """The estimate t P of I_F⁻¹.

        Raises:
            PairError: a preconditioner that keeps no inverse.
        """
        rule: Any = self.preconditioner
        if not hasattr(rule, "inverse"):
            raise PairError(f"{type(rule).__name__} keeps no inverse Fisher matrix. Use Recursive or MatrixFree.")
        return rule.inverse(self.memory["preconditioner"])

    # -------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the state of the generator."""
        self.memory["generator"] = self.generator.get_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the draws go on where they were."""
        super().load_state_dict(state_dict)
        saved = self.memory.pop("generator", None)
        if saved is not None:
            self.generator.set_state(saved.to(device="cpu", dtype=torch.uint8))

    def __getstate__(self) -> dict[str, Any]:
        own = ("family", "preconditioner", "averaging", "estimator", "fisher_at_average", "warmup", "_warned")
        generator = {"device": self.generator.device, "state": self.generator.get_state()}
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}, "generator": generator}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.last, self._target = None, (None, None)
        generator = state.get("generator")
        if isinstance(generator, dict):
            fresh = torch.Generator(generator["device"])
            fresh.set_state(generator["state"])
            state = {**state, "generator": fresh}
        super().__setstate__(state)


def _check(**values: Any) -> None:
    """The ranges of what every optimizer takes."""
    if not values["lr"] > 0:
        raise InputError(f"lr is c of c/(c' + k)^alpha and must be positive; got {values['lr']}.")
    if not 0 <= values["alpha"] <= 1:
        raise InputError(f"alpha is the power of the decay, in [0, 1]; got {values['alpha']}.")
    if not values["offset"] >= 0:
        raise InputError(f"offset is c' of c/(c' + k)^alpha and must not be negative; got {values['offset']}.")
    if values["warmup"] is not None and not values["warmup"] >= 0:
        raise InputError(f"warmup counts scores before the first step, not negative; got {values['warmup']}.")
    if values["clip"] is not None and not values["clip"] > 0:
        raise InputError(f"clip is the largest norm of a direction, positive; got {values['clip']}.")
    if values["radius"] is not None and not values["radius"] > 0:
        raise InputError(f"radius is the largest KL divergence of a step, positive; got {values['radius']}.")
    if not 0 <= values["momentum"] < 1:
        raise InputError(f"momentum must lie in [0, 1); got {values['momentum']}.")


def _recursion(alpha: float, beta: float | None, c_beta: float | None, samples: int, eps: float | None) -> Recursive:
    """The recursion with β in the range the theory wants."""
    if not 0.5 < alpha < 1:
        raise InputError(f"alpha must lie in (1/2, 1); got {alpha}.")
    beta = (alpha - 0.5) / 2 if beta is None else beta
    if c_beta != 0 and not 0 < beta < alpha - 0.5:
        raise InputError(f"beta must lie in (0, alpha - 1/2), here (0, {alpha - 0.5:.3g}); got {beta}.")
    return Recursive(samples, eps=eps, c_beta=c_beta, beta=beta)


class IFVB(PreconditionedVI):
    """Inversion-free variational Bayes (Godichon-Baggioni, Nguyen and Tran 2023, Algorithm 1).

    For a family without a known Fisher matrix: flows, mixtures, copulas.  For a Gaussian the exact natural
    gradient is cheaper and free of noise: `torchngvi.fit`, or the preconditioner `Exact`.

    Args:
        family: q.
        lr, alpha, offset: α_k = lr/(offset + k)^alpha, alpha in (½, 1). With an accurate metric a natural step
            of 1 is a full one: keep lr/offset^alpha well below it.
        samples: S, Fisher draws an iteration; they cost no likelihood.
        eps, c_beta, beta: see `Recursive`; beta is (alpha - ½)/2 if not given.
        estimator, warmup, clip, radius, momentum, generator: see `PreconditionedVI`.

    Raises:
        InputError: a value out of range, or more memory than there is.

    >>> import torch
    >>> from torchngvi.ifvb import Beta, ControlVariate
    >>> q = Beta(torch.tensor([50.0, 100.0]).double())
    >>> opt = IFVB(q, estimator=ControlVariate(200), generator=torch.Generator().manual_seed(0))
    >>> for _ in range(300):
    ...     loss = opt.step(lambda theta: (57 * theta.log() + 143 * torch.log1p(-theta))[..., 0])
    >>> round((q.vector[0] / q.vector.sum()).item(), 2)  # the posterior is Beta(58, 144)
    0.29
    """

    def __init__(
        self,
        family: FlatPosterior,
        lr: float = 1.0,
        *,
        alpha: float = 0.75,
        offset: float = 100.0,
        samples: int = 10,
        eps: float | None = None,
        c_beta: float | None = None,
        beta: float | None = None,
        estimator: GradientEstimator | None = None,
        warmup: int | None = None,
        clip: float | None = None,
        radius: float | None = RADIUS,
        momentum: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(
            family,
            _recursion(alpha, beta, c_beta, samples, eps),
            lr,
            alpha=alpha,
            offset=offset,
            estimator=estimator,
            warmup=warmup,
            clip=clip,
            radius=radius,
            momentum=momentum,
            generator=generator,
        )


class AIFVB(PreconditionedVI):
    """IFVB with a weighted average of the iterates as its estimate (Algorithm 2): see ``average``.

    Args:
        family, lr, alpha, offset, samples, eps, c_beta, beta, estimator, warmup, clip, radius, momentum, generator:
            see `IFVB`.
        w: power of the logarithm in the weights; 2 in the paper, 0 is the plain mean.
        burn_in: iterations before the average begins. Early iterates keep their weight for long: the average
            is behind the iterate until the run is in its noise.
        fisher_at_average: Fisher draws at the average (Eq 4.8), or at the iterate (Remark 4.2).

    Raises:
        InputError: a value out of range, or more memory than there is.
        PairError: a family on a manifold.
    """

    def __init__(
        self,
        family: FlatPosterior,
        lr: float = 1.0,
        *,
        alpha: float = 0.75,
        offset: float = 100.0,
        w: float = 2.0,
        burn_in: int = 0,
        fisher_at_average: bool = True,
        samples: int = 10,
        eps: float | None = None,
        c_beta: float | None = None,
        beta: float | None = None,
        estimator: GradientEstimator | None = None,
        warmup: int | None = None,
        clip: float | None = None,
        radius: float | None = RADIUS,
        momentum: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(
            family,
            _recursion(alpha, beta, c_beta, samples, eps),
            lr,
            alpha=alpha,
            offset=offset,
            estimator=estimator,
            averaging=Averaging(w, burn_in),
            fisher_at_average=fisher_at_average,
            warmup=warmup,
            clip=clip,
            radius=radius,
            momentum=momentum,
            generator=generator,
        )
