"""What runs beside vLLM: the engine's process, the holder of a base's weights, and the changes inside vLLM.

- `process`: the commands that the process carries out, and its sequences.
- `engine`: the arguments of the vLLM engine, its version and memory.
- `requests`, `sequences`, `answers`: a task becomes vLLM's input, a sequence in the engine, and an answer.
- `fair_admission`: which sequence the engine admits next.
- `versions`, `adapters`: saved weights in the engine, linked and loaded before their first use.
- `slot_check`: the comparison of a LoRA slot with the adapter's files.
- `grammars`, `grammar_process`: grammars that answers follow, and the process that tries them.
- `weight_holder`: the process that holds one copy of a base for engine and trainer.
- `chat`: vLLM's chat handlers on these sequences.
- `vllm_patches`: the changes inside vLLM.
"""

import logging

# vLLM applies the level in its environment only after it has warned of what it finds while it is imported.
logging.getLogger("vllm").setLevel(logging.ERROR)
