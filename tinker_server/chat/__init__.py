"""What is ours of the chat endpoints of OpenAI and Anthropic. vLLM's handlers, in the sampler, make the answers."""
