"""Tokenizers: sentencepiece models that reproduce every text byte for byte, and Hugging Face's."""

import hashlib
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from cplm_jax.data.huggingface_tokenizer import HuggingFaceBackend
from cplm_jax.errors import UserError

# Sentencepiece writes a space as this character, so the character itself must be spelt in bytes.
_SPACE = "\u2581"
_SPACE_BYTES = _SPACE.encode("utf-8")
_CHUNK_CHARACTERS = 100_000
_LONG_CHARACTERS = 1_000_000


class Tokenizer:
    """A sentencepiece model with byte fallback, or a Hugging Face ``tokenizer.json``.

    ``decode(encode(text)) == text`` holds for every text when the model was trained by
    :func:`train_tokenizer`; for another, :meth:`is_lossless` tells of a text.

    Attributes:
      proto: the content of the file.
      sha256: its hash.
      file_name: what the file is called wherever it is stored.
      size: number of ids.
      bos_id, eos_id, pad_id: the control tokens.
      control_ids: ids that never stand for text and are never copied.
    """

    def __init__(self, proto: bytes, where: str = "tokenizer"):
        self.proto = proto
        self.sha256 = hashlib.sha256(proto).hexdigest()
        backend: SentencepieceBackend | HuggingFaceBackend
        if proto.lstrip().startswith(b"{"):
            self.file_name, backend = "tokenizer.json", HuggingFaceBackend(proto, where)
        else:
            self.file_name, backend = "tokenizer.model", SentencepieceBackend(proto, where)
        self._backend = backend
        self._bytes = backend.piece_bytes
        crosses = any(_ACROSS.search(piece) for piece in backend.piece_bytes)
        self._cuts = backend.cuts_at_spaces and not crosses
        self.size, self.bos_id, self.eos_id = backend.size, backend.bos_id, backend.eos_id
        # Padding is masked everywhere, so any id serves.
        self.pad_id = backend.eos_id if backend.pad_id < 0 else backend.pad_id
        self.control_ids = backend.control_ids

    @classmethod
    def load(cls, path: str | Path, name: str = "tokenizer") -> "Tokenizer":
        """Loads a file. Raises :class:`UserError`, with ``name``, if it is missing or no tokenizer."""
        try:
            proto = Path(path).expanduser().read_bytes()
        except OSError as e:
            raise UserError(
                f"{name} {path}: cannot read it: {e.strerror or e}; give a sentencepiece .model file or a "
                "tokenizer.json"
            ) from e
        return cls(proto, f"{name} {path}")

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of ``text``, without BOS or EOS.

        A text of several :data:`_LONG_CHARACTERS` is split before a space that follows another character,
        so that memory does not grow with it, unless the tokenizer has a piece that crosses such a place.
        """
        return list(itertools.chain.from_iterable(self._encoded(text)))

    def encode_array(self, text: str) -> np.ndarray:
        """Returns the same as an int32 array, without a list of all of them."""
        return np.concatenate([np.asarray(ids, np.int32) for ids in self._encoded(text)])

    def _encoded(self, text: str) -> Iterator[list[int]]:
        backend = self._backend
        if len(text) <= _LONG_CHARACTERS or not self._cuts:
            yield backend.encode(text)
            return
        for number, part in enumerate(_parts(text, backend.cuts_anywhere)):
            yield backend.encode(part, begins=number == 0)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes that token ids stand for; control tokens stand for none."""
        return b"".join(self._bytes[i] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def is_lossless(self, text: str) -> bool:
        """Returns whether ``text`` can be had back from its token ids, byte for byte."""
        return self.decode_bytes(self.encode(text)) == text.encode("utf-8")

    def byte_lengths(self, vocabulary_size: int) -> np.ndarray:
        """Returns the bytes of text each id stands for, int32 of shape (vocabulary_size,)."""
        lengths = np.zeros(vocabulary_size, np.int32)
        lengths[: self.size] = [len(b) for b in self._bytes]
        return lengths


# A space after another character, since a run of white space may be one piece.
_CUT = re.compile(r"(?<=\S) ")
_ACROSS = re.compile(rb"\S ")


def _parts(text: str, anywhere: bool) -> Iterator[str]:
    """Yields a text in parts that begin at a space, or, if ``anywhere``, elsewhere where there is none."""
    start = 0
    while len(text) - start > _LONG_CHARACTERS:
        stop = start + _LONG_CHARACTERS
        cut = text.rfind(" ", start + 1, stop)
        while cut > start and text[cut - 1].isspace():
            cut = text.rfind(" ", start + 1, cut)
        if cut <= start:
            found = None if anywhere else _CUT.search(text, stop)
            cut = stop if anywhere else len(text) if found is None else found.start()
        yield text[start:cut]
        start = cut
    yield text[start:]


class SentencepieceBackend:
    """What :class:`Tokenizer` needs of a sentencepiece model.

    Attributes:
      size, bos_id, eos_id, pad_id, control_ids: as in :class:`Tokenizer`; no padding token is -1.
      piece_bytes: the bytes that each id stands for.
      cuts_at_spaces, cuts_anywhere: whether a text may be given in parts that begin at a space, or
        elsewhere.

    Raises:
      UserError: if it is no model, or one without BOS, EOS or byte fallback.
    """

    cuts_at_spaces = cuts_anywhere = True

    def __init__(self, proto: bytes, where: str):
        try:
            # Sentencepiece takes no bytes for no argument, and then answers everything with 0.
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=proto or b"-")
            self.size = self._processor.get_piece_size()
        except RuntimeError as e:
            raise UserError(
                f"{where}: not a sentencepiece model, or a damaged one; give a sentencepiece .model file or "
                "a tokenizer.json"
            ) from e
        p = self._processor
        self.bos_id, self.eos_id, self.pad_id = p.bos_id(), p.eos_id(), p.pad_id()
        for name, value in (("BOS", self.bos_id), ("EOS", self.eos_id)):
            if value < 0:
                raise UserError(
                    f"{where}: the model has no {name} token, which separates documents; use another, or "
                    "null to train one"
                )
        ids = range(self.size)
        self.control_ids = tuple(i for i in ids if p.is_control(i) or p.is_unknown(i))
        byte_pieces = {int(p.id_to_piece(i)[3:5], 16): i for i in ids if p.is_byte(i)}
        if len(byte_pieces) != 256:
            raise UserError(
                f"{where}: the model has no byte fallback, so it cannot spell every text; use one that was "
                "trained with --byte_fallback, or null to train one"
            )
        self._space_ids = [byte_pieces[b] for b in _SPACE_BYTES]
        self.piece_bytes = [self._piece_bytes(i) for i in ids]
        self._inside, self._at_space = self._continuing(proto)

    def _continuing(self, proto: bytes) -> tuple[Any, Any]:
        """Returns processors for a part that is not the first of its text, and for one after a space.

        Models that add a space to the beginning of a text must not do so within it; but one that also
        takes spaces away from there would lose a part's own.
        """
        parse = sentencepiece_model_pb2.ModelProto.FromString  # type: ignore[attr-defined]
        spec = parse(proto).normalizer_spec

        def with_prefix(added: bool) -> Any:
            if spec.add_dummy_prefix == added:
                return self._processor
            changed = parse(proto)
            changed.normalizer_spec.add_dummy_prefix = added
            return sentencepiece.SentencePieceProcessor(model_proto=changed.SerializeToString())

        return with_prefix(False), with_prefix(spec.remove_extra_whitespaces)

    def _piece_bytes(self, i: int) -> bytes:
        if i in self.control_ids:
            return b""
        piece = self._processor.id_to_piece(i)
        if self._processor.is_byte(i):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE, " ").encode("utf-8")

    def encode(self, text: str, begins: bool = True) -> list[int]:
        """Returns the token ids of ``text``, or of a later part of a text."""
        first, *rest = text.split(_SPACE)
        later = self._at_space if first.startswith(" ") else self._inside
        ids = (self._processor if begins else later).encode(first)
        for part in rest:
            ids += self._space_ids + self._inside.encode(part)
        return ids


