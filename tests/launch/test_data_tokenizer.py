"""Tokenizers: round trips, export, refusals."""

import numpy as np
import pytest

from launch.data import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

TEXTS = ["", "plain", " leading and  double", "tabs\tand\r\nlines\n", "é ü 漢字 🙂 \x00\x7f\x80\xad", "don't"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    ByteTokenizer().save_pretrained(directory)
    return directory


def test_byte_ids_are_the_utf8_bytes_and_come_back():
    tokenizer = load_tokenizer("byte")
    assert isinstance(tokenizer, Tokenizer) and tokenizer.vocab_size % 64 == 0
    for text in TEXTS:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_many([text])[0].tolist() == tokenizer.encode(text)
    assert tokenizer.decode([tokenizer.bos_id, 104, 105, tokenizer.eos_id, tokenizer.pad_id]) == "hi"
    assert max(tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) < tokenizer.vocab_size
    with pytest.raises(ValueError, match=r"320 is outside .* 0\.\.319"):
        tokenizer.decode([320])


def test_exported_byte_tokenizer_gives_the_same_ids_through_auto_tokenizer(exported):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    ours = ByteTokenizer()
    for theirs in (
        AutoTokenizer.from_pretrained(exported, local_files_only=True),
        PreTrainedTokenizerFast.from_pretrained(exported, local_files_only=True),
    ):
        every_byte = "".join(chr(i) for i in range(0x2FF)) + "\U0010ffff"
        for text in [*TEXTS, every_byte]:
            ids = theirs(text)["input_ids"]
            assert ids == ours.encode(text)
            assert theirs.decode(ids) == text
        special = (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
        assert special == (ours.bos_id, ours.eos_id, ours.pad_id)
        assert theirs.decode([104, ours.eos_id], skip_special_tokens=True) == "h"


def test_a_tokenizer_directory_round_trips_and_keeps_its_fingerprint(exported, tmp_path):
    tokenizer = load_tokenizer(exported)
    assert isinstance(tokenizer, HuggingFaceTokenizer) and isinstance(tokenizer, Tokenizer)
    assert tokenizer.vocab_size == 259 and tokenizer.eos_id == 257 and tokenizer.pad_id == 258
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    many = tokenizer.encode_many(TEXTS)
    assert [row.tolist() for row in many] == [list(t.encode()) for t in TEXTS]
    assert all(row.dtype == np.uint32 for row in many)
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode("é") == tokenizer.encode("é")
    assert load_tokenizer(exported).fingerprint == tokenizer.fingerprint
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text() + " ")
    assert load_tokenizer(tmp_path).fingerprint != again.fingerprint


def test_special_tokens_of_a_template_are_not_added(tmp_path):
    """Llama's tokenizer puts bos before every text; documents here are joined by eos only."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "hello": 3, "world": 4}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hello world") == [3, 4]
    assert tokenizer.pad_id == tokenizer.eos_id == 2, "without a pad token, eos fills up (its labels are ignored)"
    del special["eos_token"]
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(tmp_path / "no_eos")
    with pytest.raises(ValueError, match="no_eos.*names no eos_token"):
        load_tokenizer(tmp_path / "no_eos")


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="'bytes' is neither \"byte\" nor an existing directory"):
        load_tokenizer("bytes")
    with pytest.raises(ValueError, match=f"{tmp_path}.*no Hugging Face tokenizer can be loaded"):
        load_tokenizer(tmp_path)
