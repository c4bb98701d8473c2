"""The byte-level BPE tokenizer and the chat template of a GGUF file."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers
from gguf import GGUFReader, TokenType
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, models, pre_tokenizers

from jax_ops.demo.errors import DemoError
from jax_ops.demo.gguf_model import metadata


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back.

    Attributes:
      bpe: the tokenizer proper.
      token_bytes: what each id stands for in UTF-8; nothing for a control token.
      eos_id: the id that ends a turn.
      chat_template: the file's Jinja template over `messages` and `add_generation_prompt`.
    """

    bpe: tokenizers.Tokenizer
    token_bytes: Sequence[bytes]
    eos_id: int
    chat_template: str

    @classmethod
    def from_gguf(cls, reader: GGUFReader) -> "Tokenizer":
        """Builds the tokenizer that the file describes; one of another kind is a DemoError."""
        for key, accepted in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
            if (value := metadata(reader, key)) != accepted:
                raise DemoError(f"demo: the GGUF file's {key} is {value!r}; need {accepted!r}.")
        tokens, kinds = metadata(reader, "tokenizer.ggml.tokens"), metadata(reader, "tokenizer.ggml.token_type")
        control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
        merges = [tuple(merge.split(" ")) for merge in metadata(reader, "tokenizer.ggml.merges")]

        bpe = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])

        alphabet = _byte_alphabet()
        silent = set(control)
        return cls(
            bpe=bpe,
            token_bytes=[b"" if token in silent else bytes(alphabet[c] for c in token) for token in tokens],
            eos_id=metadata(reader, "tokenizer.ggml.eos_token_id"),
            chat_template=metadata(reader, "tokenizer.chat_template"),
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a text; control tokens spelled out in it become themselves."""
        return self.bpe.encode(text, add_special_tokens=False).ids

    def encode_chat(self, prompt: str) -> list[int]:
        """The ids of a conversation in which the user has said `prompt` and the model is to answer."""
        template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(self.chat_template)
        return self.encode(template.render(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without control tokens; U+FFFD for what is no UTF-8."""
        return b"".join(self.token_bytes[i] for i in ids).decode("utf-8", errors="replace")

    def stream(self) -> "TextStream":
        """A decoder to be fed one id at a time."""
        return TextStream(self.token_bytes)


class TextStream:
    """Turns ids into text as they come, holding back the bytes of a character that is not complete yet."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The text that this id completes, maybe empty."""
        return self._decoder.decode(self._token_bytes[token])

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never was completed, or nothing."""
        return self._decoder.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, are spelled U+0100, U+0101, ...
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
