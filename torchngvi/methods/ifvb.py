"""IFVB and AIFVB, and the same with another metric: constructor calls of `NaturalGradientVI` over flat posteriors.

    1. ∇L at λ⁽ˢ⁾, from B draws, or from ``loss.backward()``
    2. S fresh draws θ ~ q, at λ⁽ˢ⁾ or at the average, and the inverse P of εI + Σ φφᵀ + Σ β_j ZZᵀ takes them in
    3. λ⁽ˢ⁺¹⁾ = λ⁽ˢ⁾ - α_{s+1} t P ∇L,      α_k = c/(c' + k)^α by ``LambdaLR(opt, PowerSchedule(α, c'))``
    4. AIFVB: the average moves towards λ⁽ˢ⁺¹⁾

(Godichon-Baggioni, Nguyen and Tran 2023, Algorithms 1 and 2.)  Draws of 1 and 2 are independent; those of 2 need no
data.  A metric of one's own takes the place of the recursion in any of them.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.averaging import Averaging
from torchngvi.errors import InputError, PairError
from torchngvi.expectations.flat import ControlVariate, GradientEstimator, Pathwise
from torchngvi.interfaces import Bent, Estimator, Local, Metric, Momentum, Posterior, StepSize
from torchngvi.metrics import Preconditioner, Recursive
from torchngvi.optim import Evaluation, NaturalGradientVI, Watch, pairs
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.rules import RootGradient
from torchngvi.stepsizes import Constant, KLRadius

_RADIUS = 0.1  # nats
_BETA = 0.125  # (α - ½)/2 of the usual α = ¾


class PreconditionedVI(NaturalGradientVI):
    """Steps λ ← λ - ρ d of a flat posterior, where the direction d is what a metric makes of ∇L.

    The metric stands in the place of the inverse Fisher matrix; `IFVB` and `AIFVB` are this class with the metric of
    their paper.  A step whose result is not finite or leaves the domain of the posterior is not taken, member by
    member; it is counted in ``rejections`` and, on the CPU, warned of once.

    Args:
        posterior: q, flat, or several, as in `NaturalGradientVI`.
        metric: the inverse Fisher matrix or what takes its place, from `torchngvi.metrics`.
        lr: the step size ρ; a torch scheduler may change it.
        estimator: the estimator of ∇L, where ``step`` is given a log joint; by default `Pathwise(10)` where the
            posterior allows it, else `ControlVariate(100)`.
        step_size: by default `KLRadius(0.1)`, so that no step is longer than 0.1 nats in the estimated metric, and
            `Constant` for `Identity` and `Adam`, which have no such metric; `Clip` and `Shortest` are others.
        momentum: `ExponentialAverage`, or none.
        loss_scale: see `NaturalGradientVI`.

    Raises:
        InputError: a posterior that is not flat, a value out of range, more memory than there is.
        PairError: parts that cannot work together.

    >>> import torch
    >>> from torchngvi.ifvb import Beta, ClosedForm, Exact
    >>> q, target = Beta(torch.tensor([5.0, 45.0]).double()), Beta(torch.tensor([58.0, 144.0]).double())
    >>> opt = PreconditionedVI(q, Exact(), 1.0, estimator=ClosedForm(), step_size=Constant())
    >>> _ = opt.step(lambda lam: -torch.distributions.kl_divergence(
    ...     torch.distributions.Beta(*lam), torch.distributions.Beta(*target.vector)))
    >>> q.vector.round(decimals=6).tolist()  # a full natural step is exact
    [58.0, 144.0]
    """

    # a preconditioner that is still an average of few draws sends the loss up a thousandfold, and brings it back
    watch = Watch(climb=1e4)

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        metric: Metric,
        lr: float | Tensor = 1.0,
        *,
        estimator: Estimator | None = None,
        step_size: StepSize | None = None,
        momentum: Momentum | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        pairs.check_kinds(metric=metric, step_size=step_size)
        super().__init__(
            posterior,
            RootGradient(),
            lr,
            step_size=step_size or (KLRadius(_RADIUS) if metric.natural else Constant()),
            estimator=estimator,
            metric=metric,
            momentum=momentum,
            loss_scale=loss_scale,
        )
        if self.estimator is None:
            self.estimator = usual_estimator(self.posteriors)
        for index in range(len(self.posteriors)):
            self._state(index)  # what a metric cannot serve is refused here

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a flat posterior to the optimizer.

        Raises:
            InputError: a posterior that is not flat, such as a `CholeskyGaussian`.
        """
        q = param_group.get("posterior")
        if not isinstance(q, FlatPosterior):
            raise InputError(
                f"{type(self).__name__} updates a flat posterior of torchngvi.ifvb, such as Beta; "
                f"got {type(q).__name__}. For a Gaussian posterior use torchngvi.fit, VN or SRVN."
            )
        super().add_param_group(param_group)

    @property
    def posterior(self) -> FlatPosterior:
        """The flat posterior q, of an optimizer that holds one.

        Raises:
            PairError: an optimizer of several posteriors.
        """
        q = self._only_posterior("this")
        assert isinstance(q, FlatPosterior)
        return q

    @property
    def memory(self) -> dict[str, Any]:
        """The state between two steps: rejections, and a dict for each part, "metric" and "averaging" among them."""
        return self._state(0)

    def inverse_fisher(self) -> Tensor:  # (*batch, D, D)
        """The estimate t P of the inverse Fisher matrix I_F⁻¹ after t steps.

        Returns:
            The matrix, (*batch, D, D).

        Raises:
            PairError: a metric that keeps no inverse.
        """
        rule: Any = self.metric
        if not hasattr(rule, "inverse"):
            raise PairError(f"{type(rule).__name__} keeps no inverse Fisher matrix. Use Recursive or MatrixFree.")
        return rule.inverse(self.memory["metric"])


