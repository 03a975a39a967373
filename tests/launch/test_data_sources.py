"""Reading text: files, globs, formats, refusals, limits, the on-disk cache."""

import json
import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from launch.data.corpus import build_corpus
from launch.data.sources import SourceReport, iter_documents, resolve_files
from launch.data.tokenizer import ByteTokenizer


def read(spec, format="auto", **options):
    report = SourceReport()
    documents = iter_documents(resolve_files(spec, format), report=report, **options)
    return ["".join(document.pieces) for document in documents], report


def write_jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_kind_of_spec_lists_the_same_files_in_the_same_order(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    expected = ["text of a.txt", "text of b.txt", "text of sub/c.txt"]
    monkeypatch.chdir(tmp_path)
    assert read(str(tmp_path))[0] == expected
    assert read(str(tmp_path / "**" / "*.txt"))[0] == expected
    assert read("a.txt, b.txt,sub")[0] == expected
    assert read([tmp_path / "a.txt", "b.txt", "sub/*"])[0] == expected
    assert read("a.txt,a.txt,*.txt,.")[0] == expected, "no file is read twice"
    (tmp_path / "x,y.txt").write_text("comma")
    assert read("x,y.txt")[0] == ["comma"]


def test_jsonl_text_key_may_be_nested_and_blank_lines_are_no_documents(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": {"b": "one"}, "x.y": "dot"}\n\n{"a": {"b": "z\\ud800"}, "x.y": "t"}\n')
    assert read(path, text_key="a.b")[0] == ["one", "z?"]
    assert read(path, text_key="x.y")[0] == ["dot", "t"]


def test_parquet_flat_nested_and_dotted_columns(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"text": f"row {i}", "meta": {"body": f"body {i}"}, "q.r": f"dot {i}"} for i in range(3000)]
    path = tmp_path / "d.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)
    for key, start in (("text", "row"), ("meta.body", "body"), ("q.r", "dot")):
        assert read(path, text_key=key)[0] == [f"{start} {i}" for i in range(3000)]
    with pytest.raises(ValueError, match=r"d\.parquet: no column 'txt'.*text, meta, q\.r"):
        read(path, text_key="txt")
    with pytest.raises(ValueError, match=r"row 0: no field 'meta.x'.*body"):
        read(path, text_key="meta.x")
    path.write_bytes(b"PAR1 this is no parquet")
    with pytest.raises(ValueError, match=r"d\.parquet: cannot be read as Parquet"):
        read(path)


def test_a_data_directory_is_read_without_the_readme_beside_the_data(tmp_path):
    write_jsonl(tmp_path / "d.jsonl", [{"text": "data"}])
    (tmp_path / "README.md").write_text("about")
    assert read(tmp_path)[0] == ["data"]
    assert read(tmp_path, "text")[0] == ["about"]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("d.jsonl", b'{"text": "a"}\n{"text": \n', {}, r"d\.jsonl:2: not valid JSON"),
        ("d.jsonl", b'{"text": "a"}\n["b"]\n', {}, r"d\.jsonl:2: .*JSON object, found list"),
        ("d.jsonl", b'{"body": "a", "id": 1}\n', {}, r"d\.jsonl:1: no field 'text'.*body, id"),
        ("d.jsonl", b'{"text": null}\n', {}, r"d\.jsonl:1: field 'text'.*string, found NoneType"),
        ("d.jsonl", b'{"text": "a"}\n', {"text_key": "text.x"}, r"d\.jsonl:1: no field 'text\.x'"),
        ("d.jsonl", b'{"text": "\xff"}\n', {}, r"d\.jsonl:1: not UTF-8"),
        ("d.txt", b"abc\xff", {}, r"d\.txt: not UTF-8"),
        ("d.csv", b"a", {}, r"d\.csv: format auto does not know the suffix '\.csv' .*\.txt"),
    ],
)
def test_bad_content_is_refused_with_its_place(tmp_path, name, content, options, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name, **options)


def test_bad_specs_are_refused_by_name(tmp_path):
    (tmp_path / "a.bin").write_text("a")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    for spec, message in [
        ("missing.txt", "missing.txt.*no such file"),
        (str(tmp_path / "*.jsonl"), "jsonl.*no such file, directory or glob"),
        (" , ", "no data source"),
        (str(tmp_path / "gone*"), r"gone\.txt: cannot be read: No such file"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(spec)
    (tmp_path / "gone.txt").unlink()
    with pytest.raises(ValueError, match=r"suffixes .*\.txt .*\.jsonl .*\.parquet"):
        read(tmp_path)
    with pytest.raises(ValueError, match="'csv'; allowed: auto, text, jsonl, parquet"):
        read(tmp_path, "csv")


def test_stdlib_is_the_library_without_its_tests(monkeypatch, tmp_path):
    names = [file.name for file in resolve_files("stdlib")]
    assert names == sorted(names) and "0/argparse.py" in names and "0/json/decoder.py" in names
    assert not [n for n in names if "/test/" in n or "/tests/" in n or "_test/" in n or "-packages/" in n]
    (tmp_path / "good.py").write_text("x = 'é'")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text("no")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    texts, report = read("stdlib")
    assert texts == ["x = 'é'"] and report.undecodable_files == 1 and report.files == 2


def test_max_bytes_cuts_the_document_at_the_limit_and_reads_no_further(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "aaaa"}, {"text": "éé"}, {"text": "cccc"}])
    assert read(path, max_bytes=12)[0] == ["aaaa", "éé", "cccc"]
    assert not read(path, max_bytes=12)[1].limited
    for limit, expected in [(7, ["aaaa", "é"]), (8, ["aaaa", "éé"]), (3, ["aaa"])]:
        texts, report = read(path, max_bytes=limit)
        assert texts == expected and report.limited and report.bytes <= limit
    path.write_text('{"text": "aaaa"}\nbroken')
    assert read(path, max_bytes=2)[0] == ["aa"], "what lies behind the limit is not read"


