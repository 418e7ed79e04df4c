"""The trainer: `client` is the server's side, `process` a child's, `rank` computes.

- `client`, `replicas`: the ranks of a base model, together and on other machines; restarted when any dies.
- `commands`, `process`: the commands to ranks, and the process that carries them out.
- `rank`: the models on a base, on a rank.
- `distributed`, `shards`: the group of ranks, sums of gradients, and tensors cut into equal parts.
- `base_model`: the base of a rank, loaded, tested and compiled (`model`).
- `model`: the decoder and the vision tower over packed microbatches.
- `step`: a forward_backward, from its body to the results.
- `lora`: a client's model as the trainer sees it: adapters on the frozen base.
- `optimizer`: AdamW.
- `checkpoint_files`: the files of saved weights.
"""
