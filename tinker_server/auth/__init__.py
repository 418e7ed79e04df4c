"""API keys and signed links."""
