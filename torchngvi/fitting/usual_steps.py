"""The steps of `torchngvi.fit` for a flat posterior without an optimizer: which method, and how long its steps are."""

import math
import warnings
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LambdaLR

from torchngvi.arguments import read_number
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.expectations import StatisticRegression
from torchngvi.fitting import reasons
from torchngvi.fitting.engine import Engine, Standing
from torchngvi.fitting.request import Request
from torchngvi.fitting.smoothed import SmoothedSteps
from torchngvi.fitting.stopping import Criterion
from torchngvi.interfaces import Target
from torchngvi.methods.ifvb import IFVB
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors.flat import ExponentialFamily
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.rules import NaturalGradient
from torchngvi.stepsizes import KLRadius, PowerSchedule

_TOLERANCE = {torch.float64: 1e-6}  # of exponential families
_SUPPORT = "It has to be on the whole support of q; or start at other parameters."
_COARSE = 1e-2  # of those in float32, whose coefficients of large problems have a relative error of 1e-6; 5e-5 nats
_LEFT = 20  # steps in a row that leave the domain, after which none is expected to stay
_TRUST = 0.245  # nats, ½ · 0.7², a step of an exponential family
_UNTIL = 20  # steps of γ near 1, before they fall
_FIRST = _UNTIL**0.75


def flat_steps_of(request: Request) -> tuple[Engine, Criterion]:
    """Make the engine of a `Request` for a flat posterior, and what ends its run; an optimizer makes its own steps."""
    if request.optimizer is not None:
        return request.engine("steps")
    assert isinstance(request.q, FlatPosterior)
    engine = usual_steps(request.q, request.target, request.tolerance)
    return engine, request.until_unimproved(engine.tolerance)


def usual_steps(q: FlatPosterior, target: Any, tolerance: object = None) -> SmoothedSteps:
    """The engine of `torchngvi.fit` for a flat posterior without an optimizer.

    It is `IFVB` with ρ_k = (100 + k)^-¾; of an `ExponentialFamily` natural gradients by `StatisticRegression`, with
    γ_k = (1 + k/20)^-¾; where the log joint is conjugate they begin at the posterior.

    >>> import torch
    >>> from torchngvi.posteriors.flat import MeanFieldGaussian
    >>> engine = usual_steps(MeanFieldGaussian(torch.zeros(2)), lambda theta: -theta.square().sum(-1))
    >>> engine.name, engine.window
    ('IFVB', 100)
    """
    if isinstance(q, ExponentialFamily):
        usual = _TOLERANCE.get(q.dtype, _COARSE)
        tolerance = usual if tolerance is None else read_number("tolerance", tolerance, "bounds the norm", above=0)
        steps = NaturalGradientVI(
            q, NaturalGradient(), _FIRST, step_size=KLRadius(_TRUST), estimator=StatisticRegression()
        )
        return FamilySteps(steps, target, LambdaLR(steps, PowerSchedule(0.75, _UNTIL - 1)), tolerance=tolerance)
    if tolerance is not None:
        raise InputError(
            "tolerance bounds the natural-gradient norm, and that of stochastic gradients does not vanish: "
            f"{type(q).__name__} is fitted until its smoothed bound stops rising. Leave tolerance out, or say when to "
            "end by stop=."
        )
    optimizer = IFVB(q)
    return SmoothedSteps(optimizer, target, LambdaLR(optimizer, PowerSchedule(0.75, 100.0)))


@final
class FamilySteps(SmoothedSteps):
    """The engine of an exponential family: `SmoothedSteps` that begin at the posterior of a conjugate log joint."""

    refused = 0  # steps in a row

    @torch.no_grad()
    def begin(self) -> None:
        """Go to the posterior where the log joint is conjugate, if that is inside the domain."""
        q, estimator = self.flat, self.optimizer.estimator
        assert isinstance(q, ExponentialFamily)
        assert isinstance(estimator, StatisticRegression)
        if not isinstance(self.target, Target):
            return
        self.target.admit(q)
        vector, found, draws = estimator.conjugate(q, self.target)
        self.draws += draws
        if bool(found & vector.isfinite().all(-1) & q.in_domain(vector)):
            self._put(vector)

    def advance(self) -> Standing:
        """Take a step, and say where none can help: values that are not finite, or a log joint without an optimum."""
        before = self.optimizer.rejections
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RejectedStepWarning)  # whose advice is for an optimizer of one's own
            standing = super().advance()
        self.refused = self.refused + 1 if self.optimizer.rejections > before else 0
        if self.steps == 1 and not math.isfinite(standing.record.loss):
            return standing._replace(lost=reasons.not_finite(standing.record.loss, _SUPPORT))
        if self.refused >= _LEFT:
            return standing._replace(lost=reasons.leaving(self.flat.domain, self.refused))
        return standing

    def state_dict(self) -> dict[str, Any]:
        """As of all, with the steps in a row that left the domain."""
        return {**super().state_dict(), "refused": self.refused}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put everything where the saved step began."""
        super().load_state_dict(state)
        self.refused = state["refused"]
