"""Names that have changed: for one release the old spelling works, and warns; or a sentence says where it is now.

The tables of this release are here, and only here: modules that were merged into others, modules that left the
package, and names that left the front door for the module that they belong to.
"""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

# the old path of a module, and that of the module which holds its content now
MODULES: dict[str, str] = {
    "torchngvi.models.group_lasso_network": "torchngvi.models.regularized",
    "torchngvi.models.mixture_integrand": "torchngvi.models.log_joint",
    "torchngvi.models.summands": "torchngvi.models.streamed",
    "torchngvi.models.mixed_summary": "torchngvi.models.mixed",
    "torchngvi.models.mixed_spread": "torchngvi.models.mixed",
    "torchngvi.models.mixed_start": "torchngvi.models.mixed_rows",
    "torchngvi.models.mixed_units": "torchngvi.models.mixed_rows",
    "torchngvi.models.effects_prior": "torchngvi.models.mixed_prior",
    "torchngvi.models.scale_priors": "torchngvi.models.mixed_prior",
    "torchngvi.adapters.formula": "torchngvi.tables",
    "torchngvi.adapters.table_checks": "torchngvi.tables.cells",
    "torchngvi.adapters.files.npy": "torchngvi.adapters.files.reader",
    "torchngvi.adapters.files.parquet": "torchngvi.adapters.files.reader",
    "torchngvi.adapters.files.texts": "torchngvi.adapters.files.reader",
    "torchngvi.adapters.pyro.enumeration": "torchngvi.adapters.pyro.batching",
    "torchngvi.adapters.pyro.factored": "torchngvi.adapters.pyro.structure",
    "torchngvi.adapters.pyro.finding": "torchngvi.adapters.pyro.structure",
    "torchngvi.adapters.pyro.held": "torchngvi.adapters.pyro.fitting",
    "torchngvi.adapters.pyro.lists": "torchngvi.adapters.pyro.svi",
    "torchngvi.adapters.pyro.local_bound": "torchngvi.adapters.pyro.local_guide",
    "torchngvi.adapters.pyro.local_density": "torchngvi.adapters.pyro.local_guide",
    "torchngvi.adapters.pyro.local_elbo": "torchngvi.adapters.pyro.local_guide",
    "torchngvi.adapters.pyro.local_layout": "torchngvi.adapters.pyro.local_guide",
    "torchngvi.adapters.pyro.local_passes": "torchngvi.adapters.pyro.local_guide",
    "torchngvi.adapters.pyro.local_sites": "torchngvi.adapters.pyro.local_guide",
    "torchngvi.adapters.pyro.local_steps": "torchngvi.adapters.pyro.local_guide",
    "torchngvi.adapters.pyro.location_scale": "torchngvi.adapters.pyro.fitting",
    "torchngvi.adapters.pyro.losses": "torchngvi.adapters.pyro.guide",
    "torchngvi.adapters.pyro.missing": "torchngvi.adapters.pyro.layout",
    "torchngvi.adapters.pyro.names": "torchngvi.adapters.pyro.layout",
    "torchngvi.adapters.pyro.owned": "torchngvi.adapters.pyro.distribution",
    "torchngvi.adapters.pyro.passes": "torchngvi.adapters.pyro.fitting",
    "torchngvi.adapters.pyro.reads": "torchngvi.adapters.pyro.structure",
    "torchngvi.adapters.pyro.site_densities": "torchngvi.adapters.pyro.product",
    "torchngvi.adapters.pyro.sites": "torchngvi.adapters.pyro.layout",
    "torchngvi.adapters.pyro.starting": "torchngvi.adapters.pyro.layout",
    "torchngvi.adapters.pyro.steps": "torchngvi.adapters.pyro.svi",
    "torchngvi.adapters.pyro.store": "torchngvi.adapters.pyro.guide",
    "torchngvi.adapters.gpytorch.checkpoints": "torchngvi.adapters.gpytorch.distribution",
    "torchngvi.adapters.gpytorch.covariances": "torchngvi.adapters.gpytorch.distribution",
    "torchngvi.adapters.gpytorch.inducing": "torchngvi.adapters.gpytorch.starts",
    "torchngvi.adapters.gpytorch.lent": "torchngvi.adapters.gpytorch.distribution",
    "torchngvi.adapters.gpytorch.memory": "torchngvi.adapters.gpytorch.distribution",
    "torchngvi.adapters.gpytorch.natural_steps": "torchngvi.adapters.gpytorch.epochs",
    "torchngvi.adapters.gpytorch.scales": "torchngvi.adapters.gpytorch.starts",
    "torchngvi.adapters.gpytorch.second_start": "torchngvi.adapters.gpytorch.starts",
    "torchngvi.adapters.gpytorch.settings": "torchngvi.adapters.gpytorch.epochs",
    "torchngvi.afar": "torchngvi.mode",
    "torchngvi.diagnostics.allowance": "torchngvi.diagnostics.examination",
    "torchngvi.diagnostics.confirmation": "torchngvi.diagnostics.linear_response",
    "torchngvi.diagnostics.dependence": "torchngvi.diagnostics.columns",
    "torchngvi.diagnostics.flatness": "torchngvi.diagnostics.linear_response",
    "torchngvi.diagnostics.left_out": "torchngvi.diagnostics.predictive",
    "torchngvi.diagnostics.monte_carlo": "torchngvi.diagnostics.importance",
    "torchngvi.diagnostics.other_modes": "torchngvi.diagnostics.examination",
    "torchngvi.diagnostics.power": "torchngvi.diagnostics.calibration",
    "torchngvi.diagnostics.psis": "torchngvi.diagnostics.importance",
    "torchngvi.diagnostics.rule": "torchngvi.diagnostics.verdict",
    "torchngvi.diagnostics.separation": "torchngvi.diagnostics.columns",
    "torchngvi.diagnostics.simulations": "torchngvi.diagnostics.calibration",
    "torchngvi.diagnostics.uniformity": "torchngvi.diagnostics.calibration",
    "torchngvi.distributed.headers": "torchngvi.distributed",
    "torchngvi.distributed.meetings": "torchngvi.distributed",
    "torchngvi.distributed.prints": "torchngvi.distributed",
    "torchngvi.distributed.processes": "torchngvi.distributed",
    "torchngvi.distributed.synchronizing": "torchngvi.distributed",
    "torchngvi.expectations.autograd": "torchngvi.expectations.hessian",
    "torchngvi.expectations.bonnet_price": "torchngvi.expectations.hessian",
    "torchngvi.expectations.closed_entropy_stein": "torchngvi.expectations.stein",
    "torchngvi.expectations.drawing": "torchngvi.expectations.draws",
    "torchngvi.expectations.gauss_newton": "torchngvi.expectations.hessian",
    "torchngvi.expectations.hessian_vector": "torchngvi.expectations.hessian",
    "torchngvi.expectations.least_squares_stein": "torchngvi.expectations.stein",
    "torchngvi.expectations.monte_carlo": "torchngvi.expectations.hessian",
    "torchngvi.expectations.path_derivative": "torchngvi.expectations.reparametrized",
    "torchngvi.expectations.per_factor": "torchngvi.expectations.quadrature",
    "torchngvi.expectations.score_function": "torchngvi.expectations.reparametrized",
    "torchngvi.expectations.statistic_regression": "torchngvi.expectations.flat",
    "torchngvi.fitting.anderson": "torchngvi.fitting.coordinate_sweeps",
    "torchngvi.fitting.bending": "torchngvi.fitting.warped",
    "torchngvi.fitting.callbacks": "torchngvi.fitting.loop",
    "torchngvi.fitting.chunks": "torchngvi.fitting.steps",
    "torchngvi.fitting.directions": "torchngvi.fitting.warped",
    "torchngvi.fitting.engine": "torchngvi.fitting.loop",
    "torchngvi.fitting.fingerprints": "torchngvi.fitting.checkpoints",
    "torchngvi.fitting.generators": "torchngvi.fitting.checkpoints",
    "torchngvi.fitting.irls": "torchngvi.fitting.laplace",
    "torchngvi.fitting.mixture_start": "torchngvi.fitting.laplace",
    "torchngvi.fitting.mixture_words": "torchngvi.fitting.mixtures",
    "torchngvi.fitting.newton_search": "torchngvi.fitting.laplace",
    "torchngvi.fitting.origin": "torchngvi.fitting.starts",
    "torchngvi.fitting.pool_loop": "torchngvi.fitting.pool",
    "torchngvi.fitting.progress": "torchngvi.fitting.loop",
    "torchngvi.fitting.request": "torchngvi.fitting.fit",
    "torchngvi.fitting.sight": "torchngvi.fitting.descent",
    "torchngvi.fitting.slope": "torchngvi.fitting.stopping",
    "torchngvi.fitting.usual_steps": "torchngvi.fitting.smoothed",
    "torchngvi.interfaces.cliques": "torchngvi.interfaces.packets",
    "torchngvi.interfaces.frame": "torchngvi.interfaces.packets",
    "torchngvi.interfaces.moves": "torchngvi.interfaces.posterior",
    "torchngvi.interfaces.priors": "torchngvi.interfaces.packets",
    "torchngvi.latents.chain": "torchngvi.latents.modes",
    "torchngvi.latents.curvature": "torchngvi.latents.modes",
    "torchngvi.latents.error": "torchngvi.latents.summary",
    "torchngvi.latents.sparsity": "torchngvi.latents.laplace",
    "torchngvi.methods.newton": "torchngvi.methods.gaussian",
    "torchngvi.methods.ngvi": "torchngvi.methods.gaussian",
    "torchngvi.metrics.batch_fisher": "torchngvi.metrics.fisher",
    "torchngvi.metrics.blocks": "torchngvi.metrics.preconditioner",
    "torchngvi.metrics.damped": "torchngvi.metrics.preconditioner",
    "torchngvi.metrics.exact": "torchngvi.metrics.preconditioner",
    "torchngvi.metrics.identity": "torchngvi.metrics.preconditioner",
    "torchngvi.metrics.matrix_free": "torchngvi.metrics.recursive",
    "torchngvi.metrics.recursion": "torchngvi.metrics.recursive",
    "torchngvi.metrics.site_newton": "torchngvi.metrics.quasi_newton",
    "torchngvi.metrics.window": "torchngvi.metrics.fisher",
    "torchngvi.models.by_moments": "torchngvi.models.mixed",
    "torchngvi.models.graphs": "torchngvi.models.checks",
    "torchngvi.models.grouped": "torchngvi.models.factors",
    "torchngvi.models.guarded_factors": "torchngvi.models.guarded",
    "torchngvi.models.known_factors": "torchngvi.models.factor_graph",
    "torchngvi.models.messages": "torchngvi.models.factor_graph",
    "torchngvi.models.per_datum": "torchngvi.models.log_joint",
    "torchngvi.models.shards": "torchngvi.models.sharded",
    "torchngvi.models.softmax_rows": "torchngvi.models.softmax",
    "torchngvi.models.together": "torchngvi.models.sharded",
    "torchngvi.models.warped": "torchngvi.models.log_joint",
    "torchngvi.momentum.adam": "torchngvi.momentum.averages",
    "torchngvi.momentum.exponential_average": "torchngvi.momentum.averages",
    "torchngvi.momentum.normalized": "torchngvi.momentum.averages",
    "torchngvi.networks.curvatures.base": "torchngvi.networks.curvatures",
    "torchngvi.networks.curvatures.example_gradients": "torchngvi.networks.curvatures",
    "torchngvi.networks.curvatures.gradient_noise": "torchngvi.networks.curvatures",
    "torchngvi.networks.curvatures.reparametrized": "torchngvi.networks.curvatures",
    "torchngvi.networks.curvatures.sampled_labels": "torchngvi.networks.curvatures",
    "torchngvi.networks.gradients": "torchngvi.networks.laplace",
    "torchngvi.networks.hooks": "torchngvi.networks.weights",
    "torchngvi.networks.labels": "torchngvi.networks.likelihoods",
    "torchngvi.networks.losses": "torchngvi.networks.watch",
    "torchngvi.numerics.bends": "torchngvi.interfaces.targets",
    "torchngvi.numerics.gamma_functions": "torchngvi.numerics.special",
    "torchngvi.numerics.gauss_hermite": "torchngvi.numerics.special",
    "torchngvi.numerics.host": "torchngvi.numerics.arrays",
    "torchngvi.numerics.inference_mode": "torchngvi.numerics.versions",
    "torchngvi.numerics.least_squares": "torchngvi.numerics.linalg",
    "torchngvi.numerics.normal_tail": "torchngvi.numerics.special",
    "torchngvi.numerics.seeds": "torchngvi.expectations.draws",
    "torchngvi.optim.averaged": "torchngvi.optim.optimizer",
    "torchngvi.optim.base": "torchngvi.optim.evaluating",
    "torchngvi.optim.cache": "torchngvi.optim.evaluating",
    "torchngvi.optim.notices": "torchngvi.optim.watching",
    "torchngvi.optim.state": "torchngvi.optim.records",
    "torchngvi.optim.trial": "torchngvi.optim.optimizer",
    "torchngvi.posteriors.cliques": "torchngvi.posteriors.precision",
    "torchngvi.posteriors.covariance_root": "torchngvi.posteriors.gaussian",
    "torchngvi.posteriors.flat.beta": "torchngvi.posteriors.flat.exponential_family",
    "torchngvi.posteriors.flat.categorical": "torchngvi.posteriors.flat.exponential_family",
    "torchngvi.posteriors.flat.cholesky": "torchngvi.posteriors.flat.flat_gaussian",
    "torchngvi.posteriors.flat.concentrations": "torchngvi.posteriors.flat.exponential_family",
    "torchngvi.posteriors.flat.covariance_gaussian": "torchngvi.posteriors.flat.flat_gaussian",
    "torchngvi.posteriors.flat.dirichlet": "torchngvi.posteriors.flat.exponential_family",
    "torchngvi.posteriors.flat.discrete": "torchngvi.posteriors.flat.exponential_family",
    "torchngvi.posteriors.flat.drawing": "torchngvi.posteriors.flat.flat_posterior",
    "torchngvi.posteriors.flat.inverse_gamma": "torchngvi.posteriors.flat.gamma",
    "torchngvi.posteriors.flat.low_rank": "torchngvi.posteriors.flat.flat_gaussian",
    "torchngvi.posteriors.flat.mean_field": "torchngvi.posteriors.flat.flat_gaussian",
    "torchngvi.posteriors.flat.module_flow": "torchngvi.posteriors.flat.flows",
    "torchngvi.posteriors.flat.normal_inverse_gamma": "torchngvi.posteriors.flat.gamma",
    "torchngvi.posteriors.flat.orthogonal_flow": "torchngvi.posteriors.flat.flows",
    "torchngvi.posteriors.flat.poisson": "torchngvi.posteriors.flat.exponential_family",
    "torchngvi.posteriors.flat.rank_one": "torchngvi.posteriors.flat.flat_gaussian",
    "torchngvi.posteriors.flat.shape_rate": "torchngvi.posteriors.flat.gamma",
    "torchngvi.posteriors.flat.wishart": "torchngvi.posteriors.flat.gamma",
    "torchngvi.posteriors.memory": "torchngvi.posteriors.conversions",
    "torchngvi.posteriors.natural": "torchngvi.posteriors.precision",
    "torchngvi.posteriors.precision_root": "torchngvi.posteriors.precision",
    "torchngvi.posteriors.roots": "torchngvi.posteriors.conversions",
    "torchngvi.posteriors.starts": "torchngvi.posteriors.conversions",
    "torchngvi.posteriors.warps.sinh_arcsinh": "torchngvi.posteriors.warps",
    "torchngvi.posteriors.warps.warp": "torchngvi.posteriors.warps",
    "torchngvi.posteriors.warps.yeo_johnson": "torchngvi.posteriors.warps",
    "torchngvi.posteriors.weighted": "torchngvi.posteriors.mixture",
    "torchngvi.refinement.curves": "torchngvi.refinement.layers",
    "torchngvi.refinement.importance": "torchngvi.refinement.density",
    "torchngvi.refinement.joint": "torchngvi.refinement.density",
    "torchngvi.refinement.newton": "torchngvi.refinement.fan",
    "torchngvi.refinement.second": "torchngvi.refinement.refinement",
    "torchngvi.refinement.tracing": "torchngvi.refinement.fan",
    "torchngvi.rules.bures_wasserstein": "torchngvi.rules.wasserstein",
    "torchngvi.rules.centered_svgd": "torchngvi.rules.wasserstein",
    "torchngvi.rules.covariance_gradient": "torchngvi.rules.wasserstein",
    "torchngvi.rules.geodesic": "torchngvi.rules.natural_gradient",
    "torchngvi.rules.local_exponential": "torchngvi.rules.natural_gradient",
    "torchngvi.rules.log_natural_gradient": "torchngvi.rules.natural_gradient",
    "torchngvi.rules.log_root_gradient": "torchngvi.rules.root_gradient",
    "torchngvi.rules.projected_root_gradient": "torchngvi.rules.root_gradient",
    "torchngvi.rules.projected_square_root": "torchngvi.rules.root_gradient",
    "torchngvi.rules.proximal_root_gradient": "torchngvi.rules.root_gradient",
    "torchngvi.rules.retraction": "torchngvi.rules.natural_gradient",
    "torchngvi.rules.root_newton": "torchngvi.rules.newton",
    "torchngvi.rules.svgd": "torchngvi.rules.wasserstein",
    "torchngvi.rules.symmetric_root": "torchngvi.rules.newton",
    "torchngvi.rules.variational_newton": "torchngvi.rules.newton",
    "torchngvi.solved.cavities": "torchngvi.solved.leave_one_out",
    "torchngvi.solved.differentiable": "torchngvi.solved.response",
    "torchngvi.solved.joint": "torchngvi.solved.leave_one_out",
    "torchngvi.solved.stacking": "torchngvi.solved.comparison",
    "torchngvi.solved.system": "torchngvi.solved.response",
    "torchngvi.stepsizes.backtracking": "torchngvi.stepsizes.line_search",
    "torchngvi.stepsizes.clip": "torchngvi.stepsizes.bounds",
    "torchngvi.stepsizes.constant": "torchngvi.stepsizes.schedules",
    "torchngvi.stepsizes.convex": "torchngvi.stepsizes.schedules",
    "torchngvi.stepsizes.kl_radius": "torchngvi.stepsizes.bounds",
    "torchngvi.stepsizes.lengths": "torchngvi.stepsizes.line_search",
    "torchngvi.stepsizes.shortest": "torchngvi.stepsizes.bounds",
    "torchngvi.stepsizes.sufficient_decrease": "torchngvi.stepsizes.line_search",
    "torchngvi.stopping": "torchngvi.fitting",
    "torchngvi.structures.diagonal": "torchngvi.structures.blocks",
    "torchngvi.structures.full_algebra": "torchngvi.structures.blocks",
    "torchngvi.structures.groups": "torchngvi.structures.forest",
    "torchngvi.structures.index": "torchngvi.structures.pattern",
    "torchngvi.structures.levels": "torchngvi.structures.storage",
    "torchngvi.structures.no_matrix": "torchngvi.structures.pattern",
    "torchngvi.structures.sparse_rows": "torchngvi.structures.forest",
    "torchngvi.testing.accelerations": "torchngvi.testing.metrics",
    "torchngvi.testing.exponential_families": "torchngvi.testing.flat_posteriors",
    "torchngvi.testing.flat_estimators": "torchngvi.testing.estimators",
    "torchngvi.testing.flat_problems": "torchngvi.testing.flat_posteriors",
    "torchngvi.testing.likelihoods": "torchngvi.testing.regressions",
    "torchngvi.testing.matrices": "torchngvi.testing.claims",
    "torchngvi.testing.moves": "torchngvi.testing.posteriors",
    "torchngvi.testing.problems": "torchngvi.testing.claims",
    "torchngvi.testing.step_sizes": "torchngvi.testing.momenta",
    "torchngvi.theory.kim2024.bases": "torchngvi.theory.kim2024.scales",
    "torchngvi.words": "torchngvi.messages",
}