def _training_texts(texts: Iterable[str], limit: int) -> Iterator[str]:
    used = 0
    for text in texts:
        for start in range(0, len(text), _CHUNK_CHARACTERS):
            chunk = text[start : start + _CHUNK_CHARACTERS].replace("\0", "")
            used += len(chunk.encode("utf-8"))
            if used > limit:
                return
            yield chunk


def train_tokenizer(
    texts: Iterable[str],
    vocabulary_size: int,
    limit_bytes: int,
    kind: str = "bpe",
    option: str = "data.tokenizer_vocabulary_size",
) -> Tokenizer:
    """Trains a lossless sentencepiece model with byte fallback.

    Args:
      texts: training documents.
      vocabulary_size: number of pieces, including 256 bytes and four control tokens.
      limit_bytes: bytes of text after which the rest is not read.
      kind: ``bpe`` or ``unigram``.
      option: where the size was set, for messages.

    Raises:
      UserError: if the texts are too small for that many pieces, or as ``texts`` raises it.
    """
    out = io.BytesIO()
    failures: list[UserError] = []

    def watched() -> Iterator[str]:  # sentencepiece makes another error of one that its input raises
        try:
            yield from _training_texts(texts, limit_bytes)
        except UserError as e:
            failures.append(e)

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=watched(),
            model_writer=out,
            model_type=kind,
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
        if failures:
            raise failures[0] from e
        raise UserError(
            f"{option} = {vocabulary_size}: the training text is too small for a "
            f"tokenizer of that size; lower it or add text (sentencepiece: {_last_line(e)})"
        ) from e
    if failures:
        raise failures[0]
    return Tokenizer(out.getvalue())


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][-200:] if str(error).strip() else "no detail"


def control_mask(tokens: np.ndarray, control_ids: Sequence[int]) -> np.ndarray:
    """Returns whether each token is an ordinary one, which may be copied; a bool array like ``tokens``."""
    return ~np.isin(tokens, control_ids)
