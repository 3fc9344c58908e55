"""Windows of evaluation text."""

from pathlib import Path

import numpy as np
import pytest

from jaxmoe.errors import ConfigError
from jaxmoe.evals.windows import bundled_texts, cut_windows, read_text


def test_round_robin_without_overlap() -> None:
    documents = {"a": list(range(0, 31)), "b": list(range(100, 112)), "c": list(range(200, 221))}
    windows = cut_windows(documents, length=10, count=6)
    assert windows.shape == (6, 11) and windows.dtype == np.int32
    assert windows[:, 0].tolist() == [0, 100, 200, 10, 210, 20]
    for window in windows:
        assert (np.diff(window) == 1).all(), "tokens follow each other as in the document"
    fed = windows[:, :-1].reshape(-1)
    assert len(set(fed.tolist())) == fed.size, "no token is fed twice"
    predicted = windows[:, 1:].reshape(-1)
    assert len(set(predicted.tolist())) == predicted.size, "no token is predicted twice"


def test_fewer_windows_than_there_are() -> None:
    documents = {"a": list(range(100)), "b": list(range(200, 300))}
    assert cut_windows(documents, length=10, count=3)[:, 0].tolist() == [0, 200, 10]
    assert (cut_windows(documents, length=10, count=3) == cut_windows(documents, length=10, count=9)[:3]).all()


def test_last_window_needs_one_token_more_to_predict() -> None:
    assert len(cut_windows({"a": list(range(21))}, length=10, count=2)) == 2
    with pytest.raises(ConfigError, match=r"2 windows of 10 tokens asked for, the text holds 1 \(a 1\)"):
        cut_windows({"a": list(range(20))}, length=10, count=2)


def test_text_too_short_names_the_numbers() -> None:
    documents = {"a": list(range(31)), "b": list(range(5)), "c": list(range(21))}
    with pytest.raises(ConfigError, match=r"6 windows of 10 tokens asked for, the text holds 5 \(a 3, b 0, c 2\)"):
        cut_windows(documents, length=10, count=6)


def test_bundled_texts_are_readable() -> None:
    texts = bundled_texts()
    assert len(texts) >= 3
    assert all(len(read_text(path)) > 10_000 for path in texts)


def test_read_text_refuses(tmp_path: Path) -> None:
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_text(" \n", encoding="utf-8")
    latin.write_bytes("größe".encode("latin-1"))
    with pytest.raises(ConfigError, match=f"{empty} holds no text"):
        read_text(empty)
    for wrong in (latin, tmp_path / "absent.txt", tmp_path):
        with pytest.raises(ConfigError, match=f"{wrong} is not readable as UTF-8 text"):
            read_text(wrong)
