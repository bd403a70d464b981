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

# the modules that hold the content of others now, with the old names of these: in the same folder, or by their path
_MERGED: dict[str, str] = {
    "adapters.files": "adapters.files.npy adapters.files.parquet adapters.files.reader adapters.files.texts",
    "adapters.gpytorch.distribution": "checkpoints covariances",
    "adapters.gpytorch.energies": "latents",
    "adapters.gpytorch.engines": "epochs natural_steps rounds settings",
    "adapters.gpytorch.model": "batches kernels lent memory",
    "adapters.gpytorch.sparse_gp": "profile",
    "adapters.gpytorch.starts": "inducing scales second_start",
    "adapters.gpytorch.training": "refinement results",
    "adapters.pyro.density": "batching enumeration",
    "adapters.pyro.fitting": "centring held location_scale passes",
    "adapters.pyro.guide": "distribution losses owned store",
    "adapters.pyro.layout": "missing names sites starting",
    "adapters.pyro.local_guide": "local_bound local_density local_elbo local_layout local_passes local_sites "
    "local_steps",
    "adapters.pyro.product": "site_densities",
    "adapters.pyro.structure": "factored finding reads",
    "adapters.pyro.svi": "lists steps",
    "adapters.sklearn.estimators": "arguments base classification mixed regression",
    "app.fits": "report",
    "app.prepare": "readers",
    "app.saved": "outputs",
    "app.settings": "flags",
    "diagnostics.calibration": "power simulations uniformity",
    "diagnostics.importance": "monte_carlo psis",
    "diagnostics.linear_response": "marginal confirmation flatness",
    "diagnostics.predictive": "left_out",
    "diagnostics.verdict": "allowance examination figures other_modes rule",
    "distributed": "distributed.headers distributed.meetings distributed.prints distributed.processes "
    "distributed.synchronizing",
    "expectations.draws": "drawing numerics.seeds",
    "expectations.flat": "statistic_regression",
    "expectations.quadrature": "per_factor piecewise",
    "expectations.sampled": "black_box autograd bonnet_price closed_entropy_stein gauss_newton hessian hessian_vector "
    "least_squares_stein monte_carlo path_derivative reparametrized sample_average score_function stein",
    "fitting": "stopping",
    "fitting.checkpoints": "fingerprints generators",
    "fitting.coordinate_sweeps": "anderson",
    "fitting.fit": "request",
    "fitting.laplace": "irls mixture_start newton_search",
    "fitting.loop": "callbacks engine progress",
    "fitting.mixtures": "mixture_words",
    "fitting.pool": "descent pool_loop sight",
    "fitting.smoothed": "usual_steps",
    "fitting.sample_average": "fresh",
    "fitting.starts": "origin settings streaming",
    "fitting.steps": "chunks groups",
    "fitting.stopping": "slope",
    "fitting.warped": "bending directions",
    "interfaces": "interfaces.parts",
    "interfaces.packets": "cliques frame priors",
    "interfaces.posterior": "moves",
    "interfaces.targets": "numerics.bends",
    "latents.laplace": "sparsity",
    "latents.modes": "chain curvature",
    "latents.summary": "quadrature error",
    "messages": "extras words",
    "methods": "methods.bbvi methods.gaussian methods.ifvb methods.newton methods.ngvi",
    "metrics.preconditioner": "adam blocks damped exact identity nagvac",
    "metrics.quasi_newton": "site_newton",
    "metrics.recursive": "batch_fisher matrix_free recursion window",
    "mode": "afar",
    "models.checks": "graphs",
    "models.factor_graph": "known_factors messages",
    "models.factors": "grouped guarded guarded_factors",
    "models.log_joint": "arguments mixture_integrand per_datum warped",
    "models.mixed": "by_moments mixed_rows mixed_spread mixed_start mixed_summary mixed_units",
    "models.mixed_prior": "effects_prior scale_priors",
    "models.regularized": "group_lasso_network",
    "models.sharded": "shards together",
    "models.softmax": "softmax_rows",
    "models.streamed": "data_log_joint summands",
    "momentum": "momentum.adam momentum.exponential_average momentum.normalized",
    "networks.attached": "watch losses optimizers",
    "networks.curvatures": "networks.curvatures.base networks.curvatures.example_gradients "
    "networks.curvatures.gradient_noise networks.curvatures.reparametrized networks.curvatures.sampled_labels",
    "networks.families": "finite networks.families.base networks.families.dense networks.families.diagonal "
    "networks.families.kronecker noise",
    "networks.laplace": "gradients predictions",
    "networks.likelihoods": "labels",
    "networks.posterior": "calibration",
    "networks.weights": "hooks",
    "numerics.arrays": "host inference_mode versions",
    "numerics.gaussian_integrals": "logistic self_concordance",
    "numerics.kernels": "compiling",
    "numerics.linalg": "least_squares small_blocks",
    "numerics.special": "gamma_functions gauss_hermite normal_tail",
    "optim.evaluating": "watching base cache notices pairs records state",
    "optim.optimizer": "averaged gradients trial",
    "posteriors.conversions": "memory roots starts",
    "posteriors.flat.exponential_family": "beta categorical concentrations dirichlet discrete gamma inverse_gamma "
    "normal_inverse_gamma poisson shape_rate wishart",
    "posteriors.flat.flat_gaussian": "cholesky covariance_gaussian low_rank mean_field rank_one",
    "posteriors.flat.flat_posterior": "drawing",
    "posteriors.flat.flows": "module_flow orthogonal_flow",
    "posteriors.gaussian": "covariance_root",
    "posteriors.mixture": "weighted",
    "posteriors.precision": "cliques natural precision_root",
    "posteriors.product": "natural_forms",
    "posteriors.warps": "posteriors.warps.sinh_arcsinh posteriors.warps.warp posteriors.warps.yeo_johnson warped",
    "refinement.fan": "curves density importance joint layers newton tracing",
    "refinement.refinement": "mixture second",
    "rules.natural_gradient": "geodesic local_exponential log_natural_gradient retraction",
    "rules.newton": "root_newton symmetric_root variational_newton",
    "rules.root_gradient": "log_root_gradient projected_root_gradient projected_square_root proximal_root_gradient",
    "rules.wasserstein": "bures_wasserstein centered_svgd covariance_gradient svgd",
    "solved.leave_one_out": "cavities comparison joint stacking",
    "solved.response": "differentiable system update",
    "stepsizes": "stepsizes.backtracking stepsizes.bounds stepsizes.clip stepsizes.constant stepsizes.convex "
    "stepsizes.kl_radius stepsizes.line_search stepsizes.lengths stepsizes.schedules stepsizes.shortest "
    "stepsizes.sufficient_decrease",
    "structures.blocks": "diagonal full_algebra",
    "structures.forest": "groups levels sparse_rows storage",
    "structures.pattern": "index no_matrix",
    "tables": "adapters.formula",
    "tables.cells": "adapters.table_checks",
    "testing.claims": "matrices problems structures",
    "testing.estimators": "flat_estimators likelihoods regressions",
    "testing.parts": "accelerations metrics momenta rules step_sizes",
    "testing.posteriors": "exponential_families flat_posteriors flat_problems moves",
    "networks.layout": "units",
    "tables.effects": "left_out prediction",
    "tables.table": "remarks",
    "tables.columns": "diagnostics.columns diagnostics.dependence diagnostics.separation",
    "tables.design": "formulas",
    "tables.globals": "several",
    "tables.model": "saved",
    "tables.result": "exports",
    "theory.kim2024": "theory.kim2024.bases theory.kim2024.moments theory.kim2024.rates theory.kim2024.scales",
}
# the old path of a module, and the new one
MODULES = {
    f"torchngvi.{old if '.' in old else '.'.join([*new.split('.')[:-1], old])}": f"torchngvi.{new}"
    for new, names in _MERGED.items()
    for old in names.split()
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
    "torchngvi.stepsizes.theory": "its bounds are examples/papers/kumar2025_steps.py of a clone",
    "torchngvi.testing.waits": "waits for a device are counted by benchmarks/waits.py of a clone",
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
    """Say what takes the place of a name of a module that is gone; any other is none of the module."""
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
    """Warn that a name has changed, at the line that still uses the old one: the caller of the caller."""
    warnings.warn(
        f"{where}: {old} is now called {new}. The old name is understood in this release only; write {new}.",
        FutureWarning,
        stacklevel=3,
    )