def test_large_text_comes_in_pieces_that_join_to_the_file(tmp_path):
    text = "".join(f"line {i} é\r\n" for i in range(300_000))
    (tmp_path / "big.txt").write_bytes(text.encode())
    (document,) = list(iter_documents(resolve_files(tmp_path / "big.txt")))
    pieces = list(document.pieces)
    assert len(pieces) > 2 and all(p.endswith("\n") for p in pieces) and "".join(pieces) == text


@pytest.mark.parametrize("cached", [False, True])
def test_corpus_holds_each_document_and_its_eos(tmp_path, cached, monkeypatch):
    texts = ["one", "", "é" * 40_000, "t"]  # the long one spans flushes
    monkeypatch.setattr("launch.data.corpus._FLUSH_CHARS", 1000)
    write_jsonl(tmp_path / "d.jsonl", [{"text": t} for t in texts])
    files, tokenizer = resolve_files(tmp_path / "d.jsonl"), ByteTokenizer()
    corpus = build_corpus(files, tokenizer, cache_dir=tmp_path / "cache" if cached else None)
    assert corpus.tokens.dtype == np.uint16 and len(corpus) == 3 and corpus.report["empty_documents"] == 1
    for i, text in enumerate(t for t in texts if t):
        row = corpus.tokens[corpus.offsets[i] : corpus.offsets[i + 1]].tolist()
        assert row == [*text.encode(), tokenizer.eos_id]


def test_cache_is_reused_renewed_when_the_file_changes_and_repaired(tmp_path, monkeypatch):
    path, cache = write_jsonl(tmp_path / "d.jsonl", [{"text": "abc"}, {"text": "de"}]), tmp_path / "cache"
    calls = []
    encode = ByteTokenizer.encode_many
    monkeypatch.setattr(ByteTokenizer, "encode_many", lambda s, t: calls.append(1) or encode(s, t))

    def build(**options):
        corpus = build_corpus(resolve_files(path), ByteTokenizer(), cache_dir=cache, **options)
        return len(calls), bytes(int(t) for t in corpus.tokens if t < 256), corpus

    assert build()[:2] == (1, b"abcde")
    count, _, corpus = build()
    assert count == 1, "the second call reads the cache"
    assert corpus.report["bytes"] == 5
    corpus.tokens[0] = 99  # a private copy of the page: the file keeps its content
    assert build()[:2] == (1, b"abcde")
    assert build(max_bytes=3)[:2] == (2, b"abc"), "another limit is another entry"
    stat = path.stat()
    write_jsonl(path, [{"text": "abd"}, {"text": "de"}])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert build()[:2] == (3, b"abdde")
    for entry in cache.iterdir():
        with open(entry / "tokens.bin", "r+b") as stream:
            stream.truncate(4)
    assert build()[:2] == (4, b"abdde"), "a damaged entry is written anew"
    assert not [p.name for p in cache.iterdir() if p.name.startswith(".")], "nothing half-written stays"
    write_jsonl(path, [{"text": "new content"}]).open("a").write("broken")
    with pytest.raises(ValueError, match=r"d\.jsonl:2"):
        build()
    assert not [p.name for p in cache.iterdir() if p.name.startswith(".")]
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ValueError, match="cache_dir .*cannot be written"):
        write_jsonl(path, [{"text": "a"}])
        build_corpus(resolve_files(path), ByteTokenizer(), cache_dir=blocked)


def test_ranks_that_fill_the_cache_at_once_all_get_the_data(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": f"document {i}"} for i in range(5000)])

    def build(_):
        return build_corpus(resolve_files(path), ByteTokenizer(), cache_dir=tmp_path / "cache")

    with ThreadPoolExecutor(6) as pool:
        corpora = list(pool.map(build, range(6)))
    expected = build_corpus(resolve_files(path), ByteTokenizer())
    for corpus in corpora:
        assert np.array_equal(corpus.tokens, expected.tokens)
        assert np.array_equal(corpus.offsets, expected.offsets)
    assert len(list((tmp_path / "cache").iterdir())) == 1
