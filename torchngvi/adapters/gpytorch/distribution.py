"""A variational distribution of GPyTorch that holds a posterior of this library.

Its mean and covariance are functions of the posterior's probes p = 0 and R = 0,

    u = m + C p + C (I + R) z        q(u) = N(m + C p, C (I + R)(I + R)ᵀ Cᵀ)

so that ``loss.backward()``, whatever the strategy and the objective, leaves a = Cᵀg in ``mean_probe.grad`` and
P in ``root_probe.grad``: the natural gradient in the frame of q.  Nothing is differentiated through a
Cholesky factorisation of S, which is where GPyTorch's own natural gradient loses its digits.

Hensman, Matthews and Ghahramani (2015) for the bound; Salimbeni, Eleftheriadis and Hensman (2018) for natural
gradients of it, here those of Khan and Rue (2023).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.variational import (
    BatchDecoupledVariationalStrategy,
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    _VariationalDistribution,
    _VariationalStrategy,
)
from linear_operator.operators import CholLinearOperator, DiagLinearOperator, TriangularLinearOperator
from torch import Tensor, _foreach_mul
from torch.utils.hooks import RemovableHandle

from torchngvi.arguments import read_instance, read_number, read_size, read_sizes
from torchngvi.errors import InputError
from torchngvi.interfaces import Frame
from torchngvi.numerics.arrays import Versions
from torchngvi.numerics.linalg import cholesky, positive_columns
from torchngvi.optim.evaluating import warn
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.flat.flat_gaussian import FlatGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Dense

_PATIENCE = 100  # passes after which a gradient that nobody uses is told
FULL = (CholeskyVariationalDistribution, NaturalVariationalDistribution, TrilNaturalVariationalDistribution)


@torch.no_grad()
def taken(
    state_dict: dict[str, Any], prefix: str, num_inducing_points: int, batch_shape: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """Take the entries of a distribution of GPyTorch's out of a state dict."""
    for kind in (*FULL, MeanFieldVariationalDistribution):
        q = kind(num_inducing_points, torch.Size(batch_shape))
        names = [name for name, _ in q.named_parameters()]
        if not all(prefix + name in state_dict for name in names):
            continue
        found = {name: state_dict.pop(prefix + name) for name in names}
        like = found[names[0]]
        q = q.to(dtype=like.dtype, device=like.device)
        q.load_state_dict(found)
        return moments_of(q)
    return None


@torch.no_grad()
def moments_of(own: Any) -> tuple[Tensor, Tensor]:
    """The moments of a Gaussian of GPyTorch's, or of this library."""
    q = own()
    # Adam may leave columns of either sign
    return q.mean, positive_columns(q.lazy_covariance_matrix.cholesky().to_dense().tril())[0]


class RootCovariance(CholLinearOperator):
    """C Cᵀ for a triangular root, upper or lower, where GPyTorch's own takes every root for a lower one."""

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        """Solve with C Cᵀ by two substitutions."""
        solved = self.root._transpose_nonbatch().solve(self.root.solve(right_tensor))
        return solved if left_tensor is None else left_tensor @ solved

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int | None = 0) -> Any:
        return super()._solve(rhs, preconditioner, num_tridiag) if num_tridiag else self.solve(rhs)

    def _cholesky(self, upper: bool = False) -> TriangularLinearOperator:
        """The lower factor, or its transpose: C, or of an upper C the one with Cᵀ = Q Lᵀ, without forming C Cᵀ."""
        lower = self.root
        if lower.upper:
            R = torch.linalg.qr(lower.to_dense().mT).R
            signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(R)
            lower = TriangularLinearOperator(R.mT * signs[..., None, :])
        return lower._transpose_nonbatch() if upper else lower