_INTEGRATED = "torchngvi.MixedModel(...).fit() integrates the random effects out, those of several factors too"
# the path of a module or of a name of `models` that is gone, and what to use in its place, as the end of a sentence
GONE: dict[str, str] = {
    "torchngvi.mixed_models": "models and results of tables are in torchngvi.tables; the front door has MixedModel",
    "torchngvi.models.GaussianMixed": _INTEGRATED,
    "torchngvi.models.GaussianMultilevel": _INTEGRATED,
    "torchngvi.models.MarginalMixed": _INTEGRATED,
    "torchngvi.models.MultilevelLogJoint": _INTEGRATED,
    "torchngvi.studies": "the studies of the papers are examples/papers of a clone, where python -m examples.papers "
    "lists and runs them; methods of fitting are compared by python -m examples.compare_methods",
    "torchngvi.distributed.ranks": "import ranks from torchngvi.distributed",
    "torchngvi.solved.sensitivity": "import sensitivity from torchngvi.solved",
    "torchngvi.adapters.words": "families by their words are read by torchngvi.tables.family_of",
    "torchngvi.networks.blocks": "torch's own loops over tensors take its place",
    "torchngvi.networks.kernels": "attach(fused=True) has no effect any more",
    "torchngvi.networks.radii": "attach(steps=...) chooses the length of the steps by itself",
}

