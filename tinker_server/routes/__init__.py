"""The HTTP routes: parse, ask, return."""
