"""A small Llama generating text through the paged ops: the demo, and an example of a caller.

`model` is the part to copy: parameters, layers, prefill and decode over a paged cache. `generate` batches prompts and steps
the model, `gguf_model` and `tokenizer` read a GGUF file, `cli` is `python -m jax_ops demo`.
"""
