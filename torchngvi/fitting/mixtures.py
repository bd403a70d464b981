"""The engine of `torchngvi.fit` for a `Mixture`: natural-gradient steps of all components and of the weights.

Every step is that of Lin, Khan and Schmidt (2019), see `torchngvi.models.MixtureIntegrand`, over the same draws z for
all steps and components.  The curve of the components stays positive definite, so that no step has to be tried; what
keeps them in place is a trust in Fisher length, for each component and for the weights, which rest at first.  Where the
ELBO falls again and again the steps circle, and ρ is halved.

At the end the gradients of all components vanish and all E_k h are equal, h = log p - log q.  The second is what sees a
component that has lost its mode and its weight: the ELBO alone stands still without it.
"""

from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.expectations import Stein
from torchngvi.expectations.draws import Fixed, drawn_seed
from torchngvi.fitting import fingerprints, mixture_words
from torchngvi.fitting.checkpoints import copied
from torchngvi.fitting.engine import Ending, Engine, Standing, Stop
from torchngvi.fitting.mixture_words import GONE, Seen
from torchngvi.fitting.records import Record
from torchngvi.fitting.request import BY_DRAWS, Request
from torchngvi.fitting.stopping import Criterion
from torchngvi.interfaces import Local, RootTangent, Rule, StepSize, Target
from torchngvi.models.arguments import FullPrecision
from torchngvi.models.mixture_integrand import MixtureIntegrand
from torchngvi.numerics.arrays import on_host
from torchngvi.optim import NaturalGradientVI
from torchngvi.optim.watching import UNWATCHED
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.mixture import Mixture
from torchngvi.rules import LocalExponential, Retraction, VariationalNewton
from torchngvi.stepsizes import Constant, KLRadius

_TRUST = 0.7  # Fisher length of a step, of each component and of the weights
_REST = 5  # steps before the weights move
_FALLS, _AMONG = 2, 5  # of the ELBO, among so many steps, that halve ρ
_LEAST = 2.0**-6  # ρ
_FALL = 0.02  # nats for a norm of 1, below which a fall is none: over fixed draws it is not monotone
_DRAWS, _MORE, _MOST = 256, 4, 4096  # of a component, the factor by which they grow, and up to how many
_SHARE = 0.1  # of the tolerance, to which the average over fixed draws is solved


def mixture_steps_of(request: Request) -> tuple["MixtureSteps", Criterion]:
    """Make the engine of a `Request` for a mixture, and what ends its run."""
    if request.optimizer is not None or request.batch_size is not None:
        raise InputError(
            "a Mixture has its own steps, of components and weights; leave optimizer= and batch_size= out, or make "
            "steps by an optimizer over q.components with MixtureIntegrand(q, log_joint)."
        )
    assert isinstance(request.q, Mixture)
    criteria = request.until_small(request.tolerance_or(lambda q: BY_DRAWS))
    return MixtureSteps(request.q, request.target, criteria.tolerance), criteria


def usual_rule(components: Gaussian) -> Rule:
    """The curve of the components: one that stays positive definite where these coordinates have one.

    >>> from torchngvi import CholeskyGaussian, NaturalGaussian
    >>> type(usual_rule(CholeskyGaussian(2, (3,)))).__name__, type(usual_rule(NaturalGaussian(2, (3,)))).__name__
    ('LocalExponential', 'Retraction')
    """
    if RootTangent in components.takes:
        return LocalExponential()
    return Retraction() if components.structure.closed else VariationalNewton()


class MixtureSteps(Engine):
    """Steps of components and weights until all gradients vanish and all E_k h are equal."""

    name = "mixture"

    def __init__(
        self,
        q: Mixture,
        target: Target,
        tolerance: float,
        rule: Rule | None = None,
        draws: int = _DRAWS,
        trust: float | None = _TRUST,
    ) -> None:
        super().__init__(q)
        self.mixture, self.target, self.tolerance = q, target, tolerance
        self.integrand = MixtureIntegrand(q, target)
        self.trust = torch.inf if trust is None else trust
        step_size: StepSize = Constant() if trust is None else KLRadius(0.5 * trust**2)
        rule = usual_rule(q.components) if rule is None else rule
        self.draws = max(draws, 2 * q.components.structure.widest + 2)
        self.most_draws = max(_MOST, self.draws)
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
            if seen.norm <= _SHARE * self.tolerance:
                self.fresh = self._on_fresh_draws()
                if self.fresh.norm > self.tolerance:
                    lost = self._grown()
        told = seen if self.fresh is None else self.fresh
        record = Record(
            self.evaluations,
            -self.target.temperature * seen.elbo,
            told.norm,
            self.step,
            self.optimizer.rejections,
            self.gradients,
            0.0,
        )
        return Standing(
            record,
            torch.tensor(self.fresh is not None and self.fresh.norm <= self.tolerance, device="cpu"),
            torch.tensor(record.loss, dtype=torch.float64, device="cpu"),
            (self.evaluations, self.gradients),
            self.tolerance,
            lost=lost or mixture_words.not_finite(seen),
        )

    def _take_step(self, seen: Seen) -> None:
        """Of the components, and of the weights once the components are near their places."""
        self._halve_if_falling(seen)
        self.optimizer.step(self.integrand)
        assert self.optimizer.last is not None
        self.step = float(self.optimizer.last.rho.min())
        self.steps += 1
        if self.steps > _REST:
            self.mixture.reweigh_(seen.gains.to(self.mixture.log_weights), self.rho, self.trust)

    def _halve_if_falling(self, seen: Seen) -> None:
        """Halve ρ where the ELBO fell twice in five steps, by more than nothing: they go round the fixed point."""
        self.elbos = [*self.elbos[-_AMONG:], seen.elbo]
        least = _FALL * min(seen.norm, 1.0) ** 2
        falls = sum(new < old - least for old, new in zip(self.elbos, self.elbos[1:], strict=False))
        if falls >= _FALLS and self.rho > _LEAST:
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
        gaps = torch.where((weights < GONE) & (gains < elbo), 0.0, gains - elbo)
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
        if self.draws >= self.most_draws:
            return mixture_words.too_noisy(self.draws, self.fresh.norm, self.tolerance)
        self.draws = min(_MORE * self.draws, self.most_draws)
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
            reason = mixture_words.converged(self.fresh, self.draws, self.mixture)
        self.values += 2 * len(self.mixture)
        elbo = -loss / self.target.temperature
        remarks = mixture_words.remarks(self.mixture, self.target, self.origin, elbo)
        return Ending(stop.converged, reason + remarks, loss, last.record.norm, last.members)

    def counted(self) -> tuple[int, int]:
        """Gradients and values of the log joint so far, those of the remarks at the end too."""
        return self.gradients, self.values

    # -------------------------------------------------------------------------------- checkpoints

    def settings(self) -> dict[str, str]:
        """The settings of the run: the problem, and the parts of the steps but for the draws, which grow."""
        parts = fingerprints.of_optimizer(self.optimizer)
        own = {name: parts[name] for name in ("rule", "step_size")}
        return {"method": type(self).__name__, **fingerprints.of_problem(self.mixture, self.target), **own}

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
