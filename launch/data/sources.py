"""Where text comes from: files, directories, globs and the standard library of the running Python.

A source is read as a stream of `Document`s whose text arrives in pieces, so that one huge file costs no more
memory than a small one. Plain text and JSON Lines need the standard library only; Parquet imports ``pyarrow``
when used.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STDLIB = "stdlib"
FORMATS = ("auto", "text", "jsonl", "parquet")
SUFFIXES = {
    "text": (".txt", ".text", ".md", ".rst", ".py", ".tex"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet", ".pq"),
}
# What "stdlib" leaves out: tests are full of broken or repetitive text on purpose, the rest is no library.
_STDLIB_SKIP_DIRS = ("test", "tests", "*_test", "site-packages", "dist-packages", "config-*", "__pycache__")
_STDLIB_SKIP_FILES = ("_sysconfigdata*",)  # generated for one machine
STDLIB_MAX_BYTES = 32 * 2**20
_PIECE_CHARS = 2**20


@dataclass(frozen=True)
class SourceFile:
    """One file of a source: ``format`` is concrete, ``name`` does not depend on where the source lies."""

    path: Path
    name: str
    format: str
    lenient: bool = False  # skip what is not UTF-8 instead of refusing it


@dataclass
class SourceReport:
    """What reading a source met: counts that `summary` shows, filled in while documents are read."""

    files: int = 0
    bytes: int = 0
    undecodable_files: int = 0
    limited: bool = False  # max_bytes ended the reading before the end of the source


@dataclass
class Document:
    """One document. ``pieces`` yields its text in order, before the next document is asked for."""

    identity: str
    pieces: Iterator[str] = field(repr=False)


def split_spec(spec: str | Sequence[str]) -> list[str]:
    """The items of a list of paths, joined by commas or not; an existing path with a comma is one item."""
    if isinstance(spec, (str, os.PathLike)):
        text = os.fspath(spec)
        items = [text] if os.path.exists(os.path.expanduser(text)) else text.split(",")
    else:
        items = [os.fspath(item) for item in spec]
    items = [item.strip() for item in items if item.strip()]
    if not items:
        raise ValueError(f'no data source in {spec!r}; give "stdlib", or paths or globs joined by commas')
    return items


def resolve_files(spec: str | Sequence[str], format: str = "auto") -> list[SourceFile]:
    """The files of ``spec`` in a fixed order (items as given, sorted by name inside an item), none of them
    twice.

    Raises ValueError if an item matches nothing, or if ``auto`` cannot tell the format of a file by its
    suffix.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown data format {format!r}; allowed: {', '.join(FORMATS)}")
    files: list[SourceFile] = []
    seen: set[str] = set()
    for index, item in enumerate(split_spec(spec)):
        found = _stdlib_files() if item == STDLIB else _path_files(item, format)
        if not found:
            raise ValueError(_nothing_found(item, format))
        for file in found:
            real = os.path.realpath(file.path)
            if real not in seen:
                seen.add(real)
                files.append(SourceFile(file.path, f"{index}/{file.name}", file.format, file.lenient))
    return files


def _nothing_found(item: str, format: str) -> str:
    suffixes = [s for name in SUFFIXES if format in ("auto", name) for s in SUFFIXES[name]]
    if item == STDLIB:
        return f'data source "stdlib": no .py file under {sysconfig.get_path("stdlib")}; give a path instead'
    if os.path.isdir(os.path.expanduser(item)):
        return f"data source {item!r}: no file in that directory has one of the suffixes {' '.join(suffixes)}"
    return f'data source {item!r}: no such file, directory or glob match ("stdlib" needs no file)'


def _stdlib_files() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for directory, subdirs, names in os.walk(root):
        subdirs[:] = [d for d in subdirs if not any(fnmatch.fnmatch(d, p) for p in _STDLIB_SKIP_DIRS)]
        for name in names:
            if name.endswith(".py") and not any(fnmatch.fnmatch(name, p) for p in _STDLIB_SKIP_FILES):
                path = Path(directory, name)
                found.append(SourceFile(path, path.relative_to(root).as_posix(), "text", lenient=True))
    return sorted(found, key=lambda file: file.name)


def _path_files(item: str, format: str) -> list[SourceFile]:
    text = os.path.expanduser(item)
    if os.path.isdir(text):
        return _directory_files(Path(text), format)
    if os.path.exists(text):
        return [SourceFile(Path(text), Path(text).name, _format_of(Path(text), format))]
    found: list[SourceFile] = []
    matches = sorted(glob.glob(text, recursive=True))
    # Names relative to the fixed part of the pattern: moving a data set does not change its split.
    fixed = os.path.dirname(text[: min((text.find(c) for c in "*?[" if c in text), default=len(text))])
    for match in matches:
        path = Path(match)
        name = Path(os.path.relpath(match, fixed or ".")).as_posix()
        if not path.is_dir():  # a dangling link counts as a file, and is refused when it is read
            found.append(SourceFile(path, name, _format_of(path, format)))
        elif "**" not in text:  # a recursive pattern lists the files of its directories itself
            inside = _directory_files(path, format)
            found += [SourceFile(f.path, f"{name}/{f.name}", f.format) for f in inside]
    return found


