"""The marginals of a q over a forest: a node with its ancestors is an ordinary dense Gaussian, one of a batch."""

from typing import final

from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.interfaces import Frame, Posterior, clique_frames
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.memory import RememberingPosterior
from torchngvi.posteriors.precision_root import PrecisionCholeskyGaussian
from torchngvi.structures import Forest
from torchngvi.structures.pattern import is_whole


@final
class CliqueGaussian(PrecisionCholeskyGaussian):
    """N(m_c, (T_c T_cᵀ)⁻¹) over the coordinates of cliques, one a batch member: see `clique_marginals`."""

    def __init__(
        self,
        frame: Frame,  # of the cliques
        root: Tensor,  # T_c, (*batch, n, k, k)
    ) -> None:
        RememberingPosterior.__init__(self)
        self._size(frame.mean.shape[-1], frame.mean.shape[:-1], frame.structure)
        self._hold(frame.mean, root)
        self._seen = frame

    def frame(self) -> Frame:
        """Return the frame (m_c, T_c⁻ᵀ), cut out of that of q."""
        return self._seen


def clique_marginals(
    q: Posterior,  # over a `Forest`
) -> list[CliqueGaussian]:
    """The marginals of q over each node and its ancestors, of each kind of nodes those of all n nodes in one batch.

    Wanted where a model's terms see one group and the global parameters: the expectation of such a term under q is
    that under one of these.  With C = T⁻ᵀ the root of q's covariance, T_c is T restricted to the clique, and no matrix
    is factorised.

    Args:
        q: a `PrecisionCholeskyGaussian` or `NaturalGaussian` whose structure is a `Forest`.

    Returns:
        For each kind of nodes, in the order of ``q.structure.kinds``, a posterior of batch shape (*batch, n) over the k
        coordinates of node and ancestors, the node first.

    Raises:
        PairError: another structure, or a root of the covariance.

    >>> from torchngvi.structures import arrow
    >>> q = PrecisionCholeskyGaussian(7, structure=arrow(groups=3, local=2, globals=1))
    >>> [(one.batch_shape, one.dim) for one in clique_marginals(q)]
    [(torch.Size([3]), 3), (torch.Size([1]), 1)]
    """
    q = read_instance("q", q, Posterior, "is a posterior over a forest")
    frames = clique_frames(q.frame())
    assert isinstance(q.structure, Forest)  # `clique_frames` has refused any other: for the types alone
    assert isinstance(q, Gaussian)
    roots = q.structure.cliques(q.whitener())
    return [CliqueGaussian(frame, root) for frame, root in zip(frames, roots, strict=True)]


def forest_of(q: Posterior) -> Forest | None:
    """The forest of a q whose precision has the pattern of one, in this process alone.

    >>> from torchngvi.structures import arrow
    >>> groups = arrow(groups=3, local=2, globals=1)
    >>> forest_of(PrecisionCholeskyGaussian(7, structure=groups)) is groups
    True
    """
    forest = q.structure
    if isinstance(forest, Forest) and q.upper and not q.batch_shape and is_whole(forest):
        return forest
    return None
