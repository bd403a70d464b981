"""Bridges to other packages: the only modules that import third parties beside torch and tqdm."""
