"""Averages over the steps: of posteriors in expectation parameters, and of flat vectors with weights of their own.

The first is the output of stochastic natural-gradient VI,

    ω̄_{T+1} = 2/((T + 1)(T + 2)) Σ_t (t + 1) ω_{t+1},      ω = (E z, E zzᵀ)

(Wu and Gardner 2024, Theorem 1).  It has the moments of the mixture of all iterates with these weights: averages of
natural parameters, or of m and V, are others.  Kept as m̄ and V̄, which stay exact and positive definite,

    m̄' = m̄ + w(m - m̄)     V̄' = (1 - w)V̄ + wV + w(1 - w)(m - m̄)(m - m̄)ᵀ     w = (t + 1)/Σ_{s ≤ t} (s + 1) = 2/(t + 2)

in the place of Ξ̄ - m̄m̄ᵀ, which cancels where the mean is large.  Of an exponential family ω̄ itself is kept.  The second
is the estimate of AIFVB (Godichon-Baggioni, Nguyen and Tran 2023, section 4.3),

    λ̄⁽ˢ⁺¹⁾ = λ̄⁽ˢ⁾ + w_s/Σ_{k≤s} w_k (λ⁽ˢ⁺¹⁾ - λ̄⁽ˢ⁾)      w_s = log(s + 1)^w

For w > 0 the first weight is 0/0, which the paper leaves open: λ̄⁽¹⁾ = λ⁽¹⁾ here.  The second is exactly 1,
so that the choice is forgotten.  w = 0 is the plain mean.
"""

import math
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor

from torchngvi.arguments import read_count, read_flag, read_number
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import where_members
from torchngvi.posteriors.flat import ExponentialFamily
from torchngvi.posteriors.gaussian import Gaussian

__all__ = ["Averaging", "ExpectationAverage"]

Q = TypeVar("Q", bound=Gaussian | ExponentialFamily)


class ExpectationAverage(torch.nn.Module, Generic[Q]):
    """A running average of a posterior's expectation parameters, in which the iterate after step t has weight t + 1.

    Use it as the result of stochastic natural-gradient VI with the steps 2/(2 + t), where it is nearer to the
    optimum than the last iterate in the mean.  Its state lies in buffers, so that ``state_dict``, ``.to()`` and
    ``deepcopy`` carry it.  In natural coordinates a call costs one factorisation of V, O(D³); a mean-field posterior
    keeps the marginal second moments, and an exponential family its ω.  Members whose moments are not finite are left
    out.

    Args:
        q: the posterior to be followed, a Gaussian or an `ExponentialFamily`, for its class, shape, dtype and device;
            its state is not read yet.

    Raises:
        PairError: if the posterior is neither; on use, if another class or shape of posterior is given.
        InputError: on use, if the posterior is asked for before the first update.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(1, mean=3.0)
    >>> average = ExpectationAverage(q)
    >>> average.update(q)
    >>> average.update(q.initialize_(mean=0.0))  # weights 1 and 2
    >>> round(average.posterior().mean.item(), 6), round(average.posterior().variance.item(), 6)  # 1, 1 + 2
    (1.0, 3.0)
    """

    steps: Tensor
    mean: Tensor
    spread: Tensor

    def __init__(self, q: Q) -> None:
        super().__init__()
        if not isinstance(q, Gaussian | ExponentialFamily):
            raise PairError(
                "ExpectationAverage averages E z and E zzᵀ of a Gaussian posterior, or the statistics of an "
                f"exponential family; got {type(q).__name__}. "
                "Give it a CholeskyGaussian, DiagonalGaussian or NaturalGaussian."
            )
        if isinstance(q, Gaussian) and not q.structure.closed:
            raise PairError(
                f"ExpectationAverage needs the blocks of a covariance; {q.structure} keeps those of the precision. "
                "Use a posterior with a dense or block-diagonal structure."
            )
        self._kind: Any = type(q)
        self._family = q.at(q.vector) if isinstance(q, ExponentialFamily) else None
        like = q.mean_probe.detach()
        self.structure = q.structure
        self.register_buffer("steps", torch.zeros_like(like[..., 0]))
        self.register_buffer("mean", torch.zeros_like(like))
        self.register_buffer("spread", torch.zeros_like(q.root_probe.detach()))

    @torch.no_grad()
    def update(self, q: Q) -> None:
        """Add the posterior as it is now to the average, once after each step.

        Args:
            q: the posterior that is followed.

        Raises:
            PairError: if it is another class or shape of posterior than the first.
        """
        if type(q) is not self._kind or q.mean_probe.shape != self.mean.shape:
            raise PairError(
                f"this average follows a {self._kind.__name__} of shape {tuple(self.mean.shape)}; got "
                f"a {type(q).__name__} of shape {tuple(q.mean_probe.shape)}. Make another ExpectationAverage for it."
            )
        weight = 2 / (self.steps + 2)
        if isinstance(q, ExponentialFamily):
            shift = q.expectation() - self.mean
            finite = shift.isfinite().all(-1)
        else:
            structure, mean, spread = q.structure, q.mean, q.frame().marginals()
            finite = mean.isfinite().all(-1) & structure.is_finite(spread)
            shift = mean - self.mean
            outer = structure.lower(shift[..., None, :], shift[..., None, :])
            change = structure.scaled(weight, spread - self.spread) + structure.scaled(weight * (1 - weight), outer)
            self.spread.copy_(where_members(finite, self.spread + change, self.spread))
        self.mean.copy_(where_members(finite, self.mean + weight[..., None] * shift, self.mean))
        self.steps.add_(finite)

    def posterior(self) -> Q:
        """Make the posterior of the averaged parameters.

        Returns:
            A new posterior of the class that is followed.

        Raises:
            InputError: if there was no update yet.
        """
        if not bool((self.steps > 0).all()):
            raise InputError("the average is empty: call update(q) after a step, then posterior().")
        if isinstance(self._family, ExponentialFamily):
            return self._family.with_expectation(self.mean)
        return self._kind.from_marginals(self.mean, self.spread, self.structure)


