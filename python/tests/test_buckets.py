"""URLs of buckets in the place of paths, against a real S3 server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import buckets
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_cases import buckets as cases
from ckpt_cases.harness import run

import forebay
from forebay.dcp import Reader, Stager, Writer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's endpoint; the variables of this process lead to it."""
    process, endpoint = buckets.start(tmp_path_factory.mktemp("moto"))
    before = {name: os.environ.get(name) for name in buckets.variables(endpoint)}
    os.environ.update(buckets.variables(endpoint))
    yield endpoint
    for name, value in before.items():
        if value is None:
            os.environ.pop(name)
        else:
            os.environ[name] = value
    process.kill()
    process.wait()


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a.large": torch.randn(1500, 1000, generator=generator),
        "a.small": torch.arange(7, dtype=torch.int64),
        "b": torch.randn(300, 200, generator=generator).to(torch.bfloat16),
    }


def _upload(endpoint: str, folder: Path, url: str) -> None:
    for path in folder.iterdir():
        buckets.put(endpoint, f"{url}/{path.name}", path.read_bytes())


def test_models_are_loaded_from_a_bucket(server: str, tmp_path: Path) -> None:
    url, tensors = buckets.fresh(), _tensors()
    forebay.save_sharded(tensors, tmp_path, max_shard_size=2_000_000)
    assert len(list(tmp_path.iterdir())) > 2
    _upload(server, tmp_path, url)
    told: list[tuple[int, int]] = []
    found = forebay.load_file(url, progress=lambda done, total: told.append((done, total)))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert told[-1] == (total, total)
    report = forebay.last_report()
    assert set(report["paths"]) == {"buffered"}
    part = forebay.load_file(url, names="a.*", shard=(0, 1, 3))
    assert torch.equal(part["a.large"], tensors["a.large"][500:1000])
    assert forebay.last_report()["bytes"] < total / 2
    with forebay.safe_open(url) as model:
        assert torch.equal(model.get_slice("a.large")[17:19, 3:5], tensors["a.large"][17:19, 3:5])
        assert torch.equal(model.get_tensor("a.small"), tensors["a.small"])
        arrived = dict(model.iter_tensors(max_bytes=1 << 20))
        assert torch.equal(arrived["b"], tensors["b"])
    one = next(path for path in sorted(tmp_path.iterdir()) if path.suffix == ".safetensors")
    alone = forebay.load_file(f"{url}/{one.name}")
    assert alone and set(alone) < set(tensors)
    both = sorted(f"{url}/{path.name}" for path in tmp_path.glob("*.safetensors"))
    assert forebay.load_file(both).keys() == tensors.keys()
    arrays = forebay.load_file(url, device="host", names="a.small")
    assert np.array_equal(arrays["a.small"], np.arange(7))
    module = torch.nn.Module()
    module.b = torch.nn.Parameter(torch.zeros(300, 200, dtype=torch.bfloat16))
    forebay.load_file(url, into=module, names="b")
    assert torch.equal(module.b.data, tensors["b"])


def test_a_child_of_a_fork_opens_anew(server: str, tmp_path: Path) -> None:
    url = buckets.fresh()
    forebay.save_file({"x": torch.arange(5)}, tmp_path / "model.safetensors")
    _upload(server, tmp_path, url)
    opened = forebay.safe_open(url)
    assert torch.equal(opened.get_tensor("x"), torch.arange(5))
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = "nothing"
        try:
            # What the parent opened is the parent's; the child has connections of its own.
            try:
                opened.get_tensor("x")
                said = "the parent's was used"
            except forebay.Error as error:
                again = forebay.load_file(url, device="host")
                said = f"{error.code} {list(again['x'])}"
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    assert said.startswith("forked") and "4" in said, said
    assert torch.equal(opened.get_tensor("x"), torch.arange(5))


