"""The HTTP server that tinker SDK clients talk to."""
