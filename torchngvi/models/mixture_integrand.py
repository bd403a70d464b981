"""What the components of a mixture approximate: h(θ) = log p(θ) - log q(θ), in which the other components stand.

With the Fisher matrix of (allocation, θ) jointly the factors π_k cancel, and the natural gradient of the ELBO for
component k is that of one Gaussian on h (Lin, Khan and Schmidt 2019, Fast and simple natural-gradient variational
inference with mixture of exponential-family approximations):

    a_k = -C_kᵀ E_k[∇h]        P_k = -C_kᵀ E_k[∇²h] C_k        ∇log q = Σ_j r_j ∇log N_j, r the responsibilities

The entropy is in h, so that the temperature of this target is 0 and P has no identity to be taken off.
"""

from typing import final

from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior, Target
from torchngvi.posteriors.mixture import Mixture


@final
class MixtureIntegrand(Target):
    """The target of the components of a mixture: h = log p/γ - log q, q the whole mixture as it is at the time.

    An optimizer over ``q.components`` with this target takes the natural-gradient step of every component, and minus
    its value is E_k h, of which `Mixture.reweigh_` makes a step of the weights.  `torchngvi.fit` does both; use it for
    a loop of your own.

    Args:
        q: the mixture, which is held.
        target: the log joint; its draws come as (S K, D), those of the components together.

    Raises:
        InputError: a log joint in mini-batches, or of temperature 0; on use, a posterior that is not ``q.components``.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Fixed, Stein
    >>> from torchngvi.models import LogJoint
    >>> from torchngvi.posteriors import Mixture
    >>> from torchngvi.rules import LocalExponential
    >>> q = Mixture(CholeskyGaussian(1, (2,), mean=torch.tensor([[-5.0], [5.0]])))
    >>> two = LogJoint(lambda x: torch.logaddexp(-(x + 4).square(), 1.0986123 - (x - 4).square()).sum(-1))
    >>> opt = NaturalGradientVI(q.components, LocalExponential(), lr=1.0, estimator=Stein(Fixed(64)))
    >>> for _ in range(5):
    ...     gains = -opt.evaluate(MixtureIntegrand(q, two)).loss
    ...     loss, rho = opt.step(MixtureIntegrand(q, two)), q.reweigh_(gains)
    >>> q.components.mean.flatten().round(decimals=3).tolist(), q.weights.round(decimals=3).tolist()
    ([-4.0, 4.0], [0.25, 0.75])
    """

    temperature = 0.0
    comparable = False  # E_k h is no function whose derivative is (a, P): q is in h
    coupled = True

    def __init__(self, q: Mixture, target: Target) -> None:
        read_instance("q", q, Mixture, "is a mixture, such as Mixture(CholeskyGaussian(2, (3,)))", other=target)
        read_instance("target", target, Target, "is a model or a LogJoint", other=q)
        if not target.comparable or target.in_passes:
            raise InputError(
                f"a mixture is fitted to one log joint over fixed draws, and {type(target).__name__} is another at "
                "each call, as mini-batches are. Give it all data at once."
            )
        if not target.temperature > 0:
            raise InputError(
                "a mixture at temperature 0 has no entropy, and collapses on a mode; use a temperature above 0."
            )
        self.q, self.target = q, target
        self.draws_at_once = max(1, target.draws_at_once // len(q))

    def log_joint(
        self,
        theta: Tensor,  # (*sample, K, D)
    ) -> Tensor:
        """Compute h at draws of each component, (*sample, K), differentiable in θ."""
        flat = theta.flatten(0, -2)
        h = self.target.log_joint(flat) / self.target.temperature - self.q.log_prob(flat)
        return h.unflatten(0, theta.shape[:-1])

    def check(self, q: Posterior) -> None:
        """Check that it is the components that are evaluated.

        Raises:
            InputError: another posterior.
        """
        if q is not self.q.components:
            raise InputError(
                "a MixtureIntegrand is the target of the components of its own mixture: build the optimizer over "
                "q.components."
            )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the weights, the components and the tensors of the log joint; none where those are not known."""
        known = self.target.tensors()
        return (*known, self.q.log_weights, *self.q.components.coordinates) if known else ()

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the log joint."""
        return (self.target.temperature, *self.target.settings())

    def known_data(self) -> tuple[Tensor, ...]:
        """Return the tensors that tell the problem of the log joint from another."""
        return self.target.known_data()
