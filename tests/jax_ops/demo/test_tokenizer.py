"""The tokenizer built from the GGUF file."""

import pytest
import tokenizers

from jax_ops.demo import tokenizer as tokenizer_module
from jax_ops.demo.errors import DemoError
from jax_ops.demo.tokenizer import Tokenizer

TEXTS = (
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\n\nnewlines\r\n",
    "café, naïve, Ελληνικά, 日本語, हिन्दी",
    "emoji 🙂👩‍👩‍👧‍👦 and \N{COMBINING ACUTE ACCENT}",
    "def f(x):\n    return x**2  # 3.14159",
    "\x00\x7f\x80\xa0\xad\xff",
    "",
)


def test_prompts_get_the_ids_of_the_reference(tokenizer, reference):
    for case in reference:
        assert tokenizer.encode_chat(case["prompt"]) == case["prompt_ids"]


def test_answers_get_the_text_of_the_reference(tokenizer, reference):
    for case in reference:
        assert tokenizer.decode(case["generated_ids"]) == case["generated_text"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text(tokenizer, text):
    stream = tokenizer.stream()
    assert "".join([stream.feed(token) for token in tokenizer.encode(text)] + [stream.finish()]) == text


def test_streams_give_whole_characters_only(tokenizer):
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    stream = tokenizer.stream()
    assert [stream.feed(token) for token in ids] == [""] * (len(ids) - 1) + ["🙂"]


def test_a_character_cut_short_is_replaced_at_the_end(tokenizer):
    stream = tokenizer.stream()
    assert stream.feed(tokenizer.encode("🙂")[0]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_digits_stand_alone_and_take_no_space_with_them(tokenizer):
    pieces = [tokenizer.token_bytes[token] for token in tokenizer.encode("in  1024 days")]
    assert pieces == [b"in", b"  ", b"1", b"0", b"2", b"4", b" days"]


def test_control_tokens_are_ids_and_no_text(tokenizer):
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_id]
    assert tokenizer.decode([1, *tokenizer.encode("hi"), tokenizer.eos_id]) == "hi"


def test_every_byte_has_its_character():
    """The alphabet is computed; tokenizers has its own."""
    alphabet = tokenizer_module._byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert set(alphabet) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    for text in TEXTS:
        ((spelled, _),) = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text) or [("", None)]
        assert bytes(alphabet[c] for c in spelled) == text.encode()


@pytest.mark.parametrize("key, accepted", [("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")])
def test_another_kind_of_tokenizer_is_refused(monkeypatch, key, accepted):
    values = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"} | {key: "other"}
    monkeypatch.setattr(tokenizer_module, "metadata", lambda reader, name: values[name])
    with pytest.raises(DemoError, match=rf"{key} is 'other'; need '{accepted}'"):
        Tokenizer.from_gguf(None)
