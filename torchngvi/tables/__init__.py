"""Regressions and mixed models of tables, from a formula to marginal effects."""
