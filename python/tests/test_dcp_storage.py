"""`forebay.dcp.Writer` and `Reader` under `torch.distributed.checkpoint`."""

from __future__ import annotations

import gc
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_cases import harness, planned
from support import NAMES, random_tensor, same
from torch.distributed.checkpoint.api import CheckpointException

import forebay
from forebay.dcp import Reader, Stager, Writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def every_kind() -> dict[str, Any]:
    """Tensors of all dtypes and odd shapes and strides, objects, nesting."""
    shapes = [(), (1,), (0, 3), (5, 7)]
    tensors = {
        f"{dtype}{list(shape)}": random_tensor(dtype, shape)
        for dtype in NAMES
        for shape in shapes
        if "float4" not in str(dtype)
    }
    return {
        "tensors": tensors,
        "views": {
            "t": torch.arange(12.0).reshape(3, 4).t(),
            "e": torch.arange(3.0).expand(2, 3),
            "c": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        },
        "objects": {"n": None, "t": (1, 2), "list": [1, "x"], "s": "text", "i": 1 << 70},
        "mixed": [torch.ones(2), {"deep": 3}],
    }


def blank_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank_of(one) for key, one in value.items()}
    if isinstance(value, list) and any(isinstance(one, torch.Tensor) for one in value):
        return [blank_of(one) for one in value]
    return 0


def check(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        assert same(found, wanted), where
    elif isinstance(wanted, dict):
        for key, one in wanted.items():
            check(found[key], one, f"{where}.{key}")
    elif isinstance(wanted, list) and any(isinstance(one, torch.Tensor) for one in wanted):
        for place, one in enumerate(wanted):
            check(found[place], one, f"{where}.{place}")
    else:
        assert found == wanted and type(found) is type(wanted), where


def test_a_place_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"not_found.*none-such") as caught:
        dcp.load({"a": torch.zeros(1)}, storage_reader=Reader(tmp_path / "none-such"))
    assert "metadata is None" not in str(caught.value)


@pytest.mark.parametrize("writer", ["ours", "torch"])
@pytest.mark.parametrize("reader", ["ours", "torch"])
def test_each_writer_is_read_by_each_reader(tmp_path: Path, writer: str, reader: str) -> None:
    state = every_kind()
    if writer == "ours":
        metadata = dcp.save(state, storage_writer=Writer(tmp_path))
        assert metadata.storage_meta is not None
    else:
        dcp.save(state, checkpoint_id=str(tmp_path))
    found = blank_of(state)
    if reader == "ours":
        dcp.load(found, storage_reader=Reader(tmp_path))
    else:
        dcp.load(found, checkpoint_id=str(tmp_path))
    check(found, state)


