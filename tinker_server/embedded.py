"""The base model that comes with the server: small, made by this project, and it sees. See examples/tiny_vl."""

from pathlib import Path

TINY_VL = "tinker-server/tiny-vl"
DIRECTORIES = {TINY_VL: Path(__file__).with_name("tiny_vl")}
"""Of each embedded model, by its public name."""
