"""Natural steps for q on batches, beside hyper-parameters that move: how long they are, and in which dtype.

A stationary run of natural steps ρ on batches is noise about an optimum: one step undoes what the step before took from
its batch.  With g_t = x_t + ξ_t in the frame of q, x the distance to the optimum and ξ the noise of a batch,

    E⟨g_t, g_t+1⟩ = -½ρ E|g|²            at rest
    E⟨g_t, g_t+1⟩ > -½ρ E|g|²            where the optimum moves on with the hyper-parameters and q lags behind

so that the cosine c of successive gradients of the mean tells which of the two prevails, and the length follows it,

    log ρ ← log ρ + 0.1 clip(c/ρ + 0.3, -1, 1)        from  min(½, max(B/N, B/(5M))),  within  [B/(10N), ½]

(at most 1/L where L latent functions are mixed, see `latents`).

At rest c/ρ is -½ and ρ falls; at a lag it rises.  -0.3 is where the lag costs about a third of what the noise costs.
(Kesten 1958 for the sign of successive errors as a signal to the step length.)
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from torchngvi.adapters.gpytorch.energies import conjugate, log_concave
from torchngvi.adapters.gpytorch.sparse_gp import SparseGP
from torchngvi.errors import RejectedStepWarning
from torchngvi.fitting.checkpoints import copied
from torchngvi.methods import IBLR, VN, Method
from torchngvi.optim.watching import warn
from torchngvi.stepsizes import Constant, KLRadius

_NOISE = 0.05  # nats per datum that the noise of a mini-batch may cost at first
_CAP = 0.5  # longest natural step on a part of the data
_RADIUS = 4.0  # nats a step may move q, where the likelihood is not log-concave
_RATE = 0.1  # largest change of log ρ a step
_LAG = 0.3  # -c/ρ at which ρ stays


class NaturalSteps:
    """Steps of q on batches, whose length follows the cosine of successive gradients of the mean."""

    def __init__(self, target: SparseGP, num_data: int) -> None:
        self.q, self.num_data, self.longest = target.posterior, num_data, target.latents.longest
        self.conjugate = conjugate(target.likelihood)
        # where curvature may be negative the form that stays positive definite, in short steps
        self.optimizer: Method = (
            VN(self.q, lr=1.0, step_size=Constant())
            if log_concave(target.likelihood)
            else IBLR(self.q, lr=1.0, step_size=KLRadius(_RADIUS))
        )
        self.log_rho: Tensor | None = None
        self.force: Tensor | None = None  # of the batch before

    def step(self, target: SparseGP, rows: int) -> Tensor:
        """Take a step of q on a batch.  Where float32 is not enough for the step, q is in float64 from here on."""
        self.set_length(rows)
        refused = self.optimizer.rejections if self.q.dtype != torch.float64 else 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RejectedStepWarning)  # there is no learning rate to lower
            loss = self.optimizer.step(target)
        if self.q.dtype != torch.float64 and self.optimizer.rejections > refused:
            warn(
                f"a natural step could not be taken in {str(self.q.dtype).removeprefix('torch.')}: q is kept in "
                "float64 for the rest of the training.",
                RejectedStepWarning,
            )
            self.q.double()
        assert loss is not None
        return loss

    def set_length(self, rows: int) -> None:
        """Set ρ of the next step; on all of the data of a Gaussian likelihood it is 1, where that is exact."""
        if self.log_rho is None:
            share = rows / self.num_data
            first = min(_CAP, self.longest, max(share, 4 * _NOISE * rows / self.q.dim))
            self.log_rho = torch.tensor(first, dtype=torch.float64, device=self.q.device).log()
        whole = self.conjugate and rows == self.num_data
        self.optimizer.param_groups[0]["lr"] = self.longest if whole else self.log_rho.exp().to(self.q.dtype)

    def follow(
        self,
        force: Tensor,  # gradient of the mean on the batch of the last step, (*batch, M)
        rows: int,
    ) -> None:
        """Let the length follow the cosine of this gradient and the one before, in the frame of q."""
        assert self.log_rho is not None
        before, self.force = self.force, force.detach().to(self.q.dtype)
        if before is None:
            return
        a, b = (self.q.frame().pull(g.to(self.q.dtype)).flatten() for g in (before, self.force))
        cosine = ((a @ b) / (a.norm() * b.norm()).clamp_min(1e-300)).double()
        change = _RATE * (cosine / self.log_rho.exp() + _LAG).clamp(-1.0, 1.0)
        lowest = torch.tensor(0.1 * rows / self.num_data, dtype=torch.float64, device=change.device).log()
        rho = torch.maximum(self.log_rho + change.nan_to_num(0.0), lowest)
        self.log_rho = rho.clamp_max(math.log(min(_CAP, self.longest)))

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, with the length of the steps and the last gradient."""
        return {"optimizer": self.optimizer.state_dict(), "log_rho": self.log_rho, "force": self.force}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        self.optimizer.load_state_dict(copied(state["optimizer"]))
        self.log_rho, self.force = state["log_rho"], state["force"]
