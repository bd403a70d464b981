"""The flow of Example 5 as printed, θ = W₂ h(W₁ε + b₁) + b₂ over λ = (vec W₁, b₁, vec W₂, b₂), D = 2d² + 2d.

`OrthogonalFlow` leaves W₁ out of λ, for W₁ε is standard normal whatever the orthogonal W₁.  Here it moves too, by the
same projection and retraction as W₂.  The law of q depends on (b₁, W₂, b₂) alone: the tangent part of ∂ log q/∂W₁ is
0, and a path derivative in W₁ is noise of mean 0.
"""

import torch
from torch import Tensor

from torchngvi.ifvb import FlatPosterior, OrthogonalFlow
from torchngvi.posteriors.shapes import Shape, normal


class TwoRotations(FlatPosterior):
    """q = law of W₂ h(W₁ε + b₁) + b₂ with h the logistic function and both W₁ and W₂ on the move.

    Args:
        W1: the rotation of the noise at the start, (d, d), orthogonal.
        b1: the shift before the logistic function at the start, (d,).
        W2: the rotation of the cube at the start, (d, d), orthogonal.
        b2: the corner of the support at the start, (d,).

    >>> q = TwoRotations(torch.eye(2), torch.zeros(2), torch.eye(2), torch.zeros(2))
    >>> q.size, q.sample((9,)).shape
    (12, torch.Size([9, 2]))
    """

    domain = "W1 and W2 are orthogonal"
    flat = False
    reparametrised = True

    def __init__(self, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor) -> None:
        flow = OrthogonalFlow(b1, W2, b2, W1)
        super().__init__(torch.cat([W1.flatten(), flow.vector]), flow.dim)
        self.flow = flow

    def parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Take λ apart into W₁ and the λ of `OrthogonalFlow`, (b₁, vec W₂, b₂)."""
        lam = self.point(at)
        return lam[..., : self.dim**2].unflatten(-1, (self.dim, self.dim)), lam[..., self.dim**2 :]

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ without a gradient."""
        return self.rsample(shape, generator, self.point(at).detach())

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = W₂ h(W₁ε + b₁) + b₂, differentiable in λ."""
        W1, rest = self.parts(at)
        b1, W2, b2 = self.flow.parts(rest)
        t = (W1 @ normal(shape, b1, self.dim, generator)[..., None])[..., 0] + b1
        return (W2 @ torch.sigmoid(t)[..., None])[..., 0] + b2

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute log q, which does not depend on W₁."""
        return self.flow.log_prob(theta, self.parts(at)[1])

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute the tangent part of the derivatives, in W₁ zero."""
        W1, rest = self.parts(at)
        score = self.flow.score(theta, rest)
        return torch.cat([score.new_zeros(*score.shape[:-1], self.dim**2), score], -1)

    def projected(self, at: Tensor, vector: Tensor) -> Tensor:
        """Project the parts of W₁ and W₂ of a direction, each on its tangent space."""
        (W1, rest), (G1, G) = self.parts(at), self.parts(vector)
        first = self.flow.projected(self._alone(W1), self._alone(G1))
        return torch.cat([first[..., self.dim : -self.dim], self.flow.projected(rest, G)], -1)

    def retracted(self, at: Tensor, change: Tensor) -> Tensor:
        """Compute λ after a step: the QR retractions of W₁ and W₂, with b₁ and b₂ in a straight line."""
        (W1, rest), (G1, G) = self.parts(at), self.parts(change)
        first = self.flow.retracted(self._alone(W1), self._alone(G1))
        return torch.cat([first[..., self.dim : -self.dim], self.flow.retracted(rest, G)], -1)

    def _alone(self, matrix: Tensor) -> Tensor:
        """A matrix in the place of W₂, with zeros for b₁ and b₂."""
        zero = matrix.new_zeros(matrix.shape[:-1])
        return torch.cat([zero, matrix.flatten(-2), zero], -1)
