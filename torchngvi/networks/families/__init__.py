"""Families of posteriors over the parameters of a network, and the noise of their draws."""

import functools
import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchngvi.errors import InputError
from torchngvi.numerics.arrays import remembered

__all__ = ["Delta", "Dense", "Diagonal", "Family", "Kronecker", "Rows"]

Delta = float | Tensor  # the precision of the prior a datum, of all weights of a parameter or of each


class Family(nn.Module, ABC):
    """Gaussians N(m, T C Cᵀ) over some parameters of a network, independent from one parameter tensor to the next.

    It is no posterior of `torchngvi.posteriors` itself, which would keep a second, flattened copy of the mean and of
    each draw, and whose verbs take as many lines; `NetworkGaussian.as_gaussian` makes one of the blocks.
    The parameters themselves stay the network's: they hold the draw θ = m + √T C ε in training and m in evaluation.  C
    is the root at the temperature 1, with (C Cᵀ)⁻¹ = N (H + δ) where q has settled.  In training, but not after a
    Laplace approximation, no weight is wider than at the start, 1/(N(h₀ + δ)): a weight that the data say nothing of
    would be as wide as the prior, and the noise of many of them buries what the others have learned.  The mean is kept
    in float32 at least.

    Args:
        parameters: by name, the network's own.
        prior: δ = λ/N by name, the prior's precision a datum.
        start: h₀ by name, the curvature a datum that the posterior starts from, and its least one in training.
        num_data: the number N of labels.
        centers: the mean m₀ of the prior by name, 0 where there is none.

    Attributes:
        single: whether it wants the gradients of single labels, with the labels first, and not that of their mean.
        passes: over the data that `settle_` takes; more than 1 where the part of a curvature depends on C, and then
            `statistics` sums over gradients that have the labels first.
        bounded: whether h₀ is the least curvature; not of a Laplace approximation, nor of published methods.
    """

    single = False
    passes = 1

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        prior: Mapping[str, Delta],
        start: Mapping[str, float],
        num_data: int,
        centers: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.names = list(parameters)
        self.parameters_of_network = list(parameters.values())  # a list, so that they are not parameters of q
        self.start = [start[name] for name in self.names]
        self.num_data, self.bounded = num_data, True
        self.picked: frozenset[str] = frozenset()  # embeddings: a row without a gradient has no pull to the prior
        self._mangled = [key("", name)[1:] for name in self.names]
        self._numbers = [d if isinstance(d, float) else 0.0 for d in map(prior.__getitem__, self.names)]
        for name, p in parameters.items():
            dtype = torch.promote_types(p.dtype, torch.float32)
            self.register_buffer(key("mean", name), p.detach().to(dtype, copy=True))
            for what, given in (("delta", prior[name]), ("center", (centers or {}).get(name))):
                if isinstance(given, Tensor):
                    self.register_buffer(key(what, name), given.detach().to(p.device, dtype, copy=True))
        self.lay_out_()
        self.refresh_()

    @abstractmethod
    def lay_out_(self) -> None:
        """Register the buffers of the covariance, which begins at the start."""

    def stored(self, what: str) -> list[Tensor]:
        """Return the buffers of one kind, "mean" or what the family calls its other ones, one tensor a parameter."""
        return [self._buffers[f"{what}/{name}"] for name in self._mangled]  # type: ignore[misc]

    @property
    def mean(self) -> list[Tensor]:
        """The means, one tensor a parameter."""
        return self.stored("mean")

    @property
    def prior(self) -> list[Delta]:
        """The precision δ of the prior a datum, one number or tensor a parameter."""
        pairs = zip(self._mangled, self._numbers, strict=True)
        return [self._buffers.get(f"delta/{name}", number) for name, number in pairs]  # type: ignore[misc]

    @property
    def centers(self) -> list[Tensor | None]:
        """The means of the prior, None for 0."""
        return [self._buffers.get(f"center/{name}") for name in self._mangled]

    def follow_(self) -> None:
        """Move to the devices of the parameters, where the network has been moved."""
        if self.mean[0].device == self.parameters_of_network[0].device:
            return
        device = dict(zip(self._mangled, (p.device for p in self.parameters_of_network), strict=True))
        for stored, buffer in self.named_buffers():
            self._buffers[stored] = buffer.to(device[stored.partition("/")[2]])

    def adopt_(self) -> None:
        """Take the parameters for the mean where they are not what the mean is in their dtype."""
        for p, m in zip(self.held(), self.mean, strict=True):
            m.copy_(p if p.dtype == m.dtype else torch.where(p == m.to(p.dtype), m, p.to(m.dtype)))

    def mean_(self) -> None:
        """Write the mean into the parameters."""
        torch._foreach_copy_(self.held(), self.mean)

    def add_prior_(self, gradients: Mapping[str, Tensor], at: list[Tensor]) -> None:
        """Add the prior's part δ(θ - m₀), at weights θ, to gradients of the mean loss, by name, in place."""
        each = zip(self.names, at, self.prior, self.centers, strict=True)
        known = [(name, gradients[name], m, delta, center) for name, m, delta, center in each if name in gradients]
        plain = [
            (g, m, delta)
            for name, g, m, delta, center in known
            if center is None and isinstance(delta, float) and name not in self.picked
        ]
        for value in {delta for *_, delta in plain}:
            alike = [(g, m) for g, m, delta in plain if delta == value]
            torch._foreach_add_(*map(list, zip(*alike, strict=True)), alpha=value)
        for name, g, m, delta, center in known:
            if center is not None or isinstance(delta, Tensor) or name in self.picked:
                pull = (m if center is None else m - center) * delta
                g.add_(pull * (g != 0).any(1, keepdim=True) if name in self.picked else pull)

    def noise(self, seed: int, draw: int) -> list[Tensor]:
        """Return the noise ε of a draw, only to be read, one tensor a parameter, of the dtype of the mean."""
        return [normals(m, name, seed, draw) for m, name in zip(self.mean, self.names, strict=True)]

    def draw_(self, seed: int, draw: int, spread: float) -> None:
        """Write the draw θ = m + √T C ε into the parameters, √T the spread."""
        drawn = torch._foreach_add(self.mean, self.colored(self.noise(seed, draw)), alpha=spread)
        torch._foreach_copy_(self.held(), list(drawn))

    def disturb_(self, seed: int, draw: int, spread: float) -> None:
        """Add the noise √T C ε of a draw to what the parameters hold."""
        torch._foreach_add_(self.held(), self.colored(self.noise(seed, draw)), alpha=spread)

    def take_moves_(self) -> list[Tensor]:
        """Return how far the parameters are from the mean that they held, in their place where their dtype is its."""
        pairs = zip(self.held(), self.mean, strict=True)
        return [p.sub_(m) if p.dtype == m.dtype else p.sub_(m.to(p.dtype)).to(m.dtype) for p, m in pairs]

    def held(self) -> list[Tensor]:
        """Return what the parameters hold, without their graph."""
        return [p.detach() for p in self.parameters_of_network]

    def departure(self, moves: list[Tensor], note: Callable[[int, Tensor], None]) -> Tensor:
        """Return N dmᵀ(H + δ)dm, a number, for moves dm of the mean; their squares are noted, one at a time."""
        for k, move in enumerate(moves):
            note(k, move * move)
        return self._squared_length(moves)

    def _squared_length(self, moves: list[Tensor]) -> Tensor:
        """N dmᵀ(H + δ)dm, a number."""
        norms = torch._foreach_norm(self.whitened(moves))
        return torch.stack([norm.to(norms[0]) for norm in norms]).square().sum()

    @abstractmethod
    def colored(self, noise: list[Tensor]) -> list[Tensor]:
        """Return C ε for noise that is only to be read, one tensor a parameter."""

    @abstractmethod
    def whitened(self, moves: list[Tensor]) -> list[Tensor]:
        """Return C⁻¹ dm, whose squared norm is twice the divergence of a move of the mean at the temperature 1."""

    @abstractmethod
    def natural(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return N C Cᵀ g = (H + δ)⁻¹ g, the natural gradient of the mean for a gradient of the mean loss."""

    @abstractmethod
    def statistics(self, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        """Return the family's part of the curvature scale · g gᵀ, scale the number of independent labels in g.

        A gradient is None where nothing was observed.  Processes that train together average what is returned.
        """

    @abstractmethod
    def absorb_(self, statistics: list[Tensor | None], rate: float | Tensor) -> None:
        """Move what is known of the curvature by a rate towards a statistic, where there is one."""

    @abstractmethod
    def refresh_(self) -> None:
        """Make C from what is known of the curvature."""

    def restart_(self, observed: bool) -> None:
        """Prepare for the first call of `settle_`; where a curvature is known, a parameter that is frozen keeps it."""

    def settle_(self, statistics: list[Tensor | None]) -> None:
        """Make C from the curvature of all data alone, without the start and without what was observed before."""
        self.bounded = False
        self.absorb_(statistics, 1.0)
        self.refresh_()

    def take_prior_(self, prior: Mapping[str, float]) -> None:
        """Take other precisions of the prior a datum by name, of those that have one number for all weights."""
        self._numbers = [prior.get(name, delta) for name, delta in zip(self.names, self._numbers, strict=True)]
        self.refresh_()

    @abstractmethod
    def variances(self) -> list[Tensor]:
        """Return the diagonal of C Cᵀ, one tensor a parameter."""

    @abstractmethod
    def precisions(self) -> list[Tensor]:
        """Return the diagonal of N (H + δ), of each weight given the others, one tensor a parameter."""

    @abstractmethod
    def log_det(self) -> Tensor:
        """Return log|C Cᵀ|, a number."""

    def vector(self, tensors: list[Tensor]) -> Tensor:
        """Return one vector of the numbers of all parameters, in the order of `blocks`."""
        return torch.cat([tensor.flatten() for tensor in tensors])

    @abstractmethod
    def blocks(self) -> list[Tensor]:
        """Return the lower roots of the blocks of C Cᵀ, (blocks, size, size) for those of one size that follow."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load a state with the prior that it has, and make C of it; files of 0.2 have no flag for some families."""
        state_dict.setdefault(f"{prefix}_extra_state", 1.0)
        for what, (name, mean) in itertools.product(("delta", "center"), zip(self._mangled, self.mean, strict=True)):
            if f"{prefix}{what}/{name}" in state_dict:
                self.register_buffer(f"{what}/{name}", torch.empty_like(mean))
        super()._load_from_state_dict(state_dict, prefix, *others)
        self.refresh_()

    def get_extra_state(self) -> dict[str, Any]:
        """Return whether h₀ is the least curvature, and δ by name where it is a number."""
        prior = {name: d for name, d in zip(self.names, self.prior, strict=True) if isinstance(d, float)}
        return {"bounded": self.bounded, "prior": prior}

    def set_extra_state(self, state: dict[str, Any] | float) -> None:
        """Take it up again; a number is of release 0.2, which had no bound."""
        self.bounded = isinstance(state, dict) and state["bounded"]
        self.take_prior_(state.get("prior", {}) if isinstance(state, dict) else {})


def key(what: str, name: str) -> str:
    """Name a buffer, as mean/0/weight: names of parameters have dots, names of buffers may not."""
    return f"{what}/{name.replace('.', '/')}"


# -------------------------------------------------------------------------------- independent weights


class Diagonal(Family):
    """Independent normals, with a curvature h for each weight: C Cᵀ = diag(1/(N (max(h, h₀) + δ))).

    Its tensors are the mean, the running curvature h, and the standard deviations that are made from it whenever it
    moves.  The length of a move is dmᵀ(h + δ)dm: what was observed, without the start.
    """

    def lay_out_(self) -> None:
        """Register the curvature 0, and σ."""
        for name, mean in zip(self.names, self.mean, strict=True):
            self.register_buffer(key("curvature", name), torch.zeros_like(mean))
            self.register_buffer(key("stddev", name), torch.empty_like(mean), persistent=False)

    @property
    def curvature(self) -> list[Tensor]:
        """The running means h of the observed curvature a datum, 0 before anything was observed."""
        return self.stored("curvature")

    @property
    def stddev(self) -> list[Tensor]:
        """The standard deviations σ at the temperature 1."""
        return self.stored("stddev")

    def refresh_(self) -> None:
        """Make σ from max(h, h₀) + δ."""
        each = zip(self.stddev, self.curvature, self.prior, self.start, strict=True)
        for sd, h, delta, start in each:
            torch.clamp(h, min=start if self.bounded else 0.0, out=sd)
            sd.add_(delta).mul_(self.num_data).rsqrt_()

    def colored(self, noise: list[Tensor]) -> list[Tensor]:
        """Multiply by σ."""
        return list(torch._foreach_mul(noise, self.stddev))

    def draw_(self, seed: int, draw: int, spread: float) -> None:
        """Write the draw θ = m + √T σ ε into the parameters; on the CPU in one pass."""
        for name, p, m, sd in zip(self.names, self.held(), self.mean, self.stddev, strict=True):
            noise = windows(m, name, seed, draw)
            if p.device.type != "cpu" or p.dtype != m.dtype or not p.is_contiguous():
                super().draw_(seed, draw, spread)
                return
            if len(noise) == 1:
                torch.addcmul(m, sd, noise[0], value=spread, out=p)
                continue
            means, sds, parts = (tensor.reshape(-1).split(WINDOW) for tensor in (m, sd, p))
            for mean, scale, e, part in zip(means, sds, noise, parts, strict=True):
                torch.addcmul(mean, scale, e, value=spread, out=part)

    def departure(self, moves: list[Tensor], note: Callable[[int, Tensor], None]) -> Tensor:
        """Return N Σ (h + δ) dm²; see the base class."""
        total = []
        for k, (move, h, delta) in enumerate(zip(moves, self.curvature, self.prior, strict=True)):
            square = (move * move).reshape(-1)
            note(k, square.view(move.shape))
            prior = delta * square.sum() if isinstance(delta, float) else square.dot(delta.reshape(-1))
            total.append((square.dot(h.reshape(-1)) + prior).to(moves[0].device))
        return self.num_data * torch.stack(total).sum()

    def whitened(self, moves: list[Tensor]) -> list[Tensor]:
        """Divide by σ."""
        return list(torch._foreach_div(moves, self.stddev))

    def natural(self, gradients: list[Tensor]) -> list[Tensor]:
        """Multiply by N σ²."""
        steps = self.variances()
        torch._foreach_mul_(steps, self.num_data)
        torch._foreach_mul_(steps, gradients)
        return steps

    def statistics(self, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        """Return scale · g²."""
        return [None if g is None else (g * g).mul_(scale) for g in gradients]

    def absorb_(self, statistics: list[Tensor | None], rate: float | Tensor) -> None:
        """Move the running means."""
        for h, seen in zip(self.curvature, statistics, strict=True):
            if seen is not None:
                h.lerp_(seen, rate if isinstance(rate, float) else rate.to(h))

    def begin_(self) -> None:
        """Let the running curvature begin at the start h₀, which it may leave."""
        self.bounded = False
        for h, start in zip(self.curvature, self.start, strict=True):
            h.fill_(start)
        self.refresh_()

    def retract_(self, observed: Sequence[Tensor | None], rate: float) -> None:
        """Move the curvature by the retraction, which keeps h + δ positive where what is observed may be negative.

        h' = (1 - ρ)h + ρĥ + ½ρ²(h - ĥ)²/(h + δ) (Lin, Schmidt and Khan 2020; Shen et al. 2024), ρ the rate.
        """
        for h, delta, seen in zip(self.curvature, self.prior, observed, strict=True):
            if seen is not None:
                correction = 0.5 * rate**2 * (h - seen).square() / (h + delta)
                h.lerp_(seen, rate).add_(correction)
        self.refresh_()

    def variances(self) -> list[Tensor]:
        """Return σ², one tensor a parameter."""
        return list(torch._foreach_mul(self.stddev, self.stddev))

    def precisions(self) -> list[Tensor]:
        """Return N (h + δ), without the start, one tensor a parameter."""
        return [self.num_data * (h + delta) for h, delta in zip(self.curvature, self.prior, strict=True)]

    def log_det(self) -> Tensor:
        """Return 2 Σ log σ."""
        return 2 * torch.stack([sd.log().sum() for sd in self.stddev]).sum()

    def blocks(self) -> list[Tensor]:
        """Return σ, a block for each weight."""
        return [sd.view(-1, 1, 1) for sd in self.stddev]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load the curvature, which release 0.2 stored as the standard deviations that it gave, and make σ of it."""
        for name, delta in zip(self._mangled, self.prior, strict=True):
            stddev = state_dict.pop(f"{prefix}stddev/{name}", None)
            if isinstance(stddev, Tensor):
                found = stddev.cpu().double().square().mul_(self.num_data).reciprocal_() - torch.as_tensor(delta).cpu()
                state_dict[f"{prefix}curvature/{name}"] = found.clamp_min_(0.0)
        super()._load_from_state_dict(state_dict, prefix, *others)


# -------------------------------------------------------------------------------- weights together


LARGEST = 2000  # weights, whose root costs 3e9 operations
_MOST = 50_000_000  # numbers in the blocks of rows: 200 MB in single precision, twice


class Dense(Family):
    """One normal over all weights of the family's parameters, with a full covariance: C Cᵀ = (N (H + δ))⁻¹.

    It is for the last layer of a network.  The running mean H is of whole outer products, of every label's own
    gradient, so that an observation of B labels has the rank B; for a linear layer under a softmax E[H] is the Hessian
    itself.  Memory is two squares of the number of weights, at most 2,000; an `InputError` refuses more.  For the
    arguments see :class:`Family`.
    """

    single = True
    curvature: Tensor
    root: Tensor

    def lay_out_(self) -> None:
        """Register the curvature 0, and L."""
        shape = self._laid_out()
        self.register_buffer("curvature", self.mean[0].new_zeros(shape))
        # lower, of the precision: C is its inverse, transposed
        self.register_buffer("root", self.mean[0].new_zeros(shape), persistent=False)

    def _laid_out(self) -> tuple[int, ...]:
        """Find the numbers of weights of the parameters in a block, after a check; the shape of all blocks."""
        self.sizes = [m.numel() for m in self.mean]
        width = sum(self.sizes)
        if width > LARGEST:
            raise InputError(
                f'structure="dense" is for {LARGEST:,} weights at most; {", ".join(self.names[:4])} have '
                f'{width:,}. Use "rows", "kronecker" or "diagonal", or name fewer parameters.'
            )
        return width, width

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        """The vectors of weights that depend on one another, (..., D)."""
        return super().vector(tensors)

    def _parts(self, vectors: Tensor) -> list[Tensor]:
        """Their parameters."""
        return [part.view_as(m) for part, m in zip(vectors.split(self.sizes, -1), self.mean, strict=True)]

    def _each_weight(self, values: Sequence[Delta]) -> Tensor:
        pairs = zip(self.mean, values, strict=True)
        return self._flat([torch.zeros_like(m, dtype=torch.float64) + value for m, value in pairs])

    def follow_(self) -> None:
        """Move to the device of the parameters, which is one."""
        if self.curvature.device != self.parameters_of_network[0].device:
            self.to(self.parameters_of_network[0].device)

    def colored(self, noise: list[Tensor]) -> list[Tensor]:
        """Return L⁻ᵀ ε, L the root of the precision."""
        e = self._flat(noise)[..., None]
        return self._parts(torch.linalg.solve_triangular(self.root.mT, e, upper=True)[..., 0])

    def whitened(self, moves: list[Tensor]) -> list[Tensor]:
        """Return Lᵀ dm."""
        return self._parts((self.root.mT @ self._flat(moves)[..., None])[..., 0])

    def _squared_length(self, moves: list[Tensor]) -> Tensor:
        """N dmᵀ(H + δ)dm, without the bound that is in L."""
        flat = self._flat(moves)
        curved = (flat * (self.curvature @ flat[..., None])[..., 0]).sum()
        prior = torch.stack([(move * move * delta).sum() for move, delta in zip(moves, self.prior, strict=True)])
        return self.num_data * (curved + prior.sum())

    def natural(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return N (L Lᵀ)⁻¹ g."""
        found = torch.cholesky_solve(self._flat(gradients)[..., None], self.root)
        return self._parts(self.num_data * found[..., 0])

    def statistics(self, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        """Return scale/B Σᵢ gᵢgᵢᵀ of gradients that have the labels first; nothing if a part of them is frozen."""
        known = [g for g in gradients if g is not None]
        if len(known) < len(gradients):
            return [None]
        each = torch.vmap(lambda *g: self._flat(list(g)))(*known)  # (B, ..., D)
        rows = each.movedim(0, -2)
        return [scale / len(each) * (rows.mT @ rows)]

    def absorb_(self, statistics: list[Tensor | None], rate: float | Tensor) -> None:
        """Move the running mean."""
        if statistics[0] is not None:
            self.curvature.lerp_(statistics[0], rate if isinstance(rate, float) else rate.to(self.curvature))

    def refresh_(self) -> None:
        """Make L from H + δ, with max(H, h₀) on the diagonal of H in training."""
        precision = self.curvature.to(torch.float64, copy=True)
        diagonal = precision.diagonal(dim1=-2, dim2=-1)
        if self.bounded:
            diagonal.clamp_(min=self._each_weight(self.start))
        diagonal.add_(self._each_weight(self.prior))
        self.root.copy_(lower_root(precision.mul_(self.num_data), torch.finfo(self.curvature.dtype).eps))

    def variances(self) -> list[Tensor]:
        """Return the diagonal of (L Lᵀ)⁻¹, one tensor a parameter."""
        return self._parts(torch.cholesky_inverse(self.root).diagonal(dim1=-2, dim2=-1))

    def precisions(self) -> list[Tensor]:
        """Return N (H_jj + δ), without the start, one tensor a parameter."""
        each = zip(self._parts(self.curvature.diagonal(dim1=-2, dim2=-1)), self.prior, strict=True)
        return [self.num_data * (h + delta) for h, delta in each]

    def log_det(self) -> Tensor:
        """Return -2 Σ log L_jj."""
        return -2 * self.root.diagonal(dim1=-2, dim2=-1).log().sum()

    def vector(self, tensors: list[Tensor]) -> Tensor:
        """Return one vector of the numbers, block after block."""
        return self._flat(tensors).flatten()

    def blocks(self) -> list[Tensor]:
        """Return the lower roots of (L Lᵀ)⁻¹."""
        root = torch.linalg.cholesky(torch.cholesky_inverse(self.root.double())).to(self.root)
        return [root.view(-1, *root.shape[-2:])]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load the curvature; of release 0.2 that of the stored root, which is what its q had."""
        root = state_dict.pop(f"{prefix}root", None)
        if isinstance(root, Tensor):
            precision = root.cpu().double() @ root.mT.cpu().double() / self.num_data
            precision.diagonal(dim1=-2, dim2=-1).sub_(self._each_weight(self.prior).cpu())
            state_dict[f"{prefix}curvature"] = precision
        super()._load_from_state_dict(state_dict, prefix, *others)


class Rows(Dense):
    """One normal for each row of a layer, the weights into one unit with its bias, with a full covariance of each.

    It is for a last layer of many classes: the covariance of the classes with one another is left out, and the
    C blocks have d² numbers each instead of (C d)² in all.  Each block is the block of the dense H.  An `InputError`
    refuses parameters of different numbers of rows, and more weights than a block can have.
    """

    def _laid_out(self) -> tuple[int, ...]:
        counts = {name: len(m) if m.ndim else 1 for name, m in zip(self.names, self.mean, strict=True)}
        if len(set(counts.values())) > 1:
            rows = ", ".join(f"{name} has {count}" for name, count in list(counts.items())[:4])
            raise InputError(f'structure="rows" is for one layer, whose parameters have the same rows; {rows}.')
        self.rows = counts[self.names[0]]
        self.sizes = [m.numel() // self.rows for m in self.mean]
        width = sum(self.sizes)
        if width > LARGEST or self.rows * width**2 > _MOST:
            raise InputError(
                f'structure="rows" is for {LARGEST:,} weights a row and {_MOST:,} numbers in the blocks at '
                f'most; {", ".join(self.names[:4])} have {width:,} and {self.rows * width**2:,}. Use "kronecker" or '
                '"diagonal".'
            )
        return self.rows, width, width

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(self.rows, -1) for tensor in tensors], 1)


def lower_root(precision: Tensor, rounding: float) -> Tensor:
    """Return the lower root; where rounding has left a matrix indefinite, of one with a diagonal D times it larger."""
    root, failed = torch.linalg.cholesky_ex(precision)
    if failed.device.type == "cpu" and not failed.any():
        return root
    precision.diagonal(dim1=-2, dim2=-1).mul_(1 + precision.shape[-1] * rounding)
    return torch.where((failed > 0)[..., None, None], torch.linalg.cholesky_ex(precision)[0], root)


# -------------------------------------------------------------------------------- Kronecker products

# θ = M + A Z Bᵀ.  For a parameter of o rows and i columns (of all its other dimensions), A is o x o, B is i x i, both
# lower triangular, and the covariance of its rows, one after the other, is AAᵀ ⊗ BBᵀ.  With the pull R = AᵀĝB of a
# gradient on n labels that the network predicts, the two factors of W = CᵀHC in the frame are
#
#     W_A = N (n R Rᵀ + δ |B|² AᵀA)/i,   W_B = N (n RᵀR + δ |A|² BᵀB)/o,   P_A = W_A - I,  P_B = W_B - I,
#
# and the natural gradient of the roots is A(P_A - ½τ I)/2, B(P_B - ½τ I)/2 with τ = tr P_A/o = tr P_B/i: neither an
# inverse nor a hook on a layer.


_LONGEST = 0.2  # rate of a step of the roots: one statistic is of one batch
_SMALL = 0.5  # largest Frobenius norm of K, so that I - K + ½K² stays near I


class Kronecker(Family):
    """Matrix normals with lower roots A of the rows and B of the columns: C = A ⊗ B.

    It is for layers whose weights depend on one another.  A step costs products of the matrix with its two
    roots, which is cheap where batches are large against the sides of the matrix.  Parameters have two dimensions or
    more, of which the first is the rows; for other arguments see :class:`Family`.
    """

    passes = 5  # after which the divergence is within 0.001 nats a weight of the smallest, in tests

    def lay_out_(self) -> None:
        """Register roots that make the start."""
        for name, mean, delta, h0 in zip(self.names, self.mean, self.prior, self.start, strict=True):
            scale = (self.num_data * (h0 + delta)) ** -0.25  # a root of the standard deviation for either side
            rows, columns = mean.shape[0], mean[0].numel()
            self.register_buffer(key("rows", name), scale * torch.eye(rows, device="cpu").to(mean))
            self.register_buffer(key("columns", name), scale * torch.eye(columns, device="cpu").to(mean))

    def roots(self) -> list[tuple[Tensor, Tensor]]:
        """Return (A, B) of every parameter."""
        return list(zip(self.stored("rows"), self.stored("columns"), strict=True))

    def colored(self, noise: list[Tensor]) -> list[Tensor]:
        """Return A ε Bᵀ."""
        return [(A @ e.flatten(1) @ B.mT).view_as(e) for e, (A, B) in zip(noise, self.roots(), strict=True)]

    def whitened(self, moves: list[Tensor]) -> list[Tensor]:
        """Return A⁻¹ dm B⁻ᵀ."""
        found = []
        for dm, (A, B) in zip(moves, self.roots(), strict=True):
            left = torch.linalg.solve_triangular(A, dm.flatten(1), upper=False)
            found.append(torch.linalg.solve_triangular(B.mT, left, upper=True, left=False))
        return found

    def natural(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return N AAᵀ g BBᵀ."""
        return [
            self.num_data * (A @ (A.mT @ g.flatten(1) @ B) @ B.mT).view_as(g)
            for g, (A, B) in zip(gradients, self.roots(), strict=True)
        ]

    def statistics(self, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        """Return N scale RRᵀ/i and N scale RᵀR/o of every parameter, R = AᵀgB; their sums where labels come first."""
        found: list[Tensor | None] = []
        for g, m, (A, B) in zip(gradients, self.mean, self.roots(), strict=True):
            if g is None:
                found += [None, None]
                continue
            R = A.mT @ g.flatten(g.ndim - m.ndim + 1) @ B
            rows, columns = R.movedim(-2, 0).flatten(1), R.flatten(0, -2)
            found += [
                self.num_data * scale / len(B) * (rows @ rows.mT),
                self.num_data * scale / len(A) * (columns.mT @ columns),
            ]
        return found

    def factors(self, statistics: list[Tensor | None]) -> list[tuple[Tensor, Tensor] | None]:
        """Return W_A and W_B of every parameter, the prior's part included, from what `statistics` returned."""
        found: list[tuple[Tensor, Tensor] | None] = []
        for k, ((A, B), delta) in enumerate(zip(self.roots(), self.prior, strict=True)):
            of_rows, of_columns = statistics[2 * k : 2 * k + 2]
            if of_rows is None or of_columns is None:
                found.append(None)
                continue
            W_A = of_rows + (self.num_data * delta * B.square().sum() / len(B)) * (A.mT @ A)
            W_B = of_columns + (self.num_data * delta * A.square().sum() / len(A)) * (B.mT @ B)
            found.append((W_A, W_B))
        return found

    def projected(self, statistics: list[Tensor | None]) -> list[tuple[Tensor, Tensor] | None]:
        """Return P_A - ½τI and P_B - ½τI of every parameter, the prior's part included."""
        found = self.factors(statistics)
        for P_A, P_B in filter(None, found):  # W_A and W_B still
            half = 0.5 * (P_A.diagonal().mean() - 1)
            P_A.diagonal().sub_(1 + half)
            P_B.diagonal().sub_(1 + half)
        return found

    def absorb_(self, statistics: list[Tensor | None], rate: float | Tensor) -> None:
        """Step along the natural gradient of the roots, A(I - K + ½K²), K = ρ tril½[P_A - ½τI], and B likewise."""
        for (A, B), pair in zip(self.roots(), self.projected(statistics), strict=True):
            for root, P in zip((A, B), pair or (), strict=False):
                K = torch.tril(P)
                K.diagonal().mul_(0.5)
                K *= rate.to(K).clamp(max=_LONGEST) if isinstance(rate, Tensor) else min(rate, _LONGEST)
                K *= _SMALL / torch.linalg.matrix_norm(K).clamp_min(_SMALL)
                root.sub_(root @ (K - 0.5 * K @ K))

    def refresh_(self) -> None:
        """Do nothing: the roots are what is known of the curvature, and leave the start by steps of their own."""

    def restart_(self, observed: bool) -> None:
        """Begin at the prior, but for what is frozen and known."""
        each = zip(self.parameters_of_network, self.roots(), self.prior, strict=True)
        for p, pair, delta in each:
            for root in pair if p.requires_grad or not observed else ():
                root.zero_().diagonal().fill_((self.num_data * delta) ** -0.25)

    def settle_(self, statistics: list[Tensor | None]) -> None:
        """Take AAᵀ to √τ A W_A⁻¹Aᵀ and BBᵀ to √τ B W_B⁻¹Bᵀ, τ = tr W_A/o = tr W_B/i: both blocks of a pass at once.

        A fixed point has W_A = W_B = I, as the steps have, and minimises KL(q‖N(m, (N (H + δ))⁻¹)) over either factor;
        if H + δ is a Kronecker product the first pass ends at its inverse.
        """
        self.bounded = False
        for pair, factors in zip(self.roots(), self.factors(statistics), strict=True):
            if factors is None:
                continue
            quarter = factors[0].double().diagonal().mean() ** 0.25
            for root, W in zip(pair, factors, strict=True):
                upper = lower_root(W.double().flip(0, 1), torch.finfo(W.dtype).eps).flip(0, 1)  # W = upper upperᵀ
                root.copy_(quarter * torch.linalg.solve_triangular(upper.mT, root.double(), upper=False, left=False))

    def variances(self) -> list[Tensor]:
        """Return (AAᵀ)_jj (BBᵀ)_kk, one tensor a parameter."""
        return [
            torch.outer(A.square().sum(1), B.square().sum(1)).view_as(m)
            for m, (A, B) in zip(self.mean, self.roots(), strict=True)
        ]

    def precisions(self) -> list[Tensor]:
        """Return (AAᵀ)⁻¹_jj (BBᵀ)⁻¹_kk, one tensor a parameter."""
        return [
            torch.outer(torch.cholesky_inverse(A).diagonal(), torch.cholesky_inverse(B).diagonal()).view_as(m)
            for m, (A, B) in zip(self.mean, self.roots(), strict=True)
        ]

    def log_det(self) -> Tensor:
        """Return 2 i Σ log A_jj + 2 o Σ log B_kk."""
        each = [2 * (len(B) * A.diagonal().log().sum() + len(A) * B.diagonal().log().sum()) for A, B in self.roots()]
        return torch.stack(each).sum()

    def blocks(self) -> list[Tensor]:
        """Return A ⊗ B of each parameter, written out, after a check of its size."""
        for name, m in zip(self.names, self.mean, strict=True):
            if m.numel() > LARGEST:
                raise InputError(
                    f"A covariance is written out for {LARGEST:,} weights at most, and {name} has {m.numel():,}; say "
                    "as_gaussian(marginals=True) for the variances alone."
                )
        return [torch.kron(A.contiguous(), B.contiguous())[None] for A, B in self.roots()]


# ------------------------------------------------------------------------------------ noise that can be drawn again
# Normal noise as a function of a seed, the number of the draw and the name of a parameter: two integers make a draw
# again, and freezing one parameter leaves the noise of the others as it was.


_TABLE, WINDOW = 2**22, 2**18  # numbers in the table, and in a window of it


def seed_of(seed: int, draw: int, name: str) -> int:
    """Mix a seed, the number of a draw and a name into the seed of a generator."""
    digest = hashlib.blake2b(f"{seed}/{draw}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(device: torch.device, seed: int, draw: int, name: str) -> torch.Generator:
    """Make the generator of one parameter's noise in one draw."""
    return torch.Generator(device).manual_seed(seed_of(seed, draw, name))


@functools.partial(remembered, most=4)
def _table(seed: int, dtype: torch.dtype) -> Tensor:
    """Normal noise to take windows of, on the CPU."""
    return torch.randn(_TABLE, dtype=dtype, generator=generator(torch.device("cpu"), seed, 0, "table"), device="cpu")


def windows(like: Tensor, name: str, seed: int, draw: int) -> list[Tensor]:
    """Return normal noise, only to be read: as the tensor, or on the CPU windows of a table of ``WINDOW`` numbers."""
    if like.device.type != "cpu":
        return [torch.empty_like(like).normal_(generator=generator(like.device, seed, draw, name))]
    table, numel = _table(seed, like.dtype), like.numel()
    state = _word(f"{seed}/{draw}") * _word(name) % 2**64
    if numel <= WINDOW:
        return [table.narrow(0, (state >> 20) % (_TABLE - WINDOW), numel).view(like.shape)]
    found = []
    for first in range(0, numel, WINDOW):
        found.append(table.narrow(0, (state >> 20) % (_TABLE - WINDOW), min(WINDOW, numel - first)))
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64  # the generator of Knuth's MMIX
    return found


def normals(like: Tensor, name: str, seed: int, draw: int) -> Tensor:
    """Return the noise of :func:`windows` in the shape of the tensor."""
    found = windows(like, name, seed, draw)
    return found[0] if len(found) == 1 else torch.cat(found).view(like.shape)


@functools.lru_cache(maxsize=10_000)
def _word(text: str) -> int:
    """A text as an odd number of 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1


# ------------------------------------------------------------------------------------ tensors that may not be finite


def all_finite(tensors: list[Tensor]) -> Tensor:
    """Return whether all entries of some tensors are finite."""
    return look_at(tensors)[0]


def look_at(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return whether all entries of some tensors are finite, and whether one of them is not 0."""
    if not tensors:
        return torch.tensor(True, device="cpu"), torch.tensor(False, device="cpu")
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)  # half precision would overflow
    if tensors[0].device.type == "cpu":  # where a sum costs half of a norm
        sums = [float(tensor.sum(dtype=dtype)) for tensor in tensors]
        some = any(sums) or any(bool(tensor.any()) for tensor in tensors)
        return torch.tensor(all(map(math.isfinite, sums)), device="cpu"), torch.tensor(some, device="cpu")
    norms = torch.stack([norm.to(tensors[0].device) for norm in torch._foreach_norm(tensors, 2, dtype)])
    return norms.isfinite().all(), norms.any()


def zero_where_(tensors: list[Tensor], bad: Tensor) -> None:
    """Fill tensors with zeros where a flag is set."""
    if bad.device.type == "cpu":
        if bad:
            torch._foreach_zero_(tensors)
    else:
        for tensor in tensors:
            tensor.masked_fill_(bad.to(tensor.device), 0.0)
