"""Shorter words for the families of distributions, and those of other libraries; PyTorch is not needed for them."""

SHORT = {
    "bernoulli": "bernoulli_logit",
    "logistic": "bernoulli_logit",
    "logit": "bernoulli_logit",
    "probit": "bernoulli_probit",
    "poisson": "poisson_log",
    "normal": "gaussian",
    "negbin": "negative_binomial",
    "nb": "negative_binomial",
    "student": "student_t",
    "t": "student_t",
}
BINOMIAL = "For two classes say bernoulli; for counts of events poisson, or negative_binomial."


def full_name(word: str) -> str:
    """The name of the family that a short word stands for; another word as it is.

    >>> full_name("Logistic"), full_name("gaussian"), full_name("poison")
    ('bernoulli_logit', 'gaussian', 'poison')
    """
    return SHORT.get(word.lower(), word)
