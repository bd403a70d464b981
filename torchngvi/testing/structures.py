"""The check of a structure: every verb against matrices that are written out."""

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from torchngvi.interfaces import Frame
from torchngvi.structures import FullAlgebra, Pattern
from torchngvi.testing.claims import (
    DTYPE,
    IDENTITY,
    SINGLE,
    Claim,
    batch_text,
    definite_in,
    kind,
    mask,
    matvec,
    normal,
    root_in,
    symmetric_in,
)

DIM = 6
STORED = 0.0  # of entries that are only put in their places
BATCHES: list[tuple[int, ...]] = [(), (2,), (3,), (2, DIM)]  # in the last a wrong broadcast raises no error
SAMPLES: list[tuple[int, ...]] = [(), (3,), (2, 3)]


def check_structure(
    structure: Pattern | Callable[[int], Pattern],
) -> None:
    """Check that a structure keeps the contract of `Pattern`, and of `FullAlgebra` if it is one.

    Its matrices must be closed under products, inverses and congruences.  Every verb must agree with that of the
    matrices written out, for batches and for samples on the left of the batch.  `flat` must be isometric for ½⟨A, A'⟩,
    the metric in which accelerations and momenta measure.  A failed factorisation must be told member by member.

    Args:
        structure: a pattern, or a function from D to one, which is called with D = 6.

    Raises:
        AssertionError: an identity fails; the text says which, by how much, and for which input.

    >>> from torchngvi.structures import Dense, block_diagonal
    >>> check_structure(Dense)
    >>> check_structure(block_diagonal([1, 2, 1]))
    """
    pattern = structure if isinstance(structure, Pattern) else structure(DIM)
    claim = Claim(kind(pattern))
    claim.holds(isinstance(pattern, Pattern), "a structure must be a torchngvi.structures.Pattern")
    with claim.at("D = " + str(pattern.dim)).works("positions()"):
        _positions(claim, pattern)
    for batch in BATCHES:
        here = claim.at(batch_text(batch))
        _group(here, pattern, batch)
        for verbs in (_entries, _matrices, _metric, *((_full,) if isinstance(pattern, FullAlgebra) else ())):
            with here.works("one of its verbs"):
                verbs(here, pattern, batch)
        for sample in SAMPLES:
            there = claim.at(f"{batch_text(batch)} and samples {sample}")
            with there.works("one of its verbs for vectors"):
                _vectors(there, pattern, batch, sample)
        for upper in (False, True):
            with here.works("what it makes of the data"):
                _data(here.at(f"{here.where} and C = {'Lᵀ' if upper else 'L'}"), pattern, batch, upper)
    for verbs in (_sparse, _failures, _gradients, _single):
        with claim.at("one posterior").works("one of its verbs"):
            verbs(claim.at("one posterior"), pattern)


def _positions(claim: Claim, pattern: Pattern) -> None:
    rows, columns = pattern.positions()
    claim.holds(
        rows.shape == columns.shape == torch.Size(pattern.shape),
        f"positions() must be two tensors of its shape {pattern.shape}; got {tuple(rows.shape)}",
    )
    pairs = list(zip(rows.flatten().tolist(), columns.flatten().tolist(), strict=True))
    claim.holds(len(set(pairs)) == len(pairs), "positions() must name every entry once")
    claim.holds(
        all((i, i) in pairs for i in range(pattern.dim)),
        f"positions() must have all D = {pattern.dim} diagonal entries",
    )
    claim.holds(
        all((j, i) in pairs for i, j in pairs if i < j),
        "an entry above the diagonal may be stored only beside its mirror image",
    )
    claim.holds(pattern.parameters == int(mask(pattern).tril().sum()), "`parameters` must count the entries of a root")
    # in a closed pattern what stands below one diagonal entry is a square without gaps
    widest = int(mask(pattern).tril().sum(0).max())
    claim.holds(pattern.widest == widest, f"`widest` must be the size of its largest square, {widest}")
    twin = copy.deepcopy(pattern)
    claim.holds(
        twin == pattern and hash(twin) == hash(pattern),
        "it must be compared and hashed by its sizes; make it a frozen dataclass",
    )


