"""`forebay.dcp.Reader`: whatever bytes lie where an object should be, nothing of them is executed."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from forebay import Checkpointer
from forebay.dcp import Reader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def archive_of(value: Any) -> bytes:
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


def appended(front: bytes) -> bytes:
    """An archive behind other bytes, with places that count from the first of these: sound for those who look for its
    directory at the end."""
    made = io.BytesIO(front)
    with zipfile.ZipFile(made, "a") as records:
        records.writestr("archive/data.pkl", pickle.dumps({"x": 1}, 2))
        records.writestr("archive/version", "3\n")
    return made.getvalue()


def legacy_before_records(evil: Evil) -> bytes:
    made = io.BytesIO()
    torch.save(evil, made, _use_new_zipfile_serialization=False)
    return appended(made.getvalue())


def pickle_before_records(evil: Evil) -> bytes:
    """Where torch reads a plain pickle first."""
    return appended(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(evil, 2))


def legacy_before_zip(evil: Evil) -> bytes:
    """torch.load looks at the front, zipfile at the end."""
    made = io.BytesIO()
    torch.save(evil, made, _use_new_zipfile_serialization=False)
    return made.getvalue() + archive_of({"x": 1})


def pickle_before_zip(evil: Evil) -> bytes:
    return pickle.dumps(evil, 2) + archive_of(1)


def doubled_record(evil: Evil, last: bool) -> bytes:
    """Two records of one name: readers differ in which they take."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as records:
        both = [pickle.dumps(1, 2), pickle.dumps(evil, 2)]
        for data in both if last else reversed(both):
            records.writestr("archive/data.pkl", data)
        records.writestr("archive/version", "3\n")
    return made.getvalue()


def two_folders(evil: Evil) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as records:
        records.writestr("a/data.pkl", pickle.dumps(1, 2))
        records.writestr("archive/data.pkl", pickle.dumps(evil, 2))
        records.writestr("archive/version", "3\n")
    return made.getvalue()


def renamed_inside(evil: Evil) -> bytes:
    """The directory at the end and the header before the data give one record two names."""
    data = archive_of(1)
    bad = pickle.dumps(evil, 2)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as records:
        records.writestr("archive/data.pkl", bad)
        records.writestr("archive/version", "3\n")
    return made.getvalue().replace(b"archive/data.pkl", b"archive/else.pkl", 1) + data


KINDS: list[Callable[[Evil], bytes]] = [
    archive_of,
    legacy_before_records,
    pickle_before_records,
    legacy_before_zip,
    pickle_before_zip,
    lambda evil: doubled_record(evil, True),
    lambda evil: doubled_record(evil, False),
    two_folders,
    renamed_inside,
    lambda evil: pickle.dumps(evil, 2),
]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_no_bytes_are_executed(tmp_path: Path, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "executed"
    item = KINDS[kind](Evil(mark))

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return io.BytesIO(item)

    folder = tmp_path / "step-1"
    dcp.save({"o": "?"}, storage_writer=FileSystemWriter(folder), planner=Planner())
    blank: dict[str, Any] = {"o": None}
    try:
        dcp.load(blank, storage_reader=Reader(folder))
    except CheckpointException:
        assert blank == {"o": None}
    assert not mark.exists()
    try:
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.restore(blank, 1)
    except Exception:  # noqa: BLE001
        pass
    assert not mark.exists()


def test_the_bytes_do_run_where_nobody_looks(tmp_path: Path) -> None:
    """What the cases above are worth: torch's own reader executes what they hold."""
    executed = 0
    for number, kind in enumerate(KINDS[:4]):
        mark = tmp_path / f"executed-{number}"
        item = kind(Evil(mark))
        try:
            torch.load(io.BytesIO(item), weights_only=False)
        except Exception:  # noqa: BLE001
            pass
        executed += mark.exists()
    assert executed >= 3


def test_what_torch_saved_rank_by_rank_is_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    folder = tmp_path / "c"
    dcp.save({"o": Evil(mark), "n": 3}, checkpoint_id=str(folder), use_collectives=False)
    blank: dict[str, Any] = {"o": None, "n": 0}
    reader = Reader(folder)
    reader.read_metadata(rank=0)
    with pytest.raises(Exception, match="forbidden_global"):
        _load_alone(blank, reader)
    assert not mark.exists()
    harmless: dict[str, Any] = {"n": 0}
    _load_alone(harmless, Reader(folder))
    assert harmless == {"n": 3}


def _load_alone(state: dict[str, Any], reader: Reader) -> None:
    """What a rank does where every rank has metadata of its own."""
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(state, reader.read_metadata(rank=0), True)
    reader.set_up_storage_reader(planner.metadata, True)  # type: ignore[arg-type]
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def test_harmless_values_of_every_kind_come_back(tmp_path: Path) -> None:
    state = {"t": (1, {"x": torch.ones(2)}), "s": {1, 2}, "b": b"\x00\xff", "d": torch.float16}
    folder = tmp_path / "c"
    dcp.save({"o": state, "t": [torch.zeros(1), 5]}, checkpoint_id=str(folder))
    blank: dict[str, Any] = {"o": dict.fromkeys(state), "t": [torch.ones(1), 0]}
    dcp.load(blank, storage_reader=Reader(folder))
    assert blank["o"]["t"][1]["x"].tolist() == [1, 1] and blank["t"][1] == 5
    assert {key: blank["o"][key] for key in "sbd"} == {key: state[key] for key in "sbd"}
