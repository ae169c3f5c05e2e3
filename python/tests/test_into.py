"""load_file(into=...): dicts, modules, meta, ties."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from support import same
from torch import nn

import forebay


class Net(nn.Module):
    """Tied weights, a buffer, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids)))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Net]:
    net = Net()
    path = tmp_path / "net.safetensors"
    forebay.save_model(net, path)
    return path, net


def check(net: Net, other: Net) -> None:
    for name, tensor in other.state_dict().items():
        assert same(net.state_dict()[name], tensor), name
    assert net.head.weight is net.embed.weight
    ids = torch.arange(7)
    net.eval(), other.eval()
    assert torch.equal(net(ids), other(ids))


def test_a_module(saved: tuple[Path, Net]) -> None:
    path, net = saved
    other = Net()
    memory = {name: tensor.data_ptr() for name, tensor in other.named_parameters()}
    found = forebay.load_file(path, into=other)
    check(other, net)
    assert {name: tensor.data_ptr() for name, tensor in other.named_parameters()} == memory
    assert set(found) == set(net.state_dict())
    assert found["head.weight"] is found["embed.weight"]


def test_a_module_on_meta(saved: tuple[Path, Net]) -> None:
    path, net = saved
    with torch.device("meta"):
        other = Net()
    other.embed.weight.requires_grad_(False)
    other.embed.weight.loader = "kept"
    with pytest.warns(UserWarning, match="scratch"):
        forebay.load_file(path, into=other)
    other.scratch = torch.zeros(3)
    check(other, net)
    assert not other.embed.weight.requires_grad and other.body[0].weight.requires_grad
    assert other.embed.weight.loader == "kept"
    assert isinstance(other.head.weight, nn.Parameter)
    other.train()
    other(torch.arange(4)).sum().backward()


def test_casts_into_a_module(saved: tuple[Path, Net]) -> None:
    path, net = saved
    half = Net().to(torch.bfloat16)
    with pytest.raises(forebay.UsageError) as caught:
        forebay.load_file(path, into=half)
    assert caught.value.code == "dtype_mismatch" and "dtype='target'" in str(caught.value)
    forebay.load_file(path, into=half, dtype="target")
    check(half, Net.to(net, torch.bfloat16))
    with torch.device("meta"):
        other = Net()
    with pytest.warns(UserWarning):
        forebay.load_file(path, into=other, dtype=torch.float64)
    assert other.embed.weight.dtype == torch.float64
    assert other.body[1].num_batches_tracked.dtype == torch.int64


def test_missing_and_unexpected(saved: tuple[Path, Net], tmp_path: Path) -> None:
    path, net = saved
    tensors = {k: v.clone() for k, v in net.state_dict().items() if k != "embed.weight"}
    tensors["more"] = torch.ones(2)
    del tensors["body.0.bias"]
    odd = tmp_path / "odd.safetensors"
    forebay.save_file(tensors, odd)
    other = Net()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(forebay.NoSuchTensorError) as caught:
        forebay.load_file(odd, into=other)
    assert "`body.0.bias`" in str(caught.value) and "`more`" in str(caught.value)
    # One name of a tied pair is enough.
    assert "embed.weight" not in str(caught.value)
    assert all(same(tensor, before[name]) for name, tensor in other.state_dict().items())
    found = forebay.load_file(odd, into=other, strict=False)
    assert "more" not in found and same(other.embed.weight, net.head.weight)
    assert same(other.body[0].bias, before["body.0.bias"])
    forebay.load_file(odd, into=other, names="body.0.w*")
    wrong = {"body.0.weight": torch.zeros(3, 3)}
    with pytest.raises(forebay.UsageError) as caught:
        forebay.load_file(odd, into=wrong, names="body.0.weight")
    assert caught.value.code == "shape_mismatch" and "[16, 16]" in str(caught.value)


def test_a_dict(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(6, 8),
        "b": torch.arange(5),
        "c": torch.randn(3),
        "d": torch.randn(2),
    }
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(tensors, path)
    back = torch.zeros(8, 6)
    pool = torch.zeros(10)
    into = {
        "a": back.t(),
        "b": torch.zeros(5, dtype=torch.int64),
        "c": pool[4:7].requires_grad_(False),
        "d": torch.empty(2, device="meta"),
    }
    b = into["b"]
    found = forebay.load_file(path, into=into)
    assert torch.equal(back.t(), tensors["a"]) and found["b"] is b
    assert torch.equal(pool[4:7], tensors["c"]) and pool[:4].sum() == 0 == pool[7:].sum()
    assert into["d"] is found["d"] and same(found["d"], tensors["d"])
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    leaf = {
        name: tensor.clone().float().requires_grad_()
        for name, tensor in tensors.items()
        if name != "b"
    }
    forebay.load_file(path, into=leaf, names=["a", "c", "d"])
    assert torch.equal(leaf["a"], tensors["a"])
    shared = torch.zeros(6)
    with pytest.raises(forebay.UsageError, match="share memory"):
        forebay.load_file(path, into={"c": shared[:3], "d": shared[2:4]}, strict=False)
    for bad in (3, [torch.zeros(2)], {"d": 3}):
        with pytest.raises(forebay.UsageError):
            forebay.load_file(path, into=bad, strict=False)


