"""Tokenizers: long texts, Hugging Face's, and the commands that train and inspect them."""

import io
import json
import random

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from cplm_jax import cli
from cplm_jax.data import commands
from cplm_jax.data import tokenizer as module
from cplm_jax.data.files import list_files
from cplm_jax.data.preparation.units import is_held_out, text_digest
from cplm_jax.data.records import Reading
from cplm_jax.data.tokenizer import Tokenizer, train_tokenizer
from cplm_jax.errors import UserError
from cplm_jax.loading import load_model
from tests.tiny import tiny_settings, write_corpus, write_yaml

TEXT = "def value(self, index):\n    return self.data[index]  # été 日本 🙂\n" * 40


def byte_level(specials=("<|endoftext|>",)):
    """A tokenizer of GPT-2's kind."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    return made.to_str().encode()


def byte_fallback(prefix=False, across=False):
    """A tokenizer of Llama's kind: sentencepiece's pieces in a tokenizer.json.

    With ``prefix`` it adds a space to the beginning of a text; with ``across`` a piece spans two words.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁a", "a", "b", "▁b", "ab"]
    pieces += ["b▁a"] * across
    made = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "a"), ("▁", "b"), ("a", "b")] + [("b", "▁a")] * across,
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made.to_str().encode()


KINDS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60), kind=st.sampled_from(list(KINDS)))
def test_a_tokenizer_json_reproduces_any_text(text, kind):
    if kind == "byte_fallback":
        text = text.replace("▁", "")  # which such a tokenizer takes for a space
    tokenizer = Tokenizer(KINDS[kind])
    ids = tokenizer.encode(text)
    assert tokenizer.is_lossless(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths(tokenizer.size)[ids].sum() == len(text.encode())
    assert not set(ids) & set(tokenizer.control_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_special_token_does_not_become_it(kind):
    tokenizer = Tokenizer(KINDS[kind])
    for text in ("a<|endoftext|>b", "a</s>b", "<s>"):
        ids = tokenizer.encode(text)
        assert not set(ids) & set(tokenizer.control_ids)
        assert tokenizer.decode(ids) == text


def test_ids_are_the_librarys():
    tokenizer = Tokenizer(KINDS["byte_level"])
    reference = tokenizers.Tokenizer.from_str(KINDS["byte_level"].decode())
    assert tokenizer.encode(TEXT) == reference.encode(TEXT).ids
    assert tokenizer.bos_id == tokenizer.eos_id == reference.token_to_id("<|endoftext|>")
    assert tokenizer.size == reference.get_vocab_size()


def test_control_tokens_of_the_known_families():
    tokenizer = Tokenizer(KINDS["byte_fallback"])
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    assert tokenizer.control_ids == (0, 1, 2)
    tokenizer = Tokenizer(byte_level(("<|begin_of_text|>", "<|end_of_text|>", "<pad>")))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)


@pytest.mark.parametrize(
    ("data", "fragment"),
    [
        (b"{", r"not a tokenizer\.json"),
        (b"{}", r"not a tokenizer\.json"),
        (byte_level(("<odd>",)), r"none of its special tokens \(<odd>\) are known as BOS and EOS"),
    ],
)
def test_what_is_no_tokenizer_is_refused(data, fragment):
    with pytest.raises(UserError, match=fragment):
        Tokenizer(data)


def sentencepiece_model(**options):
    """A model as others train them, with a space added to the beginning of a text, for instance."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=out,
        vocab_size=350,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return out.getvalue()


LONG_KINDS = {
    "ours": lambda: train_tokenizer([TEXT], 350, 10**6).proto,
    "sentencepiece": lambda: sentencepiece_model(remove_extra_whitespaces=False),
    "sentencepiece that strips": lambda: sentencepiece_model(),
    "sentencepiece that strips, no prefix": lambda: sentencepiece_model(add_dummy_prefix=False),
    "byte_level": lambda: KINDS["byte_level"],
    "prefixed": lambda: byte_fallback(prefix=True),
}


@pytest.mark.parametrize("kind", LONG_KINDS)
def test_a_long_text_is_split_where_no_piece_crosses(monkeypatch, kind):
    tokenizer = Tokenizer(LONG_KINDS[kind]())
    rng = random.Random(0)
    words = ["self", "return  ", "value", "   ", "\n    ", "été", "x", "[index]"]
    text = " ".join(rng.choice(words) for _ in range(3000))
    whole = tokenizer.encode(text)
    monkeypatch.setattr(module, "_LONG_CHARACTERS", 500)
    parts = []
    encode = tokenizer._backend.encode
    monkeypatch.setattr(
        tokenizer._backend, "encode", lambda part, **how: parts.append(part) or encode(part, **how)
    )
    assert tokenizer.encode(text) == whole
    assert len(parts) > 20
    assert "".join(parts) == text
    assert tokenizer.encode_array(text).tolist() == whole
    # Without a place to cut, a text is still had back.
    solid = "abcdefgh" * 500
    assert tokenizer.decode(tokenizer.encode(solid)).removeprefix(" ") == solid
    assert all(len(part) <= 500 for part in module._parts("a" + " " * 2000, anywhere=True))
    solid += " a" * 1000
    assert [*module._parts(solid, anywhere=False)][:2] == [solid[:4000], solid[4000:4498]]


def test_a_text_is_not_cut_by_a_tokenizer_that_looks_beyond_words(monkeypatch):
    tokenizer = Tokenizer(byte_fallback(across=True))
    text = "a b " * 1000
    whole = tokenizer.encode(text)
    monkeypatch.setattr(module, "_LONG_CHARACTERS", 500)
    assert tokenizer.encode(text) == whole


@pytest.mark.parametrize("kind", [kind for kind in LONG_KINDS if "sentencepiece" in kind])
def test_the_character_that_stands_for_a_space_brings_none(kind):
    tokenizer = Tokenizer(LONG_KINDS[kind]())
    for text in ("value▁value", "a▁▁b", "self▁"):
        assert tokenizer.decode(tokenizer.encode(text)).removeprefix(" ") == text


def run(capsys, *words):
    status = cli.run(cli.tokenizer_command, [str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_train_and_inspect(tmp_path, capsys, kind):
    corpus, model = write_corpus(tmp_path / "in"), tmp_path / "t.model"
    words = ["train", "--paths", corpus, "--output", model, "--vocabulary_size", "325", "--type", kind]
    status, out, error = run(capsys, *words)
    assert (status, out) == (0, f"{model}\n"), error
    tokenizer = Tokenizer.load(model)
    assert tokenizer.size == 325
    assert all(tokenizer.is_lossless(path.read_text()) for path in corpus.iterdir())
    status, out, _ = run(capsys, "inspect", model, "--text", "value  é\n")
    assert status == 0
    assert tokenizer.sha256 in out
    assert "325, of which 4 are control tokens" in out
    assert "had back byte for byte: yes" in out
    status, _, error = run(capsys, "inspect", model, "--text", "a\udcff")  # as Python takes the byte 0xff
    assert (status, error) == (2, "error: --text: not valid UTF-8; give text\n")
    status, _, error = run(capsys, *words)
    assert status == 2
    assert "exists already" in error


@pytest.mark.parametrize("size", [2_000, 20_000, 10**6])
def test_no_held_out_document_is_sampled(tmp_path, size):
    texts = [f"document {i} of some words" for i in range(3000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = list_files([str(tmp_path)], "--paths")
    sample = list(commands._sample(files, Reading("text", 1000), size, 0, 0.05))
    held_out = {text for text in texts if is_held_out(text_digest(text.encode()), 0.05)}
    assert 100 < len(held_out) < 200
    assert not held_out & set(sample)
    wanted = min(size / (sum(map(len, texts)) + 12 * len(texts)), 1) * len(texts)
    assert 0.6 * wanted < len(sample) < 1.5 * wanted
    if size == 10**6:
        assert held_out | set(sample) == set(texts)


def test_the_sample_is_spread_over_the_input(tmp_path, capsys):
    for name, text in (
        ("a", "first{} second thirdly fourfold quick"),
        ("b", "zzyzx{} vexing dwarves mocked"),
    ):
        records = [json.dumps({"text": text.format(i) * 9}) + "\n" for i in range(500)]
        (tmp_path / f"{name}.jsonl").write_text("".join(records))
    model = tmp_path / "t.model"
    words = ["train", "--paths", tmp_path / "*.jsonl", "--output", model, "--vocabulary_size", "350"]
    status, _, error = run(capsys, *words, "--sample_bytes", "60000")
    assert status == 0, error
    # a.jsonl alone would have been enough; the words of both files were learnt.
    tokenizer = Tokenizer.load(model)
    assert all(len(tokenizer.encode(text)) < 7 for text in ("first second", "zzyzx vexing"))


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["tarin"], ["unknown command 'tarin'"]),
        (["train", "--paths", "{in}", "--output", "gs://b/x.model"], ["a URL, but a path on this machine"]),
        (["train", "--paths", "none", "--output", "x.model"], ["--paths", "'none'", "matches no file"]),
        (["train", "--paths", "none"], ["--output"]),
        (["train", "--paths", "{in}", "--output", "{in}/no/x.model"], ["--output", "does not exist"]),
        (
            ["train", "--paths", "{in}", "--output", "{in}.model", "--vocabulary_size", "90000"],
            ["--vocabulary_size = 90000", "too small"],
        ),
        (
            ["train", "--paths", "{in}", "--output", "{in}.model", "--vocabulary_size", "3"],
            ["--vocabulary_size", "from 300"],
        ),
        (["inspect", "none"], ["none", "No such file"]),
        (["inspect", "{in}"], ["manifest.json"]),
    ],
)
def test_mistakes(tmp_path, capsys, words, fragments):
    corpus = write_corpus(tmp_path / "in")
    status, _, error = run(capsys, *(word.replace("{in}", str(corpus)) for word in words))
    assert status == 2
    for fragment in fragments:
        assert fragment in error


def test_a_run_with_a_tokenizer_json(tmp_path, capfd):
    (tmp_path / "tokenizer.json").write_bytes(KINDS["byte_level"])
    config = tiny_settings(write_corpus(tmp_path / "in"), tmp_path / "cache", tmp_path / "run")
    config["data"] |= {"tokenizer": str(tmp_path / "tokenizer.json"), "validation_fraction": 0.2}
    config["train"], config["optimizer"] = {"steps": 2, "batch_size": 8}, {"warmup_steps": 1}
    words = ["--config", str(write_yaml(tmp_path / "c.yaml", config))]
    assert cli.run(cli.train_command, words) == 0, capfd.readouterr().err
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == KINDS["byte_level"]
    assert not (tmp_path / "run" / "tokenizer.model").exists()
    model = load_model(tmp_path / "run")
    assert model.tokenizer.decode(model.tokenizer.encode("value")) == "value"
    export = ["--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "export")]
    assert cli.run(cli.export_command, export) == 0
    words = ["--checkpoint", str(tmp_path / "export"), "--prompt", "value", "--max_tokens", "3"]
    assert cli.run(cli.generate_command, words) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("value")


def test_a_bad_record_ends_the_training_of_a_tokenizer(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": TEXT}) + "\n[]\n" + json.dumps({"text": TEXT}) + "\n"
    )
    words = ["train", "--paths", tmp_path / "a.jsonl", "--output", tmp_path / "t.model"]
    status, _, error = run(capsys, *words, "--vocabulary_size", "320")
    assert status == 2
    assert "a.jsonl:2: expected a JSON object" in error
    assert run(capsys, *words, "--vocabulary_size", "320", "--max_bad", "1")[0] == 0
