"""The command line: python -m jax_ops {demo, explain, bench, doctor}."""