def test_a_dict_of_arrays(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(6, 8), "b": torch.randn(4).bfloat16()}
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(tensors, path)
    into = {"a": np.zeros((6, 8), np.float32), "b": np.zeros(4, np.float32)}
    forebay.load_file(path, "host", into=into, dtype="target")
    assert np.array_equal(into["a"], tensors["a"].numpy())
    assert np.array_equal(into["b"], tensors["b"].float().numpy())
    turned = {"a": np.zeros((8, 6), np.float64).T}
    forebay.load_file(path, "host", into=turned, names=["a"], dtype="target")
    assert np.array_equal(turned["a"], tensors["a"].numpy())


def test_regions_into(tmp_path: Path) -> None:
    tensor = torch.randn(8, 6)
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": tensor}, path)
    into = {"w": torch.zeros(8, 3)}
    forebay.load_file(path, into=into, shard=(1, 1, 2))
    assert torch.equal(into["w"], tensor[:, 3:])


class Views(nn.Module):
    """Parameters over one piece of memory, none of them the same object as another."""

    def __init__(self, *views: torch.Tensor) -> None:
        super().__init__()
        for number, view in enumerate(views):
            self.register_parameter(f"p{number}", nn.Parameter(view))


def test_parameters_over_the_same_memory_are_tied(tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    path, both = tmp_path / "one.safetensors", tmp_path / "both.safetensors"
    forebay.save_file({"p1": weight}, path)
    forebay.save_file({"p0": weight, "p1": weight.clone()}, both)
    for file in (path, both):
        memory = torch.zeros(6, 4)
        module = Views(memory, memory.view(6, 4))
        assert module.p0 is not module.p1
        found = forebay.load_file(file, into=module)
        assert forebay.last_report()["tensors"] == 1
        assert set(found) == {"p0", "p1"}
        assert torch.equal(memory, weight)
        assert found["p0"] is module.p0 and found["p1"] is module.p1
        assert module.p0.data_ptr() == module.p1.data_ptr() == memory.data_ptr()
    # In another form: what is in the file fits the name that it has there.
    turned = torch.zeros(4, 6)
    module = Views(turned, turned.t())
    forebay.load_file(path, into=module)
    assert torch.equal(turned.t(), weight)
    with torch.device("meta"):
        memory = torch.zeros(6, 4)
        module = Views(memory, memory.view(6, 4))
    forebay.load_file(path, into=module)
    assert torch.equal(module.p0, weight) and module.p0.data_ptr() == module.p1.data_ptr()


def test_parameters_that_share_a_part_of_their_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    forebay.save_file({"p0": torch.ones(4), "p1": torch.full((4,), 2.0)}, path)
    memory = torch.zeros(6)
    module = Views(memory[:4], memory[2:])
    with pytest.raises(forebay.UsageError, match="share memory") as caught:
        forebay.load_file(path, into=module)
    assert caught.value.code == "usage" and "`p0` and `p1`" in str(caught.value)
    assert not memory.any()
    forebay.load_file(path, into=module, names=["p0"])
    assert memory.tolist() == [1, 1, 1, 1, 0, 0]


def test_parameters_beside_each_other(tmp_path: Path) -> None:
    """Rows and columns of one matrix share no byte, though columns lie between one another."""
    path = tmp_path / "m.safetensors"
    parts = {"p0": torch.randn(4, 2), "p1": torch.randn(4, 3), "p2": torch.randn(4, 1)}
    forebay.save_file(parts, path)
    memory = torch.zeros(4, 6)
    forebay.load_file(path, into=Views(memory[:, :2], memory[:, 2:5], memory[:, 5:]))
    assert torch.equal(memory, torch.cat(list(parts.values()), 1))
    with pytest.raises(forebay.UsageError, match="share memory"):
        forebay.load_file(path, into=Views(memory[:, :2], memory[:, 1:4], memory[:, 5:]))
    memory = torch.zeros(24)
    cuts = [memory[:8].view(4, 2), memory[8:20].view(4, 3), memory[20:].view(4, 1)]
    forebay.load_file(path, into=Views(*cuts))
    assert torch.equal(memory, torch.cat([part.flatten() for part in parts.values()]))


def test_a_change_while_tensors_are_cast_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forebay._load, "CAST_WINDOW_BYTES", 1)
    path = tmp_path / "m.safetensors"
    forebay.save_file({"a": torch.ones(4096), "b": torch.ones(4096)}, path)
    into = {name: torch.zeros(4096, dtype=torch.float64) for name in "ab"}

    def rewrite(done: int, total: int) -> None:
        if done < total:
            # Times of files count in ticks of the kernel, of 10 ms at the most.
            time.sleep(0.05)
            path.write_bytes(path.read_bytes())

    with pytest.raises(forebay.FileChangedError, match="m.safetensors"):
        forebay.load_file(path, into=into, dtype="target", progress=rewrite)
    assert into["a"].all() and not into["b"].any()
