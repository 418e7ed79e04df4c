"""Chat endpoints of OpenAI and Anthropic, the server's part. vLLM's handlers, in the sampler, make the answers."""
