"""Cached directories: built once, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxpp.data.cache import NpyWriter, cache_key, cached


def read(directory: Path) -> str | None:
    file = directory / "result"
    return file.read_text() if file.exists() else None


def test_built_once_then_read(tmp_path: Path) -> None:
    builds = []

    def build(directory: Path) -> None:
        builds.append(directory)
        (directory / "result").write_text("made")

    target = tmp_path / "deep" / "key"
    assert cached(target, build, read) == "made" == cached(target, build, read)
    assert len(builds) == 1 and builds[0] != target


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "result").write_text("half")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        cached(tmp_path / "key", build, read)
    assert read(tmp_path / "key") is None and not list(tmp_path.glob("*.unfinished"))


def test_what_a_killed_build_left_is_never_used(tmp_path: Path) -> None:
    (tmp_path / "key.unfinished").mkdir()
    (tmp_path / "key.unfinished" / "result").write_text("half")
    (tmp_path / "key.unfinished" / "other").write_text("half")
    result = cached(tmp_path / "key", lambda d: (d / "result").write_text("whole") and None, read)
    assert result == "whole" and [p.name for p in (tmp_path / "key").iterdir()] == ["result"]


def test_unwritable_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"data cache .* cannot be written.*data\.cache_dir") as error:
        cached(tmp_path / "file" / "key", lambda directory: None, read)
    assert "\n" not in str(error.value)


def test_key_is_of_values_not_of_order() -> None:
    assert cache_key(a=1, b=2) == cache_key(b=2, a=1) != cache_key(a=1, b=3)


@pytest.mark.parametrize("lengths", [(), (3, 0, 5), (100_000, 1)])
def test_npy_grows_as_numpy_writes_it(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    parts = [np.arange(length, dtype=np.int64) % 60_000 for length in lengths]
    with NpyWriter(tmp_path / "a.npy", np.uint16) as writer:
        for part in parts:
            writer.append(part)
    expected = np.concatenate([*parts, []]).astype(np.uint16)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), expected)
    assert np.load(tmp_path / "a.npy").dtype == np.uint16 and writer.length == len(expected)
