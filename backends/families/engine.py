"""The changes inside vLLM that kinds of models need, for the engine's process alone: it imports vLLM."""

from tinker_server.backends.families.deepseek_v3.engine import set_latent_norms
from tinker_server.backends.families.gemma.engine import add_head
from tinker_server.backends.families.gpt_oss.engine import lay_out_experts

OF_PROCESS = (add_head, lay_out_experts)
"""To be applied once, before a model is made."""
OF_MODEL = (set_latent_norms,)
"""To be applied to a model that was loaded."""
