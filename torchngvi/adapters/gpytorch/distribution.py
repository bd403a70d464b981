"""A variational distribution of GPyTorch that holds a posterior of this library.

Its mean and covariance are functions of the posterior's probes p = 0 and R = 0,

    u = m + C p + C (I + R) z        q(u) = N(m + C p, C (I + R)(I + R)ᵀ Cᵀ)

so that ``loss.backward()``, whatever the strategy and the objective, leaves a = Cᵀg in ``mean_probe.grad`` and
P in ``root_probe.grad``: the natural gradient in the frame of q.  Nothing is differentiated through a
Cholesky factorisation of S, which is where GPyTorch's own natural gradient loses its digits.

Hensman, Matthews and Ghahramani (2015) for the bound; Salimbeni, Eleftheriadis and Hensman (2018) for natural
gradients of it, here those of Khan and Rue (2023).
"""

from collections.abc import Callable, Sequence
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.variational import BatchDecoupledVariationalStrategy, CholeskyVariationalDistribution
from gpytorch.variational._variational_distribution import _VariationalDistribution
from gpytorch.variational._variational_strategy import _VariationalStrategy
from linear_operator.operators import CholLinearOperator, DiagLinearOperator, TriangularLinearOperator
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.flat.flat_gaussian import FlatGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.renamed import renamed


class _Watched:
    """Of a linear operator: tells how much of its log determinant a loss holds."""

    watch: Callable[[Tensor], None] | None = None  # called in the backward pass, with that weight

    def inv_quad_logdet(self, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """GPyTorch's result, with a hook on the gradient that reaches the log determinant."""
        inv_quad, logdet = super().inv_quad_logdet(*arguments, **options)  # type: ignore[misc]
        if self.watch is not None and logdet is not None and logdet.requires_grad:
            logdet.register_hook(self.watch)
        return inv_quad, logdet

    def _expand_batch(self, batch_shape: Any) -> "_Watched":
        expanded = super()._expand_batch(batch_shape)  # type: ignore[misc]
        expanded.watch = self.watch
        return expanded


class _DiagonalCovariance(_Watched, DiagLinearOperator):
    """The covariance diag(c)² of a diagonal root."""


class _RootCovariance(_Watched, CholLinearOperator):
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


class NaturalGradientVariationalDistribution(_VariationalDistribution):
    """q(u) = N(m, S) for any variational strategy of GPyTorch, stepped by the optimizers of this library.

    It takes the place of `gpytorch.variational.CholeskyVariationalDistribution` and its kin.  The posterior is the
    submodule ``posterior``; its coordinates are buffers, so that ``model.parameters()`` holds hyper-parameters and
    inducing points only, and Adam never meets q.

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

    @renamed(family="posterior")
    def __init__(
        self,
        num_inducing_points: int,
        batch_shape: Sequence[int] = (),
        mean_init_std: float = 1e-3,
        *,
        posterior: type[Gaussian] | type[FlatGaussian] = CholeskyGaussian,
    ) -> None:
        super().__init__(num_inducing_points, torch.Size(batch_shape), mean_init_std)
        if not (isinstance(posterior, type) and issubclass(posterior, Gaussian | FlatGaussian)):
            raise InputError(
                f"posterior is a Gaussian posterior such as CholeskyGaussian or NaturalGaussian; got {posterior!r}."
            )
        self.posterior: Gaussian | FlatGaussian
        if issubclass(posterior, FlatGaussian):
            self.posterior = posterior.standard(num_inducing_points, batch_shape)
        else:
            self.posterior = posterior(num_inducing_points, batch_shape)
        self.register_buffer("_like", torch.empty(0), persistent=False)  # of the model's dtype
        self._entropy_weights: list[tuple[bool, Tensor]] | None = None  # kept while `natural_optimizer` asks
        self.kept_factor: tuple[object, Tensor] | None = None  # of K_ZZ, for `SparseGP`

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept_factor": None, "_entropy_weights": None}

    @property
    def device(self) -> torch.device:
        """The device that the posterior is on."""
        return self.posterior.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model; the posterior may have another: ``q.posterior.double()`` in a float32 model."""
        return self._like.dtype

    def forward(self) -> MultivariateNormal:
        """q(u) as a distribution of GPyTorch, differentiable in the probes of the posterior.

        Returns:
            The Gaussian over (*batch, M) values.

        Raises:
            InputError: the probes are no longer zero.
        """
        if any(bool(probe.any()) for probe in (self.posterior.mean_probe, self.posterior.root_probe)):
            raise InputError(
                "the probes of q have to stay zero, and another optimizer has moved them. Give it model.parameters() "
                "and likelihood.parameters(), which leave q out, not buffers()."
            )
        mean, covariance = self._moments()
        if self._entropy_weights is not None:
            covariance.watch = self._weigh
        return MultivariateNormal(mean, covariance)

    def _moments(self) -> tuple[Tensor, "_DiagonalCovariance | _RootCovariance"]:
        """Mean and covariance in the dtype of the model, differentiable in the probes."""
        if isinstance(self.posterior, FlatGaussian):
            mean, root = self.posterior.moments()
            return mean.to(self.dtype), _RootCovariance(TriangularLinearOperator(root.to(self.dtype)))
        frame = self.posterior.probed()
        mean = frame.mean.to(self.dtype)
        if frame.structure.widest == 1:
            return mean, _DiagonalCovariance(frame.variance.to(self.dtype))
        return mean, _RootCovariance(TriangularLinearOperator(frame.dense().to(self.dtype), upper=frame.upper))

    def _weigh(self, weight: Tensor) -> None:
        """Keep the weight of the log determinant in a loss, and whether the probes had no gradient before it."""
        q = self.posterior
        gradient = q.root_probe.grad if q.framed else q.mean_probe.grad
        if self._entropy_weights is not None:
            self._entropy_weights.append((gradient is None or not bool(gradient.any()), weight.sum()))

    @torch.no_grad()
    def initialize_variational_distribution(
        self,
        prior_dist: MultivariateNormal,  # over (*batch, M), or broadcasting to it
    ) -> None:
        """Start q at the prior, with a little noise on the mean; a strategy calls this once.

        Args:
            prior_dist: the prior of the inducing values, over (*batch, M), or broadcasting to it.

        Raises:
            InputError: a prior covariance without a Cholesky factor.
        """
        mean = prior_dist.mean.expand(self.shape())
        covariance = prior_dist.covariance_matrix.expand(*self.shape(), self.num_inducing_points)
        root, ok = cholesky(covariance)
        if not bool(ok.all()):
            raise InputError(
                "the prior covariance of the inducing values is not positive definite: inducing points coincide, or "
                "the jitter is too small for this dtype. Raise jitter_val, or use float64."
            )
        noise = self.mean_init_std * torch.randn_like(mean)
        self.posterior.initialize_(mean + noise, self.posterior.kept_covariance(root.tril()))

    @torch.no_grad()
    def to_cholesky(self) -> CholeskyVariationalDistribution:
        """The same q(u) as GPyTorch's own distribution, for code that accepts no other, such as ``get_fantasy_model``.

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
    found = [d.posterior for d in model.modules() if isinstance(d, NaturalGradientVariationalDistribution)]
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
    """Check q against the inducing points and the kernels of its strategy.

    Args:
        strategy: a variational strategy; one without a q of this library passes.

    Raises:
        InputError: another number of inducing values than points, or fewer posteriors than the batch of models needs.
    """
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
