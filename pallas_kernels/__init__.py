"""Attention kernels for NVIDIA GPUs in Pallas, and the same mathematics in plain JAX. They never choose: see jax_ops."""
