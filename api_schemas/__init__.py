"""The wire types of the Tinker protocol. Knows neither torch nor the server."""
