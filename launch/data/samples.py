"""Fixed-length training samples cut from a corpus, packed or one document each.

A sample is ``seq_length`` inputs and as many labels, shifted already: ``labels[t]`` is the token after
``input_ids[t]``, or ``IGNORE`` where there is nothing to learn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launch.data.corpus import Corpus

IGNORE = -100
PADDING_DOCUMENT = -1


@dataclass
class Sample:
    """One row: int64 [seq_length] each. The last two exist only where documents are isolated."""

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray | None = None
    document_ids: np.ndarray | None = None


def filler(seq_length: int, pad_id: int, isolate: bool) -> Sample:
    """A row with nothing to learn, shaped like the others."""
    position = np.arange(seq_length, dtype=np.int64)
    return Sample(
        np.full(seq_length, pad_id, dtype=np.int64),
        np.full(seq_length, IGNORE, dtype=np.int64),
        position if isolate else None,
        np.full(seq_length, PADDING_DOCUMENT, dtype=np.int64) if isolate else None,
    )


class PackedSamples:
    """Windows over all documents laid end to end with one end-of-text token between them.

    Windows advance by ``seq_length`` and share one token, so that every token but the very first is a label
    exactly once: nothing is dropped, and the last window is filled up with padding (labels `IGNORE`).

    With ``isolate`` each document is its own context: positions restart at 0 at its first token (and at the
    start of a window), `Sample.document_ids` numbers the documents of the window from 0 (`PADDING_DOCUMENT`
    on padding, an end-of-text token belongs to the document it ends), and a label that lies in another
    document is `IGNORE`.
    """

    dropped_tokens = 0
    truncated_documents = 0

    def __init__(
        self, corpus: Corpus, documents: np.ndarray, seq_length: int, pad_id: int, *, isolate: bool = False
    ) -> None:
        self.corpus, self.documents = corpus, documents
        self.seq_length, self.pad_id, self.isolate = seq_length, pad_id, isolate
        self.ends = np.cumsum(corpus.lengths[documents])
        self.total = int(self.ends[-1]) - 1 if len(documents) else 0  # no end-of-text after the last document
        self.tokens = self.total
        self.padding = len(self) * seq_length - max(self.total - 1, 0)

    def __len__(self) -> int:
        return -(-max(self.total - 1, 0) // self.seq_length)

    def __getitem__(self, index: int) -> Sample:
        start = index * self.seq_length
        stop = min(start + self.seq_length + 1, self.total)
        window = np.full(self.seq_length + 1, self.pad_id, dtype=np.int64)
        document = np.full(self.seq_length + 1, PADDING_DOCUMENT, dtype=np.int64)
        position = np.zeros(self.seq_length + 1, dtype=np.int64)
        at, order, number = start, int(np.searchsorted(self.ends, start, side="right")), 0
        while at < stop:
            end = min(int(self.ends[order]), stop)
            source = int(self.corpus.offsets[self.documents[order] + 1]) - (int(self.ends[order]) - at)
            row = slice(at - start, end - start)
            window[row] = self.corpus.tokens[source : source + end - at]
            document[row] = number
            position[row] = np.arange(end - at)
            at, order, number = end, order + 1, number + 1
        position[stop - start :] = np.arange(len(position) - (stop - start))
        labels = window[1:].copy()
        labels[document[1:] == PADDING_DOCUMENT] = IGNORE
        if not self.isolate:
            return Sample(window[:-1], labels)
        labels[document[1:] != document[:-1]] = IGNORE
        return Sample(window[:-1], labels, position[:-1], document[:-1])


class DocumentSamples:
    """One document a row, padded on the right (labels `IGNORE`) or truncated to ``seq_length + 1`` tokens.

    The end-of-text token is the last label where it fits: a document of ``seq_length`` tokens has room for
    it, one of ``seq_length + 1`` fills the row exactly without it, and only a longer one is truncated.
    Truncated documents and the tokens they lose are counted. Padding is at the end, so causal attention keeps
    it away from every real token.
    """

    isolate = False

    def __init__(self, corpus: Corpus, documents: np.ndarray, seq_length: int, pad_id: int) -> None:
        self.corpus, self.documents = corpus, documents
        self.seq_length, self.pad_id = seq_length, pad_id
        lengths = corpus.lengths[documents] - 1
        self.tokens = int(lengths.sum())
        self.truncated_documents = int((lengths > seq_length + 1).sum())
        self.dropped_tokens = int(np.maximum(lengths - (seq_length + 1), 0).sum())
        self.padding = int(np.maximum(seq_length - lengths, 0).sum())

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Sample:
        document = self.documents[index]
        start, end = int(self.corpus.offsets[document]), int(self.corpus.offsets[document + 1])
        tokens = self.corpus.tokens[start : min(end, start + self.seq_length + 1)].astype(np.int64)
        row = filler(self.seq_length, self.pad_id, False)
        row.input_ids[: len(tokens) - 1] = tokens[:-1]
        row.labels[: len(tokens) - 1] = tokens[1:]
        return row


Samples = PackedSamples | DocumentSamples
