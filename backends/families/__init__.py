"""Kinds of models: one file each knows a kind by name, and no other room does."""