def test_a_state_is_rebuilt_without_knowing_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {"a": {"b.c": torch.arange(3)}, "l": [torch.ones(1), {"x": 5}], "n": 1}
    dcp.save(state, storage_writer=Writer(tmp_path))
    found: dict[str, Any] = {}
    _load_state_dict(
        found, storage_reader=Reader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert torch.equal(found["a"]["b.c"], state["a"]["b.c"]) and found["n"] == 1
    assert found["l"][1] == {"x": 5}


def test_tensors_are_cast_as_torch_does(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(6.0).reshape(2, 3)}, storage_writer=Writer(tmp_path))
    found = {"w": torch.zeros(3, 2, dtype=torch.bfloat16).t()}
    dcp.load(found, storage_reader=Reader(tmp_path))
    assert found["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["w"].dtype == torch.bfloat16


def test_a_writer_serves_several_folders_and_replaces_what_is_there(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    for value in range(3):
        dcp.save({"w": torch.full((3,), float(value))}, storage_writer=writer)
        found = {"w": torch.zeros(3)}
        dcp.load(found, storage_reader=Reader(tmp_path / "a"))
        assert found["w"].tolist() == [value] * 3
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id=str(tmp_path / "b"))
    assert writer.checkpoint_id == str(tmp_path / "b")
    reader = Reader(tmp_path / "a")
    dcp.load(found, storage_reader=reader, checkpoint_id=str(tmp_path / "b"))
    assert found["w"].tolist() == [1] * 3
    with pytest.raises(CheckpointException, match="already_exists"):
        dcp.save({"w": torch.ones(3)}, storage_writer=Writer(tmp_path / "b", overwrite=False))
    assert all(map(Writer.validate_checkpoint_id, ["s3://b/x", "file:///x", "/x"]))
    assert not Writer.validate_checkpoint_id("ftp://b/x")


def test_torch_written_chunks_are_read_in_ranges(tmp_path: Path) -> None:
    whole = torch.arange(4096.0 * 1024).reshape(4096, 1024)
    dcp.save({"w": whole}, checkpoint_id=str(tmp_path))
    rows = torch.zeros(4, 1024)
    state = {"w": _Rows(rows, 100, whole.shape)}
    before = _bytes_read()
    dcp.load(state, storage_reader=Reader(tmp_path))
    assert torch.equal(rows, whole[100:104])
    assert _bytes_read() - before < 2 << 20


class _Rows(torch.Tensor):
    """Some rows of a larger tensor, by the hooks of torch's planner."""

    def __new__(cls, rows: torch.Tensor, start: int, shape: torch.Size) -> _Rows:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype)
        made.rows, made.start = rows, start
        return made

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size((self.start, 0)), self.rows.shape)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.rows

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a part")


def _bytes_read() -> int:
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar:")[1].split()[0])


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_neither_metadata_nor_objects_are_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / ".metadata").write_bytes(pickle.dumps(_Evil(mark), 4))
    (tmp_path / "m" / "__0.metadata").write_bytes(pickle.dumps(_Evil(mark), 4))
    with pytest.raises(CheckpointException, match="metadata"):
        dcp.load({"w": torch.zeros(1)}, storage_reader=Reader(tmp_path / "m"))
    with pytest.raises(forebay.ForbiddenGlobalError):
        Reader(tmp_path / "m").read_metadata(rank=0)
    assert not mark.exists()
    dcp.save({"o": _Evil(mark)}, checkpoint_id=str(tmp_path / "o"))
    with pytest.raises(CheckpointException, match="forbidden_global"):
        dcp.load({"o": None}, storage_reader=Reader(tmp_path / "o"))
    assert not mark.exists()
    dcp.load({"o": None}, storage_reader=Reader(tmp_path / "o", weights_only=False))
    assert mark.exists()


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(1000.0)}, storage_writer=Writer(tmp_path))
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.find(torch.arange(500.0, 510.0).numpy().tobytes())
    data[at + 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointException, match="checksum"):
        dcp.load({"w": torch.zeros(1000)}, storage_reader=Reader(tmp_path))


@pytest.mark.parametrize(
    ("writer", "reader"), [("ours", "torch"), ("torch", "ours"), ("ours", "ours")]
)
@pytest.mark.parametrize("layout", ["rows", "both", "hybrid"])
def test_ranks_save_and_other_ranks_load(
    tmp_path: Path, layout: str, writer: str, reader: str
) -> None:
    harness.run(planned.save, 4, str(tmp_path), layout, writer)
    for world, other in ((4, "columns"), (2, "both")):
        harness.run(planned.load, world, str(tmp_path), other, reader)


@pytest.mark.parametrize("mode", ["thread", "future"])
def test_asynchronous_saves_hold_what_was_there_at_the_call(tmp_path: Path, mode: str) -> None:
    for blocks in harness.run(planned.asynchronous, 2, str(tmp_path), mode):
        assert 1 <= blocks <= 2


def test_asynchronous_saves_by_another_process(tmp_path: Path) -> None:
    # One block of shared memory goes to the other process, not three thousand descriptors.
    assert all(one <= 2 for one in harness.run(planned.asynchronous, 2, str(tmp_path), "process"))


def test_plans_from_the_cache_of_torch_are_attempts_of_their_own(tmp_path: Path) -> None:
    harness.run(planned.with_cached_plans, 2, str(tmp_path))


