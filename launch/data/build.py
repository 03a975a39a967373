"""From `DataConfig` to batches."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from launch.data.batches import TrainStream, ValidationSet
from launch.data.corpus import Corpus, build_corpus
from launch.data.order import derive_seed, mix64
from launch.data.samples import DocumentSamples, PackedSamples, Samples
from launch.data.sources import STDLIB, STDLIB_MAX_BYTES, SourceFile, resolve_files, split_spec
from launch.data.tokenizer import Tokenizer, load_tokenizer

_SPLIT_SALT = 0x73706C6974  # keeps the split's hash apart from the order's


@dataclass
class Data:
    """Everything one rank needs of the data.

    Attributes:
        tokenizer: see `Tokenizer`.
        train: endless stream of global batches with the resumable position.
        validation: the fixed held-out batches (of length 0 if ``validation_fraction`` is 0).
        fingerprint: changes whenever the same position would mean other samples; save it beside the position.
    """

    tokenizer: Tokenizer
    train: TrainStream
    validation: ValidationSet
    fingerprint: str
    _summary: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """Counts for the report, as nested dicts of plain numbers.

        ``train`` and ``validation`` have documents, samples, tokens, padding, truncated_documents and
        dropped_tokens; ``reading`` (and ``validation_reading``) what reading met and left out, see `Corpus`.
        """
        return json.loads(json.dumps(self._summary))


def build_data(
    data_cfg: Any,
    *,
    seq_length: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    micro_batch_size: int = 1,
    global_batch_size: int | None = None,
) -> Data:
    """Reads, tokenizes and splits the text of ``data_cfg`` (a `launch.config.DataConfig`).

    Fields ``isolate_documents``, ``max_bytes`` and ``cache_dir`` are optional. ``max_bytes`` None means 32
    MiB for ``stdlib`` and no limit otherwise.

    Raises:
        ValueError: nothing to read, unreadable or too little text, or sizes that do not fit together.
    """
    sizes = {"seq_length": seq_length, "world_size": world_size, "micro_batch_size": micro_batch_size}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1} (world_size {world_size}), got {rank}")
    step = micro_batch_size * world_size
    global_batch_size = step if global_batch_size is None else global_batch_size
    if global_batch_size < 1 or global_batch_size % step:
        raise ValueError(
            f"global_batch_size {global_batch_size} must be a multiple of micro_batch_size x world_size = "
            f"{micro_batch_size} x {world_size} = {step}"
        )
    shuffle_seed = _get(data_cfg, "shuffle_seed")
    shuffle_seed = seed if shuffle_seed is None else shuffle_seed
    pack, isolate = _get(data_cfg, "pack", True), _get(data_cfg, "isolate_documents", False)

    tokenizer = load_tokenizer(_get(data_cfg, "tokenizer", "byte"))
    parts, reading = _split(data_cfg, tokenizer, shuffle_seed)
    samples: dict[str, Samples] = {}
    summary: dict[str, Any] = {}
    for name, (corpus, documents) in parts.items():
        if pack:
            made = PackedSamples(corpus, documents, seq_length, tokenizer.pad_id, isolate=isolate)
        else:
            made = DocumentSamples(corpus, documents, seq_length, tokenizer.pad_id)
        if len(made) == 0:
            raise ValueError(
                f"the {name} data has {made.tokens} token(s) in {len(documents)} document(s), "
                "which makes no sample; give more text (data.train, data.validation)"
            )
        samples[name] = made
        summary[name] = {"documents": len(documents), "samples": len(made)} | {
            key: getattr(made, key) for key in ("tokens", "padding", "truncated_documents", "dropped_tokens")
        }
    summary |= reading
    corpus, documents = parts["train"]
    digest = hashlib.sha256(json.dumps([tokenizer.fingerprint, seq_length, pack, isolate, shuffle_seed]).encode())
    for column in (corpus.identities, corpus.lengths):
        digest.update(column[documents].tobytes())
    place = {"rank": rank, "world_size": world_size, "micro_batch_size": micro_batch_size}
    stream = TrainStream(samples["train"], seed=shuffle_seed, global_batch_size=global_batch_size, **place)
    held_out = ValidationSet(samples.get("validation"), **place)
    return Data(tokenizer, stream, held_out, digest.hexdigest()[:16], summary)


def _get(config: Any, name: str, default: Any = None) -> Any:
    return getattr(config, name, default)


Part = tuple[Corpus, np.ndarray]  # a corpus and the indices of its documents that belong to the part


def _split(config: Any, tokenizer: Tokenizer, seed: int) -> tuple[dict[str, Part], dict[str, Any]]:
    """Train and validation parts, and the counts of the reading."""
    train_spec, validation_spec = _get(config, "train", STDLIB), _get(config, "validation")
    format, fraction = _get(config, "format", "auto"), _get(config, "validation_fraction", 0.05)
    train_files = resolve_files(train_spec, format)
    if validation_spec is not None:
        validation_files = resolve_files(validation_spec, format)
        _refuse_overlap(train_files, validation_files)
        train = _read(config, train_spec, train_files, tokenizer)
        validation = _read(config, validation_spec, validation_files, tokenizer)
        parts = {"train": _all(train), "validation": _all(validation)}
        return parts, {"reading": train.report, "validation_reading": validation.report}
    if not 0 <= fraction < 1:
        raise ValueError(f"data.validation_fraction must be at least 0 and below 1, got {fraction}")
    corpus = _read(config, train_spec, train_files, tokenizer)
    if fraction == 0:
        return {"train": _all(corpus)}, {"reading": corpus.report}
    if len(corpus) == 1:
        parts = _cut_document(corpus, fraction, tokenizer.eos_id)
        return parts, {"reading": corpus.report, "document_cut_in_two": True}
    held_out = split_documents(corpus.identities, fraction, seed)
    parts = {"train": (corpus, np.flatnonzero(~held_out)), "validation": (corpus, np.flatnonzero(held_out))}
    return parts, {"reading": corpus.report}


def _all(corpus: Corpus) -> Part:
    return corpus, np.arange(len(corpus))


def _read(config: Any, spec: Any, files: list[SourceFile], tokenizer: Tokenizer) -> Corpus:
    max_bytes = _get(config, "max_bytes")
    if max_bytes is None and split_spec(spec) == [STDLIB]:
        max_bytes = STDLIB_MAX_BYTES
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"data.max_bytes must be at least 1, got {max_bytes}")
    corpus = build_corpus(
        files,
        tokenizer,
        text_key=_get(config, "text_key", "text"),
        max_bytes=max_bytes,
        cache_dir=_get(config, "cache_dir"),
    )
    if len(corpus) == 0:
        raise ValueError(f"data source {spec!r} holds no text: {len(files)} file(s), {corpus.report}")
    return corpus


def _refuse_overlap(train: list[SourceFile], validation: list[SourceFile]) -> None:
    shared = {os.path.realpath(f.path) for f in train} & {os.path.realpath(f.path) for f in validation}
    if shared:
        raise ValueError(
            f"data.validation shares {len(shared)} file(s) with data.train, the first {min(shared)}; "
            "narrow one of the two, or leave data.validation null for a split by document"
        )


def split_documents(identities: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """bool [documents]: which documents are held out for validation.

    Those whose seeded hash is smallest: about ``fraction`` of them, at least one, and at least one is left.
    It goes by the identity (uint64 [documents]), not by the order of reading.
    """
    count = min(max(round(fraction * len(identities)), 1), len(identities) - 1)
    keys = mix64(identities ^ np.uint64(derive_seed(seed, _SPLIT_SALT)))
    held_out = np.zeros(len(identities), dtype=bool)
    held_out[np.argsort(keys, kind="stable")[:count]] = True
    return held_out


def _cut_document(corpus: Corpus, fraction: float, eos_id: int) -> dict[str, Part]:
    """A corpus of one document, say one book in one file: its end becomes the validation document."""
    length = len(corpus.tokens) - 1
    if length < 4:
        raise ValueError(f"the only document has {length} token(s), too few for training and validation")
    cut = min(max(length - round(fraction * length), 2), length - 2)
    tail = corpus.tokens[cut:].copy()
    head = corpus.tokens[: cut + 1]
    # The end-of-text goes where the tail (copied above) began: the head is not copied, for it may be huge.
    head[cut] = eos_id
    parts = {}
    for name, tokens in (("train", head), ("validation", tail)):
        parts[name] = _all(replace(corpus, tokens=tokens, offsets=np.array([0, len(tokens)])))
    return parts
