"""The sampler: `client` is the server's side, `process` a child's with its vLLM engine."""
