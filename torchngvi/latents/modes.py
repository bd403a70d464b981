"""The modes of the latents, with the sparse matrices and the derivatives that Newton's method needs."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import where_members
from torchngvi.numerics import linalg
from torchngvi.numerics.linalg import small_product as product

# Sparse symmetric matrices as chains of dense blocks: factor, solutions, log determinant, selected inverse
#
# An order of the latents in which neighbours stand at most b places apart, cut into pieces of b, leaves a
# block-tridiagonal matrix: a Cholesky factor has its blocks, and nothing else is filled in.  A lattice of √D x √D
# latents has b = √D, so that the D² entries of a matrix become 2 D^1.5, and the D³ operations D².  Several unconnected
# parts stand one behind the other, or side by side in a batch of chains of one length; groups of latents are a batch of
# chains of one block.
#
# The entries of the inverse at the places of the pattern are had from the factor, from the last block back to the
# first, without any other (Takahashi, Fagan and Chin 1973; Rue and Martino 2007).

_WORTH_A_CALL = 32  # size up to which a block costs no more than the call that factors it


class Layout:
    """Where the entries of a sparse symmetric matrix stand in chains of blocks: K chains of T blocks of b latents."""

    def __init__(self, parts: list[list[int]], pairs: Tensor, device: torch.device) -> None:
        self.dim, largest = sum(map(len, parts)), len(parts[0])
        self.parts = len(parts)
        order = torch.tensor([latent for part in parts for latent in part], device="cpu")
        part_of = torch.empty_like(order)
        sizes = torch.tensor([*map(len, parts)], device="cpu")
        part_of[order] = torch.arange(self.parts, device="cpu").repeat_interleave(sizes)
        self.part_of = part_of.to(device)  # the number of the part of each latent
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(self.dim, device="cpu")
        widest = int((inverse[pairs[:, 0]] - inverse[pairs[:, 1]]).abs().max()) if len(pairs) else 1
        self.block = max(widest, min(_WORTH_A_CALL, largest))
        abreast = max(1, self.dim // largest)
        room = self.dim if abreast == 1 else largest
        self.length = -(-room // self.block)
        starts, self.chains = _packed([len(part) for part in parts], self.length * self.block)
        slots = torch.empty(self.dim, dtype=torch.long, device="cpu")
        begun = 0
        for part, start in zip(parts, starts, strict=True):
            slots[order[begun : begun + len(part)]] = torch.arange(start, start + len(part), device="cpu")
            begun += len(part)
        # slots are numbered by chain, block and place, and stored by block, chain and place
        chain, rest = slots // (self.length * self.block), slots % (self.length * self.block)
        number, place = rest // self.block, rest % self.block
        self.slots = ((number * self.chains + chain) * self.block + place).to(device)
        self.empty = torch.ones(self.length * self.chains * self.block, dtype=torch.bool, device=device)
        self.empty[self.slots] = False
        self._place(
            torch.cat([torch.arange(self.dim, device="cpu")[:, None].expand(-1, 2), pairs]),
            chain,
            number,
            place,
            device,
        )

    def _place(self, entries: Tensor, chain: Tensor, number: Tensor, place: Tensor, device: torch.device) -> None:
        """Find the place of every entry, in its block row, and tell those within a block from those between two."""
        first, second = entries.unbind(-1)
        swap = (number[first] < number[second]) | ((number[first] == number[second]) & (place[first] < place[second]))
        below, above = torch.where(swap, second, first), torch.where(swap, first, second)
        flat = (chain[below] * self.block + place[below]) * self.block + place[above]
        rows = number[above]  # of a pair between two blocks, the first one
        between = number[below] != number[above]
        self.within, self.between = (
            Places.sorted(mask.nonzero()[:, 0], rows[mask], flat[mask], length, device)
            for mask, length in ((~between, self.length), (between, self.length - 1))
        )

    @property
    def numbers(self) -> int:
        """How many numbers the blocks of one matrix are."""
        return (2 * self.length - 1) * self.chains * self.block**2


class Places(NamedTuple):
    """Entries and where they stand, by blocks: the entries' numbers, and their places in the flat block of a row."""

    entries: tuple[Tensor, ...]  # of each block
    flat: tuple[Tensor, ...]

    @classmethod
    def sorted(cls, entries: Tensor, rows: Tensor, flat: Tensor, length: int, device: torch.device) -> "Places":
        """Sort them by their blocks."""
        order = rows.argsort(stable=True)
        counts = torch.bincount(rows, minlength=length).tolist()
        return cls(entries[order].to(device).split(counts), flat[order].to(device).split(counts))

    def blocks(
        self,
        layout: Layout,
        values: Tensor,  # (S, D + E)
        k: int,
    ) -> Tensor:
        """The blocks of number k of all chains, (S, K, b, b), with zeros where there is no entry."""
        shape = (len(values), layout.chains, layout.block, layout.block)
        out = values.new_zeros(len(values), shape[1] * shape[2] * shape[3])
        return out.index_copy_(1, self.flat[k], values[:, self.entries[k]]).view(shape)


