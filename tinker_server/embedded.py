"""The base model that comes with the server: a small vision-language model made by examples/tiny_vl."""

from pathlib import Path

TINY_VL = "tinker-server/tiny-vl"
DIRECTORIES = {TINY_VL: Path(__file__).with_name("tiny_vl")}
"""Directory of each embedded model, by its public name."""
