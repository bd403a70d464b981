"""Gaussians that hold a precision: natural parameters, a root, and the marginals over the cliques of a forest."""

import math
from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.interfaces import (
    Congruence,
    Coordinates,
    Derivative,
    Expectation,
    Frame,
    Framed,
    Local,
    LogTangent,
    Move,
    Posterior,
    Raw,
    RootTangent,
    Tangent,
    clique_frames,
)
from torchngvi.numerics.linalg import finite
from torchngvi.posteriors.conversions import (
    RememberingPosterior,
    Tested,
    covariance_root,
    root_of_inverse,
    tangent_moved,
)
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Forest
from torchngvi.structures.pattern import Structured, is_whole

# What Gaussians that hold a precision S = V⁻¹ = T Tᵀ have in common: the frame C = T⁻ᵀ, and what follows from T


class PrecisionGaussian(Gaussian):
    """N(m, (T Tᵀ)⁻¹): abstract; `PrecisionCholeskyGaussian` stores T, and `NaturalGaussian` stores S."""

    upper = True

    def factor(self) -> Structured:
        """Return T with S = T Tᵀ, in the pattern."""
        raise NotImplementedError

    def _compute_root(self) -> Structured:
        return self.structure.inverse(self.factor())

    @property
    def scale_tril(self) -> Tensor:
        """The lower Cholesky factor of the covariance V, (*batch, D, D)."""
        structure, factor = self.structure, self.factor()
        if structure.closed:
            return structure.to_dense(root_of_inverse(structure, factor))
        return covariance_root(structure, factor)

    def whiten(self, x: Tensor) -> Tensor:
        """Divide vectors by the root of the frame: C⁻¹ x = Tᵀ x, (*sample, *batch, D)."""
        return self.structure.tmv(self.factor(), x.to(self.dtype))

    def whitener(self) -> Structured:
        """Return T, the transpose of C⁻¹."""
        return self.factor()

    def log_det_root(self) -> Tensor:
        """Compute log|det C| = -Σ log T_ii, (*batch,)."""
        return -self.structure.log_det(self.factor())

    def unframe(self, a: Tensor, W: Structured) -> tuple[Tensor, Structured]:
        """Take a and W out of the frame by products with T: T a and T W Tᵀ."""
        factor = self.factor()
        return self.structure.mv(factor, a), self.structure.congruence(factor, W)