@CholeskyVariationalDistribution.register  # it has what GPyTorch reads of one to make a fantasy model
class NaturalGradientVariationalDistribution(_VariationalDistribution):
    """q(u) = N(m, S) for any variational strategy of GPyTorch, stepped by the optimizers of this library.

    It takes the place of `gpytorch.variational.CholeskyVariationalDistribution` and its kin, and loads what was trained
    with them: ``load_state_dict`` of a model takes a checkpoint with any of GPyTorch's Gaussian distributions.  The
    posterior is the submodule ``posterior``; its coordinates are buffers, so that ``model.parameters()`` holds
    hyper-parameters and inducing points only, and Adam never meets q.

    Args:
        num_inducing_points: M.
        batch_shape: the batch shape of the model, as in GPyTorch.
        mean_init_std: standard deviation of the noise on the mean where training starts.
        posterior: the class of q: `CholeskyGaussian`, `NaturalGaussian` or `PrecisionCholeskyGaussian`;
            `DiagonalGaussian` for mean field; a Gaussian over a flat vector, such as `FlatCholesky`, for `IFVB`.

    Raises:
        InputError: a posterior that is none, fewer than one inducing point.

    >>> q = NaturalGradientVariationalDistribution(4, batch_shape=torch.Size([2]))
    >>> q().batch_shape, q().event_shape, list(q.parameters())
    (torch.Size([2]), torch.Size([4]), [])
    """

    _like: Tensor
    _zero: Versions | None = None  # of the probes, when they were asked

    def __init__(
        self,
        num_inducing_points: int,
        batch_shape: Sequence[int] = (),
        mean_init_std: float = 1e-3,
        *,
        posterior: type[Gaussian] | type[FlatGaussian] = CholeskyGaussian,
    ) -> None:
        num_inducing_points = read_size("num_inducing_points", num_inducing_points, "counts inducing points")
        batch_shape = read_sizes("batch_shape", batch_shape, "is a tuple of integers of at least 1")
        mean_init_std = read_number("mean_init_std", mean_init_std, "is a standard deviation", at_least=0)
        super().__init__(num_inducing_points, torch.Size(batch_shape), mean_init_std)
        if not (isinstance(posterior, type) and issubclass(posterior, Gaussian | FlatGaussian)):
            raise InputError(
                f"posterior is a Gaussian posterior such as CholeskyGaussian or NaturalGaussian; got {posterior!r}."
            )
        make = posterior.standard if issubclass(posterior, FlatGaussian) else posterior
        self.posterior: Gaussian | FlatGaussian = make(num_inducing_points, batch_shape)
        self.register_buffer("_like", torch.empty(0), persistent=False)  # of the model's dtype
        self._passes = 0  # with a gradient that no step has used
        self.stepped_with: RemovableHandle | None = None  # the hook of a `natural_optimizer` on a hyper-optimizer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "stepped_with": None, "_zero": None}

    @property
    def device(self) -> torch.device:
        """The device that the posterior is on."""
        return self.posterior.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model; the posterior may have another: ``q.posterior.double()`` in a float32 model."""
        return self._like.dtype

    @property
    def variational_mean(self) -> Tensor:
        """The mean m, (*batch, M), to read: ``posterior.initialize_`` sets q, and what is written here may be lost."""
        return self.posterior.mean.to(self.dtype)

    @property
    def chol_variational_covar(self) -> Tensor:
        """The lower Cholesky factor of S, (*batch, M, M), to read, as `variational_mean`."""
        return self.posterior.scale_tril.to(self.dtype)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """No parameters; an `InputError` for ``model.variational_parameters()``: their optimizer would leave q."""
        if prefix and not recurse:
            raise InputError(
                "variational_parameters() has nothing for an optimizer to move: q steps by natural gradients and has "
                "no parameters. In the place of NGD(model.variational_parameters(), num_data, lr) build "
                "natural_optimizer(mll, lr=...), and give model.parameters() to Adam."
            )
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    @property
    def _diagonal(self) -> bool:
        return not isinstance(self.posterior, FlatGaussian) and self.posterior.structure.widest == 1

    def forward(self) -> MultivariateNormal:
        """q(u), (*batch, M), as a distribution of GPyTorch, differentiable in the probes of the posterior.

        Raises:
            InputError: the probes are no longer zero; autocast, under which kernels have half precision.
        """
        self.check_autocast()
        self._warn_if_idle()
        probes = self.posterior.mean_probe, self.posterior.root_probe
        far = not probes[0].is_cpu  # a device is asked only after a write to the probes
        known = far and self._zero is not None and self._zero.hold(probes, contents=False)
        if not known and any(bool(probe.any()) for probe in probes):
            raise InputError(
                "the probes of q have to stay zero, and another optimizer has moved them. Give it model.parameters() "
                "and likelihood.parameters(), which leave q out, not buffers()."
            )
        if far and not known:
            self._zero = Versions(probes)
        return MultivariateNormal(*self._moments())

    def _warn_if_idle(self, some: int = 10) -> None:
        """A gradient that stays for many passes, or for some where q is evaluated, is one that no optimizer takes."""
        trains, waits = torch.is_grad_enabled(), self.posterior.mean_probe.grad is not None
        self._passes = self._passes + trains if waits else 0
        if self._passes == _PATIENCE if trains else some <= self._passes < _PATIENCE:
            passes, self._passes = self._passes, _PATIENCE
            warn(
                f"q has not been stepped in {passes} passes and stays where it is: model.parameters() does not hold "
                "it, and Adam does not move it. Build natural_optimizer(mll, lr=0.5, hyper_optimizer=adam), or "
                "call the step() of a natural_optimizer in the loop.",
                UserWarning,
            )

    def check_autocast(self) -> None:
        """Refuse autocast around a model that is not in float64: matrices of half precision have no factor."""
        kind = self.device.type
        cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        if cast and self.dtype != torch.float64:
            raise InputError(
                "autocast evaluates the kernel matrix of the inducing points in half precision, where it is not "
                "positive definite. Call model and objective under torch.autocast(..., enabled=False), with a network "
                "before them under autocast if you like, or use a float64 model, which autocast leaves as it is."
            )

    def _moments(self) -> tuple[Tensor, DiagLinearOperator | RootCovariance]:
        """Mean and covariance in the dtype of the model, differentiable in the probes."""
        if isinstance(self.posterior, FlatGaussian):
            mean, root = self.posterior.moments()
            return mean.to(self.dtype), RootCovariance(TriangularLinearOperator(root.to(self.dtype)))
        q, frame = self.posterior, self.posterior.frame()
        known = isinstance(q.structure, Dense) and not (frame.mean.requires_grad or frame.root.requires_grad)
        if known and torch.is_grad_enabled() and not torch.jit.is_tracing():
            mean, root = _Moments.apply(q.mean_probe, q.root_probe, frame)
            frame = replace(frame, mean=mean, root=root)
        else:
            frame = q.probed()
        mean = frame.mean.to(self.dtype)
        if self._diagonal:
            return mean, DiagLinearOperator(frame.variance.to(self.dtype))
        return mean, RootCovariance(TriangularLinearOperator(frame.dense().to(self.dtype), upper=frame.upper))

    @torch.no_grad()
    def initialize_variational_distribution(self, prior_dist: MultivariateNormal) -> None:
        """Start q at the prior, (*batch, M), with a little noise on the mean; a strategy calls this once.

        Raises:
            InputError: a prior covariance without a Cholesky factor; autocast.
        """
        self.check_autocast()
        mean = prior_dist.mean.expand(self.shape())
        noise = self.mean_init_std * torch.randn_like(mean)
        self.posterior.initialize_(mean + noise, self._scale_of(prior_dist))

    def _scale_of(self, prior_dist: MultivariateNormal) -> Tensor:
        """The lower factor of a prior covariance, factored only where neither it nor q is diagonal."""
        lazy = prior_dist.lazy_covariance_matrix
        if isinstance(lazy, DiagLinearOperator) or self._diagonal:
            return prior_dist.variance.sqrt().expand(self.shape()).diag_embed()
        root, ok = cholesky(prior_dist.covariance_matrix.expand(*self.shape(), self.num_inducing_points))
        if not bool(ok.all()):
            raise InputError(
                "the prior covariance of the inducing values is not positive definite: inducing points coincide, or "
                "the jitter is too small for this dtype. Raise jitter_val, or use float64."
            )
        return self.posterior.kept_covariance(root.tril())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Load q; of a checkpoint with a distribution of GPyTorch's the same mean and covariance."""
        other = taken(state_dict, prefix, self.num_inducing_points, self.batch_shape)
        if other is not None:
            mean, root = (part.to(dtype=self.posterior.dtype, device=self.posterior.device) for part in other)
            self.posterior.initialize_(mean, self.posterior.kept_covariance(root))
            state_dict.update(self.posterior.state_dict(prefix=f"{prefix}posterior."))
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    @torch.no_grad()
    def to_cholesky(self) -> CholeskyVariationalDistribution:
        """The same q(u) as GPyTorch's own distribution, for code that accepts no other, and for its checkpoints.

        Returns:
            A `CholeskyVariationalDistribution` with this mean and covariance, in the dtype of the model.

        >>> q = NaturalGradientVariationalDistribution(2)
        >>> q.to_cholesky()().covariance_matrix.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        """
        other = CholeskyVariationalDistribution(self.num_inducing_points, self.batch_shape, self.mean_init_std)
        other = other.to(dtype=self.dtype, device=self.device)
        other.variational_mean.copy_(self.posterior.mean)
        other.chol_variational_covar.copy_(self.posterior.scale_tril)
        return other