def _packed(sizes: list[int], room: int) -> tuple[list[int], int]:
    """Where each part begins if chains hold so many latents, each in the emptiest chain; and the number of chains."""
    starts: list[int] = []
    chains = [(0, 0)]  # latents and number of each, a heap
    for size in sizes:
        used, chain = chains[0]
        if used + size <= room:
            heapq.heapreplace(chains, (used + size, chain))
        else:
            used, chain = 0, len(chains)
            heapq.heappush(chains, (size, chain))
        starts.append(chain * room + used)
    return starts, len(chains)


class Factor:
    """The Cholesky factor of a batch of sparse symmetric positive definite matrices, A = L Lᵀ."""

    def __init__(self, layout: Layout, values: Tensor) -> None:  # the diagonal and the pairs, (S, D + E)
        self.layout = layout
        pads = layout.empty.to(values.dtype).view(layout.length, layout.chains, layout.block)
        self.diagonal: list[Tensor] = []  # L_t, (S, K, b, b)
        self.below: list[Tensor] = []  # L_{t+1, t}
        fine = []
        for t in range(layout.length):
            block = layout.within.blocks(layout, values, t)
            block.diagonal(dim1=-2, dim2=-1).add_(pads[t])
            if t:
                block -= product(self.below[-1], self.below[-1].mT)
            lower, ok = linalg.small_cholesky(block)
            self.diagonal.append(lower)
            fine.append(ok.all(-1))
            if t + 1 < layout.length:
                coupling = layout.between.blocks(layout, values, t)
                self.below.append(linalg.small_solve(lower, coupling.mT).mT)
        self.ok = torch.stack(fine).all(0)  # which are positive definite, (S,); the others have no factor of use

    def log_det(self) -> Tensor:
        """Compute log|A|, (S,)."""
        return 2 * sum(lower.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1)) for lower in self.diagonal)  # type: ignore[return-value]

    def solve(
        self,
        x: Tensor,  # (S, D) or (S, D, R)
    ) -> Tensor:
        """Solve A y = x, for one vector or for R columns."""
        columns = self._forward(self._apart(x if x.ndim == 3 else x[..., None]))
        return self._together(self._backward(columns), x)

    def spread(
        self,
        z: Tensor,  # (S, D, R)
    ) -> Tensor:
        """Turn noise z ~ N(0, I) into draws L⁻ᵀ z ~ N(0, A⁻¹), (S, D, R)."""
        return self._together(self._backward(self._apart(z)), z)

    def selected_inverse(self) -> Tensor:
        """Compute the entries of A⁻¹ on the diagonal and at the pairs of the pattern, (S, D + E)."""
        layout = self.layout
        shape = (len(self.ok), sum(map(len, layout.within.entries)) + sum(map(len, layout.between.entries)))
        out = self.diagonal[0].new_empty(shape)
        following: Tensor | None = None
        for t in reversed(range(layout.length)):
            root = linalg.small_inverse(self.diagonal[t])
            inverse = product(root.mT, root)
            if following is not None:
                gain = product(self.below[t], root)
                down = product(following, gain)  # minus the block below
                inverse = inverse + product(gain.mT, down)
                out[:, layout.between.entries[t]] = -down.flatten(1)[:, layout.between.flat[t]]
            out[:, layout.within.entries[t]] = inverse.flatten(1)[:, layout.within.flat[t]]
            following = inverse
        return out

    def _apart(self, x: Tensor) -> list[Tensor]:
        """Columns (S, D, R) as blocks (S, K, b, R)."""
        layout = self.layout
        slots = x.new_zeros(len(x), len(layout.empty), x.shape[-1]).index_copy_(1, layout.slots, x)
        shape = (len(x), layout.length, layout.chains, layout.block, x.shape[-1])
        return list(slots.view(shape).unbind(1))

    def _together(self, blocks: list[Tensor], like: Tensor) -> Tensor:
        slots = torch.stack(blocks, 1).flatten(1, 3)
        return slots[:, self.layout.slots].reshape(like.shape)

    def _forward(self, x: list[Tensor]) -> list[Tensor]:
        out: list[Tensor] = []
        for t, part in enumerate(x):
            left = part - product(self.below[t - 1], out[-1]) if t else part
            out.append(linalg.small_solve(self.diagonal[t], left))
        return out

    def _backward(self, y: list[Tensor]) -> list[Tensor]:
        out: list[Tensor] = []
        for t in reversed(range(len(y))):
            left = y[t] - product(self.below[t].mT, out[-1]) if out else y[t]
            out.append(linalg.small_tsolve(self.diagonal[t], left))
        return out[::-1]


