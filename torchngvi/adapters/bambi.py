"""Models of bambi, fitted here: their formula, data, family and priors become a `torchngvi.tables.TableModel`."""

import re
import warnings
from typing import Any

import numpy as np

from torchngvi.errors import InputError
from torchngvi.messages import listed
from torchngvi.tables import Exponential, Gamma, HalfNormal, HalfT, Normal, Prior, StudentT, TableModel, regression
from torchngvi.tables.design import FormulaColumns

__all__ = ["from_bambi"]

# the family here of each of bambi's, and the names here of its other parameters
_FAMILIES: dict[str, tuple[str, dict[str, str]]] = {
    "gaussian": ("gaussian", {"sigma": "residual sd"}),
    "t": ("student_t", {"sigma": "scale"}),
    "bernoulli": ("bernoulli", {}),
    "binomial": ("binomial", {}),
    "beta_binomial": ("beta_binomial", {"kappa": "precision"}),
    "poisson": ("poisson", {}),
    "negativebinomial": ("negative_binomial", {"alpha": "size"}),
    "zero_inflated_poisson": ("zero_inflated_poisson", {}),
    "zero_inflated_negativebinomial": ("zero_inflated_negative_binomial", {"alpha": "size"}),
    "hurdle_poisson": ("hurdle_poisson", {}),
    "hurdle_negativebinomial": ("hurdle_negative_binomial", {"alpha": "size"}),
    "cumulative": ("ordinal", {}),
    "categorical": ("multinomial", {}),
    "beta": ("beta", {"kappa": "precision"}),
    "gamma": ("gamma", {"alpha": "shape"}),
    "weibull": ("weibull", {"alpha": "shape"}),
}
_GROUPS = re.compile(r"(?<!\|)\|(?!\|)")  # a single bar


def from_bambi(model: Any) -> TableModel:
    """Make the model of a ``bambi.Model``, to fit it in seconds, with a k-hat that says how far to believe the fit.

    Effects of one group are independent in bambi, so that a term (1 + x | g) becomes (1 + x || g). Priors that the user
    of bambi has set are kept, and those that bambi scales by itself become the defaults here, which are much like them
    (`torchngvi.tables.regression`). The intercept is at the means of the columns in both.

    Args:
        model: a ``bambi.Model``; what it has drawn is not needed.

    Returns:
        The model; its ``fit()`` is the answer.

    Raises:
        InputError: another object; a family, a link or a prior that is not here, or is of another quantity; formulas
            for other parameters, and parameters that are held at a number.

    The code ``from_bambi(bambi.Model("y ~ x + (1 | g)", table)).fit()`` prints a table.
    """
    if type(model).__module__.partition(".")[0] != "bambi" or not hasattr(model, "components"):
        raise InputError(f"from_bambi takes a bambi.Model; got {type(model).__name__}.")
    if model.formula.additionals:
        raise InputError(
            f"the model has formulas for other parameters, {listed(model.formula.additionals)}. A model here has one "
            "linear predictor: leave them out."
        )
    family, parameters = _family(model)
    formula = _GROUPS.sub("||", model.formula.main)
    made = regression(formula, _rows(model, formula), family, positive=_success(model, formula))
    _check_constants(model)
    priors = _priors(model, made, parameters)
    if "Intercept" in priors:
        _check_intercept(model, made)
    if family == "student_t" and not isinstance(getattr(model.components.get("nu"), "prior", None), int | float):
        warnings.warn(
            "The degrees of freedom nu of the family t are learned by bambi and are 4 here. Fix them there, priors="
            "{'nu': 4}, to compare the two.",
            stacklevel=2,
        )
    return TableModel(made.design, made.family, priors=priors, formula=made.formula) if priors else made


def _family(model: Any) -> tuple[str, dict[str, str]]:
    """The family here, and the names of its parameters."""
    name = model.family.name
    link = next(iter(model.family.link.values())).name
    family, parameters = _FAMILIES.get(name, ("", {}))
    if name == "bernoulli" and link == "probit":
        family = "probit"
    elif name == "cumulative" and link == "probit":
        family = "ordinal_probit"
    known = {"probit": "probit", "ordinal_probit": "probit", "gaussian": "identity", "student_t": "identity"}
    known["multinomial"] = "softmax"
    logit = ("bernoulli", "binomial", "beta_binomial", "beta", "ordinal")
    if not family or link != known.get(family, "logit" if family in logit else "log"):
        raise InputError(f"no family here is {name!r} with the link {link!r}; there are {listed(list(_FAMILIES))}.")
    return family, parameters


