"""L-BFGS in q's frame: the natural gradient, bent by what the last steps showed.

In the frame the Fisher metric is the identity, so limited-memory BFGS (Nocedal 1980; Nocedal and
Wright 2006, Algorithm 7.4) with the initial inverse Hessian 1 starts as the natural gradient and
learns where the objective curves otherwise: the slow tail of weakly identified directions, and the
off-diagonal coupling a mean-field q cannot hold.  Pairs s = ρ direction, y = change of the gradient
are kept in frame coordinates and carried to the next frame unchanged, which is parallel transport
up to the rotation between two triangular roots, of the order of the step.  Steps longer than
`_NEAR` in the natural norm say nothing about the tail: they clear the memory.  Under a q of many groups that
length grows with the root of their number where nearly whole steps are taken, see `torchngvi.stepsizes.lengths`.

A gradient goes in, a gradient comes out, and any natural-gradient rule may follow its curve.  The
memory of each batch member is its own.
"""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.interfaces import Acceleration, Bent, Local, Posterior, may_be_asked, where_members
from torchngvi.stepsizes.lengths import raised
from torchngvi.structures import Pattern
from torchngvi.structures.pattern import is_whole

_NEAR = 1.0  # length of a step, √(2 KL), beyond which its pair is not kept
_WHOLE = 0.5  # ρ from which a step counts as one that the model of L at q had right
_CURVED = 1e-8  # smallest cosine of the angle between s and y


@final
class QuasiNewton(Acceleration):
    """L-BFGS in the frame of q: the natural gradient ∇L becomes B∇L, with B the limited-memory inverse Hessian.

    One wants it where the last digits of a deterministic fit come slowly, as for a mean-field q of correlated variables
    or for weakly identified directions.  Steps are judged by trial, so that it needs an objective without noise.

    Args:
        memory: the number of pairs that are kept, at least 1; each costs two gradients of storage.

    Raises:
        InputError: if the memory is below 1.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, NaturalGradientVI
    >>> from torchngvi.rules import VariationalNewton
    >>> from torchngvi.stepsizes import SufficientDecrease
    >>> q, model = CholeskyGaussian(2), GeneralizedLinear(torch.eye(2), [0.0, 1.0])
    >>> opt = NaturalGradientVI(q, VariationalNewton(), step_size=SufficientDecrease(), metric=QuasiNewton())
    >>> first, second = opt.step(model), opt.step(model)
    >>> bool(second < first)
    True
    """

    def __init__(self, memory: int = 5) -> None:
        self.memory = read_size("memory", memory, "is the number of pairs kept")

    def init(self, q: Posterior) -> dict[str, Tensor]:
        """Return an empty memory of pairs (s, y), with the last gradient and direction."""
        flat = _flat(Local(q.mean_probe.detach(), q.root_probe.detach()), q.structure)
        pairs = {name: torch.zeros_like(flat) for kind in "sy" for name in self._names(kind)}
        return {
            **pairs,  # a tensor each: the memory after a step shares those that it keeps
            "kept": flat.new_zeros((self.memory, *q.batch_shape)),
            "gradient": torch.zeros_like(flat),
            "direction": torch.zeros_like(flat),
        }

    def forget(self, keep: Tensor, state: dict[str, Tensor]) -> None:
        """Drop the pairs of the members (*batch,) that the mask leaves out."""
        state["kept"] = state["kept"] * keep

    def __call__(
        self,
        q: Posterior,
        gradient: Local,
        went: Tensor,
        state: dict[str, Tensor],
    ) -> tuple[Bent, dict[str, Tensor]]:
        """Learn from the step before, then bend the gradient; return it with what of the state is to change."""
        inner = _inner(q.structure)
        flat = _flat(gradient, q.structure)
        s, y, kept = self._learned(inner, q.structure.leaves, flat, went, state)
        curvature = torch.stack([torch.linalg.vecdot(s_n, y_n) for s_n, y_n in zip(s, y, strict=True)])
        curvature = q.structure.total(curvature)  # of all pairs at once
        weight = (kept / torch.where(curvature > 0, curvature, 1.0))[..., None]
        pairs = list(zip(s, y, weight.unbind(), strict=True))
        if may_be_asked(kept):  # a pair that no member keeps has the weight 0
            by_anyone = kept.reshape(len(kept), -1).any(-1).tolist()
            pairs = [pair for pair, is_kept in zip(pairs, by_anyone, strict=True) if is_kept]
        bent, shares = flat, []
        for s_n, y_n, weight_n in pairs:  # the newest first
            share = weight_n * inner(s_n, bent).unsqueeze(-1)
            bent = bent - share * y_n
            shares.append(share)
        for (s_n, y_n, weight_n), share in zip(reversed(pairs), reversed(shares), strict=True):
            bent = bent + (share - weight_n * inner(y_n, bent).unsqueeze(-1)) * s_n
        slope, norm2 = inner(flat, bent), inner(flat, flat)
        downhill = slope > 0
        bent = torch.where(downhill[..., None], bent, flat)
        finite = norm2.isfinite()[..., None]  # a NaN is not remembered
        new = {
            **dict(zip(self._names("s"), s, strict=True)),
            **dict(zip(self._names("y"), y, strict=True)),
            "kept": kept * downhill,
            "gradient": torch.where(finite, flat, 0.0),
            "direction": torch.where(finite, bent, 0.0),
        }
        return Bent(_unflat(bent, q), torch.where(downhill, slope, norm2)), new

    def _names(self, kind: str) -> list[str]:
        """Where the state has the steps s, or the changes y of the gradient, the newest first."""
        return [f"{kind}{n}" for n in range(self.memory)]

    def _learned(
        self,
        inner: Callable[[Tensor, Tensor], Tensor],
        leaves: int,
        gradient: Tensor,
        went: Tensor,
        state: dict[str, Tensor],
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """The memory with the pair of the last step, for the members that moved."""
        s = -went[..., None] * state["direction"]
        y = gradient - state["gradient"]
        sy, ss, yy = inner(s, y), inner(s, s), inner(y, y)
        far = torch.where(went >= _WHOLE, raised(_NEAR**2, inner(gradient, gradient), leaves), _NEAR**2)
        moved, near = went > 0, ss <= far
        useful = moved & near & (sy > _CURVED * (ss * yy).sqrt())

        def pushed(new: Tensor, old: list[Tensor]) -> list[Tensor]:
            """One before the others; where all members do so, no pair is copied: they are the most that a fit holds."""
            return [where_members(useful, later, earlier) for later, earlier in zip([new, *old], old, strict=False)]

        kept = torch.stack(pushed(torch.ones_like(went), list(state["kept"]))) * (near | ~moved)
        old_s, old_y = ([state[name] for name in self._names(kind)] for kind in "sy")
        return pushed(s, old_s), pushed(y, old_y), kept


def _flat(x: Local, structure: Pattern) -> Tensor:
    """(a, P) as one vector (*batch, F) whose dot product is the inner product of the frame."""
    return torch.cat([x.a, structure.flat(x.P)], -1)


def _unflat(flat: Tensor, q: Posterior) -> Local:
    """The gradient of that vector."""
    P = flat.narrow(-1, q.dim, flat.shape[-1] - q.dim)
    return Local(flat.narrow(-1, 0, q.dim), q.structure.unflat(P))


def _inner(structure: Pattern) -> Callable[[Tensor, Tensor], Tensor]:
    """⟨x, y⟩ = a·a' + ½ tr(P P'), (*batch,), of such vectors."""
    if is_whole(structure):
        return torch.linalg.vecdot
    return lambda x, y: structure.total(torch.linalg.vecdot(x, y))
