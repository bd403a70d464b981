"""Several methods side by side on one data set: ``python -m examples.compare_methods configs/compare.toml``.

Settings, runs, logs and figures; the experiments of the papers (``python -m examples.papers``) are made of them too.
"""
