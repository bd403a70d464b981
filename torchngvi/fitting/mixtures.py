"""The engine of `torchngvi.fit` for a `Mixture`: natural-gradient steps of all components and of the weights.

Every step is that of Lin, Khan and Schmidt (2019), see `torchngvi.models.MixtureIntegrand`, over the same draws z for
all steps and components.  The curve of the components stays positive definite, so that no step has to be tried; what
keeps them in place is a trust in Fisher length, for each component and for the weights, which rest at first.  Where the
ELBO falls again and again the steps circle, and ρ is halved.

At the end the gradients of all components vanish and all E_k h are equal, h = log p - log q.  The second is what sees a
component that has lost its mode and its weight: the ELBO alone stands still without it.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.expectations import Stein
from torchngvi.expectations.draws import Fixed, drawn_seed
from torchngvi.fitting.checkpoints import copied, describe_optimizer, describe_problem
from torchngvi.fitting.fit import Request, tolerance_by_draws
from torchngvi.fitting.loop import Ending, Engine
from torchngvi.fitting.records import Record
from torchngvi.fitting.stopping import Criterion, Standing, Stop
from torchngvi.interfaces import Local, RootTangent, Rule, StepSize, Target
from torchngvi.models.log_joint import FullPrecision, MixtureIntegrand
from torchngvi.numerics.arrays import on_host
from torchngvi.numerics.linalg import finite
from torchngvi.optim import NaturalGradientVI
from torchngvi.optim.evaluating import UNWATCHED
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.mixture import Mixture, overlaps
from torchngvi.rules import LocalExponential, Retraction, VariationalNewton
from torchngvi.stepsizes import Constant, KLRadius


@dataclass(frozen=True)
class MixtureSettings:
    """The numbers of a fit of a mixture."""

    trust: float | None = 0.7  # Fisher length of a step, of each component and of the weights; None for no bound
    rest: int = 5  # steps before the weights move
    falls: tuple[int, int] = (2, 5)  # of the ELBO, among the last so many steps, that halve ρ
    fall: float = 0.02  # nats for a norm of 1, below which a fall is none: over fixed draws it is not monotone
    shortest: float = 2.0**-6  # ρ that is not halved
    draws: tuple[int, int] = (256, 4096)  # of a component at first, and at most
    growth: int = 4  # of the draws where fresh ones contradict them
    share: float = 0.1  # of the tolerance, to which the average over fixed draws is solved
    gone: float = 1e-6  # weight below which a component is left behind
    same: float = 0.95  # overlap from which two components are one
    entries: int = 2**24  # of all covariances of pairs together, up to which overlaps are asked for
    missed: float = 5.0  # nats of log p - log q above the ELBO at which q misses the density
    dense: float = 10.0  # nats, beside one a coordinate, below the largest density at a mean: further out is a tail


class Seen(NamedTuple):
    """What is seen of a mixture over draws of its components."""

    gains: Tensor  # E_k h, (K,)
    norms: Tensor  # of the natural gradient of each component, (K,)
    elbo: float  # Σ π_k E_k h, in nats
    norm: float  # of the worst component that has a weight, the gap of E_k h to the ELBO included
    error: float = 0.0  # standard error of the ELBO


def mixture_steps_of(request: Request) -> tuple["MixtureSteps", Criterion]:
    """Make the engine of a `Request` for a mixture, and what ends its run."""
    if request.optimizer is not None or request.batch_size is not None:
        raise InputError(
            "a Mixture has its own steps, of components and weights; leave optimizer= and batch_size= out, or make "
            "steps by an optimizer over q.components with MixtureIntegrand(q, log_joint)."
        )
    assert isinstance(request.q, Mixture)
    criteria = request.until_small(request.tolerance_or(lambda q: tolerance_by_draws(q, torch.inf)))
    return MixtureSteps(request.q, request.target, criteria.tolerance), criteria


def usual_rule(components: Gaussian) -> Rule:
    """The curve of the components: one that stays positive definite where these coordinates have one."""
    if RootTangent in components.takes:
        return LocalExponential()
    return Retraction() if components.structure.closed else VariationalNewton()


class MixtureSteps(Engine):
    """Steps of components and weights until all gradients vanish and all E_k h are equal."""

    name = "mixture"

    def __init__(self, q: Mixture, target: Target, tolerance: float, settings: MixtureSettings | None = None) -> None:
        super().__init__(q)
        self.engine_settings = numbers = settings or MixtureSettings()
        self.mixture, self.target, self.tolerance = q, target, tolerance
        self.integrand = MixtureIntegrand(q, target)
        trust, rule = numbers.trust, usual_rule(q.components)
        step_size: StepSize = Constant() if trust is None else KLRadius(0.5 * trust**2)
        self.draws = max(numbers.draws[0], 2 * q.components.structure.widest + 2)
        self.seed = drawn_seed()
        self.optimizer = NaturalGradientVI(q.components, rule, 1.0, step_size=step_size, estimator=self._estimator())
        self.optimizer.watch = UNWATCHED  # the mean of the last ELBOs judges the run
        self.evaluations = self.gradients = self.values = self.steps = 0
        self.elbos: list[float] = []  # of the last steps with this ρ and these draws
        self.origin = q.components.frame().mean.clone()
        self.step = 0.0
        self.fresh: Seen | None = None
        self._seen: Seen | None = None  # where q is now

    def _estimator(self) -> Stein:
        return Stein(Fixed(self.draws, seed=self.seed))

    @property
    def rho(self) -> float:
        """The largest ρ of a step."""
        return float(self.optimizer.param_groups[0]["lr"])

    # -------------------------------------------------------------------------------- the run

    @torch.no_grad()
    def advance(self) -> Standing:
        """A step, but for the first time and after more draws, and an evaluation; at a fixed point one more, fresh."""
        with FullPrecision(self.mixture.device.type):
            if self._seen is not None:
                self._take_step(self._seen)
            self.mark()
            seen = self._evaluated()
            self.fresh, lost = None, ""
            if seen.norm <= self.engine_settings.share * self.tolerance:
                self.fresh = self._on_fresh_draws()
                if self.fresh.norm > self.tolerance:
                    lost = self._grown()
        told = seen if self.fresh is None else self.fresh
        loss, spent = -self.target.temperature * seen.elbo, (self.evaluations, self.gradients)
        record = Record(spent[0], loss, told.norm, self.step, self.optimizer.rejections, spent[1], 0.0)
        known = torch.tensor(self.fresh is not None and self.fresh.norm <= self.tolerance, device="cpu")
        value = torch.tensor(loss, dtype=torch.float64, device="cpu")
        return Standing(record, known, value, spent, self.tolerance, lost=lost or _not_finite(seen))

    def _take_step(self, seen: Seen) -> None:
        """Of the components, and of the weights once the components are near their places."""
        self._halve_if_falling(seen)
        self.optimizer.step(self.integrand)
        assert self.optimizer.last is not None
        self.step = float(self.optimizer.last.rho.min())
        self.steps += 1
        if self.steps > self.engine_settings.rest:
            trust = torch.inf if self.engine_settings.trust is None else self.engine_settings.trust
            self.mixture.reweigh_(seen.gains.to(self.mixture.log_weights), self.rho, trust)

    def _halve_if_falling(self, seen: Seen) -> None:
        """Halve ρ where the ELBO fell twice in five steps, by more than nothing: they go round the fixed point."""
        most, among = self.engine_settings.falls
        self.elbos = [*self.elbos[-among:], seen.elbo]
        least = self.engine_settings.fall * min(seen.norm, 1.0) ** 2
        falls = sum(new < old - least for old, new in zip(self.elbos, self.elbos[1:], strict=False))
        if falls >= most and self.rho > self.engine_settings.shortest:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.5 * group["lr"]
            self.elbos = [seen.elbo]

    def _evaluated(self) -> Seen:
        """Over the fixed draws; the next step uses it."""
        status = self.optimizer.evaluate(self.integrand)
        self._count(self.draws)
        loss, norm2 = on_host(status.loss, status.norm2)
        self._seen = self._judged(-loss, norm2)
        return self._seen

    def _judged(self, gains: Tensor, norm2: Tensor, error: float = 0.0) -> Seen:
        """A component without a weight that gains less than the others is left behind, once it stands still."""
        weights = self.mixture.weights.cpu()
        elbo = weights @ gains
        gaps = torch.where((weights < self.engine_settings.gone) & (gains < elbo), 0.0, gains - elbo)
        norm = (norm2 + gaps.square()).max().sqrt()
        return Seen(gains, norm2.sqrt(), float(elbo), float(norm), error)

    def _on_fresh_draws(self) -> Seen:
        """On draws that were not fitted to, at least 1,024 of each component."""
        components, estimator = self.mixture.components, self._estimator().fresh(1)
        seen = estimator.see(components, self.integrand)
        packet = estimator.derivative_of_mean(components, seen)
        self._count(len(seen.energy))
        norm2 = components.norm2(Local(packet.a, packet.W))
        variance = seen.energy.var(0) / len(seen.energy)
        error = (self.mixture.weights.square() * variance).sum().sqrt()
        gains, norm2, error = on_host(-seen.energy.mean(0), norm2, error)
        return self._judged(gains, norm2, float(error))

    def _count(self, draws: int) -> None:
        self.evaluations += 1
        self.gradients += draws * len(self.mixture)

    def _grown(self) -> str:
        """More draws from here on; why not, where there are no more."""
        assert self.fresh is not None
        if self.draws >= self.engine_settings.draws[1]:
            return (
                f"because q is at the fixed point over {self.draws} draws of each component, which are the most, and "
                f"on fresh draws the norm is {self.fresh.norm:.2g} against a tolerance of {self.tolerance:.2g}: the "
                "log joint is far from Gaussian where the components are. More components, a warp or a larger "
                "tolerance may help."
            )
        self.draws = min(self.engine_settings.growth * self.draws, self.engine_settings.draws[1])
        self.optimizer.resample(self._estimator())
        self.elbos, self._seen = [], None
        return ""

    # -------------------------------------------------------------------------------- the end

    @torch.no_grad()
    def ending(self, stop: Stop | None, last: Standing) -> Ending:
        """The outcome, with what became of each component; the ELBO is that on fresh draws where it is known."""
        assert stop is not None
        loss, reason = last.record.loss, stop.reason
        if stop.converged and self.fresh is not None:
            loss = -self.target.temperature * self.fresh.elbo
            reason = self._why_converged(self.fresh)
        self.values += 2 * len(self.mixture)
        remarks = _remarks(
            self.mixture, self.target, self.origin, -loss / self.target.temperature, self.engine_settings
        )
        return Ending(stop.converged, reason + remarks, loss, last.record.norm, last.members)

    def _why_converged(self, fresh: Seen) -> str:
        """The reason of a run that has come to a fixed point."""
        q = self.mixture
        said = (
            f"all gradients vanish over {self.draws} draws of each component; on fresh draws their norm is "
            f"{fresh.norm:.2g} and the ELBO {fresh.elbo:.6g} ± {fresh.error:.1g}."
        )
        if len(q) == 1:
            return said
        held = q.weights.cpu() >= self.engine_settings.gone
        gap = float((fresh.gains - fresh.elbo)[held].abs().max())
        weights = _listed([f"{weight:.3g}" for weight in q.weights.tolist()])
        same = f"E_k[log p - log q] is the same for all components within {gap:.1g} nats"
        return f"{said} {same}. The weights are {weights}."

    def counted(self) -> tuple[int, int]:
        """Gradients and values of the log joint so far, those of the remarks at the end too."""
        return self.gradients, self.values

    # -------------------------------------------------------------------------------- checkpoints

    def settings(self) -> dict[str, str]:
        """The settings of the run: the problem, and the parts of the steps but for the draws, which grow."""
        parts = describe_optimizer(self.optimizer)
        own = {name: parts[name] for name in ("rule", "step_size")}
        return {"method": type(self).__name__, **describe_problem(self.mixture, self.target), **own}

    def state_dict(self) -> dict[str, Any]:
        """What an evaluation begins from; the seed stands for the draws."""
        return {
            "posterior": self.mixture.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "draws": (self.seed, self.draws),
            "counts": (self.evaluations, self.gradients, self.steps),
            "elbos": list(self.elbos),
            "origin": self.origin,
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, with the same draws."""
        self.mixture.load_state_dict(state["posterior"])
        self.optimizer.load_state_dict(copied(state["optimizer"]))
        self.seed, self.draws = state["draws"]
        self.optimizer.resample(self._estimator())
        self.evaluations, self.gradients, self.steps = state["counts"]
        self.elbos, self.origin, self.step = list(state["elbos"]), state["origin"].clone(), state["step"]
        self._seen = self.fresh = None


