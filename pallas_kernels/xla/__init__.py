"""Every slot in plain jax.numpy: the path of a machine without a GPU.

One mathematics serves them all. The query heads of a KV head are rows of one problem (`layout`), each row sees one contiguous
span of a run of keys (`spans`), and the softmax goes over a run tile by tile (`attention`), so that memory is linear in the
sequence length. What differs between the slots is where spans and tiles come from.
"""
