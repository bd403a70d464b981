"""Where a fit of a log joint starts: at a rough mode with the curvature there, and from where else it may look."""

import math

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.fitting.streaming import stream_batches
from torchngvi.mode import Mode, find_mode, find_modes
from torchngvi.models.data_log_joint import DataLogJoint
from torchngvi.models.guarded import Guarded
from torchngvi.posteriors.gaussian import Gaussian

_FEWEST = 32  # draws of one sample average
_FEWEST_DIAGONAL = 128  # of a mean field in as many dimensions and more, or its start is left for the noise of few
_STREAMED = 1024  # the fewest where each is a pass over data in batches
_STARTS = (2, 8)  # other starts of the check, fewest and most
_COLUMNS = 64  # of all their Hessians together, between these
_TRIES = 20  # points looked at for a finite density
_WIDEST = 200  # dimensions up to which the Hessian of a start is worth its gradients
_SHRINK = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3)  # of the scale, where the first draws fall off the support


class Starts:
    """The first start of a fit and the others.

    Attributes:
        mean: of q before the fit, around which starts are drawn.
        seed: of all draws.
        evidence: Laplace's, of the start.
    """

    def __init__(self, q: Gaussian, target: Guarded, seed: int) -> None:
        self.q, self.target, self.seed = q, target, seed
        self.mean = q.frame().mean.clone()
        self.evidence = -math.inf

    @property
    def streamed(self) -> bool:
        """Whether each evaluation is a pass over data in batches."""
        return self.target.in_passes

    @property
    def searched(self) -> bool:
        """Whether modes are looked for: not where a gradient is a pass over data, or a Hessian too dear."""
        return not self.q.batch_shape and self.q.dim <= _WIDEST and not self.streamed

    @property
    def others(self) -> int:
        """How many other starts: more where they are cheap."""
        return min(max(_COLUMNS // self.q.dim, _STARTS[0]), _STARTS[1])

    @property
    def first_draws(self) -> int:
        """Of the first sample average from a start."""
        whitened = 2 * self.q.dim + 2  # exact on a quadratic
        # blocks are whitened by fewer draws than all coordinates together
        fewest = max(2 * self.q.structure.widest + 2, min(whitened, _FEWEST_DIAGONAL))
        # a pass over data costs its reading, whatever the number of draws
        return max(_STREAMED if self.streamed else _FEWEST, fewest)

    @property
    def _budget(self) -> int:
        """Gradients of the search for a mode."""
        return 200 + 20 * self.q.dim

    @torch.no_grad()
    def check_repeats(self) -> None:
        """Draws inside the function would be taken for the shape of the posterior.

        Raises:
            InputError: two values at the same theta.
        """
        if self.streamed:
            return
        theta = self.mean[None]
        first, second = self.target.log_joint(theta), self.target.log_joint(theta)
        rounding = 1e3 * torch.finfo(first.dtype).eps * first.abs().clamp_min(1.0)
        if bool(((first - second).abs() > rounding).any()):
            raise InputError(
                f"the log joint gives {float(first.sum()):.6g} and then {float(second.sum()):.6g} at the same theta: "
                "it draws. Draw once and keep the draws, give mini-batches to DataLogJoint, or pass an optimizer with "
                "a learning rate, VN(q, lr=0.1)."
            )

    def first(self) -> None:
        """Put q at a rough mode, with the curvature there; with data in batches, where one pass leads."""
        data = self.target.target
        if isinstance(data, DataLogJoint):
            stream_batches(self.q, data, self.seed)
            return
        if not self.searched:
            return
        mode = find_mode(self.target, self.mean, self._budget)
        if mode is None:  # no finite density there: from the first point that has one
            points = self.mean + self._shifts(_TRIES)
            finite = torch.isfinite(self.target.log_joint(points)).nonzero()
            if len(finite):
                mode = find_mode(self.target, points[finite[0, 0]], self._budget)
        if mode is not None:
            self.evidence = mode.log_evidence
            self._place_or_stay(mode)

    def better(self) -> Mode | None:
        """The mode with the most evidence from the other starts, where it has more than the first by a nat."""
        starts = self.mean + self._shifts(self.others)
        modes = [mode for mode in find_modes(self.target, starts, self._budget) if mode is not None]
        found = max(modes, key=lambda mode: mode.log_evidence, default=None)
        return None if found is None or found.log_evidence < 1 + self.evidence else found

    def _shifts(self, count: int) -> Tensor:
        """Uniform on (-2, 2), (count, D)."""
        generator = torch.Generator().manual_seed(self.seed)
        uniform = torch.rand(count, self.q.dim, generator=generator, dtype=torch.float64)
        return (4 * uniform - 2).to(self.mean)

    def place(self, mode: Mode) -> float:
        """Put q at the mode, narrower where its draws leave the support; the loss there on few draws."""
        scale, loss = self.q.kept_precision(mode.root), math.inf  # of a mean field 1/√diag H
        for factor in _SHRINK:
            try:
                self.q.initialize_(mode.theta, factor * scale)
            except InputError:  # no numbers of this dtype: q has kept its place
                break
            loss = self.sampled_loss(_FEWEST)
            if loss < math.inf:
                break
        return loss

    def _place_or_stay(self, mode: Mode) -> None:
        """As `place`, unless q is better as it is."""
        here, before = self.q.snapshot(), self.sampled_loss(_FEWEST)
        if not self.place(mode) < before and before < math.inf:
            self.q.assign(here, torch.ones(self.q.batch_shape, dtype=torch.bool, device=self.q.device))

    def sampled_loss(self, draws: int) -> float:
        """L at q from whitened draws, the same for every q; infinite where it is not finite."""
        q = self.q
        theta = q.push_noise(Fixed(draws, seed=self.seed + 2)(q.mean_probe.detach())).detach()
        loss = float(-self.target.log_joint(theta).mean() - self.target.temperature * q.entropy())
        return loss if math.isfinite(loss) else math.inf