def test_a_job_saves_to_a_bucket_and_goes_on_from_it(server: str) -> None:
    url = buckets.fresh()
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer, "note": {"text": "x"}, "count": 3}
    with forebay.Checkpointer(url) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state, blocking=True)
        assert checkpoints.latest() == 3
        assert [one["step"] for one in checkpoints.steps() if one["state"] == "committed"][-1] == 3
        fresh = torch.nn.Linear(64, 32)
        new = {"model": fresh, "optim": torch.optim.AdamW(fresh.parameters())}
        new |= {"note": {"text": ""}, "count": 0}
        report = checkpoints.restore(new)
        assert report.step == 3 and report.origin == "forebay"
        assert new["note"] == {"text": "x"} and new["count"] == 3
        assert torch.equal(fresh.weight, model.weight)
        assert checkpoints.restore(new, step=f"{url}/step-3").step == 3
    with forebay.Checkpointer(url) as again:
        assert again.latest() == 3
        report = again.prune(keep_last=1, dry_run=True)
        assert report["unpublished"] == [1, 2]
        assert again.restore(new).step == 3
    found = forebay.load_file(f"{url}/step-3", names="model.*")
    assert torch.equal(found["model.weight"], model.weight)


def test_ranks_save_and_restore_together(server: str) -> None:
    environment = buckets.variables(server)
    found = run(cases.save_and_restore, 2, buckets.fresh(), environment)
    assert [one["own"] for one in found] == [0, 1]
    for one in found:
        assert one["equal"] and one["step"] == 2 and one["steps"] == [1, 2]
    # What both want is read once on the node.
    assert any(one["shared"] for one in found), found


def _dcp_state(filled: bool) -> dict[str, Any]:
    large = torch.arange(400_000, dtype=torch.float32).reshape(400, 1000)
    if not filled:
        large = torch.zeros_like(large)
    return {"w": large, "nested": {"n": 7 if filled else 0}}


def _stock(url: str, server: str) -> dict[str, Any]:
    return {"path": url, "client_kwargs": {"endpoint_url": server, "region_name": "us-east-1"}}


def _fsspec() -> Any:
    if os.environ.get("FOREBAY_NO_SKIP") != "1":
        pytest.importorskip("s3fs", reason="s3fs is not installed; `cargo xtask test` does")
    from torch.distributed.checkpoint import _fsspec_filesystem

    # Credentials by variables of botocore.
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    return _fsspec_filesystem


def test_stock_torch_opens_what_forebay_saved(server: str) -> None:
    stock = _fsspec()
    url = buckets.fresh()
    with forebay.Checkpointer(url) as checkpoints:
        checkpoints.save(5, _dcp_state(True), blocking=True)
    dcp.save(_dcp_state(True), storage_writer=Writer(f"{url}/planned"), no_dist=True)
    for place in ("step-5", "planned"):
        new = _dcp_state(False)
        reader = stock.FsspecReader(**_stock(f"{url}/{place}", server))
        dcp.load(new, storage_reader=reader, no_dist=True)
        assert torch.equal(new["w"], _dcp_state(True)["w"]) and new["nested"]["n"] == 7


def test_what_stock_torch_saved_is_opened(server: str, tmp_path: Path) -> None:
    stock = _fsspec()
    url = f"{buckets.fresh()}/step-4"
    writer = stock.FsspecWriter(**_stock(url, server))
    dcp.save(_dcp_state(True), storage_writer=writer, no_dist=True)
    new = _dcp_state(False)
    dcp.load(new, storage_reader=Reader(url), no_dist=True)
    assert torch.equal(new["w"], _dcp_state(True)["w"]) and new["nested"]["n"] == 7
    found = forebay.load_file(url)
    assert torch.equal(found["w"], _dcp_state(True)["w"])
    with forebay.Checkpointer(url.rpartition("/")[0]) as checkpoints:
        assert checkpoints.latest() == 4
        new = _dcp_state(False)
        report = checkpoints.restore(new)
        assert report.origin == "dcp" and torch.equal(new["w"], _dcp_state(True)["w"])


