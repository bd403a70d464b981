"""Examples; those of the papers are run by ``python -m examples.papers``."""
