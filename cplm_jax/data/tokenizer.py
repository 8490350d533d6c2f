"""Sentencepiece tokenizers that reproduce every text byte for byte."""

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from cplm_jax.errors import UserError

# Sentencepiece writes a space as this character, so the character itself must be spelt in bytes.
_SPACE = "\u2581"
_SPACE_BYTES = _SPACE.encode("utf-8")
_CHUNK_CHARACTERS = 100_000


class Tokenizer:
    """A sentencepiece model with byte fallback.

    ``decode(encode(text)) == text`` holds for every text when the model was trained by
    :func:`train_tokenizer`.

    Attributes:
      proto: the serialised model.
      sha256: hash of the serialised model.
      size: number of pieces.
      bos_id, eos_id, pad_id: the control tokens.
      control_ids: ids that never stand for text and are never copied.
    """

    def __init__(self, proto: bytes, where: str = "tokenizer"):
        try:
            # Sentencepiece takes no bytes for no argument, and then answers everything with 0.
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=proto or b"-")
            self.size = self._processor.get_piece_size()
        except RuntimeError as e:
            raise UserError(
                f"{where}: not a sentencepiece model, or a damaged one; give a sentencepiece .model file"
            ) from e
        p = self._processor
        self.proto = proto
        self.sha256 = hashlib.sha256(proto).hexdigest()
        self.bos_id, self.eos_id, self.pad_id = p.bos_id(), p.eos_id(), p.pad_id()
        for name, value in (("BOS", self.bos_id), ("EOS", self.eos_id)):
            if value < 0:
                raise UserError(
                    f"{where}: the model has no {name} token, which separates documents; use another, or "
                    "null to train one"
                )
        if self.pad_id < 0:
            self.pad_id = self.eos_id  # padding is masked everywhere, so any id serves
        ids = range(self.size)
        self.control_ids = tuple(i for i in ids if p.is_control(i) or p.is_unknown(i))
        byte_pieces = {int(p.id_to_piece(i)[3:5], 16): i for i in ids if p.is_byte(i)}
        if len(byte_pieces) != 256:
            raise UserError(
                f"{where}: the model has no byte fallback, so it cannot spell every text; use one that was "
                "trained with --byte_fallback, or null to train one"
            )
        self._space_ids = [byte_pieces[b] for b in _SPACE_BYTES]
        self._bytes = [self._piece_bytes(i) for i in ids]

    @classmethod
    def load(cls, path: str | Path, name: str = "tokenizer") -> "Tokenizer":
        """Loads a ``.model`` file. Raises :class:`UserError`, with ``name``, if it is missing or not one."""
        try:
            proto = Path(path).expanduser().read_bytes()
        except OSError as e:
            raise UserError(
                f"{name} {path}: cannot read it: {e.strerror or e}; give a sentencepiece .model file"
            ) from e
        return cls(proto, f"{name} {path}")

    def _piece_bytes(self, i: int) -> bytes:
        if i in self.control_ids:
            return b""
        piece = self._processor.id_to_piece(i)
        if self._processor.is_byte(i):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE, " ").encode("utf-8")

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of ``text``, without BOS or EOS."""
        first, *rest = text.split(_SPACE)
        ids = self._processor.encode(first)
        for part in rest:
            ids += self._space_ids + self._processor.encode(part)
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes that token ids stand for; control tokens stand for none."""
        return b"".join(self._bytes[i] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def byte_lengths(self, vocabulary_size: int) -> np.ndarray:
        """Returns the bytes of text each id stands for, int32 of shape (vocabulary_size,)."""
        lengths = np.zeros(vocabulary_size, np.int32)
        lengths[: self.size] = [len(b) for b in self._bytes]
        return lengths


def _training_texts(texts: Iterable[str], limit: int) -> Iterator[str]:
    used = 0
    for text in texts:
        for start in range(0, len(text), _CHUNK_CHARACTERS):
            chunk = text[start : start + _CHUNK_CHARACTERS].replace("\0", "")
            used += len(chunk.encode("utf-8"))
            if used > limit:
                return
            yield chunk


def train_tokenizer(texts: Iterable[str], vocabulary_size: int, limit_bytes: int) -> Tokenizer:
    """Trains a lossless BPE model with byte fallback.

    Args:
      texts: training documents.
      vocabulary_size: number of pieces, including 256 bytes and four control tokens.
      limit_bytes: bytes of text after which the rest is not read.

    Raises:
      UserError: if the texts are too small for that many pieces.
    """
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_training_texts(texts, limit_bytes),
            model_writer=out,
            model_type="bpe",
            vocab_size=vocabulary_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.9999,
            max_sentence_length=8 * _CHUNK_CHARACTERS,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            minloglevel=2,
        )
    except RuntimeError as e:
        raise UserError(
            f"data.tokenizer_vocabulary_size = {vocabulary_size}: the training text is too small for a "
            f"tokenizer of that size; lower it or add text (sentencepiece: {_last_line(e)})"
        ) from e
    return Tokenizer(out.getvalue())


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][-200:] if str(error).strip() else "no detail"


def control_mask(tokens: np.ndarray, control_ids: Sequence[int]) -> np.ndarray:
    """Returns whether each token is an ordinary one, which may be copied; a bool array like ``tokens``."""
    return ~np.isin(tokens, control_ids)