def test_dcp_saves_beside_training(server: str) -> None:
    url = buckets.fresh()
    state = _dcp_state(True)
    stager = Stager()
    future = dcp.async_save(state, storage_writer=Writer(url), async_stager=stager, no_dist=True)
    future.result()
    new = _dcp_state(False)
    dcp.load(new, storage_reader=Reader(url), no_dist=True)
    assert torch.equal(new["w"], state["w"])
    with pytest.raises(dcp.CheckpointException, match="overwrite=False"):
        dcp.save(state, storage_writer=Writer(url, overwrite=False), no_dist=True)


def test_errors_are_those_of_folders_and_hold_no_secret(server: str) -> None:
    url = buckets.fresh()
    said = []
    for code, use in [
        ("not_found", lambda: forebay.load_file(f"{url}/none")),
        ("not_found", lambda: forebay.load_file(f"{url}/none.safetensors")),
        ("io", lambda: forebay.load_file("s3://no-such-bucket-here/x")),
        ("usage", lambda: forebay.load_file("ftp://host/x")),
        ("usage", lambda: forebay.Checkpointer("http://host/x")),
        ("usage", lambda: forebay.load_file(f"s3://user:{buckets.SECRET}@bucket/x")),
        ("unsafe_path", lambda: forebay.load_file("s3://bucket/../x")),
    ]:
        with pytest.raises(forebay.Error) as caught:
            use()
        assert caught.value.code == code, caught.value
        said.append(f"{caught.value!r} {caught.value} {caught.value.hints}")
    with forebay.Checkpointer(url) as checkpoints, pytest.raises(forebay.Error) as caught:
        checkpoints.restore({"x": torch.zeros(1)})
    assert caught.value.code == "not_found"
    assert not any(buckets.SECRET in text for text in said), said


def test_a_block_that_was_changed_in_the_bucket_is_found(server: str) -> None:
    url = buckets.fresh()
    with forebay.Checkpointer(url) as checkpoints:
        checkpoints.save(1, _dcp_state(True), blocking=True)
        attempt = checkpoints.steps()[0]["attempt"]
        data = f"{url}/step-1/{attempt}_0_0.distcp"
        stored = bytearray(buckets.get(server, data))
        at = bytes(stored).index(torch.arange(64, dtype=torch.float32).numpy().tobytes())
        stored[at + 100] ^= 1
        buckets.put(server, data, bytes(stored))
        with pytest.raises(forebay.ChecksumError, match="step-1"):
            checkpoints.restore(_dcp_state(False))


def test_memory_of_this_process_is_a_place_too() -> None:
    with forebay.Checkpointer("memory:tests/run") as checkpoints:
        checkpoints.save(1, _dcp_state(True), blocking=True)
        new = _dcp_state(False)
        assert checkpoints.restore(new).step == 1
    assert torch.equal(new["w"], _dcp_state(True)["w"])
    assert forebay.load_file("memory:tests/run/step-1")["w"].shape == (400, 1000)


@pytest.mark.parametrize("name", ["llama.ckpt", "run.pt", "old.bin", "x.json/"])
def test_folders_may_be_called_like_files(name: str) -> None:
    url = f"memory:tests/called/{name}"
    with forebay.Checkpointer(url) as checkpoints:
        checkpoints.save(
            1, _dcp_state(True), per_rank={"cursor": 7}, side_files={"c.json": b"{}"}, blocking=True
        )
    with forebay.Checkpointer(url) as checkpoints:
        new = _dcp_state(False)
        assert checkpoints.restore(new).step == 1
        assert torch.equal(new["w"], _dcp_state(True)["w"])
        assert checkpoints.per_rank() == {"cursor": 7}
        assert checkpoints.side_files() == {"c.json": b"{}"}
    alone = f"{url.rstrip('/')}-alone.pt"
    dcp.save(_dcp_state(True), storage_writer=Writer(alone), no_dist=True)
    new = _dcp_state(False)
    dcp.load(new, storage_reader=Reader(alone), no_dist=True)
    assert torch.equal(new["w"], _dcp_state(True)["w"])
    assert torch.equal(forebay.load_file(alone)["w"], new["w"])