def _group(claim: Claim, pattern: Pattern, batch: tuple[int, ...]) -> None:
    """Of the matrices that `positions` describes, without a verb."""
    outside = 1 - mask(pattern)
    L, M, A = root_in(pattern, batch, 1), root_in(pattern, batch, 2), symmetric_in(pattern, batch, 3)
    products = {
        "products L M of two roots": L @ M,
        "inverses L⁻¹ of a root": torch.linalg.inv(L),
        "congruences L A Lᵀ": L @ A @ L.mT,
        "squares L Lᵀ of a root": L @ L.mT,
    }
    for name, product in products.items():
        claim.close(f"{name} must have no entry outside its positions", product * outside, torch.zeros_like(product))


def _entries(claim: Claim, pattern: Pattern, batch: tuple[int, ...]) -> None:
    dim = pattern.dim
    L, A, x = root_in(pattern, batch, 1), symmetric_in(pattern, batch, 2), normal(*batch, dim, seed=3)
    root, symmetric = pattern.from_dense(L), pattern.from_dense(A)
    shape = (*batch, *pattern.shape)
    claim.holds(root.shape == shape, f"from_dense must give the shape {shape}; got {tuple(root.shape)}")
    claim.close("to_dense(from_dense(L)) must be L", pattern.to_dense(root), L, STORED)
    claim.close("full(from_dense(A)) must be the symmetric A", pattern.full(symmetric), A, STORED)
    eye = torch.eye(dim, dtype=DTYPE).expand(*batch, dim, dim)
    claim.close("eye must be the identity", pattern.to_dense(pattern.eye(x)), eye, STORED)
    claim.close("diagonal(A) must be its diagonal", pattern.diagonal(symmetric), A.diagonal(dim1=-2, dim2=-1), STORED)
    replaced = L.clone()
    replaced.diagonal(dim1=-2, dim2=-1).copy_(x)
    claim.close(
        "with_diagonal(L, x) must change it", pattern.to_dense(pattern.with_diagonal(root, x)), replaced, STORED
    )
    half = A.tril()
    claim.close("tril(A) must be its lower triangle", pattern.to_dense(pattern.tril(symmetric)), half, STORED)
    claim.close(
        "one_sided must mirror a lower triangle", pattern.full(pattern.one_sided(pattern.from_dense(half))), A, STORED
    )
    half.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    claim.close("tril_half(A) must be tril½[A]", pattern.to_dense(pattern.tril_half(symmetric)), half, STORED)
    factor = x[..., 0]
    scaled = pattern.from_dense(factor[..., None, None] * L)
    claim.close("scaled(s, L) must be s L, one s a member", pattern.scaled(factor, root), scaled, STORED)
    claim.holds(pattern.is_finite(root).all(), "is_finite must hold for finite entries")


def _vectors(claim: Claim, pattern: Pattern, batch: tuple[int, ...], sample: tuple[int, ...]) -> None:
    L, A = root_in(pattern, batch, 1), symmetric_in(pattern, batch, 2)
    root, symmetric, x = pattern.from_dense(L), pattern.from_dense(A), normal(*sample, *batch, pattern.dim, seed=3)
    claim.close("mv(L, x) must be L x", pattern.mv(root, x), matvec(L, x))
    claim.close("tmv(L, x) must be Lᵀ x", pattern.tmv(root, x), matvec(L.mT, x))
    inverse = torch.linalg.inv(L)
    claim.close("solve(L, x) must be L⁻¹ x", pattern.solve(root, x), matvec(inverse, x), IDENTITY)
    claim.close("tsolve(L, x) must be L⁻ᵀ x", pattern.tsolve(root, x), matvec(inverse.mT, x), IDENTITY)
    claim.close("smv(A, x) must be A x", pattern.smv(symmetric, x), matvec(A, x))
    claim.close("neighbours(x) must sum x over the entries of a row", pattern.neighbours(x), x @ mask(pattern))


