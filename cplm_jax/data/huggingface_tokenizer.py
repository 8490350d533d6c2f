"""Tokenizers of the Hugging Face ``tokenizers`` library, read from a ``tokenizer.json``."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from cplm_jax.errors import UserError, first_line

# Names of BOS and EOS in the model families that publish a tokenizer.json; a family with one name for
# both separates documents by it.
_PAIRS = (
    ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<|startoftext|>", "<|endoftext|>"),
    ("<s>", "</s>"),
    ("<bos>", "<eos>"),
    ("[BOS]", "[EOS]"),
    ("<|endoftext|>", "<|endoftext|>"),
    ("<|end_of_text|>", "<|end_of_text|>"),
)
_PADS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
_SPACE = "\u2581"


class HuggingFaceBackend:
    """What :class:`~cplm_jax.data.tokenizer.Tokenizer` needs of a ``tokenizer.json``.

    Attributes:
      size: number of ids, up to the largest.
      bos_id, eos_id, pad_id: the control tokens; no padding token is -1.
      control_ids: ids of all special tokens, and ids that no token has.
      piece_bytes: the bytes that each id stands for.
      cuts_at_spaces, cuts_anywhere: whether a text may be given in parts that begin at a space, or
        elsewhere.

    Raises:
      UserError: if the file is not a tokenizer, or has no BOS and EOS tokens of a known name.
    """

    def __init__(self, data: bytes, where: str):
        import tokenizers

        try:
            text = data.decode("utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            description = json.loads(text)
        except Exception as e:  # the library raises Exception itself
            raise UserError(f"{where}: not a tokenizer.json, or a damaged one ({first_line(e)})") from e
        # A document that contains the text of a special token must not become that token.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values()) + 1
        added = description.get("added_tokens") or []
        special = {token["content"]: token["id"] for token in added if token.get("special")}
        pair = next((pair for pair in _PAIRS if all(name in special for name in pair)), None)
        if pair is None:
            raise UserError(
                f"{where}: none of its special tokens ({', '.join(special) or 'there are none'}) are known "
                f"as BOS and EOS, which separate documents; name two of them as one of "
                f"{', '.join(f'{a} and {b}' for a, b in _PAIRS)}"
            )
        self.bos_id, self.eos_id = special[pair[0]], special[pair[1]]
        self.pad_id = next((special[name] for name in _PADS if name in special), -1)
        known = set(vocabulary.values())
        self.control_ids = tuple(
            sorted({*special.values(), *(i for i in range(self.size) if i not in known)})
        )
        literal = {token["id"] for token in added}
        by_level = _has_byte_level(description.get("decoder")) or _has_byte_level(
            description.get("pre_tokenizer")
        )
        self.piece_bytes = [b""] * self.size
        for piece, i in vocabulary.items():
            if i not in self.control_ids:
                self.piece_bytes[i] = _bytes_of(piece, by_level and i not in literal)
        whole, first, second = (self._encode(text) for text in ("a b", "a", "b"))
        self.cuts_anywhere = whole == first + self._encode(" b")
        self._adds_space = not self.cuts_anywhere and whole == first + second
        self.cuts_at_spaces = self.cuts_anywhere or self._adds_space

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode(self, text: str, begins: bool = True) -> list[int]:
        """Returns the token ids of ``text``, or of a later part of a text."""
        return self._encode(text[1:] if self._adds_space and not begins else text)


def _has_byte_level(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    if part.get("type") == "ByteLevel":
        return True
    return any(map(_has_byte_level, part.get("decoders") or part.get("pretokenizers") or ()))


def _bytes_of(piece: str, by_level: bool) -> bytes:
    if by_level:
        table = _byte_characters()
        if all(character in table for character in piece):
            return bytes(table[character] for character in piece)
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(_SPACE, " ").encode("utf-8", "surrogatepass")


@cache
def _byte_characters() -> dict[str, int]:
    """Returns the byte that each character of a byte-level piece stands for, as GPT-2 writes bytes."""

    def visible() -> Iterator[int]:
        yield from range(ord("!"), ord("~") + 1)
        yield from range(ord("¡"), ord("¬") + 1)
        yield from range(ord("®"), ord("ÿ") + 1)

    table = {chr(byte): byte for byte in visible()}
    hidden = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(256 + i): byte for i, byte in enumerate(hidden)}