def _directory_files(root: Path, format: str) -> list[SourceFile]:
    """Files with known suffixes, hidden ones left out.

    Under ``auto``, a directory that holds JSON Lines or Parquet is read as those only: the README beside a
    data set is not a document of it.
    """
    found = []
    for directory, subdirs, names in os.walk(root):
        subdirs[:] = [d for d in subdirs if not d.startswith(".")]
        for name in names:
            kind = next((k for k, s in SUFFIXES.items() if name.lower().endswith(s)), None)
            if kind and not name.startswith(".") and format in ("auto", kind):
                path = Path(directory, name)
                found.append(SourceFile(path, path.relative_to(root).as_posix(), kind))
    if format == "auto" and any(file.format != "text" for file in found):
        found = [file for file in found if file.format != "text"]
    return sorted(found, key=lambda file: file.name)


def _format_of(path: Path, format: str) -> str:
    if format != "auto":
        return format
    suffix = path.suffix.lower()
    for kind, suffixes in SUFFIXES.items():
        if suffix in suffixes:
            return kind
    if not suffix:
        return "text"
    known = " ".join(s for suffixes in SUFFIXES.values() for s in suffixes)
    raise ValueError(
        f"{path}: format auto does not know the suffix {suffix!r} (known: {known}); "
        "set data.format to text, jsonl or parquet"
    )


def iter_documents(
    files: Iterable[SourceFile],
    *,
    text_key: str = "text",
    max_bytes: int | None = None,
    report: SourceReport | None = None,
) -> Iterator[Document]:
    """Documents of ``files`` in order: one a text file, one a line of JSON Lines, one a row of Parquet.

    Args:
        text_key: the field that holds the text; ``a.b`` means field ``b`` of field ``a``.
        max_bytes: stop after this many bytes of UTF-8 text; the document that crosses the limit is cut there.
        report: counts are added to it while reading.

    Raises:
        ValueError: a file that cannot be read or decoded, bad JSON (with its line), a missing or non-string
            field.
    """
    report = SourceReport() if report is None else report
    for file in files:
        report.files += 1
        try:
            yield from _limited(_read_file(file, text_key, report), max_bytes, report)
        except OSError as error:
            raise _unreadable(file.path, error) from error
        if report.limited:
            return


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path}: cannot be read: {error.strerror or error}")


def _limited(documents: Iterator[Document], max_bytes: int | None, report: SourceReport) -> Iterator[Document]:
    def pieces(document: Document) -> Iterator[str]:
        for text in document.pieces:
            size = len(text) if text.isascii() else len(text.encode())
            if max_bytes is not None and report.bytes + size > max_bytes:
                report.limited = True
                text = text.encode()[: max_bytes - report.bytes].decode(errors="ignore")
                size = len(text.encode())
            report.bytes += size
            if text:
                yield text
            if report.limited:
                return

    for document in documents:
        if max_bytes is not None and report.bytes >= max_bytes:
            report.limited = True
        if report.limited:
            return
        yield Document(document.identity, pieces(document))
        if report.limited:  # before the source is asked for a document that nobody wants
            return


def _read_file(file: SourceFile, text_key: str, report: SourceReport) -> Iterator[Document]:
    if file.format == "text":
        if file.lenient:
            try:
                text = file.path.read_bytes().decode()
            except UnicodeDecodeError:
                report.undecodable_files += 1
                return
            yield Document(file.name, iter((text,)))
        else:
            yield Document(file.name, _text_pieces(file.path))
        return
    texts = _jsonl_texts if file.format == "jsonl" else _parquet_texts
    for index, text in enumerate(texts(file.path, text_key)):
        yield Document(f"{file.name}#{index}", iter((text,)))


def _text_pieces(path: Path) -> Iterator[str]:
    """About a million characters at a time, each piece ending with a line: no word is cut in two."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as stream:
            while piece := stream.read(_PIECE_CHARS):
                yield piece + stream.readline()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason}); convert it or set data.format") from error
    except OSError as error:  # here too: the pieces are read outside of iter_documents
        raise _unreadable(path, error) from error


def _jsonl_texts(path: Path, text_key: str) -> Iterator[str]:
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text ({error.reason})") from error
            except (ValueError, RecursionError) as error:  # also too many digits, too deep a nesting
                reason = getattr(error, "msg", str(error))
                raise ValueError(f"{where}: not valid JSON ({reason}), one object a line is due") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: a line must be a JSON object, found {type(row).__name__}")
            yield _text_of(row, text_key, where)


def _parquet_texts(path: Path, text_key: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('Parquet needs pyarrow: pip install "lumen-train[train]", or use jsonl') from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
        names = table.schema_arrow.names
        column = text_key if text_key in names else text_key.split(".")[0]
        if column not in names:
            raise ValueError(f"{path}: no column {text_key!r} (data.text_key); columns: {', '.join(names)}")
        number = 0
        # pyarrow takes a dot in a column's own name for nesting, so such a file is read whole.
        for batch in table.iter_batches(batch_size=1024, columns=None if "." in column else [column]):
            for value in batch.column(column).to_pylist():
                yield _text_of({column: value}, text_key, f"{path}, row {number}")
                number += 1
    except (pyarrow.ArrowException, OSError) as error:  # pyarrow reports a damaged file as either
        raise ValueError(f"{path}: cannot be read as Parquet: {str(error).splitlines()[0]}") from error


def _text_of(row: dict[str, Any], key: str, where: str) -> str:
    value: Any = row
    if key in row:
        value = row[key]
    else:
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                has = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
                raise ValueError(f"{where}: no field {key!r} (data.text_key): {part!r} is not in: {has}")
            value = value[part]
    if not isinstance(value, str):
        kind = type(value).__name__
        raise ValueError(f"{where}: field {key!r} (data.text_key) must be a string, found {kind}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which no tokenizer takes
        value = value.encode(errors="replace").decode()
    return value
