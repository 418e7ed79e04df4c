"""The dashboard: pages about runs, queues, samples, checkpoints and the machine.

No other part of the server depends on it. Its pages read the stores, and change only what the API's routes change too.
"""
