"""A file per schema change, applied in order of their numbers."""
