"""The sampler: `client` is the server's side, `process` a child's with its vLLM engine."""

import logging

# vLLM applies the level in its environment only after it has warned of what it finds while it is imported.
logging.getLogger("vllm").setLevel(logging.ERROR)
