"""L and its gradient at q: by an estimator on a target, once for each q, and counted."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchngvi.expectations import Quadrature, Stein
from torchngvi.interfaces import (
    Acceleration,
    Bent,
    Cost,
    Estimator,
    Expectation,
    Framed,
    Local,
    Path,
    Posterior,
    Raw,
    Target,
    TractableTarget,
)
from torchngvi.models.arguments import as_target
from torchngvi.numerics.inference_mode import tracked
from torchngvi.optim import pairs
from torchngvi.optim.base import PosteriorOptimizer
from torchngvi.optim.cache import Cached, cached
from torchngvi.optim.records import Evaluation, Heading, Status
from torchngvi.optim.state import State


class EvaluatingOptimizer(PosteriorOptimizer):
    """A `PosteriorOptimizer` that evaluates a target at q: the loss, its gradient, and the path of the next step.

    It is the base of `NaturalGradientVI`; its methods `evaluate`, `averaged` and `resample` are for loops such as
    `torchngvi.fit`, which look at the norm of the gradient between two steps.
    """

    evaluations: int = 0
    gradients: int = 0  # of the log joint, one a draw; for a model, passes over its data
    values: int = 0  # of the log joint without a gradient
    _found: bool  # steps are in units of 1/γ, the step of Newton
    _cache: Cached | None = None

    @tracked
    @torch.no_grad()
    def evaluate(self, target: Target | Callable[[Tensor], Tensor], *, at_once: bool = False) -> Status:
        """Evaluate L and its natural-gradient norm at q, without a step.

        The next step on the same target uses the result.

        Args:
            target: a `Target`, or a function of theta that returns the log joint.
            at_once: whether this follows a step on the same target at once, so that nothing can have been written to q
                or to the data behind torch's back, and their entries need not be compared.

        Returns:
            The loss (*batch,), the squared natural norm of its gradient (*batch,), and the part of it that the noise of
            the draws explains, where that is known.

        Raises:
            PairError: a target that the estimator cannot evaluate, an optimizer of several posteriors.

        >>> import torch
        >>> from torchngvi import VN, CholeskyGaussian, GeneralizedLinear
        >>> model = GeneralizedLinear(torch.eye(1), [2.0], "gaussian")  # the posterior is N(1, ½)
        >>> opt = VN(CholeskyGaussian(1, mean=1.0, scale=0.5**0.5))
        >>> bool(opt.evaluate(model).norm2 < 1e-10)
        True
        """
        target = as_target(target)
        if not target.tensors():
            self._cache = None  # nobody knows whether the target has changed
        evaluation, heading = self._evaluated(target, stays=True, contents=not at_once)
        return Status(evaluation.loss, heading.norm2(), evaluation.e.noise2)

    @property
    @torch.no_grad()
    def expectation(self) -> Raw | None:
        """The mean gradient g = E_q[∇ℓ] and the mean Hessian H = E_q[∇²ℓ] at q, as they were evaluated last.

        They come at no further evaluation: for a Newton step or a preconditioner of one's own, for Laplace-like
        standard errors, or to look at.  H is stored in the pattern of q, (*batch, D, D) for a full covariance and its
        diagonal (*batch, D) for a mean field; with draws both are estimates.

        Returns:
            The packet (g, H), on the device of q; None where q has moved on since, as after a step with ``lr`` or after
            ``loss.backward()``: `evaluate` makes it known.

        >>> import torch
        >>> from torchngvi import VN, CholeskyGaussian, GeneralizedLinear
        >>> model = GeneralizedLinear(torch.eye(1), [2.0], "gaussian", prior_precision=1.0)
        >>> opt = VN(CholeskyGaussian(1))
        >>> _ = opt.evaluate(model)
        >>> opt.expectation  # of ½(θ - 2)² + ½θ² under N(0, 1)
        Raw(g=tensor([-2.]), H=tensor([[2.]]))
        """
        q, kept = self._only_posterior("expectation"), self._cache
        if kept is None or not q.framed or not kept.holds(kept.target, q, False):
            return None
        return Raw(*q.unframe(*kept.evaluation.e.derivative.framed(q.frame())))

    @torch.no_grad()
    def averaged(self, target: Target, repeats: int) -> Status:
        """L and the norm of the mean gradient over fresh evaluations at q, with its squared standard error.

        It is for a verdict where there are draws: the norm of one evaluation is small by chance too, and the norm on
        fixed draws says nothing of other draws.

        Args:
            target: the target to evaluate.
            repeats: the number of evaluations, each on draws of its own, at least 2.

        Returns:
            The mean loss (*batch,), the squared natural norm of the mean gradient (*batch,), and its squared standard
            error (*batch,).
        """
        q = self._only_posterior("a target")
        first = self._evaluate_target(target, q, fresh=1)
        loss, (a, P) = first.loss, q.local(first.e)
        scatter = torch.zeros_like(loss)
        for count in range(2, repeats + 1):  # as Welford (1962), without cancellation
            loss_here, e = self._evaluate_target(target, q, fresh=count)
            local = q.local(e)
            change = Local(local.a - a, local.P - P)
            loss, a, P = loss + (loss_here - loss) / count, a + change.a / count, P + change.P / count
            scatter = scatter + (1 - 1 / count) * self._norm2(q, change)
        return Status(loss, self._norm2(q, Local(a, P)), scatter / (repeats * (repeats - 1)))

    def _norm2(self, q: Posterior, local: Local) -> Tensor:
        """The squared natural norm of a gradient: q's own, or that of the metric that stands in its place."""
        if self.metric is None or isinstance(self.metric, Acceleration):
            return q.norm2(local)
        return self._bent(0, local)[0].slope

    def _evaluated(self, target: Target, stays: bool = False, contents: bool = True) -> tuple[Evaluation, Heading]:
        """The packet and heading at q, from the cache while q and the target are what they were."""
        q, kept = self._only_posterior("a target"), self._cache
        if kept is not None and kept.holds(target, q, stays, contents):
            return kept.evaluation, kept.heading
        target.admit(q)
        evaluation = self._evaluate_target(target, q)
        self._forget_unless(evaluation.loss)
        heading = self._heading(0, evaluation.e)
        if stays:
            self._keep(target, evaluation, heading)
        return evaluation, heading

    def _keep(self, target: Target, evaluation: Evaluation, heading: Heading) -> None:
        """Into the cache: an evaluation at q as it is now, with the way from there."""
        self._cache = cached(target, self.posteriors[0], evaluation, heading, self._cache)

    def _evaluate_target(self, target: Target, q: Posterior, fresh: int | None = None) -> Evaluation:
        estimator = self._estimator_for(target)
        estimator = estimator if fresh is None else estimator.fresh(fresh)
        estimator.check(q)
        learned = self._state(0)["estimator"]
        e = estimator.recalling(learned)(q, target)
        learned.update(e.learned or {})
        self._count(e.cost)
        return Evaluation(q.loss(e), e)

    def _count(self, cost: Cost) -> None:
        if torch.compiler.is_compiling():  # a graph would be made anew for each number
            return
        self.evaluations += 1
        self.gradients += cost.gradients
        self.values += cost.values

    def evaluates_exactly(self, target: Target) -> bool:
        """Whether an evaluation gives L itself, so that losses may be compared.

        Args:
            target: the target that would be evaluated.

        Returns:
            True if neither the estimator nor the target is noisy, and there is no average over fixed draws.
        """
        return self._estimator_for(target).comparable and target.comparable and not self.averages(target)

    def averages(self, target: Target) -> bool:
        """Whether every evaluation is the average over the same fixed draws (a sample-average approximation of L).

        Args:
            target: the target that would be evaluated.

        Returns:
            True if the estimator keeps its draws.
        """
        return self._estimator_for(target).fixed

    def _estimator_for(self, target: Target) -> Estimator:
        estimator = self.estimator or (Quadrature() if isinstance(target, TractableTarget) else Stein())
        pairs.refuse(pairs.WITH_TARGET, self._parts(estimator=estimator, target=target))
        return estimator

    def resample(self, estimator: Estimator) -> None:
        """Go on with another estimator of the same expectation; what is known of the curvature is kept.

        Args:
            estimator: the estimator from now on, for example the same one on more draws.

        Raises:
            PairError: an estimator that cannot work with the other parts.

        >>> from torchngvi import VN, CholeskyGaussian, Stein
        >>> from torchngvi.expectations import Fixed
        >>> opt = VN(CholeskyGaussian(1), estimator=Stein(Fixed(4)))
        >>> opt.resample(Stein(Fixed(8)))
        """
        pairs.refuse(pairs.AMONG_PARTS, self._parts(estimator=estimator))
        self.estimator, self._cache = estimator, None
        for index in range(len(self.posteriors)):
            state = self._state(index)
            state["loss"] = torch.full_like(state["loss"], torch.nan)  # not to be compared with
            state["went"] = torch.zeros_like(state["went"])  # nor the gradients

    def _forget_unless(self, loss: Tensor) -> None:
        """Empty the memory of members whose loss is not what the last step left: q or the target was changed."""
        if self.metric is not None:
            state = self._state(0)
            rounding = 64 * torch.finfo(loss.dtype).eps * loss.abs().clamp_min(1.0)
            resampled = state["loss"].isnan()
            same = ((loss - state["loss"]).abs() <= rounding) | resampled
            state["loss"] = torch.where(resampled, loss, state["loss"])
            state["went"] = torch.where(same, state["went"], 0.0)
            self.metric.forget(same, state["metric"])

    def _heading(self, index: int, e: Expectation) -> Heading:
        """The rule's path along the gradient, or along what the metric makes of it."""
        q = self.posteriors[index]
        unit = 1 / e.temperature if self._found and e.temperature > 0 else 1.0
        if self.metric is None:
            path = self.rule(q, e)
            return Heading(path.in_units_of(unit), path.norm2, {})
        gradient = q.local(e)
        # the metric sees L/γ, whose curvature in the frame is about 1 whatever γ
        scaled = gradient if unit == 1.0 else Local(unit * gradient.a, unit * gradient.P)
        bent, memory = self._bent(index, scaled)
        a, P = bent.local if unit == 1.0 else (bent.local.a / unit, bent.local.P / unit)
        path = self.rule(q, e._replace(derivative=Framed(a, P + e.temperature * q.structure.eye(a))))
        path, slope = path.in_units_of(unit), lambda: bent.slope if unit == 1.0 else bent.slope / unit
        if isinstance(self.metric, Acceleration):
            return Heading(Path(path.at, path.norm2, slope), lambda: q.norm2(gradient), memory)
        return Heading(Path(path.at, slope, slope), slope, memory)

    def _bent(self, index: int, gradient: Local) -> tuple[Bent, State]:
        """What the metric makes of a gradient, and will remember of it."""
        assert self.metric is not None
        state = self._state(index)
        return self.metric(self.posteriors[index], gradient, state["went"], state["metric"])