def _matrices(claim: Claim, pattern: Pattern, batch: tuple[int, ...]) -> None:
    L, M, A = root_in(pattern, batch, 1), root_in(pattern, batch, 2), symmetric_in(pattern, batch, 3)
    root, other, symmetric = (pattern.from_dense(x) for x in (L, M, A))
    kept, w, dense = mask(pattern), normal(*batch, pattern.dim, seed=4), pattern.to_dense
    claim.close("matmul(L, M) must be L M", dense(pattern.matmul(root, other)), L @ M)
    claim.close("inverse(L) must be L⁻¹", dense(pattern.inverse(root)), torch.linalg.inv(L), IDENTITY)
    claim.close(
        "tmatmul(L, A) must be the lower entries of Lᵀ A, zeros above",
        dense(pattern.tmatmul(root, symmetric)),
        (L.mT @ A).tril() * kept,
    )
    claim.close("congruence(L, A) must be L A Lᵀ", pattern.full(pattern.congruence(root, symmetric)), L @ A @ L.mT)
    claim.close("scale_columns(L, s) must be L diag(s)", dense(pattern.scale_columns(root, w)), L * w[..., None, :])
    factor, ok = pattern.cholesky(pattern.from_dense(L @ L.mT))
    claim.holds(ok.shape == batch and bool(ok.all()), "cholesky must tell that L exists, (*batch,)")
    claim.close("cholesky(L Lᵀ) must be L", dense(factor), L, IDENTITY)
    signs = torch.where(w > 0, 1.0, -1.0).to(DTYPE)
    turned, ok = pattern.positive_root(pattern.from_dense(L * signs[..., None, :]))
    claim.close("positive_root must turn columns", dense(turned), L)
    claim.holds(ok.all(), "positive_root must hold for a regular root")


def _data(claim: Claim, pattern: Pattern, batch: tuple[int, ...], upper: bool) -> None:
    """What rows, draws and weights bring, in the frame."""
    dim = pattern.dim
    L, X, H = root_in(pattern, batch, 1), normal(*batch, 5, dim, seed=2), normal(*batch, dim, dim, seed=3)
    H, w, root = H + H.mT, normal(*batch, dim, seed=4), pattern.from_dense(L)
    C, kept, full = (L.mT if upper else L), mask(pattern), pattern.full
    frame, one = Frame(w, root, pattern, upper), X.reshape(-1, 5, dim)[0]
    claim.close("rows(X, L) must be X C", frame.rows(X), X @ C)
    claim.close("rows(X, L) of one X for all members must be X C", frame.rows(one), one @ C)
    claim.close("conjugate must be the entries of Cᵀ H C", full(frame.conjugate(H)), (C.mT @ H @ C) * kept)
    claim.close(
        "gram must be the entries of Cᵀ diag(w) C", full(frame.gram(w)), (C.mT @ torch.diag_embed(w) @ C) * kept
    )
    claim.close("the marginals must be the entries of C Cᵀ", full(frame.marginals()), (C @ C.mT) * kept)
    claim.close("row_norms must be diag(C Cᵀ)", frame.variance, (C @ C.mT).diagonal(dim1=-2, dim2=-1))
    outer = X.mT @ (2 * X + 1)
    lower = pattern.to_dense(pattern.tril(pattern.lower(X, 2 * X + 1)))
    claim.close("lower(l, r) must be the entries of Σ l rᵀ on and below the diagonal", lower, outer.tril() * kept)
    symmetric = full(pattern.sym_lower(X, 2 * X + 1))
    claim.close("sym_lower(l, r) must be those of Σ ½(l rᵀ + r lᵀ)", symmetric, 0.5 * (outer + outer.mT) * kept)