class _Moments(torch.autograd.Function):
    """m + C p and the root of C(I + R) at p = R = 0, which are m and C: p gets Cᵀg, and R the same of the root."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean_probe: Tensor, root_probe: Tensor, frame: Frame) -> tuple[Tensor, ...]:
        return tuple(_foreach_mul([frame.mean, frame.root], 1.0))  # copies, by one kernel

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.frame = inputs[2]
        ctx.save_for_backward(ctx.frame.root)  # a step in between raises torch's own version error

    @staticmethod
    def backward(ctx: Any, by_mean: Tensor, by_root: Tensor) -> tuple[Tensor | None, ...]:
        (root,) = ctx.saved_tensors
        turned = by_root @ root.mT if ctx.frame.upper else root.mT @ by_root
        return ctx.frame.pull(by_mean), turned, None


def distributions_of(model: torch.nn.Module) -> list[NaturalGradientVariationalDistribution]:
    """The distributions of this library in a model, in the order of the modules."""
    read_instance("model", model, torch.nn.Module, "is a model of GPyTorch, such as an ApproximateGP")
    return [d for d in model.modules() if isinstance(d, NaturalGradientVariationalDistribution)]


def variational_posteriors(model: torch.nn.Module) -> list[Gaussian | FlatGaussian]:
    """The posteriors of every layer, task and latent function of a model, for an optimizer of this library.

    Args:
        model: an `ApproximateGP`, or a whole `DeepGP`.

    Returns:
        The posteriors, in the order of the modules.

    Raises:
        InputError: a model without any, or one that does not fit its inducing points or kernels.

    >>> q = NaturalGradientVariationalDistribution(4)
    >>> variational_posteriors(q) == [q.posterior]
    True
    """
    found = [distribution.posterior for distribution in distributions_of(model)]
    if found:
        for strategy in model.modules():
            if isinstance(strategy, _VariationalStrategy):
                check_shapes(strategy)
        return found
    others = sorted({type(d).__name__ for d in model.modules() if isinstance(d, _VariationalDistribution)})
    if not others:
        raise InputError(
            f"{type(model).__name__} has no variational distribution; give an ApproximateGP, or the whole DeepGP."
        )
    why = "no other variational distribution steps by natural gradients here"
    if "DeltaVariationalDistribution" in others:
        why = "a point mass has no covariance, and no natural gradient"
    elif any(isinstance(m, gpytorch.variational.NNVariationalStrategy) for m in model.modules()):
        why = "the nearest-neighbour strategy takes GPyTorch's mean field only"
    raise InputError(
        f"{type(model).__name__} holds {', '.join(others)}, and {why}. "
        "Give its strategy a NaturalGradientVariationalDistribution, or leave q to Adam."
    )


def check_shapes(strategy: _VariationalStrategy) -> None:
    """Check q against the inducing points and the kernels of its strategy."""
    q = getattr(strategy, "_variational_distribution", None)
    if not isinstance(q, NaturalGradientVariationalDistribution):
        return
    Z = strategy.inducing_points
    if q.num_inducing_points != Z.shape[-2]:
        raise InputError(
            f"q holds {q.num_inducing_points} inducing values where the strategy has {Z.shape[-2]} inducing points: "
            f"build NaturalGradientVariationalDistribution({Z.shape[-2]})."
        )
    kernels = [module for module in strategy.model.children() if isinstance(module, Kernel)]
    wanted = torch.broadcast_shapes(Z.shape[:-2], *(kernel.batch_shape for kernel in kernels))
    if isinstance(strategy, BatchDecoupledVariationalStrategy):  # one dimension is of the mean and of the covariance
        sizes = list(wanted)
        del sizes[strategy.mean_var_batch_dim or -1]
        wanted = torch.Size(sizes)
    padded = (1,) * (len(q.batch_shape) - len(wanted)) + wanted
    if len(padded) > len(q.batch_shape) or any(
        size not in (1, own) for size, own in zip(padded, q.batch_shape, strict=True)
    ):
        raise InputError(
            f"q has the batch shape {tuple(q.batch_shape)} where the inducing points and kernels have {tuple(wanted)}: "
            f"build NaturalGradientVariationalDistribution({Z.shape[-2]}, batch_shape={tuple(wanted)})."
        )


def base_strategy(model: Any) -> Any:
    """The strategy of the latent functions of a model, within that which makes tasks of them; or None."""
    outer = getattr(model, "variational_strategy", None)
    return getattr(outer, "base_variational_strategy", outer)
