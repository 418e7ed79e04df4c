"""The HTTP server that tinker SDK clients talk to."""

from importlib.metadata import version

VERSION = version("tinker-server")