def _metric(claim: Claim, pattern: Pattern, batch: tuple[int, ...]) -> None:
    A, B, L = symmetric_in(pattern, batch, 1), symmetric_in(pattern, batch, 2), root_in(pattern, batch, 3)
    stored = [pattern.from_dense(x) for x in (A, B)]
    flat = [pattern.flat(x) for x in stored]
    shape = (*batch, pattern.parameters)
    claim.holds(flat[0].shape == shape, f"flat(A) must have the shape {shape}; got {tuple(flat[0].shape)}")
    claim.close(
        "the dot product of flat(A) and flat(B) must be ½⟨A, B⟩",
        (flat[0] * flat[1]).sum(-1),
        0.5 * (A * B).sum((-2, -1)),
    )
    claim.close("unflat(flat(A)) must be A", pattern.unflat(flat[0]), stored[0])
    claim.close("norm2(A) must be ‖A‖² of a symmetric matrix", pattern.norm2(stored[0]), A.square().sum((-2, -1)))
    root = pattern.from_dense(L)
    claim.close("entries_norm2(L) must be ‖L‖² of a root", pattern.entries_norm2(root), L.square().sum((-2, -1)))
    claim.close("log_det(L) must be log|L|", pattern.log_det(root), torch.linalg.slogdet(L)[1])


def _full(claim: Claim, pattern: Pattern, batch: tuple[int, ...]) -> None:
    assert isinstance(pattern, FullAlgebra)
    kept, dim = mask(pattern), pattern.dim
    L, A, B = root_in(pattern, batch, 1), symmetric_in(pattern, batch, 2), normal(*batch, dim, dim, seed=3) * kept
    S, x = definite_in(pattern, batch, 4), normal(*batch, dim, seed=5)
    root, symmetric, other = (pattern.from_dense(x) for x in (L, A, B))
    dense, inverse = pattern.to_dense, torch.linalg.inv(L)
    claim.close("matmul(A, B) must be A B of any squares", dense(pattern.matmul(symmetric, other)), A @ B)
    claim.close("mv(B, x) must be B x of any squares", pattern.mv(other, x), matvec(B, x))
    claim.close("transpose(B) must be Bᵀ", dense(pattern.transpose(other)), B.mT, STORED)
    claim.close("exp(A) must be the matrix exponential", dense(pattern.exp(symmetric)), torch.linalg.matrix_exp(A))
    claim.close("right_solve(B, L) must be B L⁻¹", dense(pattern.right_solve(other, root)), B @ inverse, IDENTITY)
    norm2 = B.square().sum((-2, -1))
    claim.close("entries_norm2(B) must be ‖B‖² of any squares", pattern.entries_norm2(other), norm2)
    lower = dense(pattern.lower_root(other))
    claim.close("lower_root must be lower triangular", lower.tril(), lower, STORED)
    claim.close("lower_root(B) must be L with L Lᵀ = B Bᵀ", lower @ lower.mT, B @ B.mT)
    factor, ok = pattern.reverse_cholesky(pattern.from_dense(S))
    claim.holds(ok.shape == batch and bool(ok.all()), "reverse_cholesky must tell that L exists, (*batch,)")
    factor = dense(factor)
    claim.close("reverse_cholesky(S) must be L with Lᵀ L = S", factor.tril().mT @ factor, S)
    a, W = pattern.unconjugate(root, x, symmetric)
    claim.close("unconjugate must give L⁻ᵀ a", a, matvec(inverse.mT, x), IDENTITY)
    claim.close("unconjugate must give L⁻ᵀ W L⁻¹", dense(W), inverse.mT @ A @ inverse, IDENTITY)


