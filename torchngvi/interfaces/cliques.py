"""The frames of the marginals of q over the cliques of a forest: each node with its ancestors."""

from torchngvi.errors import PairError
from torchngvi.interfaces.frame import Frame
from torchngvi.structures import Dense, Forest


def clique_frames(frame: Frame) -> list[Frame]:
    """The frame of q restricted to each node and its ancestors, of each kind of nodes all n in one batch.

    q over a clique c is N(m_c, C_c C_cᵀ), where C_c = T_c⁻ᵀ is the part of C = T⁻ᵀ in the clique: an ordinary dense
    frame of batch shape (*batch, n), in which local work can be done.  No matrix is factorised.

    Args:
        frame: of a q whose precision has the pattern of a `Forest`.

    Returns:
        One for each kind of nodes, in the order of ``structure.kinds``; the coordinates of a node stand before those of
        its ancestors.

    Raises:
        PairError: another structure, or a root of the covariance.

    >>> from torchngvi import PrecisionCholeskyGaussian
    >>> from torchngvi.structures import arrow
    >>> q = PrecisionCholeskyGaussian(7, structure=arrow(groups=3, local=2, globals=1))
    >>> [tuple(one.mean.shape) for one in clique_frames(q.frame())]
    [(3, 3), (1, 1)]
    """
    structure = frame.structure
    if not isinstance(structure, Forest) or not frame.upper:  # a user passes q; only a forest has nodes
        raise PairError(
            "cliques are nodes with their ancestors, of a q whose precision has the pattern of a forest; got one over "
            f"{structure}. Use PrecisionCholeskyGaussian(D, structure=arrow(groups=..., local=..., globals=...))."
        )
    parts = zip(structure.gather(frame.mean), structure.cliques(frame.root), strict=True)
    return [Frame(mean, root, Dense(mean.shape[-1]), upper=True) for mean, root in parts]
