"""A Llama in float64 NumPy, written from its definition: no cache, no pages, one sequence at a time."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_ops.demo.model import Config, Layers, Params

TINY = Config(
    num_layers=3,
    vocab_size=50,
    hidden_size=24,
    mlp_size=40,
    q_heads=6,
    kv_heads=2,
    head_dim=8,
    context_length=64,
    rope_theta=100.0,
    norm_eps=1e-5,
)


def random_params(config: Config, seed: int = 0) -> Params:
    """Weights large enough that every part matters to the result."""
    rng = np.random.default_rng(seed)
    n, e, f, d = config.num_layers, config.hidden_size, config.mlp_size, config.head_dim

    def matrix(*shape: int, gain: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * gain / np.sqrt(shape[-2]), jnp.float32)

    def norm(*shape: int) -> jax.Array:
        return jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32)

    layers = Layers(
        attention_norm=norm(n, e),
        q=matrix(n, e, config.q_heads * d, gain=2),
        k=matrix(n, e, config.kv_heads * d, gain=2),
        v=matrix(n, e, config.kv_heads * d),
        o=matrix(n, config.q_heads * d, e),
        mlp_norm=norm(n, e),
        gate=matrix(n, e, f),
        up=matrix(n, e, f),
        down=matrix(n, f, e),
    )
    return Params(embedding=matrix(config.vocab_size, e, gain=7), layers=layers, norm=norm(e))


def logits(params: Params, config: Config, tokens: list[int]) -> np.ndarray:
    """The logits (len(tokens), vocab_size) after every token."""
    embedding, norm = (np.asarray(a, np.float64) for a in (params.embedding, params.norm))
    layers = Layers(*(np.asarray(a, np.float64) for a in params.layers))
    x = embedding[tokens]
    for i in range(config.num_layers):
        w = Layers(*(a[i] for a in layers))
        h = _rms_norm(x, w.attention_norm, config.norm_eps)
        x = x + _attention(h @ w.q, h @ w.k, h @ w.v, config) @ w.o
        h = _rms_norm(x, w.mlp_norm, config.norm_eps)
        gate = h @ w.gate
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w.up)) @ w.down
    return _rms_norm(x, norm, config.norm_eps) @ embedding.T


def greedy(params: Params, config: Config, prompt: list[int], count: int) -> list[int]:
    """The `count` ids that follow a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(params, config, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, config: Config) -> np.ndarray:
    d, group = config.head_dim, config.q_heads // config.kv_heads
    heads = []
    for h in range(config.q_heads):
        shared = slice(h // group * d, (h // group + 1) * d)
        scores = _rotate(q[:, h * d : (h + 1) * d], config) @ _rotate(k[:, shared], config).T / np.sqrt(d)
        scores = np.where(np.tri(len(scores), dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        heads.append(p / p.sum(axis=1, keepdims=True) @ v[:, shared])
    return np.concatenate(heads, axis=1)


def _rotate(x: np.ndarray, config: Config) -> np.ndarray:
    """Each pair (i, i + d / 2) as a complex number, turned by position * theta ** (-2i / d)."""
    half = x.shape[1] // 2
    angles = np.outer(np.arange(len(x)), config.rope_theta ** (-np.arange(half) / half))
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=1)


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight
