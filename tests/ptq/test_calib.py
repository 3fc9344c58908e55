"""Calibration data: what is read and refused, and the laws of the samples."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.assets import asset
from jaxmoe.engine.tokenizer import Tokenizer
from jaxmoe.errors import ConfigError, RequestError
from jaxmoe.ptq.calib import Calibration, joined, next_windows, sample_windows
from jaxmoe.ptq.calib_coverage import measure_coverage
from jaxmoe.ptq.calib_documents import Document, TokenizedDocument, read_documents, tokenize_documents
from jaxmoe.ptq.calib_windows import STRATA, Sampling, length_edges
from tests.commands.folders import write_tokenizer

SEPARATOR = 0


class Characters:
    """One token a character, by its number; conversations as role and text."""

    def encode_long(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, ready: bool) -> list[int]:
        text = "".join(f"{message['role']}:{message['content']};" for message in messages)
        return [ord(c) for c in text + ("assistant:" if ready else "")]


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8"))
    return path


def lines(path: Path, *records: object) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


# Reading.

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def test_every_kind_of_record(tmp_path: Path) -> None:
    records = [
        {"text": "plain"},
        {"inputs_pretokenized": "msModelSlim's", "id": 7, "token_count": 3},
        {"messages": CHAT, "domain": "chat"},
        {"prompt": "2 + 2?", "response": "4", "id": "a"},
        "a string",
    ]
    contents = ("plain", "msModelSlim's", tuple(CHAT), tuple(CHAT), "a string")
    domains = ("maths", "maths", "chat", "maths", "maths")
    by_line = read_documents(lines(tmp_path / "maths.jsonl", *records))
    by_index = read_documents(write(tmp_path / "maths.json", json.dumps(records)))
    for documents in (by_line, by_index):
        assert tuple(document.content for document in documents) == contents
        assert tuple(document.domain for document in documents) == domains
    assert by_line[4].where == f"{tmp_path}/maths.jsonl:5"
    assert by_index[4].where == f"{tmp_path}/maths.json[4]"


@pytest.mark.parametrize("suffix", [".txt", ".md"])
def test_text_is_one_document_and_keeps_its_line_ends(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"prose{suffix}", "One.\r\n\r\nTwo.\n")
    assert read_documents(path) == (Document(domain="prose", where=str(path), content="One.\r\n\r\nTwo.\n"),)


def test_line_separators_inside_a_string_end_no_record(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "one\u2028two\x85three"}\r\n{"text": "four"}')
    assert [document.content for document in read_documents(path)] == ["one\u2028two\x85three", "four"]


BAD_RECORDS = {
    '{"text": "a"': "not JSON: Expecting ',' delimiter",
    "": "not JSON: Expecting value",
    '{"text": "a", "text": "b"}': "not JSON: key text is there twice",
    "[" * 100_000: "not JSON: maximum recursion depth exceeded",
    "17": "17 is not a table",
    '{"text": 17}': "17 is not a str",
    '{"text": "a", "meta": {}}': "unknown key meta; known are domain, id, inputs_pretokenized, messages, prompt, ",
    '{"domain": "a"}': "none of text, inputs_pretokenized, messages, prompt/response; a record has one",
    '{"text": "a", "prompt": "b"}': "more than one of text, prompt/response; a record has one",
    '{"prompt": "a"}': "missing key response; prompt and response go together",
    '{"response": "a"}': "missing key prompt; prompt and response go together",
    '{"prompt": "a", "response": ""}': "response is empty",
    '{"text": " \\n"}': "text is empty",
    '""': "text is empty",
    '{"inputs_pretokenized": ""}': "inputs_pretokenized is empty",
    '{"inputs_pretokenized": [1, 2]}': r"inputs_pretokenized: \[1, 2\] is not a str",
    '{"text": "a", "domain": ""}': "domain is empty",
    '{"text": "a\\ud800"}': "text is not valid Unicode: .*surrogates not allowed",
    '{"messages": []}': "messages is empty",
    '{"messages": [{"role": "user", "content": ""}]}': r"messages\[0\].content is empty",
    '{"messages": [{"role": "user"}]}': r"messages\[0\]: missing key content",
    '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}': r"messages\[0\].content: .* is not a str",
}


@pytest.mark.parametrize("record", BAD_RECORDS, ids=range(len(BAD_RECORDS)))
def test_bad_record_is_named(tmp_path: Path, record: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "good"}\n' + record + '\n{"text": "good"}\n')
    with pytest.raises(ConfigError, match=rf"^{path}:2[.:].*{BAD_RECORDS[record]}"):
        read_documents(path)


def test_bad_record_of_a_list_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '["good", {"text": ""}]')
    with pytest.raises(ConfigError, match=rf"^{path}\[1\]: text is empty"):
        read_documents(path)


BAD_FILES = {
    "empty.jsonl": ("", "holds no records"),
    "empty.json": ("[]", "holds no records"),
    "object.json": ('{"text": "a"}', "holds a dict where a list of records was expected"),
    "broken.json": ("[", "not JSON"),
    "empty.txt": (" \n", "the text is empty"),
    "a.csv": ("a,b", ".csv is not one of .json, .jsonl, .txt, .md"),
    "README": ("a", "no suffix is not one of"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_refused(tmp_path: Path, name: str) -> None:
    text, message = BAD_FILES[name]
    path = write(tmp_path / name, text)
    with pytest.raises(ConfigError, match=rf"^{path}:? {message}"):
        read_documents(path)


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("größe".encode("latin-1"))
    (tmp_path / "folder.txt").mkdir()
    for name in ("latin.txt", "folder.txt"):
        with pytest.raises(ConfigError, match=f"{name} is not readable as UTF-8 text"):
            read_documents(tmp_path / name)
    with pytest.raises(ConfigError, match=r"absent.txt does not exist"):
        read_documents(tmp_path / "absent.txt")


# Tokens.


def test_texts_and_conversations_become_tokens(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "ab"}, {"messages": CHAT, "domain": "chat"})
    text, chat = tokenize_documents(read_documents(path), Characters())
    assert text.ids.tolist() == [97, 98] and text.ids.dtype == np.int32 and text.domain == "a"
    assert bytes(chat.ids.tolist()) == b"user:2 + 2?;assistant:4;" and chat.domain == "chat"
    asked = lines(tmp_path / "b.jsonl", {"messages": CHAT[:1]})
    (question,) = tokenize_documents(read_documents(asked), Characters())
    assert bytes(question.ids.tolist()) == b"user:2 + 2?;assistant:", (
        "a question is followed by where its answer begins"
    )


def test_document_without_tokens_is_refused() -> None:
    class Deaf(Characters):
        def encode_long(self, text: str) -> list[int]:
            return []

    with pytest.raises(ConfigError, match="a.txt: the tokenizer makes no tokens of this document"):
        tokenize_documents([Document(domain="a", where="a.txt", content="x")], Deaf())


def test_checkpoint_tokenizer_with_and_without_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    documents = read_documents(lines(tmp_path / "a.jsonl", {"text": "user"}, {"prompt": "Hi", "response": "Ho"}))
    tokenizer = Tokenizer(tmp_path, 256)
    text, chat = tokenize_documents(documents, tokenizer)
    assert tokenizer.decode(text.ids.tolist()) == "user"
    assert tokenizer.decode(chat.ids.tolist()) == "user: Hi\nassistant: Ho\n"
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    with pytest.raises(RequestError, match=r"a.jsonl:2: this checkpoint has no chat template"):
        tokenize_documents(documents, Tokenizer(tmp_path, 256))


# Samples. Tokens of the made documents are all different, so that each says where it comes from.


def made(sizes: Mapping[str, Sequence[int]]) -> tuple[TokenizedDocument, ...]:
    """Documents of numbers that follow each other; a hundred are left out between two documents."""
    documents, start = [], 1
    for domain, own in sizes.items():
        for size in own:
            documents.append(
                TokenizedDocument(domain=domain, where="made", ids=np.arange(start, start + size, dtype=np.int32))
            )
            start += size + 100
    return tuple(documents)


Case = tuple[dict[str, list[int]], Sampling]
"""Sizes of the documents by domain (the documents are made in the test: type checks inside a strategy draw random
numbers, which hypothesis forbids), and how they are cut."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shortest = draw(st.integers(1, 40))
    longest = shortest + draw(st.integers(0, 120))
    sizes = st.lists(st.integers(1, 300), min_size=1, max_size=8).filter(lambda s: sum(s) + len(s) > shortest)
    by_domain = draw(st.dictionaries(st.sampled_from("abcd"), sizes, min_size=1))
    sampling = Sampling(min_tokens=shortest, max_tokens=longest, separator=SEPARATOR, seed=draw(st.integers(0, 3)))
    return by_domain, sampling


def sample(documents: Sequence[TokenizedDocument], sampling: Sampling, samples: int) -> Calibration:
    return sample_windows(documents, samples=samples, **dataclasses.asdict(sampling))


def rows(calibration: Calibration) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(calibration.tokens, calibration.lengths, strict=True)]


def assert_same(one: Calibration, other: Calibration) -> None:
    for field in dataclasses.fields(Calibration):
        assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name


@given(case=cases(), samples=st.integers(4, 30))
def test_shapes_lengths_and_padding(case: Case, samples: int) -> None:
    documents, sampling = made(case[0]), case[1]
    calibration = sample(documents, sampling, samples)
    assert calibration.tokens.shape == (samples, sampling.max_tokens) and calibration.tokens.dtype == np.int32
    assert ((calibration.lengths >= sampling.min_tokens) & (calibration.lengths <= sampling.max_tokens)).all()
    columns = np.arange(sampling.max_tokens)[None, :]
    assert ((calibration.tokens >= 0) == (columns < calibration.lengths[:, None])).all()
    assert set(calibration.domains) == {document.domain for document in documents}, "every domain is there"


@given(case=cases(), samples=st.integers(4, 30))
def test_tokens_are_those_of_the_domain_in_order(case: Case, samples: int) -> None:
    documents, sampling = made(case[0]), case[1]
    calibration = sample(documents, sampling, samples)
    domain_of = {int(token): document.domain for document in documents for token in document.ids}
    for row, domain in zip(rows(calibration), calibration.domains, strict=True):
        assert {domain_of[token] for token in row if token != SEPARATOR} == {domain}
        assert row[0] != SEPARATOR
        for token, following in itertools.pairwise(row):
            assert following in (token + 1, SEPARATOR) or token == SEPARATOR, "only a separator breaks a text"
            assert (token, following) != (SEPARATOR, SEPARATOR)
        tokens = [token for token in row if token != SEPARATOR]
        assert len(set(tokens)) == len(tokens), "no token is twice in a window"


@given(case=cases(), samples=st.integers(4, 40))
def test_no_token_is_used_again_before_all_are_used(case: Case, samples: int) -> None:
    documents, sampling = made(case[0]), case[1]
    calibration = sample(documents, sampling, samples)
    # Tokens are left over only where the range of lengths is too narrow to take them in.
    limit = 0 if sampling.max_tokens >= 2 * sampling.min_tokens else sampling.min_tokens - 1
    seen: set[int] = set()
    repeating = False
    for index, row in enumerate(rows(calibration)):
        tokens = {token for token in row if token != SEPARATOR}
        assert calibration.fresh_tokens[index] == len(tokens - seen)
        assert calibration.repeated_tokens[index] == len(tokens & seen)
        if tokens & seen and not repeating:
            repeating = True
            for domain in case[0]:
                unused = {int(t) for document in documents if document.domain == domain for t in document.ids} - seen
                assert len(unused) <= limit
        seen |= tokens


@given(case=cases(), samples=st.integers(4, 20), more=st.integers(1, 20))
def test_same_seed_same_bytes_and_more_samples_go_on(case: Case, samples: int, more: int) -> None:
    documents, sampling = made(case[0]), case[1]
    whole, first = sample(documents, sampling, samples + more), sample(documents, sampling, samples)
    following = next_windows(first, documents, samples=more)
    assert following.first == samples
    assert_same(joined(first, following), whole)


@given(case=cases(), samples=st.integers(4, 30))
def test_report_adds_up(case: Case, samples: int) -> None:
    documents, sampling = made(case[0]), case[1]
    calibration = sample(documents, sampling, samples)
    report = calibration.report
    assert report.samples == samples and report.tokens == sum(len(row) for row in rows(calibration))
    assert report.separators == sum(row.count(SEPARATOR) for row in rows(calibration))
    assert report.tokens == report.fresh_tokens + report.repeated_tokens + report.separators
    for parts in (report.domains, report.lengths):
        assert sum(part.samples for part in parts) == samples
        assert sum(part.tokens for part in parts) == report.tokens
    available = sum(part.available_tokens for part in report.domains)
    assert available == sum(len(document.ids) for document in documents) >= report.fresh_tokens
    assert (report.repeats == 0) == (report.repeated_tokens == 0)
    assert report.lengths[0].low_tokens == sampling.min_tokens
    assert report.lengths[-1].high_tokens == sampling.max_tokens


@given(shortest=st.integers(1, 5000), more=st.integers(0, 5000))
def test_edges_of_the_strata_rise(shortest: int, more: int) -> None:
    edges = length_edges(Sampling(min_tokens=shortest, max_tokens=shortest + more, separator=0, seed=0))
    assert edges[0] == shortest and edges[-1] == shortest + more + 1
    assert 2 <= len(edges) <= STRATA + 1 and (np.diff(edges) > 0).all()


def test_lengths_are_spread_evenly_in_every_domain() -> None:
    documents = made({"long": [20_000], "short": [30] * 400})
    calibration = sample_windows(documents, separator=SEPARATOR, samples=80, min_tokens=64, max_tokens=255)
    assert calibration.report.repeats == 0
    edges = [64, 91, 128, 181, 256]
    for domain in ("long", "short"):
        lengths = calibration.lengths[[d == domain for d in calibration.domains]]
        assert np.histogram(lengths, edges)[0].tolist() == [10, 10, 10, 10]
        assert len(set(lengths.tolist())) > 20
    assert calibration.domains[:4] == ("long", "short", "long", "short")


def test_seeds_differ_and_a_new_domain_changes_no_other() -> None:
    arguments = {"separator": SEPARATOR, "samples": 6, "min_tokens": 20, "max_tokens": 60}
    documents = made({"a": [50, 300, 70, 20], "b": [500]})
    one, other = sample_windows(documents, seed=1, **arguments), sample_windows(documents, seed=2, **arguments)
    assert rows(one) != rows(other)
    alone = sample_windows(documents[:4], seed=1, **{**arguments, "samples": 3})
    assert rows(alone) == rows(one)[::2]


def test_small_data_are_repeated_and_it_is_said() -> None:
    documents = made({"a": [100], "b": [1000]})
    calibration = sample_windows(documents, separator=SEPARATOR, samples=60, min_tokens=16, max_tokens=64)
    report = calibration.report
    assert report.fresh_tokens == 1100, "all data are used"
    assert 0 < report.repeats < 60 and report.repeated_tokens > 0
    again = next(i for i, n in enumerate(calibration.repeated_tokens) if n)
    assert set(calibration.domains[again - 3 : again]) == {"b"}, "a domain that is used up waits for the others"
    assert len({tuple(row) for row in rows(calibration)}) == 60, "repeated tokens stand in other contexts"
    assert next_windows(calibration, documents, samples=5).report.repeats == 5


def test_short_documents_are_joined_not_dropped() -> None:
    calibration = sample_windows(made({"a": [9] * 10}), separator=SEPARATOR, samples=1, min_tokens=99, max_tokens=99)
    (row,) = rows(calibration)
    assert row.count(SEPARATOR) == 9 and calibration.report.fresh_tokens == 90


def test_sampling_refuses() -> None:
    documents = made({"a": [30, 30], "b": [100]})
    good = {"separator": 0, "samples": 4, "min_tokens": 10, "max_tokens": 20, "seed": 0}
    for change, message in (
        ({"samples": 0}, "0 calibration samples; take at least 1"),
        ({"samples": 1}, r"1 calibration samples leave out some of the 2 domains \(a, b\); take at least 2"),
        ({"min_tokens": 0}, "calibration windows of 0 to 20 tokens"),
        ({"max_tokens": 9}, "calibration windows of 10 to 9 tokens"),
        ({"separator": -1}, "calibration separator -1 and seed 0"),
        ({"seed": -1}, "calibration separator 0 and seed -1"),
        (
            {"min_tokens": 62, "max_tokens": 90},
            "calibration domain 'a' holds 61 tokens in 2 documents, a window has at least 62; add text or lower",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            sample_windows(documents, **{**good, **change})
    with pytest.raises(ConfigError, match="no calibration documents were given"):
        sample_windows((), **good)


def test_extension_refuses_other_data() -> None:
    documents = made({"a": [300]})
    calibration = sample_windows(documents, separator=0, samples=2, min_tokens=10, max_tokens=20)
    with pytest.raises(
        ConfigError, match=r"the documents \(sha256 \w{12}\) are not those of the calibration \(\w{12}\)"
    ):
        next_windows(calibration, made({"b": [300]}), samples=1)
    with pytest.raises(ConfigError, match="0 calibration samples"):
        next_windows(calibration, documents, samples=0)
    with pytest.raises(ConfigError, match="samples from number 0 on do not follow: the next is number 2"):
        joined(calibration, calibration)
    other = sample_windows(documents, separator=0, samples=2, min_tokens=10, max_tokens=21)
    with pytest.raises(ConfigError, match="do not follow: they are of other data or were cut in another way"):
        joined(calibration, next_windows(other, documents, samples=1))


def test_bundled_calibration_text() -> None:
    paths = sorted(asset("configs", "text", "calib").glob("*.txt"))
    documents = tokenize_documents([d for path in paths for d in read_documents(path)], Characters())
    calibration = sample_windows(documents, separator=SEPARATOR, samples=24)
    report = calibration.report
    assert [part.domain for part in report.domains] == ["austen", "humaneval", "pydoc"]
    assert [part.samples for part in report.domains] == [8, 8, 8] and report.repeats == report.separators == 0
    text = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    for row, domain in zip(rows(calibration), calibration.domains, strict=True):
        assert 1024 <= len(row) <= 4096 and "".join(map(chr, row)) in text[domain]


# Coverage.


@given(
    counts=st.integers(1, 12).flatmap(
        lambda experts: st.lists(
            st.lists(st.integers(0, 40), min_size=experts, max_size=experts), min_size=1, max_size=4
        )
    ),
    threshold=st.integers(0, 41),
)
def test_coverage_counts(counts: list[list[int]], threshold: int) -> None:
    layers = list(range(3, 3 + len(counts)))
    coverage = measure_coverage(np.asarray(counts, np.int32), layers=layers, threshold_tokens=threshold)
    flat = sorted((n, layer, expert) for layer, row in zip(layers, counts, strict=True) for expert, n in enumerate(row))
    assert coverage.tokens == sum(n for n, _, _ in flat) and coverage.experts == len(flat)
    assert coverage.min_tokens == flat[0][0] and coverage.median_tokens == np.median([n for n, _, _ in flat])
    assert coverage.below == sum(n < threshold for n, _, _ in flat) == round(coverage.share_below * len(flat))
    assert [(c.tokens, c.layer, c.expert) for c in coverage.coldest] == flat[:8]
    assert coverage.enough == (coverage.min_tokens >= threshold)
    assert len(coverage.text().splitlines()) <= 10


def test_coverage_text() -> None:
    counts = np.asarray([[5, 300, 200, 7], [400, 0, 250, 260]], np.int32)
    assert measure_coverage(counts, layers=[1, 2], threshold_tokens=8).text().splitlines()[:4] == [
        "8 experts in 2 layers: minimum 0 tokens, median 225; 3 (37.5%) have fewer than 8",
        "  layer 2 expert 1: 0 tokens",
        "  layer 1 expert 0: 5 tokens",
        "  layer 1 expert 3: 7 tokens",
    ]
    many = measure_coverage(np.zeros((2, 8), np.int32), layers=[1, 2], threshold_tokens=1).text().splitlines()
    assert len(many) == 10 and many[-1] == "  and 8 more"
