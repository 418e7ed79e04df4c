"""The SQL, as methods with domain names; knows nothing of HTTP."""
