"""Saving, finding, copying, exporting and packing weights."""
