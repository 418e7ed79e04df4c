"""Kinds of models: each is known by name in its folder or file here, and hardly anywhere else.

A folder has the family in its `__init__`, and in `engine` its changes inside vLLM.
"""