def usual_estimator(posteriors: Iterable[Posterior]) -> GradientEstimator:
    """The default estimator of ∇L for flat posteriors.

    >>> import torch
    >>> from torchngvi.ifvb import Beta, MeanFieldGaussian
    >>> [type(usual_estimator([q])).__name__ for q in (Beta(torch.ones(2)), MeanFieldGaussian(torch.ones(2)))]
    ['ControlVariate', 'Pathwise']
    """
    if all(isinstance(q, FlatPosterior) and q.reparametrised for q in posteriors):
        return Pathwise(10)
    return ControlVariate(100)


class IFVB(PreconditionedVI):
    """Inversion-free variational Bayes (Godichon-Baggioni, Nguyen and Tran 2023, Algorithm 1).

    It is for a posterior without a known Fisher matrix: a flow, or a family of your own.  For a Gaussian the exact
    natural gradient is cheaper and free of noise: `torchngvi.fit`, or the metric `Exact`.

    Args:
        posterior: q, flat.
        lr: c of α_k = c/(c' + k)^α under ``LambdaLR(opt, PowerSchedule(α, c'))``.  With an accurate metric a natural
            step of 1 is a full one: keep lr/c'^α well below it.
        metric: `Recursive` with its number of scores, ε, c_β and β, or another.
        estimator, step_size, momentum, loss_scale: see `PreconditionedVI`.

    Raises:
        InputError: a value out of range, or more memory than there is.

    >>> from torch.optim.lr_scheduler import LambdaLR
    >>> import torch
    >>> from torchngvi.ifvb import Beta, ControlVariate
    >>> from torchngvi.stepsizes import PowerSchedule
    >>> draws = torch.Generator().manual_seed(0)
    >>> q = Beta(torch.tensor([50.0, 100.0]).double())
    >>> opt = IFVB(q, metric=Recursive(generator=draws), estimator=ControlVariate(200, draws))
    >>> schedule = LambdaLR(opt, PowerSchedule(0.75, 100.0))
    >>> for _ in range(300):
    ...     loss = opt.step(lambda theta: (57 * theta.log() + 143 * torch.log1p(-theta))[..., 0])
    ...     schedule.step()
    >>> round((q.vector[0] / q.vector.sum()).item(), 2)  # the posterior is Beta(58, 144)
    0.29
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor = 1.0,
        *,
        metric: Metric | None = None,
        estimator: Estimator | None = None,
        step_size: StepSize | None = None,
        momentum: Momentum | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        super().__init__(
            posterior,
            Recursive(beta=_BETA) if metric is None else metric,
            lr,
            estimator=estimator,
            step_size=step_size,
            momentum=momentum,
            loss_scale=loss_scale,
        )


class AIFVB(IFVB):
    """IFVB with a weighted average of its iterates (Godichon-Baggioni, Nguyen and Tran 2023, Algorithm 2).

    The average, in the attribute `average`, is the estimate; the posterior itself holds the last iterate.  Use it where
    the noise of the last iterate matters; `IFVB` where the iterates lie on a manifold, which an average would leave.

    Args:
        posterior, lr, metric, estimator, step_size, momentum, loss_scale: see `IFVB`.
        averaging: the weights, when the average begins, and whether the metric takes its scores at the average.

    Raises:
        InputError: a value out of range, or more memory than there is.
        PairError: a posterior on a manifold.

    >>> import torch
    >>> from torchngvi.ifvb import Beta
    >>> q = Beta(torch.tensor([5.0, 9.0]).double())
    >>> opt = AIFVB(q, 0.01)
    >>> for _ in range(3):
    ...     loss = opt.step(lambda theta: (57 * theta.log() + 143 * torch.log1p(-theta))[..., 0])
    >>> opt.average.shape
    torch.Size([2])
    """

    averaging: Averaging

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor = 1.0,
        *,
        metric: Metric | None = None,
        estimator: Estimator | None = None,
        averaging: Averaging | None = None,
        step_size: StepSize | None = None,
        momentum: Momentum | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        if averaging is not None:
            read_instance(
                "averaging", averaging, Averaging, "is one of torchngvi.ifvb.Averaging, or None", error=PairError
            )
        self.averaging = averaging or Averaging()
        super().__init__(
            posterior,
            lr,
            metric=metric,
            estimator=estimator,
            step_size=step_size,
            momentum=momentum,
            loss_scale=loss_scale,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a flat posterior that lies on no manifold.

        Raises:
            InputError: a posterior that is not flat.
            PairError: a posterior on a manifold, where an average of points is no point of it.
        """
        q = param_group.get("posterior")
        if isinstance(q, FlatPosterior) and not q.flat:
            raise PairError(f"the average of points of the manifold of {type(q).__name__} is no point of it. Use IFVB.")
        super().add_param_group(param_group)

    def _fresh(self, q: Posterior) -> dict[str, Any]:
        return super()._fresh(q) | {"averaging": {"average": q.coordinates.vector.clone(), "weight": 0.0, "steps": 0}}

    def _bent(self, index: int, gradient: Local) -> tuple[Bent, dict[str, Any]]:
        """With scores at the average, where the metric takes any and the averaging says so."""
        q, state = self.posteriors[index], self._state(index)
        if not (self.averaging.metric_at_average and isinstance(self.metric, Preconditioner)):
            return super()._bent(index, gradient)
        assert isinstance(q, FlatPosterior)
        return self.metric.bent(q, gradient, state["metric"], state["averaging"]["average"])

    def _advance(self, index: int, *how: Any, **options: Any) -> Evaluation | None:
        """Take the step, and let the average take in one more iterate."""
        result = super()._advance(index, *how, **options)
        state = self._state(index)["averaging"]
        self.averaging.update(state, self.posteriors[index].coordinates.vector, state["steps"])
        state["steps"] += 1
        return result

    @property
    def average(self) -> Tensor:  # (*batch, D)
        """The weighted average of the iterates, which is the estimate of λ, (*batch, D)."""
        return self.memory["averaging"]["average"]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "averaging": self.averaging}
