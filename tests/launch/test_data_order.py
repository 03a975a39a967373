"""The order of samples: seeded, new every epoch, the same for any number of ranks, resumable anywhere."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from launch.data import build_data
from launch.data.order import SampleOrder, permutation

SAMPLES = 16


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """16 documents of 8 bytes: with seq_length 9 there are 16 samples, packed or not."""
    path = tmp_path_factory.mktemp("order") / "d.jsonl"
    path.write_text("".join(json.dumps({"text": chr(65 + i) * 8}) + "\n" for i in range(SAMPLES)))
    held_out = path.with_name("validation.txt")
    held_out.write_text("held out")
    return SimpleNamespace(train=str(path), validation=str(held_out), pack=False)


def streams(config, *, world_size=1, micro=1, batch=4, seed=0, state=None):
    """One train stream per rank."""
    made = []
    for rank in range(world_size):
        sizes = {"rank": rank, "world_size": world_size, "micro_batch_size": micro, "global_batch_size": batch}
        stream = build_data(config, seq_length=9, seed=seed, **sizes).train
        if state is not None:
            stream.load_state_dict(state)
        made.append(stream)
    return made


def next_letters(ranks):
    """The documents of the next global batch, over all ranks in the order of the global batch."""
    parts = [stream.next_global_batch() for stream in ranks]
    return [chr(row[0]) for micro in zip(*parts) for batch in micro for row in batch.input_ids]


def take(ranks, batches):
    return [letter for _ in range(batches) for letter in next_letters(ranks)]


def test_the_order_is_pinned():
    """A new numpy or a change of ours that moved a sample would break every resumed run."""
    assert permutation(8, seed=1, epoch=0).tolist() == [5, 3, 0, 1, 4, 7, 6, 2]
    assert permutation(8, seed=-1, epoch=3).tolist() == permutation(8, seed=2**64 - 1, epoch=3).tolist()


@pytest.mark.parametrize("length", [1, 2, 17, 4096])
def test_each_epoch_is_a_permutation(length):
    for epoch in range(3):
        assert sorted(permutation(length, seed=7, epoch=epoch).tolist()) == list(range(length))


def test_the_order_is_well_mixed():
    """First positions over many seeds are uniform (chi-squared, 7 degrees of freedom, p about 1e-6)."""
    counts = np.bincount([permutation(8, seed, 0)[0] for seed in range(4000)], minlength=8)
    assert ((counts - 500) ** 2 / 500).sum() < 40
    order = permutation(10_000, 0, 0)
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


@pytest.mark.parametrize("pack", [False, True])
def test_epochs_differ_and_runs_agree(config, pack):
    """B79: two epochs over 16 samples, both kinds of data set."""
    kind = SimpleNamespace(**{**vars(config), "pack": pack})
    ranks = streams(kind)
    assert len(ranks[0]) == SAMPLES
    first, second = take(ranks, 4), take(ranks, 4)
    assert first != second and ranks[0].epoch == 2
    if not pack:
        assert sorted(first) == sorted(second) == [chr(65 + i) for i in range(SAMPLES)]
    assert take(streams(kind), 8) == first + second
    assert take(streams(kind, seed=1), 4) != first


@pytest.mark.parametrize(
    ("world_size", "micro", "batch"), [(1, 1, 6), (1, 3, 6), (2, 1, 6), (2, 3, 6), (3, 2, 6), (3, 1, 3)]
)
def test_the_global_order_does_not_depend_on_who_computes_it(config, world_size, micro, batch):
    """Also over ends of epochs inside a batch: 6 does not divide 16."""
    expected = take(streams(config, batch=1), 48)
    assert take(streams(config, world_size=world_size, micro=micro, batch=batch), 48 // batch) == expected


def test_ranks_take_disjoint_parts_with_the_same_number_of_micro_batches(config):
    for _ in range(3):
        ranks = streams(config, world_size=4, micro=2, batch=16)
        parts = [stream.next_global_batch() for stream in ranks]
        assert [len(p) for p in parts] == [2] * 4
        letters = [chr(row[0]) for p in parts for b in p for row in b.input_ids]
        assert sorted(letters) == [chr(65 + i) for i in range(SAMPLES)]


@pytest.mark.parametrize("consumed", range(12))
def test_resume_continues_at_the_very_next_sample(config, consumed):
    """Any step, across epochs, with other ranks and micro-batches, and resumed a second time."""
    whole = take(streams(config, batch=6), 20)
    ranks = streams(config, batch=6)
    seen = take(ranks, consumed)
    state = json.loads(json.dumps(ranks[0].state_dict()))
    assert state == {"epoch": consumed * 6 // SAMPLES, "samples": consumed * 6 % SAMPLES}
    for world_size, micro in [(1, 1), (2, 3), (3, 1), (6, 1)]:
        resumed = streams(config, world_size=world_size, micro=micro, batch=6, state=state)
        middle = take(resumed, 3)
        states = [stream.state_dict() for stream in resumed]
        assert all(s == states[0] for s in states), "the state is the same on every rank"
        last = streams(config, world_size=1, micro=2, batch=6, state=states[0])
        assert seen + middle + take(last, 17 - consumed) == whole
        assert last[0].samples_consumed == 20 * 6


def test_resume_with_another_global_batch_size_also_goes_on_at_the_next_sample(config):
    whole = take(streams(config, batch=1), 50)
    ranks = streams(config, batch=5)
    seen = take(ranks, 7)
    assert seen + take(streams(config, batch=3, state=ranks[0].state_dict()), 5) == whole


def test_a_state_that_does_not_fit_is_refused(config):
    (stream,) = streams(config)
    for state, message in [
        ({"epoch": 0, "samples": 16}, "epoch=0, samples=16 does not fit 16 samples"),
        ({"epoch": -1, "samples": 0}, "epoch=-1"),
        ({"epoch": 0}, "integers 'epoch' and 'samples'"),
        (None, "integers 'epoch' and 'samples'"),
    ]:
        with pytest.raises(ValueError, match=message):
            stream.load_state_dict(state)
    with pytest.raises(ValueError, match="at least one sample"):
        SampleOrder(0, seed=0)


def test_the_fingerprint_tells_whether_a_position_means_the_same_samples(config, tmp_path):
    def fingerprint(seq_length=9, seed=0, rank=0, world_size=1, **changes):
        changed = SimpleNamespace(**{**vars(config), **changes})
        return build_data(changed, seq_length=seq_length, seed=seed, rank=rank, world_size=world_size).fingerprint

    same = fingerprint()
    assert same == fingerprint(rank=1, world_size=2) == fingerprint(seed=5, shuffle_seed=0)
    other = tmp_path / "d.jsonl"
    other.write_text(json.dumps({"text": "x" * 9}))
    changes = [{"seq_length": 8}, {"seed": 1}, {"pack": True}, {"train": str(other)}]
    assert same not in [fingerprint(**change) for change in changes]