class NaturalGaussian(PrecisionGaussian):
    """N(m, S⁻¹), in the buffers ``precision_mean`` (S m) and ``precision`` (S).

    A step of the natural gradient adds to S, without a factor of V or a product of D x D matrices, and every structure,
    an arrow or a forest too, has a precision.  Rules that follow the gradient of a root need a posterior that stores
    one, a `CholeskyGaussian` or a `PrecisionCholeskyGaussian`.

    Args:
        dim, batch_shape, mean, scale, dtype, device: as in :class:`CholeskyGaussian`, with a scale of the covariance.
        structure: which entries S has, every one by default; the buffer holds them as the structure stores them.

    Raises:
        InputError: as in :class:`CholeskyGaussian`.

    >>> NaturalGaussian(2, mean=1.0, scale=0.5).precision_mean.tolist()
    [4.0, 4.0]
    """

    takes = frozenset({Congruence, Tangent})
    coordinate_names = ("precision_mean", "precision")
    precision_mean: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean m = S⁻¹(S m), (*batch, D), kept until the coordinates change."""
        return self._computed("mean")["mean"]

    def _compute_mean(self) -> Tensor:
        return self._solved(self.factor(), self.precision_mean)

    def _solved(self, factor: Structured, vector: Tensor) -> Tensor:
        """(T Tᵀ)⁻¹ x."""
        return self.structure.tsolve(factor, self.structure.solve(factor, vector))

    @property
    def precision(self) -> Tensor:
        """The precision S, written out, (*batch, D, D)."""
        return self.structure.full(self.coordinates.matrix)

    def factor(self) -> Structured:
        """Return T with S = T Tᵀ in the pattern, kept until S changes."""
        return self._computed("factor")["factor"]

    def _compute_factor(self) -> Structured:
        return self.structure.cholesky(self.coordinates.matrix)[0]

    def frame(self) -> Frame:
        """Return m and the root T⁻ᵀ, kept until the coordinates change."""
        known = self._computed("mean", "root")
        return Frame(known["mean"], known["root"], self.structure, upper=True)

    def snapshot(self) -> Coordinates:
        """Copy the coordinates with what is known of them."""
        return Tested.of(*super().snapshot(), **self._computed("mean", "factor", "root"))

    def _of_stddev(self, mean: Tensor, stddev: Tensor) -> Coordinates:
        return Coordinates(mean / stddev.square(), self._diagonal_matrix(stddev.pow(-2)))

    def _of_factor(self, mean: Tensor, factor: Tensor) -> Coordinates:
        structure = self.structure
        if structure.closed:  # the blocks of the factor are a factor of the blocks
            factor = structure.to_dense(structure.from_dense(factor))
        precision = structure.from_dense(torch.cholesky_inverse(factor))
        return Coordinates(structure.smv(precision, mean), precision)

    def _coordinates_with(self, mean: Tensor, whitener: Structured) -> Coordinates:
        structure = self.structure
        return Coordinates(structure.mv(whitener, structure.tmv(whitener, mean)), structure.marginals(whitener))

    def tangent(self, e: Expectation) -> Coordinates:
        """Compute the natural gradient in (S m, S), which is (g - G m, -G) with G = H - γS.

        A step of length ρ along it is VN, S' = (1 - γρ) S + ρH and m' = m - ρ S'⁻¹ g (Khan and Rue 2023).
        """
        if isinstance(e.derivative, Local):
            g, G = self.unframe(*e.derivative)
        else:
            g, H = self._raw(e.derivative)
            G = torch.sub(H, self.coordinates.matrix, alpha=e.temperature)
        return Coordinates(g - self.structure.smv(G, self.mean), G.neg_())

    def _raw(self, derivative: Derivative) -> tuple[Tensor, Structured]:
        """g and H in the pattern, with no detour through the frame where squares can be cut out of H."""
        if isinstance(derivative, Framed) or not self.structure.closed:
            return self.unframe(*derivative.framed(self.frame()))
        g, H = derivative if isinstance(derivative, Raw) else derivative.raw()
        return g, self.structure.from_dense(H)

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """Compute (S'm', S'), and where S' is positive definite and V' neither over- nor underflows."""
        vector, precision = self.coordinates
        match move:
            case Tangent((vector_change, matrix_change)):
                vector, matrix = vector + vector_change, precision + matrix_change
            case Congruence(N, force):
                # S' = T N Tᵀ,  S'm' = S'm + T f
                shift, matrix = self.unframe(force, N)
                matrix = self.structure.one_sided(matrix)
                vector = self.structure.smv(matrix, self.mean) + shift
            case _:
                raise NotImplementedError  # `takes` refuses it before
        factor, ok = self.structure.cholesky(matrix)
        mean = self._solved(factor, vector)
        ok = ok & torch.isfinite(vector).all(-1)
        if self._bounded(matrix, factor):  # the next evaluation inverts T, if it needs the root
            new, proper = Tested.of(vector, matrix, mean=mean, factor=factor), finite(mean).all(-1)
        else:
            root = self.structure.inverse(factor)
            new, proper = Tested.of(vector, matrix, mean=mean, factor=factor, root=root), self._proper(mean, root)
        return new, self.structure.everywhere(ok & proper)

    def _bounded(self, matrix: Structured, factor: Structured, small: int = 64) -> bool:
        """Whether all variances are known to be finite and positive without an inverse of T, which a small D has."""
        structure, others = self.structure, self.dim - 1
        if self.dim <= small or not matrix.is_cpu or not is_whole(structure):
            return False
        trace, log_det = structure.diagonal(matrix).sum(-1), 2 * structure.log_det(factor)
        range_ = 0.5 * math.log(torch.finfo(matrix.dtype).max)
        smallest = log_det - others * (trace / others).log()
        return bool(((smallest > -range_) & (trace.log() < range_)).all())


class PrecisionCholeskyGaussian(PrecisionGaussian):
    """N(m, (T Tᵀ)⁻¹) with a lower-triangular T, in the buffers ``mean`` and ``precision_tril``.

    Take it for rules that follow a root where only the precision is sparse, as in hierarchical models: every structure,
    an arrow or a forest too, has a root of the precision.

    Args:
        dim, batch_shape, mean, scale, dtype, device: as in :class:`CholeskyGaussian`, with a scale of the covariance.
        structure: which entries T has, every one below the diagonal by default; the buffer holds them as the structure
            stores them.

    Raises:
        InputError: as in :class:`CholeskyGaussian`.

    >>> PrecisionCholeskyGaussian(2, scale=0.1).precision_tril.diagonal().tolist()
    [10.0, 10.0]
    """

    takes = frozenset({Congruence, Tangent, RootTangent, LogTangent})
    coordinate_names = ("mean", "precision_tril")

    def factor(self) -> Structured:
        """Return T itself, which is a coordinate."""
        return self.coordinates.matrix

    @property
    def precision_tril(self) -> Tensor:
        """The lower factor T of the precision, written out, (*batch, D, D)."""
        return self.structure.to_dense(self.coordinates.matrix)

    @property
    def precision(self) -> Tensor:
        """The precision S = T Tᵀ, (*batch, D, D)."""
        root = self.precision_tril
        return root @ root.mT

    def _of_stddev(self, mean: Tensor, stddev: Tensor) -> Coordinates:
        return Coordinates(mean, self._diagonal_matrix(stddev.reciprocal()))

    def _of_factor(self, mean: Tensor, factor: Tensor) -> Coordinates:
        structure = self.structure
        if structure.closed:  # the root of the precision follows from that of the covariance, block by block
            return Coordinates(mean, root_of_inverse(structure, structure.from_dense(factor)))
        return Coordinates(mean, structure.cholesky(structure.from_dense(torch.cholesky_inverse(factor)))[0])

    def _coordinates_with(self, mean: Tensor, whitener: Structured) -> Coordinates:
        return Coordinates(mean, whitener)

    def frame(self) -> Frame:
        """Return m and the root T⁻ᵀ, kept until the coordinates change."""
        return Frame(self.mean, self._computed("root")["root"], self.structure, upper=True)

    def snapshot(self) -> Coordinates:
        """Copy the coordinates with what is known of them."""
        return Tested.of(*super().snapshot(), **self._computed("root"))

    def tangent(self, e: Expectation) -> Coordinates:
        """Compute the natural gradient in (m, T), which is (T⁻ᵀ a, -T tril½[P]) (Tan 2025, Theorem 2)."""
        a, P = self.local(e)
        half = self.structure.tril_half(P)
        return Coordinates(self.frame().push(a), -self.structure.matmul(self.coordinates.matrix, half))

    def euclidean(self, e: Expectation) -> Coordinates:
        """Compute the plain gradient in (m, T), which is (T a, -tril[T⁻ᵀ P])."""
        a, P = self.local(e)
        structure, (_, root) = self.structure, self.coordinates
        return Coordinates(structure.mv(root, a), -structure.tmatmul(self.frame().root, P))

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """Compute (m', T') with a positive diagonal, and where it is one and V' neither over- nor underflows."""
        mean, root = here = self.coordinates
        structure = self.structure
        match move:
            case Congruence(N, force):  # N = L Lᵀ:  T' = T L,  m' = m + T'⁻ᵀ L⁻¹ f
                lower, inside = structure.cholesky(N)
                new = structure.matmul(root, lower)
                vector = mean + structure.tsolve(new, structure.solve(lower, force))
            case _:
                (vector, new), inside = tangent_moved(structure, here, move)
        inverse = structure.inverse(new)
        return Tested.of(vector, new, root=inverse), structure.everywhere(inside & self._proper(vector, inverse))


# The marginals of a q over a forest: a node with its ancestors is an ordinary dense Gaussian, one of a batch


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
    """The forest of a q whose precision has the pattern of one, in this process alone."""
    forest = q.structure
    if isinstance(forest, Forest) and q.upper and not q.batch_shape and is_whole(forest):
        return forest
    return None
