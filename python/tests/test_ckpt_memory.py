"""Checkpointer: tensors whose memory is not what they say, and states that no names can be given to."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import forebay
from forebay import Checkpointer


def shortened(elements: int, left: int) -> torch.Tensor:
    tensor = torch.ones(elements)
    tensor.untyped_storage().resize_(left * 4)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(10)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "tensor",
    [shortened(1000, 0), shortened(10_000_000, 0), shortened(1000, 10), fake()],
    ids=["freed", "large", "short", "fake"],
)
def test_a_tensor_without_its_memory_is_not_saved(
    tmp_path: Path, tensor: torch.Tensor, own: bool
) -> None:
    good = {"good": torch.ones(3)}
    state, mine = (good, {"bad": tensor}) if own else ({**good, "bad": tensor}, None)
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(forebay.UsageError, match="bytes of memory, tensor `.*bad`"):
            checkpoints.save(1, state, per_rank=mine, blocking=True)
        assert checkpoints.latest() is None


@pytest.mark.parametrize("left", [0, 10])
@pytest.mark.parametrize("step", [1, 0])
def test_memory_that_goes_after_a_save_is_seen_by_the_next(
    tmp_path: Path, left: int, step: int
) -> None:
    state = {"good": torch.ones(3), "bad": torch.ones(40)[:: step + 1]}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, blocking=True)
        state["bad"].untyped_storage().resize_(left * 4)
        with pytest.raises(forebay.UsageError, match="bytes of memory, tensor `bad`"):
            checkpoints.save(2, state, blocking=True)
        state["bad"].untyped_storage().resize_(160)
        checkpoints.save(3, state, blocking=True)
        assert checkpoints.latest() == 3


def test_views_that_end_where_their_memory_ends_are_saved(tmp_path: Path) -> None:
    base = torch.arange(20.0)
    state = {
        "end": base[15:],
        "every": torch.arange(9.0)[::2],
        "one": torch.ones(1).expand(5),
        "none": shortened(8, 0)[:0],
        "across": torch.arange(12.0).reshape(3, 4).t(),
    }
    into = {name: torch.zeros(value.shape) for name, value in state.items()}
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, blocking=True)
        checkpoints.restore(into)
    assert all(torch.equal(into[name], value) for name, value in state.items())


def read_only(elements: int) -> torch.Tensor:
    memory = mmap.mmap(-1, elements * 4, prot=mmap.PROT_READ)
    return torch.frombuffer(memory, dtype=torch.float32, count=elements)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize(
    ("into", "said"),
    [
        (shortened(1024, 0), "has 0 bytes of memory"),
        (shortened(1024, 100), "has 400 bytes of memory"),
        (read_only(1024), "cannot be written"),
        (read_only(1024 * 16)[::16], "cannot be written"),
        (torch.zeros(1).expand(1024), "lie in one place"),
    ],
)
def test_memory_that_cannot_be_filled_is_named(
    tmp_path: Path, into: torch.Tensor, said: str
) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": torch.ones(1024), "b": torch.ones(2)}, blocking=True)
        with pytest.raises(forebay.UsageError, match=f"{said}.*tensor `a`"):
            checkpoints.restore({"a": into, "b": torch.zeros(2)})


@pytest.mark.parametrize(
    ("sides", "strides"),
    [((8, 3), (1, 1)), ((4, 6), (5, 1)), ((2, 3, 4), (12, 3, 1)), ((4, 3), (2, 3))],
)
def test_memory_whose_rows_overlap_is_not_filled(
    tmp_path: Path, sides: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": torch.ones(sides)}, blocking=True)
        base = torch.zeros(100)
        with pytest.raises(forebay.UsageError, match="lie in one place.*tensor `a`"):
            checkpoints.restore({"a": base.as_strided(sides, strides)})
    assert not base.any()


@pytest.mark.parametrize(
    ("sides", "strides"),
    [((8, 3), (3, 1)), ((3, 8), (1, 3)), ((3, 3), (2, 3)), ((2, 1, 4), (9, 0, 2))],
)
def test_memory_whose_rows_interleave_is_filled(
    tmp_path: Path, sides: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    value = torch.randn(sides)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": value}, blocking=True)
        into = torch.zeros(100).as_strided(sides, strides)
        checkpoints.restore({"a": into})
    assert torch.equal(into, value)


def test_conjugated_and_negated_views_are_filled(tmp_path: Path) -> None:
    state = {"conj": torch.randn(5, dtype=torch.complex64), "neg": torch.randn(5)}
    into = {
        "conj": torch.zeros(5, dtype=torch.complex64).conj(),
        "neg": torch.zeros(5, dtype=torch.complex64).conj().imag,
    }
    assert into["conj"].is_conj() and into["neg"].is_neg()
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, blocking=True)
        checkpoints.restore(into)
    assert all(torch.equal(into[name], value) for name, value in state.items())


def test_nested_tensors_are_called_by_their_name(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with (
        Checkpointer(tmp_path) as checkpoints,
        pytest.raises(forebay.UnsupportedError, match="a nested tensor is not stored, tensor `t`"),
    ):
        checkpoints.save(1, {"t": nested})


def in_itself() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


def nest(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


@pytest.mark.parametrize("value", [in_itself(), nest(5000), nest(100_000)])
def test_lists_without_end_are_refused(tmp_path: Path, value: list[Any]) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(forebay.UsageError, match="nested deeper than 500, at `a.l`"):
            checkpoints.save(1, {"a": {"l": value}})
        checkpoints.save(1, {"a": {"l": nest(400)}}, blocking=True)
        # Of a structure that is known, too.
        with pytest.raises(forebay.UsageError, match="nested deeper than 500, at `a.l`"):
            checkpoints.save(2, {"a": {"l": value}})


@pytest.mark.parametrize("value", [1, torch.ones(1)])
def test_keys_that_are_no_text_are_refused(tmp_path: Path, value: Any) -> None:
    with (
        Checkpointer(tmp_path) as checkpoints,
        pytest.raises(forebay.UsageError, match=r"the key 'a\.\\ud800' is no Unicode text"),
    ):
        checkpoints.save(1, {"é": 1, "a": {"\ud800": value}})


def test_keys_of_one_text_are_told_apart_by_their_types(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path) as checkpoints,
        pytest.raises(forebay.UsageError, match=r"keys of `a` .*: 1 \(int\) and '1' \(str\)"),
    ):
        checkpoints.save(1, {"a": {1: {"x": 1}, "1": {"y": 2}}})


@pytest.mark.parametrize(("directory", "said"), [("", "empty"), ("\ud800", "no Unicode text")])
def test_directories_that_are_none_are_refused(directory: str, said: str) -> None:
    with pytest.raises(forebay.UsageError, match=said):
        Checkpointer(directory)


_LIMITED = """
import resource, sys
import torch
import forebay
from forebay import Checkpointer
with open("/proc/self/statm") as statm:
    mapped = int(statm.read().split()[0]) * resource.getpagesize()
limit = mapped + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    Checkpointer(sys.argv[1], staging_bytes="64GiB").prepare({"w": torch.ones(4)})
except forebay.Error as error:
    print(error.code, "|", error)
"""


def test_staging_memory_that_cannot_be_reserved_is_told_by_its_setting(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.startswith("out_of_memory |"), (done.stdout, done.stderr)
    assert f"staging_bytes={64 << 30}" in done.stdout