@final
class Averaging:
    """The weights of an average of flat iterates λ⁽ˢ⁾, and the step at which it begins.

    Use it for AIFVB, whose result is the average rather than the last iterate.

    Args:
        w: the power w of the logarithm in the weights, not negative; 2 in the paper, and 0 for the plain mean.
        burn_in: the number of steps before the first that counts; until then the average is the iterate.  Early
            iterates keep their weight for long: the average is behind the iterate until the run is in its noise.
        metric_at_average: whether the metric takes its scores at the average (Eq 4.8), or at the iterate (Remark 4.2).

    Raises:
        InputError: if w or burn_in is negative.

    >>> rule, state = Averaging(w=0), {"average": torch.zeros(1), "weight": 0.0}
    >>> for index, iterate in enumerate((3.0, 5.0, 10.0)):
    ...     rule.update(state, torch.tensor([iterate]), index)
    >>> state["average"].item()
    6.0
    """

    def __init__(self, w: float = 2.0, burn_in: int = 0, *, metric_at_average: bool = True) -> None:
        self.w = read_number("w", w, "is the power of the logarithm in the weights", at_least=0)
        self.burn_in = read_count("burn_in", burn_in, "counts steps", at_least=0)
        self.metric_at_average = read_flag("metric_at_average", metric_at_average)

    def update(
        self,
        state: dict[str, Any],
        iterate: Tensor,  # (*batch, D), λ⁽ˢ⁺¹⁾
        index: int,  # s, from 0
    ) -> None:
        """Add one more iterate to the average, in place.

        Args:
            state: the dict with the average and the sum of the weights.
            iterate: the iterate λ⁽ˢ⁺¹⁾, (*batch, D).
            index: the number s of the step, from 0.
        """
        place = index - self.burn_in
        weight = 0.0 if place < 0 else math.log(place + 1) ** self.w  # 0⁰ = 1
        state["weight"] += weight
        share = weight / state["weight"] if state["weight"] > 0 else 1.0
        state["average"] = torch.lerp(state["average"], iterate, share)