# the names that left `torchngvi`, by the public module that has them
NAMES: dict[str, tuple[str, ...]] = {
    "torchngvi.averaging": ("ExpectationAverage",),
    "torchngvi.diagnostics": ("simulation_based_calibration",),
    "torchngvi.distributed": ("sum_gradients", "synchronize"),
    "torchngvi.expectations": ("Antithetic", "Autograd", "Independent", "Quasi"),
    "torchngvi.fitting": ("LaplaceResult", "RowSpace"),
    "torchngvi.methods": ("CovarianceGD", "ProximalBBVI", "RootGD", "SVGDDensity", "SymmetricSRVN"),
    "torchngvi.models": ("ShardedDraws",),
    "torchngvi.networks": ("IVON", "VOGN", "GradientNoise", "Reparametrized", "SampledLabels"),
    "torchngvi.numerics": ("show_config",),
    "torchngvi.optim": ("CapturedStep",),
    "torchngvi.rules": ("QuasiNewton", "SiteNewton"),
    "torchngvi.solved": ("merge", "sensitivity", "site_sum", "solve"),
    "torchngvi.stepsizes": ("SufficientDecrease",),
}

# functions of a public module that are methods now, by the class that has them
METHODS: dict[str, tuple[str, ...]] = {"torchngvi.networks.NetworkGaussian": ("log_prob", "outputs", "predictive")}