def test_plans_that_change_on_some_ranks_only(tmp_path: Path) -> None:
    harness.run(planned.with_plans_that_change, 2, str(tmp_path))


@pytest.mark.parametrize("reader", ["ours", "torch"])
def test_ranks_that_save_each_for_itself(tmp_path: Path, reader: str) -> None:
    harness.run(planned.each_for_itself, 3, str(tmp_path), reader)


def test_what_torch_saved_rank_by_rank_is_read(tmp_path: Path) -> None:
    harness.run(planned.torch_each_for_itself, 2, str(tmp_path))


def test_a_save_that_fails_leaves_the_checkpoint_that_was_there(tmp_path: Path) -> None:
    for said in harness.run(planned.interrupted, 3, str(tmp_path)):
        assert "out of ideas" in said


def test_a_stager_never_reuses_memory_that_may_still_be_read() -> None:
    stager = Stager(blocks=2)
    state = {"w": torch.zeros(1000), "n": [1, {"t": torch.zeros(3)}]}
    held = []
    for value in range(2):
        state["w"].fill_(value)
        held.append(stager.stage(state))
    assert [one["w"].unique().tolist() for one in held] == [[0], [1]]
    assert len(stager._kept) == 2
    first = held[0]["w"].data_ptr()
    # A tensor of it is enough to keep a block.
    kept = held.pop(0)["n"][1]["t"]
    third = kept.clone()
    del kept
    state["w"].fill_(2)
    held.append(stager.stage(state))
    assert held[-1]["w"].data_ptr() == first and held[0]["w"].unique().tolist() == [1]
    assert third.tolist() == [0, 0, 0]
    stager.close()
    assert len(stager._kept) == 2
    held.clear()
    gc.collect()
    stager.close()
    assert stager._kept == []
    assert stager.stage(state)["w"].unique().tolist() == [2]


