"""The factorisations that everything else is built on, batched and without host synchronisation.

There is one policy for failure, and no jitter is ever added.  A factorisation returns its factor and a mask
``ok`` of the batch members for which it exists, and the caller keeps the old state of the others.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchngvi.errors import InputError

_SMALL = 64  # D up to which blocks cost more than they save
_BLOCKS = 4  # of a symmetric or a triangular product: 5/8 of the multiplications
_LARGE = 256  # D from which a triangular product by blocks is faster
_UNROLLED = 4  # the size up to which a factorisation of many small matrices is written out


def finite(x: Tensor) -> Tensor:
    """Say which real entries are finite, with half of the kernels of `torch.isfinite`."""
    return x.abs() < torch.inf


def cholesky(
    matrix: Tensor,  # (*batch, D, D), symmetric
) -> tuple[Tensor, Tensor]:
    """Factor A = L Lᵀ with L lower triangular, and say for which members that worked."""
    if matrix.dtype in (torch.float16, torch.bfloat16):
        raise InputError(f"torch factors no matrices in {matrix.dtype}; convert the posterior by q.float().")
    factor, info = torch.linalg.cholesky_ex(matrix, check_errors=False)
    # a NaN or an infinity anywhere reaches the diagonal, which is positive elsewhere
    return factor, info < (factor.diagonal(dim1=-2, dim2=-1).sum(-1) < torch.inf)  # 0 < 1, and else not


def reverse_cholesky(
    matrix: Tensor,  # (*batch, D, D), symmetric
) -> tuple[Tensor, Tensor]:
    """Factor A = U Uᵀ with U upper triangular, by a Cholesky factorisation of A with rows and columns reversed."""
    factor, ok = cholesky(matrix.flip(-2, -1))
    return factor.flip(-2, -1), ok


def eigh(
    matrix: Tensor,  # (*batch, D, D), symmetric
) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose A = Q diag(λ) Qᵀ, and say for which members that worked; torch's own raises where one fails."""
    ok = torch.isfinite(matrix).flatten(-2).all(-1)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    matrix = torch.where(ok[..., None, None], matrix, eye)
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # it tells nothing of the other members
        if matrix.ndim == 2:
            return eye.diagonal(), eye, torch.zeros_like(ok)
        values, vectors, each = (torch.stack(part) for part in zip(*map(eigh, matrix), strict=True))
        return values, vectors, ok & each
    # large finite entries may overflow on the way
    fine = ok & torch.isfinite(values).all(-1) & torch.isfinite(vectors).flatten(-2).all(-1)
    return torch.where(fine[..., None], values, 1.0), torch.where(fine[..., None, None], vectors, eye), fine