def _rows(model: Any, formula: str) -> Any:
    """The table, without the rows that bambi leaves out where it was told to: those that miss a value."""
    if not getattr(model, "dropna", False):
        return model.data
    names = {name for some in FormulaColumns.of(formula) for name in some}
    return model.data.dropna(subset=[name for name in model.data.columns if name in names])


def _success(model: Any, formula: str) -> Any:
    """The class that bambi counts as 1, where classes have names and the formula does not say which; else None."""
    term = getattr(getattr(model, "response_component", None), "term", None)
    found = getattr(term, "success", None)
    known = "[" in formula.partition("~")[0] or model.family.name != "bernoulli"
    number = isinstance(found, int | float | np.number) and not isinstance(found, bool)
    return None if known or number else found


def _check_constants(model: Any) -> None:
    """Check that no parameter is held at a number, but for the degrees of freedom that they have here too."""
    for name, component in list(model.components.items())[1:]:
        value = getattr(component, "prior", None)
        if isinstance(value, int | float) and not (name == "nu" and value == 4):
            remedy = "Fix it at 4, as here" if name == "nu" else "Leave its number out of priors"
            raise InputError(f"the parameter {name!r} is held at {value:g} in bambi, and is not here. {remedy}.")


def _check_intercept(model: Any, made: TableModel) -> None:
    """Check that a prior of the intercept is of the same quantity in bambi."""
    if not getattr(model, "center_predictors", True) and len(made.design.names) > 1:
        raise InputError(
            "the model has center_predictors=False and a prior of its Intercept, which is that where all columns are 0 "
            "in bambi, and at their means here. Leave that prior out, or center the predictors in bambi."
        )
    if made.family.name == "weibull":
        raise InputError(
            "the weibull model has a prior of its Intercept, which is that of the log of the mean in bambi, and of the "
            "log of the scale here. Leave that prior out."
        )


def _priors(model: Any, made: TableModel, parameters: dict[str, str]) -> dict[str, Prior]:
    """The priors that the user of bambi has set, by their names here."""
    found: dict[str, Prior] = {}
    first, *others = model.components.items()
    for name, term in first[1].terms.items():
        prior = getattr(term, "prior", None)
        if prior is None or getattr(prior, "auto_scale", True):
            continue
        if made.family.nominal and any(np.size(value) > 1 for value in prior.args.values()):
            raise InputError(
                f"the prior of {name} has several numbers, and here it is one for all categories. Give it one number, "
                "or name the coefficients in regression(.., priors={'category: column': ..})."
            )
        if "|" not in name:
            labels = [own for own in made.design.names if own == name or own.startswith(f"{name}[")]
            found |= {own: _prior(name, prior, place) for place, own in enumerate(labels)}
            continue
        effect, factor = name.split("|")
        for of in made.design.factors:
            if of.name == factor or of.name.startswith(f"{factor}."):
                own = "Intercept" if effect == "1" else effect
                labels = [one for one in of.effects if one == own or one.startswith(f"{own}[")]
                spread = _prior(name, prior.args["sigma"], 0)
                found |= {f"{'1' if one == 'Intercept' else one}|{of.name}": spread for one in labels}
    for name, component in others:
        own_prior: Any = getattr(component, "prior", None)
        if hasattr(own_prior, "args") and not own_prior.auto_scale:
            if name not in parameters:
                raise InputError(f"the parameter {name!r} has no prior of its own here: leave its prior out.")
            found[parameters[name]] = _prior(name, own_prior, 0)
    return found


def _prior(name: str, prior: Any, place: int) -> Prior:
    """A prior here; of several coefficients that of one."""
    flat = {key: np.ravel(value) for key, value in prior.args.items()}
    of: dict[str, Any] = {key: float(value[place % len(value)]) for key, value in flat.items()}
    match prior.name:
        case "Normal":
            return Normal(of.get("mu", 0.0), of["sigma"])
        case "StudentT":
            return StudentT(of["nu"], of.get("mu", 0.0), of["sigma"])
        case "HalfNormal":
            return HalfNormal(of["sigma"])
        case "HalfStudentT":
            return HalfT(of["nu"], of["sigma"])
        case "HalfCauchy":
            return HalfT(1.0, of["beta"])
        case "Exponential":
            return Exponential(of["lam"])
        case "Gamma" if "alpha" in of and "beta" in of:
            return Gamma(of["alpha"], of["beta"])
    raise InputError(f"the prior {prior} of {name} is none of those here (torchngvi.tables.priors).")
