"""What every estimator that draws has in common: the draws, and what is seen at them."""

import copy
from typing import NamedTuple, Self

from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Draws, as_draws
from torchngvi.interfaces import Estimator, Framed, Posterior, Target


class Seen(NamedTuple):
    """What is seen of a log joint at S draws θ = m + C z."""

    z: Tensor  # (S, *batch, D)
    theta: Tensor  # (S, *batch, D)
    energy: Tensor  # ℓ, (S, *batch)
    gradient: Tensor  # ∇ℓ, (S, *batch, D)
    pulled: Tensor  # Cᵀ∇ℓ, (S, *batch, D)


class Drawing(Estimator):
    """The abstract base of every estimator that evaluates a target at standard normal draws.

    A subclass calls `see`, and makes a packet of what it returns.

    Args:
        draws: the number S of antithetic draws, or draws such as `Independent`, `Antithetic`, `Quasi` and `Fixed`.

    Raises:
        InputError: if draws is neither, or the number is not positive and even.
    """

    derives_value = False  # with fixed draws, the derivative is that of the value
    needs = Target

    def __init__(self, draws: Draws | int = 16) -> None:
        self.draws = as_draws(draws)
        self.comparable = self.derives_value and self.draws.comparable
        self.unbiased = self.unbiased and not self.draws.comparable  # fixed draws have a mean of their own
        self.generator = self.draws.generator  # the optimizer saves its state

    @property
    def fixed(self) -> bool:
        """Whether every call sees the same draws, as the draws themselves say."""
        return self.draws.comparable

    def fresh(self, number: int) -> Self:
        """Return the same estimator on the number-th set of other draws, where its draws are fixed."""
        new = copy.copy(self)
        new.draws = self.draws.fresh(number)
        return new

    def see(self, q: Posterior, target: Target) -> Seen:
        """Draw from q, and evaluate the log joint and its gradient there.

        Args:
            q: the posterior to draw from.
            target: the target whose log joint is evaluated.

        Returns:
            The draws, and what is seen at them.

        Raises:
            InputError: if the log joint does not depend on theta.
        """
        frame = q.frame()
        z = self.draws(q.mean_probe.detach())
        theta = frame.mean + frame.push(z)
        energy, gradient = energy_and_gradient(target, theta)
        return Seen(z, theta, energy, gradient, frame.pull(gradient))

    def derivative_of_mean(self, q: Posterior, seen: Seen) -> Framed:
        """The exact derivative of the mean of ℓ over fixed draws, as a and W.

        W takes the triangle that belongs to the root; averaged with its transpose, which is better for random draws, it
        would be the derivative of nothing.

        Args:
            q: the posterior at which the draws were seen.
            seen: what `see` returned.

        Returns:
            The packet in the frame of q.

        Raises:
            InputError: if the draws leave directions of a full covariance undetermined.
        """
        least = 2 * q.structure.widest
        if q.structure.widest > 1 and self.draws.num_samples < least:
            raise InputError(
                f"fixed draws determine a full covariance in {q.structure.widest} dimensions if there are at least "
                f"{least} of them: with fewer the objective has no minimum; got {self.draws.num_samples}. "
                f"Use Fixed({least}) or more, or a DiagonalGaussian."
            )
        return self.one_triangle(q, seen.pulled, seen.z)

    def one_triangle(
        self,
        q: Posterior,
        force: Tensor,  # (S, *batch, D)
        z: Tensor,  # (S, *batch, D)
    ) -> Framed:
        """The packet of a and W as means of f and of f zᵀ, of which W takes the triangle that belongs to the root.

        Args:
            q: the posterior at which the draws were seen.
            force: the vectors f, (S, *batch, D).
            z: the draws, (S, *batch, D).

        Returns:
            The packet in the frame of q.
        """
        force = force / len(z)
        return Framed(force.sum(0), q.one_triangle(force, z))