def triangular_inverse(
    lower: Tensor,  # (*batch, D, D), lower triangular
) -> Tensor:
    """Invert a lower triangular matrix by blocks: [A 0; B D]⁻¹ = [A⁻¹ 0; -D⁻¹ B A⁻¹ D⁻¹]."""
    size = lower.shape[-1]
    if size <= _SMALL or lower.device.type != "cpu":
        eye = torch.eye(size, dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    half = size // 2
    first, last = triangular_inverse(lower[..., :half, :half]), triangular_inverse(lower[..., half:, half:])
    inverse = torch.zeros_like(lower)
    inverse[..., :half, :half], inverse[..., half:, half:] = first, last
    inverse[..., half:, :half] = last @ (lower[..., half:, :half] @ first).neg_()
    return inverse


def multiply(matrix: Tensor, vector: Tensor) -> Tensor:
    """Compute A x; of many small matrices the product with a row takes a quarter of the time of that with a column."""
    return vector @ matrix.mT if matrix.ndim == 2 else (vector[..., None, :] @ matrix.mT)[..., 0, :]


def gram(
    rows: Tensor,  # X, (N, D) or (*batch, N, D)
    weights: Tensor,  # w, (*batch, N)
) -> Tensor:
    """Compute the weighted Gram matrix Xᵀ diag(w) X; of a large one only the blocks on and below the diagonal."""
    weighted, size = rows * weights[..., None], rows.shape[-1]
    if size <= 2 * _SMALL or rows.device.type != "cpu":
        return rows.mT @ weighted
    product = weighted.new_empty(*weighted.shape[:-2], size, size)
    for start, end in _blocks(size):
        _put_both(product, start, end, rows[..., start:end].mT @ weighted[..., :end])
    return product


def triangular_rows(
    rows: Tensor,  # X, (*batch, N, D)
    lower: Tensor,  # L, (*batch, D, D), lower triangular
    transposed: bool = False,
) -> Tensor:
    """Multiply a design by a triangular root, X L or X Lᵀ; a large one on a CPU block by block, without its zeros."""
    turned, size = lower if transposed else lower.mT, lower.shape[-1]
    if size < _LARGE or rows.device.type != "cpu":
        return rows @ turned.mT
    columns = rows.mT
    product = rows.new_empty(*torch.broadcast_shapes(rows.shape[:-2], turned.shape[:-2]), *columns.shape[-2:])
    for start, end in _blocks(size):
        part = slice(0, end) if transposed else slice(start, size)
        product[..., start:end, :] = turned[..., start:end, part] @ columns[..., part, :]
    return product.mT


def triangular_gram(
    lower: Tensor,  # L, (*batch, D, D), lower triangular
    transposed: bool = False,
) -> Tensor:
    """Compute C Cᵀ of a triangular root, C = L or C = Lᵀ; of a large one on a CPU 5/16 of the multiplications."""
    root, size = lower.mT if transposed else lower, lower.shape[-1]
    if size < _LARGE or lower.device.type != "cpu":
        return root @ root.mT
    product = torch.empty_like(lower, memory_format=torch.contiguous_format)
    for start, end in _blocks(size):
        part = slice(start, size) if transposed else slice(0, end)
        _put_both(product, start, end, root[..., start:end, part] @ root[..., :end, part].mT)
    return product


def _blocks(size: int) -> list[tuple[int, int]]:
    ends = [size * k // _BLOCKS for k in range(_BLOCKS + 1)]
    return list(itertools.pairwise(ends))


def _put_both(product: Tensor, start: int, end: int, block: Tensor) -> None:
    """Write rows of a symmetric matrix, up to the diagonal, and the columns that mirror them."""
    product[..., start:end, :end] = block
    product[..., :start, start:end] = block[..., :start].mT


def tril_half(
    matrix: Tensor,  # (*batch, D, D)
) -> Tensor:
    """Take the strictly lower part and half of the diagonal, tril½[A]: of a symmetric A it is A with its transpose."""
    lower = matrix.tril()
    lower.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    return lower


def positive_columns(
    lower: Tensor,  # (*batch, D, D), lower triangular
) -> tuple[Tensor, Tensor]:
    """Turn the columns of a root whose diagonal entry is negative; V = C Cᵀ does not change."""
    diagonal = lower.diagonal(dim1=-2, dim2=-1)
    ok = (diagonal != 0).all(-1) & finite(lower).flatten(-2).all(-1)
    return lower * diagonal.sign()[..., None, :], ok


# Symmetric matrices and their entries on and below the diagonal, row after row


def solve_symmetric(
    matrix: Tensor,  # (*batch, D, D)
    right: Tensor,  # (*batch, D)
) -> Tensor:
    """Solve A y = x by Cholesky, (*batch, D); NaN for members that are not positive definite."""
    factor, ok = cholesky(matrix)
    solved = torch.cholesky_solve(right[..., None], factor)[..., 0]
    return torch.where(ok[..., None], solved, torch.nan)


def symmetric(matrix: Tensor) -> Tensor:
    """Return the symmetric part (A + Aᵀ)/2 of a square matrix."""
    return 0.5 * (matrix + matrix.mT)


def lower_entries(
    matrix: Tensor,  # (*batch, d, d)
) -> Tensor:  # (*batch, d (d + 1)/2)
    """Take the entries on and below the diagonal, row after row: vech of a symmetric matrix."""
    rows, columns = torch.tril_indices(*matrix.shape[-2:], device=matrix.device)
    return matrix[..., rows, columns]


def lower_triangle(
    entries: Tensor,  # (*batch, d (d + 1)/2)
    dim: int,
) -> Tensor:  # (*batch, d, d)
    """Make the lower triangular matrix with these entries: the inverse of `lower_entries`."""
    rows, columns = torch.tril_indices(dim, dim, device=entries.device)
    where = torch.full((dim, dim), entries.shape[-1], device=entries.device)  # one past the end: a zero
    where[rows, columns] = torch.arange(entries.shape[-1], device=entries.device)
    return torch.nn.functional.pad(entries, (0, 1))[..., where]


def symmetric_matrix(
    entries: Tensor,  # (*batch, d (d + 1)/2)
    dim: int,
) -> Tensor:  # (*batch, d, d)
    """Make the symmetric matrix W with these entries vech W."""
    lower = lower_triangle(entries, dim)
    return lower + lower.tril(-1).mT


def dual_entries(
    matrix: Tensor,  # M, (*batch, d, d), symmetric
) -> Tensor:  # (*batch, d (d + 1)/2)
    """Take the entries y with ⟨y, vech W⟩ = tr(MW) for every symmetric W."""
    return lower_entries(2 * matrix - matrix.diagonal(dim1=-2, dim2=-1).diag_embed())


# Least squares for batches of problems, of which some may have columns that do not vary


def shortest_fit(
    design: Tensor,  # (*batch, n, D)
    right: Tensor,  # (*batch, n, R)
) -> Tensor:  # (*batch, D, R)
    """Find the shortest solution c of min |A c - y|, by singular values of the columns brought to length 1."""
    size = design.square().sum(-2, keepdim=True).sqrt()
    good = size.isfinite() & (size > 0)
    scaled = torch.where(good, design / size, 0.0)
    U, s, Vh = torch.linalg.svd(scaled, full_matrices=False)
    least = torch.finfo(s.dtype).eps * design.shape[-2] * s[..., :1]
    inverse = torch.where(s > least, 1 / s, 0.0)
    solution = Vh.mT @ (inverse[..., None] * (U.mT @ right))
    return torch.where(good.mT, solution / size.mT, torch.where(size.mT == 0, 0.0, torch.nan))


def anderson(
    points: Sequence[Tensor],  # x_1 .. x_n, (D,) each
    residuals: Sequence[Tensor],  # G(x) - x at each, (D,)
) -> Tensor:  # (D,)
    """The next point of x → G(x), G(x_n) - ΔG argmin_c |f_n - ΔF c| (Walker and Ni 2011; Anderson 1965)."""
    x, f = (torch.stack(list(parts), 1) for parts in (points, residuals))
    df = f.diff(dim=1)
    values, basis, _ = eigh(df.mT @ df)  # LAPACK's least squares are not the same bits twice
    seen = values > torch.finfo(values.dtype).eps ** 0.75 * values[-1:]
    solution = basis @ torch.where(seen, (basis.mT @ (df.mT @ f[:, -1])) / torch.where(seen, values, 1.0), 0.0)
    image = x[:, -1] + f[:, -1]
    aim = image - (x.diff(dim=1) + df) @ solution
    return torch.where(aim.isfinite().all(), aim, image)


def column_rank(Z: Tensor) -> int:
    """The rank of columns that are brought to length 1 before, so that their units do not matter."""
    lengths = torch.linalg.vector_norm(Z, dim=0)
    return int(torch.linalg.matrix_rank(Z / lengths.clamp_min(torch.finfo(Z.dtype).tiny)))


# Many small matrices at once: factors and solutions written out over r, elementwise over the matrices
#
# A batched library call costs a call for each matrix.  Up to r = 4 the r³ operations on whole tensors are faster, by
# two to seventeen times for 20,000 matrices on one core; above that, torch's own are.


def small_cholesky(
    matrix: Tensor,  # (*batch, r, r), symmetric
) -> tuple[Tensor, Tensor]:
    """Factor A = L Lᵀ, and say for which members that worked, as `cholesky`."""
    size = matrix.shape[-1]
    if size > _UNROLLED:
        return cholesky(matrix)
    if size == 1:
        factor = matrix.sqrt()
        return factor, (factor > 0).flatten(-2).all(-1) & factor.isfinite().flatten(-2).all(-1)
    entries: list[list[Tensor]] = [[] for _ in range(size)]
    for row in range(size):
        for column in range(row + 1):
            left = matrix[..., row, column]
            for k in range(column):
                left = left - entries[row][k] * entries[column][k]
            entries[row].append(left.sqrt() if row == column else left / entries[column][column])
    zero = torch.zeros_like(entries[0][0])
    rows = [torch.stack([*row, *[zero] * (size - len(row))], -1) for row in entries]
    factor = torch.stack(rows, -2)
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    return factor, ((diagonal > 0) & diagonal.isfinite()).all(-1)


def small_solve(
    lower: Tensor,  # L, (*batch, r, r)
    columns: Tensor,  # B, (*batch, r, S)
) -> Tensor:
    """Solve L X = B for many small lower-triangular L."""
    size = lower.shape[-1]
    if size > _UNROLLED:
        return torch.linalg.solve_triangular(lower, columns, upper=False)
    if size == 1:
        return columns / lower
    rows: list[Tensor] = []
    for row in range(size):
        left = columns[..., row, :]
        for k in range(row):
            left = left - lower[..., row, k, None] * rows[k]
        rows.append(left / lower[..., row, row, None])
    return torch.stack(rows, -2)


def small_tsolve(
    lower: Tensor,  # L, (*batch, r, r)
    columns: Tensor,  # B, (*batch, r, S)
) -> Tensor:
    """Solve Lᵀ X = B for many small lower-triangular L."""
    if lower.shape[-1] > _UNROLLED:
        return torch.linalg.solve_triangular(lower.mT, columns, upper=True)
    return small_solve(lower.mT.flip(-2, -1), columns.flip(-2)).flip(-2)


def small_inverse(
    lower: Tensor,  # L, (*batch, r, r)
) -> Tensor:
    """Invert many small lower-triangular matrices."""
    size = lower.shape[-1]
    if size > _UNROLLED:
        return triangular_inverse(lower)
    return small_solve(lower, torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower))


def small_product(
    left: Tensor,  # (*batch, a, b)
    right: Tensor,  # (*batch, b, c)
) -> Tensor:
    """Multiply many small matrices, with b = 1 elementwise."""
    return left * right if left.shape[-1] == 1 else left @ right