# The derivatives of a log joint in its latents: gradient, the entries of the Hessian, and what the adjoint needs
#
# For each colour one double backward pass gives the product of the Hessian with the indicator of the colour, whose
# entries are those of the Hessian (`torchngvi.latents.laplace`).  With the entries of the inverse Σ at the same
# places,
#
#     c(θ, u) = -½ tr(Σ H(θ, u)),     Σ held fixed,
#
# is a scalar whose gradient is that of -½ log|H|, third derivatives of the log joint and no others: one more backward
# pass, whatever the number of hyperparameters (Margossian, Vehtari, Simpson and Agrawal 2020; Margossian 2023).

Joint = Callable[[Tensor, Tensor], Tensor]  # (θ (S, P), u (S, D)) -> log p(y, u, θ), (S,)

_OF_SHAPES = ("must match", "cannot be multiplied", "is invalid for input of size", "out of bounds")
_PROBED = 2048  # latents up to which a pattern can be found by differentiating along each of them


class Jet(NamedTuple):
    """ℓ = -log p(y, u, θ) as a function of u."""

    energy: Tensor  # ℓ, (S,)
    gradient: Tensor  # ∇ℓ, (S, D)
    entries: Tensor  # of H = ∇²ℓ, the diagonal and then the pairs of the pattern, (S, D + E)