# What is said of a mixture at the end of a fit: which components have lost a weight, a place or a mode


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _components(which: list[int]) -> str:
    """Some of them, counted from 1."""
    return f"component{'s' * (len(which) > 1)} {_listed([str(k + 1) for k in which])}"


def _not_finite(seen: Seen) -> str:
    """Why no step can help, where an expectation is not finite."""
    bad = (~(finite(seen.gains) & finite(seen.norms))).nonzero().flatten().tolist()
    if not bad:
        return ""
    return (
        f"because log p - log q or its gradient is not finite at draws of {_components(bad)}: begin nearer to a mode, "
        "or narrower."
    )


def _remarks(q: Mixture, target: Target, origin: Tensor, elbo: float, numbers: MixtureSettings) -> str:
    """What became of the components, where it is not what a user expects."""
    said = ""
    weights = q.weights.cpu()
    gone = (weights < numbers.gone).nonzero().flatten().tolist()
    if gone:
        one = len(gone) == 1
        said += (
            f" {_components(gone).capitalize()} {'has' if one else 'have'} a vanishing weight "
            f"({float(weights[gone].max()):.1g}): without {'it' if one else 'them'} q is the same."
        )
    held = weights >= numbers.gone
    if len(q) > 1 and (len(q) * q.dim) ** 2 <= numbers.entries:
        near = (overlaps(q.components).cpu() > numbers.same) & held & held[:, None]
        for j, k in near.triu(1).nonzero().tolist():
            said += f" {_components([j, k]).capitalize()} have come to one place, where one of them would do."
    mean = q.components.frame().mean
    there, here = (target.log_joint(torch.cat([origin, mean])) / target.temperature).chunk(2)
    dense = there > torch.where(finite(here), here, -math.inf).max() - (numbers.dense + q.dim)  # no tail
    for k in (dense & (there - q.log_prob(origin) > elbo + numbers.missed)).nonzero().flatten().tolist():
        said += (
            f" Where {_components([k])} began the log joint is far above q: a mode is lost there. Begin with a "
            "component at each mode, or with smaller steps."
        )
    return said
