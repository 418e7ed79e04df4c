"""Kinds of models: each is known by name in one file here, and nowhere else."""
