"""The wire types of the Tinker protocol, independent of torch and of the server."""
