"""Split, packing, one document a row, validation: what the model is given to learn from."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from launch.config import DataConfig
from launch.data import IGNORE, Batch, ByteTokenizer, build_data, supervised_tokens

EOS, PAD = ByteTokenizer.eos_id, ByteTokenizer.pad_id


def corpus(tmp_path, texts, name="train.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return str(path)


def data(tmp_path, texts, *, seq_length=8, validation=("validation",), seed=0, sizes=None, **options):
    """Data whose training documents are ``texts``; ``validation=None`` splits them instead."""
    if validation is not None:
        options["validation"] = corpus(tmp_path, validation, "validation.jsonl")
    config = SimpleNamespace(train=corpus(tmp_path, texts), **options)
    return build_data(config, seq_length=seq_length, seed=seed, **(sizes or {}))


def rows(samples):
    return [samples[i] for i in range(len(samples))]


def test_labels_are_the_next_tokens_and_eos_stands_between_documents(tmp_path):
    samples = data(tmp_path, ["abc", "de", "fghij"], seq_length=4).train.samples
    stream = [*b"abc", EOS, *b"de", EOS, *b"fghij"]
    assert [r.input_ids.tolist() for r in rows(samples)] == [stream[0:4], stream[4:8], [*stream[8:11], stream[11]]]
    assert [r.labels.tolist() for r in rows(samples)] == [stream[1:5], stream[5:9], [*stream[9:12], IGNORE]]
    assert samples.padding == 1 and samples.dropped_tokens == 0


@pytest.mark.parametrize("isolate", [False, True])
def test_a_document_of_n_plus_1_tokens_is_one_full_sample(tmp_path, isolate):
    made = data(tmp_path, ["abcdefghi"], isolate_documents=isolate)
    (row,) = rows(made.train.samples)
    assert row.input_ids.tolist() == list(b"abcdefgh") and row.labels.tolist() == list(b"bcdefghi")
    counts = made.summary()["train"]
    assert (counts["samples"], counts["padding"], counts["dropped_tokens"]) == (1, 0, 0)


@pytest.mark.parametrize("seq_length", [1, 3, 8, 64])
def test_every_token_but_the_first_is_a_label_exactly_once(tmp_path, seq_length):
    texts = [chr(97 + i % 26) * (i * 7 % 23 + 1) for i in range(40)]
    made = data(tmp_path, texts, seq_length=seq_length)
    stream = [t for text in texts for t in (*text.encode(), EOS)][:-1]
    labels = np.concatenate([r.labels for r in rows(made.train.samples)])
    assert labels[labels != IGNORE].tolist() == stream[1:]
    assert made.summary()["train"]["tokens"] == len(stream)
    assert made.summary()["train"]["padding"] == (labels == IGNORE).sum()


def test_isolated_documents_restart_positions_and_never_predict_the_next_document(tmp_path):
    """B47: documents of 3 and 5 tokens (eos included) in one row."""
    row, tail = rows(data(tmp_path, ["ab", "cdef", "gh"], isolate_documents=True).train.samples)
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert row.document_ids.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert row.labels.tolist() == [*b"b", EOS, IGNORE, *b"def", EOS, IGNORE]
    assert tail.input_ids.tolist() == [*b"gh"] + [PAD] * 6
    assert tail.document_ids.tolist() == [0, 0] + [-1] * 6
    assert tail.labels.tolist() == [*b"h"] + [IGNORE] * 7


def test_isolated_rows_equal_plain_rows_but_for_labels_across_documents(tmp_path):
    texts = [chr(97 + i) * (i * 5 % 13 + 1) for i in range(20)]
    plain = rows(data(tmp_path, texts, seq_length=7).train.samples)
    isolated = rows(data(tmp_path, texts, seq_length=7, isolate_documents=True).train.samples)
    assert plain[0].document_ids is None and plain[0].position_ids is None
    for a, b in zip(plain, isolated):
        assert (a.input_ids == b.input_ids).all()
        crossing = a.input_ids == EOS
        assert (b.labels[crossing] == IGNORE).all() and (b.labels[~crossing] == a.labels[~crossing]).all()


def test_one_document_a_row_keeps_what_fits_and_counts_what_does_not(tmp_path):
    """B76: with 8 inputs, 8 and 9 tokens are whole, 10 are truncated."""
    made = data(tmp_path, ["a" * 7 + "z", "b" * 8 + "z", "c" * 9 + "z", "d"], pack=False)
    eight, nine, ten, one = rows(made.train.samples)
    assert eight.input_ids.tolist() == [*b"aaaaaaaz"] and eight.labels.tolist() == [*b"aaaaaaz", EOS]
    assert nine.input_ids.tolist() == [*b"bbbbbbbb"] and nine.labels.tolist() == [*b"bbbbbbbz"]
    assert ten.input_ids.tolist() == [*b"cccccccc"] and ten.labels.tolist() == [*b"cccccccc"]
    assert one.input_ids.tolist() == [*b"d"] + [PAD] * 7 and one.labels.tolist() == [EOS] + [IGNORE] * 7
    counts = made.summary()["train"]
    assert (counts["truncated_documents"], counts["dropped_tokens"], counts["padding"]) == (1, 1, 7)


def document_set(part):
    return {bytes(part.corpus.tokens[part.corpus.offsets[d] : part.corpus.offsets[d + 1]]) for d in part.documents}


@pytest.mark.parametrize(("count", "fraction", "held_out"), [(2, 0.05, 1), (40, 0.1, 4), (40, 0.99, 39), (3, 0.01, 1)])
def test_split_is_by_document_seeded_and_never_empty(tmp_path, count, fraction, held_out):
    texts = [f"document {i}" for i in range(count)]

    def split(seed, **options):
        made = data(tmp_path, texts, validation=None, seed=seed, validation_fraction=fraction, **options)
        return document_set(made.train.samples), document_set(made.validation.samples)

    train, validation = split(0)
    assert len(validation) == held_out and len(train) == count - held_out and not train & validation
    assert split(0) == (train, validation) == split(5, shuffle_seed=0)
    assert count < 40 or any(split(seed)[1] != validation for seed in (1, 2, 3))


def test_split_goes_by_the_document_not_by_where_the_data_lies(tmp_path):
    held_out = []
    for root in ("here", "there"):
        (tmp_path / root).mkdir()
        for i in range(20):
            (tmp_path / root / f"{i}.txt").write_text(f"text {i}")
        config = SimpleNamespace(train=str(tmp_path / root), validation_fraction=0.2)
        held_out.append(document_set(build_data(config, seq_length=8, seed=3).validation.samples))
    assert held_out[0] == held_out[1] and len(held_out[0]) == 4


@pytest.mark.parametrize("cached", [False, True])
def test_a_single_document_gives_its_end_to_validation(tmp_path, cached):
    (tmp_path / "book.txt").write_text("abcdefghij" * 10)
    cache = {"cache_dir": str(tmp_path / "cache")} if cached else {}
    for _ in range(2):  # the second time from the cache, which the cut must not have changed
        config = SimpleNamespace(train=str(tmp_path / "book.txt"), validation_fraction=0.2, **cache)
        made = build_data(config, seq_length=200, seed=0)
        for samples, length in ((made.train.samples, 80), (made.validation.samples, 20)):
            (row,) = rows(samples)
            assert bytes(row.input_ids[:length].tolist()) == b"abcdefghij" * (length // 10)
            assert (row.labels != IGNORE).sum() == length - 1
        assert made.summary()["document_cut_in_two"] is True


def test_validation_path_overrides_the_split_and_must_be_other_files(tmp_path):
    made = data(tmp_path, ["one", "two"], validation=("three",))
    assert document_set(made.train.samples) != document_set(made.validation.samples)
    assert made.summary()["train"]["documents"] == 2 and made.summary()["validation"]["documents"] == 1
    config = SimpleNamespace(train=str(tmp_path / "*.jsonl"), validation=str(tmp_path / "train.jsonl"))
    with pytest.raises(ValueError, match=r"data.validation shares 1 file.*train\.jsonl"):
        build_data(config, seq_length=8, seed=0)
    none = data(tmp_path, ["one"], validation=None, validation_fraction=0)
    assert len(none.validation) == 0 and list(none.validation.batches(4)) == []


def test_too_little_text_and_sizes_that_do_not_fit_are_refused(tmp_path):
    for texts, message in [([""], "holds no text"), (["ab"], "2 token"), (["a", "b"], r"train data has 1 token")]:
        with pytest.raises(ValueError, match=message):
            data(tmp_path, texts, validation=None)
    for sizes, message in [
        ({"global_batch_size": 6, "micro_batch_size": 2, "world_size": 2}, "multiple of .* 2 x 2 = 4"),
        ({"global_batch_size": 0}, "global_batch_size 0"),
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1"),
        ({"rank": 2, "world_size": 2}, r"rank must be in 0\.\.1"),
    ]:
        with pytest.raises(ValueError, match=message):
            data(tmp_path, ["a", "b"], sizes=sizes)
    with pytest.raises(ValueError, match="seq_length must be at least 1, got 0"):
        data(tmp_path, ["a", "b"], seq_length=0)
    with pytest.raises(ValueError, match="validation_fraction must be .* got 1.5"):
        data(tmp_path, ["a", "b"], validation=None, validation_fraction=1.5)
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        data(tmp_path, ["a", "b"], max_bytes=0)


@pytest.mark.parametrize("options", [{}, {"isolate_documents": True}, {"pack": False}])
@pytest.mark.parametrize(("world_size", "micro"), [(1, 1), (1, 4), (2, 2), (4, 3)])
def test_validation_ranks_are_disjoint_complete_and_equally_long(tmp_path, options, world_size, micro):
    """B28, B32: 5 samples over ranks; a rank without samples gets batches with nothing to learn, not fewer."""
    seen, tokens, lengths = [], 0, set()
    for rank in range(world_size):
        sizes = {"rank": rank, "world_size": world_size, "micro_batch_size": micro}
        made = data(tmp_path, ["ab"] * 2, validation=[c * 7 for c in "vwxyz"], sizes=sizes, **options)
        batches = list(made.validation.batches())
        assert len(batches) == len(made.validation)
        lengths.add(len(batches))
        for batch in batches:
            assert batch.input_ids.shape == batch.labels.shape == (micro, 8)
            assert (batch.document_ids is None) == (not options.get("isolate_documents", False))
            seen += [row.tolist() for row, label in zip(batch.input_ids, batch.labels) if (label != IGNORE).any()]
        tokens += supervised_tokens(batches)
        again = list(made.validation.batches())
        assert all(torch.equal(a.labels, b.labels) for a, b in zip(batches, again))
    everything = rows(made.validation.samples)
    assert sorted(seen) == sorted(r.input_ids.tolist() for r in everything) and len(lengths) == 1
    assert tokens == sum(int((r.labels != IGNORE).sum()) for r in everything)


def test_limited_validation_is_spread_over_the_set(tmp_path):
    made = data(tmp_path, ["ab"], validation=[c * 8 for c in "abcdefgh"], pack=False)
    first = [chr(b.input_ids[0, 0]) for b in made.validation.batches(4)]
    assert first == ["a", "c", "e", "g"]
    assert [chr(b.input_ids[0, 0]) for b in made.validation.batches(99)] == list("abcdefgh")
    assert list(made.validation.batches(0)) == []
    with pytest.raises(ValueError, match="max_batches .* got -1"):
        list(made.validation.batches(-1))


def test_supervised_tokens_counts_labels_of_one_batch_or_many():
    labels = torch.tensor([[1, IGNORE], [2, 3]])
    batch = Batch(torch.zeros_like(labels), labels)
    masked = Batch(torch.zeros_like(labels), torch.full_like(labels, IGNORE))
    assert supervised_tokens(batch) == 3 and supervised_tokens([batch, masked, batch]) == 6
    assert supervised_tokens([masked]) == 0 == supervised_tokens([])


def test_batches_are_int64_and_move(tmp_path, device):
    made = data(tmp_path, ["abc", "def"], isolate_documents=True, sizes={"micro_batch_size": 2})
    (batch,) = made.train.next_global_batch()
    for name in ("input_ids", "labels", "position_ids", "document_ids"):
        moved = getattr(batch.to(device), name)
        assert moved.dtype == torch.int64 and moved.device.type == device.type
        assert torch.equal(moved.cpu(), getattr(batch, name))


def test_default_config_reads_the_standard_library():
    made = build_data(DataConfig(), seq_length=256, seed=0, micro_batch_size=4, global_batch_size=8)
    counts = made.summary()
    assert counts["train"]["documents"] > 100 and counts["train"]["tokens"] > 2**20
    assert counts["validation"]["documents"] == round(
        0.05 * (counts["train"]["documents"] + counts["validation"]["documents"])
    )
    batches = made.train.next_global_batch()
    assert len(batches) == 2 and batches[0].input_ids.shape == (4, 256)
    assert torch.equal(batches[0].input_ids[:, 1:], batches[0].labels[:, :-1])
    assert len(made.tokenizer.decode(batches[0].input_ids[0].tolist())) > 100