def _sparse(claim: Claim, pattern: Pattern) -> None:
    L, X, b = root_in(pattern, (), 1), normal(5, pattern.dim, seed=2).clamp_min(0), normal(5, seed=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        rows = X.to_sparse_csr()
    for upper in (False, True):
        C, root = (L.mT if upper else L), pattern.from_dense(L)
        gram = pattern.full(pattern.sparse_gram(root, rows, b, upper))
        expected = C.mT @ X.mT @ torch.diag(b) @ X @ C * mask(pattern)
        claim.close("sparse_gram must be the entries of Cᵀ Xᵀ diag(b) X C", gram, expected)
        norms = pattern.sparse_row_norms(root, rows, upper)
        claim.close("sparse_row_norms must be ‖Cᵀ x_n‖²", norms, (X @ C).square().sum(-1))


def _failures(claim: Claim, pattern: Pattern) -> None:
    good = definite_in(pattern, (), 1)
    S = pattern.from_dense(torch.stack([good, -good, torch.full_like(good, torch.nan)]))
    told, sentence = [True, False, False], "must be told member by member, of a definite, a negative and a NaN matrix"
    factor, ok = pattern.cholesky(S)
    claim.holds(ok.tolist() == told, f"a failed cholesky {sentence}")
    expected = torch.linalg.cholesky(good)
    claim.close("cholesky beside failed members must be L", pattern.to_dense(factor[0]), expected, IDENTITY)
    if isinstance(pattern, FullAlgebra):
        claim.holds(pattern.reverse_cholesky(S)[1].tolist() == told, f"a failed reverse_cholesky {sentence}")
    roots = torch.stack([root_in(pattern, (), 2)] * 3)
    roots[1, 0, 0], roots[2, -1, -1] = 0.0, torch.inf
    ok = pattern.positive_root(pattern.from_dense(roots))[1]
    claim.holds(ok.tolist() == told, "positive_root must tell which members are regular and finite")


def _gradients(claim: Claim, pattern: Pattern) -> None:
    """Of what losses pass through, also where an index was first made without gradients."""
    L, M, x = (root_in(pattern, (), seed) for seed in (1, 2, 3))
    x, kept = x[0], mask(pattern).tril()
    with torch.inference_mode():
        pattern.flat(pattern.from_dense(symmetric_in(pattern)))

    def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
        leaf = at.clone().requires_grad_()
        return torch.autograd.grad(function(leaf).sin().sum(), leaf)[0]

    verbs: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "mv": (lambda root: pattern.mv(root, x), lambda dense: dense @ x),
        "tmv": (lambda root: pattern.tmv(root, x), lambda dense: dense.mT @ x),
        "matmul": (
            lambda root: pattern.to_dense(pattern.matmul(root, pattern.from_dense(M))),
            lambda dense: dense @ M,
        ),
        "row_norms": (pattern.row_norms, lambda dense: dense.square().sum(-1)),
        "log_det": (pattern.log_det, lambda dense: dense.diagonal().log().sum()),
    }
    for name, (verb, written) in verbs.items():
        actual = pattern.to_dense(gradient(verb, pattern.from_dense(L))) * kept
        claim.close(f"{name} must be differentiable in the root", actual, gradient(written, L) * kept)
    flat = gradient(pattern.flat, pattern.from_dense(symmetric_in(pattern)))
    claim.holds(flat.isfinite().all(), "flat must be differentiable after a first call in inference mode")


def _single(claim: Claim, pattern: Pattern) -> None:
    L, A, x = root_in(pattern, (), 1), symmetric_in(pattern, (), 2), normal(3, pattern.dim, seed=3)
    given = pattern.from_dense(L), pattern.from_dense(A), x
    root, symmetric, y = (tensor.float() for tensor in given)
    verbs: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "mv": lambda L, A, x: pattern.mv(L, x),
        "tsolve": lambda L, A, x: pattern.tsolve(L, x),
        "matmul": lambda L, A, x: pattern.matmul(L, L),
        "congruence": lambda L, A, x: pattern.congruence(L, A),
        "lower": lambda L, A, x: pattern.lower(x, x),
        "inverse": lambda L, A, x: pattern.inverse(L),
        "tmatmul": lambda L, A, x: pattern.tmatmul(L, A),
        "flat": lambda L, A, x: pattern.flat(A),
        "eye": lambda L, A, x: pattern.eye(x),
    }
    for name, verb in verbs.items():
        expected = verb(*given).float()
        claim.close(f"{name} of float32 must be that of float64", verb(root, symmetric, y), expected, SINGLE)
