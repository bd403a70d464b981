"""Log joints that are sums over the nodes of a forest: each term sees one node and its ancestors."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Frame, Framed, Posterior, Target, TractableTarget, clique_frames
from torchngvi.models.log_joint import LogJoint
from torchngvi.structures import Forest


class Factor(NamedTuple):
    """One kind of term: for each node of a kind one."""

    kind: int  # of ``structure.kinds``
    target: Target  # of θ_c (*sample, *batch, n, k), one value a node


class FactorTarget(Target):
    """log p(θ) = Σ_kinds Σ_c log f_c(θ_c), θ_c the coordinates of a node and of its ancestors.

    A model with n groups has n terms that see the local parameters of one group and the global ones, and one term of
    the global ones alone.  `PerFactor` takes their expectations clique by clique, at a cost that grows with n, and
    `TractableFactors` are terms that know them; as a function of the whole θ the log joint is there for every other
    estimator.

    Args:
        structure: the forest, of which q has the same.
        factors: pairs of a kind of nodes and a term: the number of the kind in ``structure.kinds`` (of an arrow with
            equal groups 0 are the groups and -1 is the root), and a function θ_c (*sample, *batch, n, k) ->
            (*sample, *batch, n) of the coordinates of all n nodes of the kind, each node's own before those of its
            ancestors; or a `Target` with batch members n, such as a `GeneralizedLinear` with rows X (n, N, k), whose
            expectation is then exact and whose prior counts once for every node.
        temperature: γ, the weight of the entropy.

    Raises:
        InputError: no factor, or of a kind that the structure does not have.

    >>> import torch
    >>> from torchngvi.structures import arrow
    >>> groups = arrow(groups=3, local=1, globals=1)
    >>> y = torch.tensor([0.5, -1.0, 2.0])
    >>> def group(theta):  # b_n, g
    ...     return -0.5 * (y - theta[..., 0]) ** 2 - 0.5 * (theta[..., 0] - theta[..., 1]) ** 2
    >>> target = FactorTarget(groups, [(0, group), (-1, lambda theta: -0.5 * theta[..., 0] ** 2)])
    >>> target.log_joint(torch.ones(2, 4)).tolist()
    [-3.125, -3.125]
    """

    def __init__(
        self,
        structure: Forest,
        factors: Sequence[tuple[int, Target | Callable[[Tensor], Tensor]]],
        temperature: float = 1.0,
    ) -> None:
        if not isinstance(structure, Forest):  # a user passes it; only a forest has nodes
            raise InputError(f"a FactorTarget is over a Forest, as arrow(...) gives it; got {structure!r}.")
        kinds, factors = len(structure.kinds), list(factors)
        if not factors or any(not -kinds <= kind < kinds for kind, _ in factors):
            raise InputError(
                f"factors are pairs of a kind of nodes, from 0 to {kinds - 1} or -1 of the last, and a term, at least "
                f"one; got the kinds {[kind for kind, _ in factors]}. The kinds are {structure}."
            )
        self.structure = structure
        self.factors = [
            Factor(kind % kinds, term if isinstance(term, Target) else LogJoint(term, temperature=0.0))
            for kind, term in factors
        ]
        self.temperature = LogJoint(self.log_joint, temperature).temperature
        self.comparable = all(factor.target.comparable for factor in self.factors)

    def log_joint(self, theta: Tensor) -> Tensor:
        """Sum the log of all factors, (*sample, *batch)."""
        cliques = self.structure.gather(theta)
        terms = [factor.target.log_joint(cliques[factor.kind]).sum(-1) for factor in self.factors]
        return sum(terms[1:], terms[0])

    def check(self, q: Posterior) -> None:
        """Raise for a q over another number of coordinates.

        Raises:
            InputError: another D.
        """
        if q.dim != self.structure.dim:
            raise InputError(f"the factors are over D = {self.structure.dim} coordinates; got a posterior of {q.dim}.")

    def assembled(
        self,
        packets: Sequence[Framed],  # of each factor, in the frames of its cliques
    ) -> Framed:
        """Sum the packets of all factors and cliques, in the frame of q."""
        vectors: list[Tensor | None] = [None] * len(self.structure.kinds)
        matrices = vectors.copy()
        for (kind, _), (a, W) in zip(self.factors, packets, strict=True):
            old_a, old_W = vectors[kind], matrices[kind]
            vectors[kind] = a if old_a is None else old_a + a
            matrices[kind] = W if old_W is None else old_W + W
        return Framed(*self.structure.scatter(vectors, matrices))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of all factors, or none where those of a function are unknown."""
        known = [factor.target.tensors() for factor in self.factors]
        return tuple(tensor for some in known for tensor in some) if all(known) else ()

    def settings(self) -> tuple[object, ...]:
        """Return the kinds and the settings of all factors."""
        return tuple((factor.kind, factor.target.settings()) for factor in self.factors)


@final
class TractableFactors(FactorTarget, TractableTarget):
    """A `FactorTarget` of terms that all know their expectation: nothing is drawn, and ``fit(q, target)`` is enough.

    A q over the same forest is needed.

    Args:
        structure: the forest, of which q has the same.
        factors: pairs of a kind of nodes and a target that knows its expectation, as a `GeneralizedLinear` does.
        temperature: γ, the weight of the entropy.

    Raises:
        InputError: as in `FactorTarget`, or a term that does not know its expectation.

    >>> import torch
    >>> from torchngvi import GeneralizedLinear, PrecisionCholeskyGaussian, fit
    >>> from torchngvi.structures import arrow
    >>> groups = arrow(groups=2, local=1, globals=1)
    >>> X = torch.tensor([[[1.0, 0.0], [1.0, 1.0]], [[1.0, 0.0], [1.0, -1.0]]], dtype=torch.float64)  # (n, N, k)
    >>> model = GeneralizedLinear(X, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    >>> q = PrecisionCholeskyGaussian(3, structure=groups, dtype=torch.float64)
    >>> fit(q, TractableFactors(groups, [(0, model)]), progress=False).converged
    True
    """

    def __init__(
        self,
        structure: Forest,
        factors: Sequence[tuple[int, TractableTarget]],
        temperature: float = 1.0,
    ) -> None:
        super().__init__(structure, factors, temperature)
        for _, target in self.factors:
            if not isinstance(target, TractableTarget):
                raise InputError(
                    "TractableFactors are targets that know their expectation, as a GeneralizedLinear; got a "
                    f"{type(target).__name__}. Use FactorTarget with VN(q, estimator=PerFactor(...))."
                )

    def check(self, q: Posterior) -> None:
        """Raise for a q over another structure.

        Raises:
            PairError: another structure, or a root of the covariance.
        """
        super().check(q)
        if q.structure != self.structure or not q.upper:
            raise PairError(f"{_NEEDS} {self.structure}; got a {type(q).__name__} over {q.structure}.")

    def expected_energy(self, frame: Frame) -> tuple[Tensor, Framed]:  # type: ignore[override]
        """Compute E_q[ℓ] (*batch,), differentiable in the frame, and its derivative, summed over the cliques."""
        frames = clique_frames(frame)
        values, packets = [], []
        for kind, target in self.factors:
            assert isinstance(target, TractableTarget)
            value, derivative = target.expected_energy(frames[kind])
            values.append(value.sum(-1))
            packets.append(derivative.framed(frames[kind]))
        return sum(values[1:], values[0]), self.assembled(packets)


_NEEDS = "the factors are over the cliques of a forest, and need a q whose precision has its pattern,"
