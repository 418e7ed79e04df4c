"""The sampler, in the server's process.

- `pool`: all engines of a base model.
- `client`: one engine, its child process and its crashes.
- `prefix_routes`: the choice of the engine that has a prompt in its prefix cache.
- `checks`: the bounds on a sample request, before anything is computed.
- `commands`: the commands to the engine's process.
- `received`: weights from another machine, for server and engine.
- `engine`: what runs beside vLLM in a child's process; only it imports vllm.
"""