def test_a_stager_knows_who_still_reads_its_memory() -> None:
    """Views and detached tensors read it too, whatever became of the tensors that were handed out."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        stager = Stager(blocks=3)
        source = torch.zeros(1000)
        held = []
        for value in range(3):
            source.fill_(value)
            held.append(stager.stage({"w": distribute_tensor(source, mesh), "p": source}))
        assert [one["w"].to_local().unique().tolist() for one in held] == [[0], [1], [2]]
        parts = [held[0]["w"].to_local().detach()[10:20], held[1]["p"].view(torch.int32).detach()]
        reads = [one.clone() for one in parts]
        del held[:2]
        gc.collect()
        source.fill_(7)
        third = held[0]["p"].data_ptr()
        del held[0]
        gc.collect()
        held.append(stager.stage({"w": distribute_tensor(source, mesh), "p": source}))
        assert held[0]["p"].data_ptr() == third and held[0]["p"].unique().tolist() == [7]
        assert all(torch.equal(one, two) for one, two in zip(parts, reads, strict=True))
        # Memory outlives the stager for those who read it.
        stager.close()
        del stager, held
        gc.collect()
        assert all(torch.equal(one, two) for one, two in zip(parts, reads, strict=True))
    finally:
        torch.distributed.destroy_process_group()


def test_a_stager_that_waits_collects_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.dcp import _stager

    monkeypatch.setattr(_stager, "WAIT_SECONDS", 2.0)
    calls = []
    monkeypatch.setattr(_stager.gc, "collect", lambda: calls.append(1))
    stager = Stager(blocks=1)
    held = stager.stage({"w": torch.zeros(10)})
    with pytest.raises(forebay.DeadlineError):
        stager.stage({"w": torch.zeros(10)})
    assert 1 <= len(calls) <= 4 and held["w"].numel() == 10


def test_saves_over_one_folder_do_not_pile_up(tmp_path: Path) -> None:
    from forebay.dcp import _writer

    (tmp_path / "mine.txt").write_text("stays")
    state = {"w": torch.zeros(100_000)}
    for value in range(4):
        state["w"].fill_(value)
        dcp.save(state, storage_writer=Writer(tmp_path, grace_s=0.0))
        assert _writer._collector.close(60)
        data = [one for one in tmp_path.rglob("*") if one.suffix == ".distcp"]
        assert sum(one.stat().st_size for one in data) < 2 * state["w"].nbytes
    found = {"w": torch.zeros(100_000)}
    dcp.load(found, storage_reader=Reader(tmp_path))
    assert found["w"].unique().tolist() == [3] and (tmp_path / "mine.txt").exists()
    # Readers that have just opened what was overwritten keep it for a while.
    for _ in range(2):
        dcp.save(state, storage_writer=Writer(tmp_path / "kept"))
        assert _writer._collector.close(60)
    assert len(list((tmp_path / "kept").glob("*.distcp"))) == 2
    with pytest.raises(forebay.UsageError, match="grace_s"):
        Writer(tmp_path, grace_s=-1)


def test_staging_memory_is_kept_between_saves_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.dcp import _memory

    forebay.release_memory()
    made = []
    native = _memory._native.Pool

    def counted(*arguments: Any, **named: Any) -> Any:
        made.append(native(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(_memory._native, "Pool", counted)
    state = {"w": torch.ones(1000)}
    for number in range(3):
        dcp.save(state, storage_writer=Writer(tmp_path / str(number)))
    assert len(made) == 1 and len(_memory._kept) == 1
    dcp.save({"w": torch.ones(20 << 18)}, storage_writer=Writer(tmp_path / "larger"))
    dcp.save(state, storage_writer=Writer(tmp_path / "smaller"))
    assert len(made) == 2
    forebay.release_memory()
    assert not _memory._kept
    dcp.save(state, storage_writer=Writer(tmp_path / "again"))
    assert len(made) == 3


def test_blocks_of_different_sizes_are_told_apart() -> None:
    stager = Stager(blocks=2)
    held = [stager.stage({"w": torch.zeros(size)}) for size in (10, 10_000)]
    held.reverse()
    del held[0]
    # The larger one is free and too small for this.
    held.append(stager.stage({"w": torch.ones(20_000)}))
    assert [one["w"].numel() for one in held] == [10, 20_000]
    held.clear()
    stager.close()
    assert stager._kept == []


def test_a_stager_waits_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.dcp import _stager

    monkeypatch.setattr(_stager, "WAIT_SECONDS", 0.2)
    stager = Stager(blocks=1)
    held = stager.stage({"w": torch.zeros(10)})
    with pytest.raises(forebay.DeadlineError, match="still in use"):
        stager.stage({"w": torch.zeros(10)})
    # In a cycle that only the collector frees.
    held["self"] = held
    del held
    assert stager.stage({"w": torch.ones(5)})["w"].tolist() == [1] * 5


def test_what_is_staged_is_the_same_state(tmp_path: Path) -> None:
    state = every_kind()
    state["tied"] = [state["views"]["t"], state["views"]["t"]]
    state["named"] = torch.ones(3, requires_grad=True)
    staged = Stager().stage(state)
    check(staged, {key: one for key, one in state.items() if key != "named"})
    assert staged["tied"][0] is staged["tied"][1]
    assert not staged["named"].requires_grad
    part = torch.ones(2)
    part.global_shape, part.local_sizes = (4,), ((2,),)  # type: ignore[attr-defined]
    part.global_offsets, part.local_offsets = ((2,),), ((0,),)  # type: ignore[attr-defined]
    assert Stager().stage({"p": part})["p"].global_offsets == ((2,),)
    with pytest.raises(forebay.UnsupportedError, match="sparse"):
        Stager().stage({"s": torch.zeros(2).to_sparse()})


def test_writers_and_readers_travel_to_other_processes(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    found = {"w": torch.zeros(3)}
    dcp.load(found, storage_reader=reader)
    again = pickle.loads(pickle.dumps(writer))
    dcp.save({"w": torch.full((3,), 2.0)}, storage_writer=again)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, storage_reader=pickle.loads(pickle.dumps(reader)))
    assert found["w"].tolist() == [2, 2, 2]
