"""The trainer: `client` is the server's side, `process` a child's, `rank` computes.

- `client`, `replicas`: the ranks of a base model, together and on other machines; restarted when one dies.
- `commands`, `process`: the commands to ranks, and the process that carries them out.
- `rank`: the models on one base, on one rank.
- `distributed`, `shards`: the group of ranks, sums of gradients, and tensors cut into equal parts.
- `base_model`: the base of one rank, loaded, tested and compiled (`model`).
- `model`: the decoder and the vision tower over packed microbatches.
- `step`: a forward_backward, from its body to the results.
- `lora`: a client's model as the trainer sees it: adapters on the frozen base.
- `optimizer`: AdamW.
- `checkpoint_files`: the files of saved weights.
"""
