"""Tokenized documents as one flat array, built in a stream and, if asked, kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.data.sources import Document, SourceFile, SourceReport, iter_documents
from launch.data.tokenizer import Tokenizer

_CACHE_VERSION = 1
_FLUSH_CHARS = 2**20


@dataclass
class Corpus:
    """Every document's tokens, each document followed by one end-of-text token.

    Attributes:
        tokens: uint16 (vocabulary up to 65536) or uint32, [total]; a copy-on-write memory map when it came
            from disk.
        offsets: int64 [documents + 1]; document ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``, its last
            token eos.
        identities: uint64 [documents], a hash of file name and index in the file: what the split goes by.
        report: counts of the reading, see `SourceReport`, plus ``empty_documents``.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    identities: np.ndarray
    report: dict[str, Any]

    def __len__(self) -> int:
        return len(self.identities)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [documents]: tokens of each document, its eos included."""
        return np.diff(self.offsets)


class _MemoryWriter:
    """A growing array; ``realloc`` in place keeps the peak near the final size."""

    def __init__(self, dtype: np.dtype) -> None:
        self.buffer = np.empty(1 << 16, dtype=dtype)
        self.size = 0

    def write(self, values: np.ndarray) -> None:
        end = self.size + len(values)
        if end > len(self.buffer):
            self.buffer.resize(max(end, len(self.buffer) * 3 // 2), refcheck=False)
        self.buffer[self.size : end] = values
        self.size = end

    def finish(self) -> np.ndarray:
        self.buffer.resize(self.size, refcheck=False)
        return self.buffer


class _FileWriter:
    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.stream = open(path, "wb")
        self.dtype = dtype
        self.size = 0

    def write(self, values: np.ndarray) -> None:
        self.stream.write(np.ascontiguousarray(values, dtype=self.dtype).tobytes())
        self.size += len(values)

    def finish(self) -> None:
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id below ``vocab_size``."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def _tokenize(
    documents: Iterable[Document], tokenizer: Tokenizer, writer: _MemoryWriter | _FileWriter
) -> tuple[np.ndarray, np.ndarray, int]:
    """Streams ``documents`` into ``writer``; returns offsets, identities and the count of empty documents."""
    eos = np.array([tokenizer.eos_id])
    offsets, identities, empty = [0], [], 0
    texts: list[str] = []
    ends: list[tuple[int, str]] = []  # (number of texts before this document's end, identity)
    pending = 0

    def flush() -> None:
        nonlocal empty, pending
        done = 0
        pieces = tokenizer.encode_many(texts)
        for end, identity in ends:
            for piece in pieces[done:end]:
                writer.write(piece)
            done = end
            if writer.size == offsets[-1]:
                empty += 1
                continue
            writer.write(eos)
            offsets.append(writer.size)
            digest = hashlib.blake2b(identity.encode(errors="surrogateescape"), digest_size=8).digest()
            identities.append(int.from_bytes(digest, "little"))
        for piece in pieces[done:]:  # the beginning of a document that goes on
            writer.write(piece)
        texts.clear()
        ends.clear()
        pending = 0

    for document in documents:
        for text in document.pieces:
            texts.append(text)
            pending += len(text)
            if pending >= _FLUSH_CHARS:
                flush()
        ends.append((len(texts), document.identity))
    flush()
    return np.array(offsets, dtype=np.int64), np.array(identities, dtype=np.uint64), empty


def build_corpus(
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    *,
    text_key: str = "text",
    max_bytes: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Reads and tokenizes ``files``, or maps the result of an earlier call from ``cache_dir``.

    The cache is keyed by path, size and modification time of each file, the tokenizer's content and the
    reading options. An entry is a directory that appears in one rename: readers see all of it or nothing, and
    of several processes that write the same entry one wins. A damaged entry is written anew.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    report = SourceReport()
    documents = iter_documents(files, text_key=text_key, max_bytes=max_bytes, report=report)
    if cache_dir is None:
        memory = _MemoryWriter(dtype)
        offsets, identities, empty = _tokenize(documents, tokenizer, memory)
        return Corpus(memory.finish(), offsets, identities, {**asdict(report), "empty_documents": empty})

    root = Path(cache_dir).expanduser()
    final = root / f"tokens-{_cache_key(files, tokenizer, text_key, max_bytes)}"
    cached = _load(final)
    if cached is not None:
        return cached
    partial = root / f".partial-{uuid.uuid4().hex}"
    try:
        partial.mkdir(parents=True)
        disk = _FileWriter(partial / "tokens.bin", dtype)
        try:
            offsets, identities, empty = _tokenize(documents, tokenizer, disk)
        finally:
            disk.finish()
        np.save(partial / "offsets.npy", offsets)
        np.save(partial / "identities.npy", identities)
        counts = {**asdict(report), "empty_documents": empty}
        meta = {"dtype": dtype.name, "tokens": disk.size, "report": counts}
        (partial / "meta.json").write_text(json.dumps(meta))
        _publish(partial, final)
    except OSError as error:
        raise ValueError(f"data.cache_dir {root}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    corpus = _load(final)
    if corpus is None:
        raise ValueError(f"data.cache_dir {root}: the entry {final.name} just written cannot be read back")
    return corpus


def _publish(partial: Path, final: Path) -> None:
    try:
        partial.rename(final)
    except OSError:
        if _load(final) is not None:  # another process was quicker, with the same content
            return
        final.rename(partial.with_name(f"{partial.name}-damaged"))
        shutil.rmtree(partial.with_name(f"{partial.name}-damaged"), ignore_errors=True)
        partial.rename(final)


def _load(entry: Path) -> Corpus | None:
    """The cache entry, or None if there is none or it is incomplete."""
    try:
        meta = json.loads((entry / "meta.json").read_text())
        dtype = np.dtype(meta["dtype"])
        if (entry / "tokens.bin").stat().st_size != meta["tokens"] * dtype.itemsize:
            return None
        offsets = np.load(entry / "offsets.npy")
        identities = np.load(entry / "identities.npy")
        if offsets[-1] != meta["tokens"] or len(offsets) != len(identities) + 1:
            return None
        if meta["tokens"]:
            tokens = np.memmap(entry / "tokens.bin", dtype=dtype, mode="c")
        else:
            tokens = np.empty(0, dtype=dtype)
        return Corpus(tokens, offsets, identities, meta["report"])
    except (OSError, ValueError, KeyError, EOFError, IndexError):
        return None


def _cache_key(files: Sequence[SourceFile], tokenizer: Tokenizer, text_key: str, max_bytes: int | None) -> str:
    try:
        stats = [(file, file.path.stat()) for file in files]
    except OSError as error:
        raise ValueError(f"{error.filename}: cannot be read: {error.strerror}") from error
    parts = [[str(f.path.absolute()), f.name, f.format, s.st_size, s.st_mtime_ns] for f, s in stats]
    key = [_CACHE_VERSION, tokenizer.fingerprint, text_key, max_bytes, parts]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
