"""Saved weights: written, found, copied, exported, packed."""