def find_gone(module: str, name: str) -> Any:
    """Say what takes the place of a name of a module that is gone; any other is none of the module.

    >>> find_gone("torchngvi.models", "MarginalMixed")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ImportError: torchngvi.models.MarginalMixed is gone: torchngvi.MixedModel...
    """
    if (there := f"{module}.{name}") in GONE:
        raise ImportError(f"{there} is gone: {GONE[there]}.")  # an AttributeError would lose its sentence in an import
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def find_method(module: str, name: str) -> Any:
    """Return the method that the function ``module.name`` has become, with a warning that says where it is now."""
    for home, methods in METHODS.items():
        if home.rpartition(".")[0] == module and name in methods:
            warnings.warn(
                f"{module}.{name}(q, ...) is now q.{name}(...). The old name is understood in this release only; write "
                f"q.{name}(...).",
                FutureWarning,
                stacklevel=3,
            )
            return getattr(getattr(import_module(module), home.rpartition(".")[2]), name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def find_moved_name(name: str) -> Any:
    """Return what ``torchngvi.name`` was, with a warning that says where it is now."""
    home = {moved: module for module, names in NAMES.items() for moved in names}[name]
    new = f"{home}.{name}"
    warnings.warn(
        f"torchngvi.{name} is now {new}. The old name is understood in this release only; write {new}.",
        FutureWarning,
        stacklevel=3,
    )
    return getattr(import_module(home), name)


class ChosenRadius(NamedTuple):
    """What `choose_radius` returns: the radius that ``attach(steps=...)`` has by itself."""

    radius: float
    factor: float
    tried: dict[float, float]
    steps: int


def choose_radius(train: Any, steps: int, *ignored: Any, **others: Any) -> ChosenRadius:
    """Return the default radius, with a warning; ``torchngvi.networks.choose_radius`` of 0.2 tried others."""
    warnings.warn(f"torchngvi.networks.choose_radius is gone: {GONE['torchngvi.networks.radii']}.", FutureWarning, 2)
    attached = import_module("torchngvi.networks.attached")
    return ChosenRadius(attached.radius_of(steps, None, attached.StepLength()), 1.0, {}, 0)


class MovedModules(MetaPathFinder, Loader):
    """The finder of the modules of `MODULES` and `GONE`, which is asked before all others."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec for a path of the tables, and None for any other."""
        if fullname in GONE:
            raise ModuleNotFoundError(f"{fullname} is gone: {GONE[fullname]}.")  # a name would let Python drop it
        return ModuleSpec(fullname, self) if fullname in MODULES else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the making of a placeholder to Python; `exec_module` replaces it."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module that holds the content in the place of the placeholder."""
        old, new = module.__name__, MODULES[module.__name__]
        warnings.warn(
            f"{old} is now {new}. The old path is understood in this release only; import {new}.",
            FutureWarning,
            stacklevel=2,
        )
        sys.modules[old] = import_module(new)


def install_finder() -> None:
    """Let imports of moved modules find their content."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())


def warn_renamed(where: str, old: str, new: str) -> None:
    """Warn that a name has changed, at the line that still uses the old one: the caller of the caller.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_renamed("fit", "acceleration=", "metric=")
    >>> str(caught[0].message)
    'fit: acceleration= is now called metric=. The old name is understood in this release only; write metric=.'
    """
    warnings.warn(
        f"{where}: {old} is now called {new}. The old name is understood in this release only; write {new}.",
        FutureWarning,
        stacklevel=3,
    )