class Curvature:
    """A log joint with its derivatives in the latents, at many (θ, u) at once."""

    # Numbers of the latents up to which each colour has a copy of its own: half of the time at 48 latents in 6 colours
    # and 8 values of θ, and twice the time at 2,048, as at 30 in 11 and 200.
    copied = 2**14

    def __init__(self, joint: Joint, dim: int, pairs: Tensor, colours: Tensor) -> None:
        self.joint, self.dim, self.pairs = joint, dim, pairs
        self.colour = colours
        self.members = [(colours == k).nonzero()[:, 0] for k in range(int(colours.max()) + 1)]
        own = torch.arange(dim, device=pairs.device)[:, None].expand(-1, 2)
        self.places = torch.cat([own, pairs, pairs.flip(-1)])  # row and column of every entry, of both triangles
        rows, columns = self.places.unbind(-1)
        own, other = colours[columns] * dim + rows, colours[rows] * dim + columns
        alone = torch.bincount(own)[own] == 1  # in its row, or else in that of the transpose
        self.seen = torch.where(alone, own, other)  # the place of each entry in the products of the colours
        self.stored = dim + len(pairs)
        self.twice = torch.ones(self.stored, device=pairs.device)
        self.twice[dim:] = 2.0  # an entry and that of the transpose
        self.products = 0  # with Hessians so far, each the work of a gradient of the log joint or two

    def energy(
        self,
        theta: Tensor,  # (S, P)
        u: Tensor,  # (S, D)
    ) -> Tensor:
        """Compute ℓ, (S,), after a check of what the function returns."""
        try:
            value = self.joint(theta, u)
        except (RuntimeError, IndexError) as error:
            if isinstance(error, RuntimeError) and not any(words in str(error) for words in _OF_SHAPES):
                raise
            raise InputError(
                f"the log joint cannot take theta {tuple(theta.shape)} and latents {tuple(u.shape)}: {error}. There "
                f"are as many latents as latents= says, {u.shape[-1]}, and as many hyperparameters as at= has, "
                f"{theta.shape[-1]}."
            ) from error
        if not isinstance(value, Tensor) or value.is_complex():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"the log joint of theta and the latents must return a real tensor; got {got}.")
        if value.shape != theta.shape[:1]:
            raise InputError(
                f"the log joint must map theta {tuple(theta.shape)} and latents {tuple(u.shape)} to one value each, "
                f"shape {tuple(theta.shape[:1])}; got shape {tuple(value.shape)}. Index coordinates as theta[..., 0], "
                "sum over the last dimension, keep the first."
            )
        if torch.promote_types(value.dtype, u.dtype) != value.dtype:
            raise InputError(
                f"the log joint of theta and the latents in {u.dtype} returns {value.dtype}, whose digits are too few "
                f"for second derivatives. Have it compute in {u.dtype}, its data too, or give at= in {value.dtype}."
            )
        return -value.to(u.dtype)

    def jet(self, theta: Tensor, u: Tensor) -> Jet:
        """Compute ℓ, its gradient and the entries of its Hessian at u, without a graph.

        Where few numbers are at stake each colour has a copy of u, so that one backward pass has all products.
        """
        together = len(self.members) * u.numel() <= self.copied
        self.products += len(self.members) * len(u)
        copies = len(self.members) if together else 1
        with torch.enable_grad():
            many = u.detach().repeat(copies, 1).requires_grad_()
            energy, gradient = self._gradient(theta.detach().repeat(copies, 1), many)
            if together:
                own = torch.nn.functional.one_hot(self.colour, copies).mT.to(u.dtype)[:, None]  # (colours, 1, D)
                sums = (gradient.view(copies, *u.shape) * own).sum()
                products = _gradients(sums, (many,))[0].view(copies, *u.shape).movedim(0, 1).flatten(1)
                entries = products[:, self.seen[: self.stored]]
            else:
                entries = self._entries(gradient, many, create_graph=False)
        return Jet(energy[: len(u)].detach(), gradient[: len(u)].detach(), entries)

    def adjoint(
        self,
        theta: Tensor,  # (S, P)
        u: Tensor,  # û, (S, D)
        inverse: Tensor,  # the entries of Σ = H⁻¹, (S, D + E)
        solve: Callable[[Tensor], Tensor],  # with H
    ) -> Tensor:
        """Differentiate log p(y, û, θ) - ½ log|H| in θ, where û is the mode of the latents at θ.

        With c as above and w = H⁻¹ ∇_u c, the implicit function theorem has dû/dθ = -H⁻¹ ∇_θ∇_u ℓ, so that the
        gradient is -∇_θ ℓ + ∇_θ c - ∇_θ(wᵀ ∇_u ℓ), w held fixed.
        """
        with torch.enable_grad():
            theta, u = theta.detach().requires_grad_(), u.detach().requires_grad_()
            energy, gradient = self._gradient(theta, u)
            by_theta, by_u = _gradients(self._change(gradient, u, inverse), (theta, u))
            w = solve(by_u)
            return by_theta + _gradients(-energy.sum() - (gradient * w).sum(), (theta,))[0]

    def slope(
        self,
        theta: Tensor,  # (S, P)
        u: Tensor,  # û, (S, D)
        inverse: Tensor,  # the entries of Σ = H⁻¹, (S, D + E)
    ) -> Tensor:
        """Compute ∇_u c, (S, D): the mean of the latents differs from their mode by H⁻¹ ∇_u c, to first order."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            _, gradient = self._gradient(theta.detach(), u)
            return _gradients(self._change(gradient, u, inverse), (u,))[0]

    def gradient_of_slopes(
        self,
        theta: Tensor,  # (S, P)
        u: Tensor,  # (S, D)
        points: Tensor,  # of the latents, (K, S, D)
        weights: Tensor,  # (K, S, D)
    ) -> Tensor:
        """Differentiate log p(y, u, θ) + Σ_k weights_k · ∇_u log p(y, points_k, θ) in θ, (S, P)."""
        with torch.enable_grad():
            theta, points = theta.detach().requires_grad_(), points.detach().requires_grad_()
            _, gradient = self._gradient(theta.repeat(len(points), 1), points.flatten(0, 1))
            total = -self.energy(theta, u.detach()).sum() - (gradient * weights.flatten(0, 1)).sum()
            return _gradients(total, (theta,))[0]

    def gradient(
        self,
        theta: Tensor,  # (S, P)
        u: Tensor,  # (S, D)
    ) -> tuple[Tensor, Tensor]:
        """Compute ℓ, (S,), and its gradient in u, (S, D)."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            energy = self.energy(theta.detach(), u)
            return energy.detach(), _gradients(energy.sum(), (u,))[0]

    def slopes_by_theta(
        self,
        theta: Tensor,  # (P,)
        u: Tensor,  # (D,)
    ) -> Tensor:
        """Differentiate ∇_u ℓ in θ, (P, D)."""
        with torch.enable_grad():
            theta, u = (x.detach().repeat(len(theta), 1).requires_grad_() for x in (theta, u))
            _, gradient = self._gradient(theta, u)
            weights = torch.zeros_like(gradient, requires_grad=True)
            (slopes,) = _gradients((gradient * weights).sum(), (theta,), create_graph=True)
            return _gradients(slopes.diagonal().sum(), (weights,))[0]

    def product(
        self,
        theta: Tensor,  # (S, P)
        u: Tensor,  # (S, D)
        v: Tensor,  # (S, D)
    ) -> Tensor:
        """Compute the product H v of the Hessian itself, whatever its pattern, (S, D)."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            _, gradient = self._gradient(theta.detach(), u)
            return _gradients((gradient * v).sum(), (u,))[0]

    def product_of_pattern(
        self,
        theta: Tensor,  # (S, P)
        u: Tensor,  # (S, D)
        v: Tensor,  # (S, D)
    ) -> Tensor:
        """Compute the product with the entries of the pattern alone, each as its own row has it, (S, D)."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            _, gradient = self._gradient(theta.detach(), u)
            entries = self._products(gradient, u, create_graph=False)[:, self.seen]
        rows, columns = self.places.unbind(-1)
        return torch.zeros_like(v).index_add(1, rows, entries * v[:, columns])

    def _gradient(self, theta: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """ℓ and ∇_u ℓ with their graphs."""
        energy = self.energy(theta, u)
        gradient = None
        if energy.requires_grad:
            (gradient,) = torch.autograd.grad(energy.sum(), u, create_graph=True, allow_unused=True)
        if gradient is None:
            raise InputError(
                "the log joint does not depend on the latents: its result has no gradient with respect to its second "
                "argument. Compute it from that by torch operations, without detach(), item() or NumPy."
            )
        return energy, gradient

    def _change(self, gradient: Tensor, u: Tensor, inverse: Tensor) -> Tensor:
        """c, summed over θ, with its graph."""
        entries = self._entries(gradient, u, create_graph=True)
        self.products += len(self.members) * len(u)
        return -0.5 * (inverse * self.twice.to(u.dtype) * entries).sum()

    def _entries(self, gradient: Tensor, u: Tensor, create_graph: bool) -> Tensor:
        """The entries of the Hessian, (S, D + E)."""
        return self._products(gradient, u, create_graph)[:, self.seen[: self.stored]]

    def _products(self, gradient: Tensor, u: Tensor, create_graph: bool) -> Tensor:
        """The products of the Hessian with the indicators of the colours, (S, colours x D), a backward pass each."""
        products = [_gradients(gradient[:, some].sum(), (u,), create_graph)[0] for some in self.members]
        return torch.stack(products, 1).flatten(1)


def _gradients(scalar: Tensor, inputs: tuple[Tensor, ...], create_graph: bool = False) -> tuple[Tensor, ...]:
    """The gradients of a scalar, zeros where it does not depend on an input; the graph is kept."""
    needed = [x for x in inputs if x.requires_grad]
    found: dict[int, Tensor | None] = {}
    if scalar.requires_grad and needed:
        gradients = torch.autograd.grad(scalar, needed, retain_graph=True, create_graph=create_graph, allow_unused=True)
        found = {id(x): gradient for x, gradient in zip(needed, gradients, strict=True)}
    every = [(x, found.get(id(x))) for x in inputs]
    return tuple(torch.zeros_like(x) if gradient is None else gradient for x, gradient in every)


def probed_pairs(
    joint: Joint,
    theta: Tensor,  # (P,)
    u: Tensor,  # (D,)
) -> Tensor:
    """Find the pairs of latents between which the Hessian has an entry, by a product with each unit vector."""
    dim = len(u)
    if dim > _PROBED:
        raise InputError(
            f"with more than {_PROBED} latents say which of them occur together in a term of the log joint, by "
            f"pattern=; got {dim} latents and no pattern."
        )
    none, alone = torch.zeros(0, 2, dtype=torch.long, device=u.device), torch.zeros(dim, dtype=torch.long, device="cpu")
    curvature = Curvature(joint, dim, none, alone.to(u.device))
    found = []
    for units in torch.arange(dim, device=u.device).split(64):
        v = torch.zeros(len(units), dim, dtype=u.dtype, device=u.device).scatter_(1, units[:, None], 1.0)
        shape = (len(units), -1)
        rows = curvature.product(theta.expand(shape), u.expand(shape), v)
        if not bool(rows.isfinite().all()):
            raise InputError(
                "the Hessian of the log joint in the latents is not finite at a point near the one where their search "
                "begins, so that its pattern cannot be found. Declare it, by pattern=."
            )
        where = rows.nonzero()
        found.append(torch.stack([units[where[:, 0]], where[:, 1]], -1))
    every = torch.cat(found)
    return every[every[:, 0] > every[:, 1]]


def check_pattern(
    curvature: Curvature,
    theta: Tensor,  # (P,)
    mode: Tensor,  # (D,)
    noise: Tensor,  # (D,)
    single: float = 1e-5,
) -> None:
    """Compare a product with the Hessian itself with that of the entries in the pattern, near a mode."""
    # single: share of the Hessian that rounding in float32 may change
    theta, v = theta[None], noise.flip(0)[None]
    sd = curvature.jet(theta, mode[None]).entries[0, : curvature.dim].rsqrt()
    u = (mode + 0.1 * sd * noise)[None]  # in general position, where no entry vanishes by chance
    truth = curvature.product(theta, u, v)
    if not bool(truth.isfinite().all()):
        u = mode[None]
        truth = curvature.product(theta, u, v)
    apart = (truth - curvature.product_of_pattern(theta, u, v)).abs()[0]
    worst = int(apart.argmax())
    largest = float(truth.abs().max())
    if not float(apart[worst]) > torch.finfo(u.dtype).eps ** 0.5 * largest:
        return
    if u.dtype == torch.float64 and float(apart[worst]) < single * largest:
        raise InputError(
            f"two ways to the Hessian of the log joint in float64 differ by {float(apart[worst]) / largest:.1g} of it, "
            "as they do where a part of it is computed in float32. Look for .float() and for data in float32, or give "
            "at= in float32."
        )
    unit = torch.zeros_like(v)
    unit[0, worst] = 1.0
    row, places = curvature.product(theta, u, unit)[0].abs(), curvature.places
    row[places[places[:, 0] == worst, 1]] = 0.0
    first, second = sorted((worst, int(row.argmax())))
    raise InputError(
        f"the pattern misses the pair of latents {first} and {second}, between which the Hessian of the log joint has "
        "an entry. Add every pair of latents that occur in one term, or leave pattern= out."
    )


# The modes of the latents at many values of the hyperparameters, by a guarded Newton's method
#
# Newton's step -H⁻¹∇ℓ is halved until ℓ falls by a share of what the step promises.  Latents in unconnected parts have
# a length each: where the whole step fails, that of a part is quartered until its slope along the step is at most half
# of what it was, uphill; with one length for all the worst part would hold back the others.  Where H is not positive
# definite, λI is added, with λ the first of 10⁻³, 10⁻², .. times the largest entry of the diagonal at which H + λI is;
# a mode has to be reached without.  Where a Hessian takes many products, steps with the factor of the one before follow
# for as long as they converge: they take a gradient each.

_STEPS = 100
_HALVINGS = 40  # of a step
_NEAR, _TIGHT = 1e-4, 1.25  # squared decrements, in nats: so near that values tell no more; rounding to this power
_ROUNDED = 0.1  # factor by which a step that is near reduces it, unless by rounding
_COSTLY = 16  # colours from which steps with the factor of before take a small part of the time of a Hessian


class Modes(NamedTuple):
    """Where Newton's method ended."""

    u: Tensor  # the modes û, (S, D)
    energy: Tensor  # ℓ there, (S,)
    factor: Factor  # of the Hessians there
    found: Tensor  # where the curvature is positive definite and the decrement is at the level of rounding, (S,)
    damped: Tensor  # where the curvature is not positive definite, so that the factor is that of H + λI, (S,)
    square: Tensor  # the squared decrements gᵀH⁻¹g, (S,): ℓ is about half of it above its minimum
    steps: int  # the largest of the S


@torch.no_grad()
def find_modes(
    curvature: Curvature,
    layout: Layout,
    theta: Tensor,  # (S, P)
    start: Tensor,  # (S, D)
) -> Modes:
    """Minimise ℓ(u) for each θ, from a start; what is found, or lost, takes part in no further step."""
    u, energy = start.clone(), torch.full_like(start[:, 0], torch.nan)
    square, before = energy.clone(), torch.full_like(energy, torch.inf)
    found = torch.zeros(len(theta), dtype=torch.bool, device=theta.device)
    damped = found.clone()
    entries = start.new_empty(len(theta), curvature.stored)
    here = torch.arange(len(theta), device=theta.device)  # those on their way
    eps = torch.finfo(u.dtype).eps
    near = max(_NEAR, 1e3 * eps)
    for steps in range(_STEPS + 1):
        jet = curvature.jet(theta[here], u[here])
        factor, entries[here], damped[here], usable = _definite(layout, jet)
        direction = -factor.solve(jet.gradient)
        energy[here], square[here] = jet.energy, -(jet.gradient * direction).sum(-1)
        ours, last, sound = square[here], before[here], ~damped[here]
        usable = usable & ours.isfinite()
        small = (ours <= eps**_TIGHT) | ((last <= near) & (ours > _ROUNDED * last))
        found[here] = done = sound & usable & (ours <= near) & small
        on = (usable & ~done).nonzero()[:, 0]
        if steps == _STEPS or not len(on):
            break
        before[here], batch = ours, here
        whole = len(on) == len(here)
        close = sound & (ours <= near)
        if not whole:
            here, jet, direction = here[on], Jet(*(each[on] for each in jet)), direction[on]
            ours, close = ours[on], close[on]
        u[here], moved = _moved(curvature, layout, theta[here], u[here], jet, direction, ours, close, len(theta))
        here = here[moved]
        if not len(here):
            break
        if len(curvature.members) >= _COSTLY:
            going = torch.isin(batch, here) & sound
            u[batch] = _followed(curvature, factor, theta[batch], u[batch], going, square[batch])
    if len(here) < len(theta):
        factor = Factor(layout, entries)
    return Modes(u, energy, factor, found, damped, square, steps)


def _followed(
    curvature: Curvature,
    factor: Factor,
    theta: Tensor,
    u: Tensor,
    going: Tensor,
    square: Tensor,
    converges: float = 0.25,
) -> Tensor:
    """Steps by the factor of before, of those that are going, while the squared decrement falls fast."""
    # converges: factor by which each of these has to reduce the squared decrement
    for _ in range(_STEPS):
        gradient = curvature.gradient(theta, u)[1]
        step = factor.solve(gradient)
        new = (gradient * step).sum(-1)
        going = going & (new <= converges * square) & (new > torch.finfo(u.dtype).eps ** (2 * _TIGHT))  # NaN is not
        if not bool(going.any()):
            break
        u, square = torch.where(going[:, None], u - step, u), new
    return u


def _definite(layout: Layout, jet: Jet, dampings: int = 7) -> tuple[Factor, Tensor, Tensor, Tensor]:
    """A factor of H, or of H + λI where that is not positive definite; its entries; where it was damped, and exists."""
    # dampings: of a Hessian, from 10⁻³ of its diagonal on
    usable = jet.energy.isfinite() & jet.gradient.isfinite().all(-1) & jet.entries.isfinite().all(-1)
    eye = torch.zeros_like(jet.entries)
    eye[:, : layout.dim] = 1.0
    entries = where_members(usable, jet.entries, eye)
    factor = Factor(layout, entries)
    damped = ~factor.ok
    scale = entries[:, : layout.dim].abs().amax(-1)
    size = torch.zeros_like(scale)
    for k in range(dampings):
        if bool(factor.ok.all()):
            break
        size = torch.where(factor.ok, size, 10.0 ** (k - 3) * scale)
        factor = Factor(layout, entries + size[:, None] * eye)
    return factor, entries + size[:, None] * eye, damped, usable & factor.ok


def _moved(
    curvature: Curvature,
    layout: Layout,
    theta: Tensor,
    u: Tensor,
    jet: Jet,
    direction: Tensor,
    square: Tensor,
    near: Tensor,
    most: int,  # latents in one call
    sufficient: float = 1e-4,
) -> tuple[Tensor, Tensor]:
    """The longest of the steps 1, ½, ¼, .. along which ℓ falls enough, for each θ, near a mode the first; who moved."""
    # sufficient: share of the promised decrease a step must reach
    result, moved = u.clone(), torch.zeros_like(near)
    rounding = 8 * torch.finfo(u.dtype).eps * jet.energy.abs().clamp_min(1.0)
    here, tried, whole = torch.arange(len(u), device=u.device), 0, 1.0  # those that have not moved
    while len(here) and tried < _HALVINGS:
        some = min(max(1, most // len(here)), _HALVINGS - tried) if tried else 1  # lengths at once
        lengths = whole * 0.5 ** torch.arange(some, dtype=u.dtype, device=u.device)[:, None]
        trial = u[here] + lengths[..., None] * direction[here]
        energy = curvature.energy(theta[here].repeat(some, 1), trial.flatten(0, 1)).view(some, -1)
        fallen = jet.energy[here] - energy
        falls = (fallen >= sufficient * lengths * square[here] - rounding[here]) | (near[here] & fallen.isfinite())
        longest, enough = falls.to(torch.uint8).argmax(0), falls.any(0).nonzero()[:, 0]
        result[here[enough]], moved[here[enough]] = trial[longest[enough], enough], True
        here = here[~falls.any(0)]
        if len(here) and tried == 0 and layout.parts > 1:
            direction = direction.clone()
            direction[here] = _shortened(curvature, layout, theta[here], u[here], jet.gradient[here], direction[here])
            square = -(jet.gradient * direction).sum(-1)
        else:
            whole *= 0.5**some
        tried += some
    return result, moved


def _shortened(
    curvature: Curvature, layout: Layout, theta: Tensor, u: Tensor, gradient: Tensor, direction: Tensor
) -> Tensor:
    """The direction, that of each part quartered until its slope is at most half of what it was, uphill."""

    def slopes(gradient: Tensor) -> Tensor:
        start = gradient.new_zeros(len(gradient), layout.parts)
        return start.index_add(1, layout.part_of, gradient * direction)

    steepest = -0.5 * slopes(gradient)
    lengths = torch.ones_like(steepest)
    for _ in range(_HALVINGS):
        step = lengths[:, layout.part_of] * direction
        over = ~(slopes(curvature.gradient(theta, u + step)[1]) <= steepest)
        if not bool(over.any()):
            break
        lengths = torch.where(over, 0.25 * lengths, lengths)
    return step
