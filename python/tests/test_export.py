"""`forebay ckpt export`: what torch and safetensors read is what was saved, cast as torch casts."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support import same
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from forebay import Checkpointer
from forebay.dcp import Writer

FLOATS = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
}


@functools.cache
def command() -> str:
    """The command: of FOREBAY_COMMAND, else built here."""
    if "FOREBAY_COMMAND" in os.environ:
        return os.environ["FOREBAY_COMMAND"]
    root = Path(__file__).resolve().parents[2]
    if shutil.which("cargo") is None or not (root / "Cargo.toml").is_file():
        pytest.skip("no forebay command: set FOREBAY_COMMAND, or have cargo build it")
    build = ["cargo", "build", "--quiet", "--package", "forebay", "--message-format", "json"]
    built = subprocess.run(build, cwd=root, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    (path,) = {message["executable"] for message in messages if message.get("executable")}
    return str(path)


def ckpt(*args: object) -> dict[str, Any]:
    run = [command(), "ckpt", *map(str, args), "--json"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    return report


def every_half() -> torch.Tensor:
    """Every number that 16 bits can be."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


def singles() -> torch.Tensor:
    """Floats of all magnitudes, and those where rounding decides: around and between short floats."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(1 << 31), 1 << 31, (300_000,), generator=generator)
    halves = torch.cat(
        [every_half().view(torch.float16).float(), every_half().view(torch.bfloat16).float()]
    )
    halves = halves[halves.isfinite()]
    ties = torch.cat([(halves[1:].double() + halves[:-1].double()).div(2).float(), halves])
    around = torch.cat(
        [ties, ties.nextafter(torch.tensor(torch.inf)), ties.nextafter(torch.tensor(-torch.inf))]
    )
    return torch.cat([bits.to(torch.int32).view(torch.float32), around])


def stock(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def test_casts_are_those_of_torch(tmp_path: Path) -> None:
    single = singles()
    state = {
        "f32": single,
        "f64": torch.cat(
            [single.double(), single.double() * (1 + 2**-30), torch.tensor([1e300, -1e-300])]
        ),
        "f16": every_half().view(torch.float16),
        "bf16": every_half().view(torch.bfloat16),
        "i64": torch.arange(9),
    }
    saved = stock(tmp_path / "saved", state)
    for name, dtype in FLOATS.items():
        out = tmp_path / f"{name}.safetensors"
        ckpt("export", saved, "--to", out, "--dtype", name)
        for key, found in load_file(out).items():
            wanted = state[key] if key == "i64" else state[key].to(dtype)
            assert found.dtype == wanted.dtype
            if key == "i64":
                assert torch.equal(found, wanted)
                continue
            # NaN stays NaN; which one is nobody's promise.
            assert torch.equal(found.isnan(), wanted.isnan()), (key, name)
            number = ~wanted.isnan()
            bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[wanted.itemsize]
            differ = found[number].view(bits) != wanted[number].view(bits)
            assert not differ.any(), (key, name, state[key][number][differ][:5])


def model_state() -> dict[str, Any]:
    torch.manual_seed(1)
    embed = torch.randn(300, 64)
    return {
        "model": OrderedDict(
            [
                ("embed.weight", embed),
                ("layer.weight", torch.randn(64, 64).bfloat16()),
                ("layer.bias", torch.randn(64).half()),
                ("head.weight", embed),
                ("empty", torch.zeros(0, 3)),
                ("scalar", torch.tensor(2.5)),
                ("mask", torch.rand(7) > 0.5),
                ("eights", torch.randn(16).to(torch.float8_e4m3fn)),
            ]
        ),
        "optim": {
            "state": [{"exp_avg": torch.randn(5), "step": 3}, {"exp_avg": torch.randn(2, 2)}],
            "betas": (0.9, 0.999),
            "name": "adam",
            "big": 1 << 70,
            "none": None,
            "raw": b"\x00\xffbytes",
        },
        "step": 42,
    }


def equal(ours: object, theirs: object) -> bool:
    if isinstance(ours, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and same(ours, theirs)
    if isinstance(ours, dict):
        return (
            isinstance(theirs, dict)
            and ours.keys() == theirs.keys()
            and all(equal(ours[key], theirs[key]) for key in ours)
        )
    if isinstance(ours, (list, tuple)):
        return (
            type(ours) is type(theirs)
            and isinstance(theirs, (list, tuple))
            and len(ours) == len(theirs)
            and all(map(equal, ours, theirs))
        )
    return type(ours) is type(theirs) and ours == theirs


def test_a_nested_state_comes_back_from_a_file_of_torch(tmp_path: Path) -> None:
    state = model_state()
    with Checkpointer(tmp_path / "root") as checkpoints:
        checkpoints.save(5, state, blocking=True)
    report = ckpt("export", tmp_path / "root", "--to", tmp_path / "all.pt")
    assert report["left_out"] == {}
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert equal(state, loaded), loaded
    # What shared memory when it was saved shares it again.
    model = loaded["model"]
    assert model["embed.weight"].data_ptr() == model["head.weight"].data_ptr()
    mapped = torch.load(tmp_path / "all.pt", weights_only=True, mmap=True)
    assert equal(state, mapped)
    flat = ckpt(
        "export", tmp_path / "root", "--to", tmp_path / "flat.pt", "--flat", "--select", "model.*"
    )
    assert flat["tensors"] == 8
    names = torch.load(tmp_path / "flat.pt", weights_only=True)
    assert set(names) == {f"model.{name}" for name in state["model"]}


def test_safetensors_of_a_training_state(tmp_path: Path) -> None:
    state = model_state()
    with Checkpointer(tmp_path / "root") as checkpoints:
        checkpoints.save(5, state, blocking=True)
    args = [
        "--to",
        tmp_path / "model",
        "--select",
        "model.*",
        "--rename",
        "model.=",
        "--max-shard-bytes",
        "5KB",
    ]
    report = ckpt("export", tmp_path / "root", *args)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(report["files"]) and len(report["files"]) > 2
    found: dict[str, torch.Tensor] = {}
    for file in report["files"]:
        found |= load_file(tmp_path / "model" / file)
        with safe_open(tmp_path / "model" / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert set(found) == set(index["weight_map"]) == set(state["model"]) - {"head.weight"}
    for name, tensor in found.items():
        assert same(tensor, state["model"][name]), name
    assert ckpt("verify", tmp_path / "root")["sound"] is True


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, which has stepped; the first parameter has no state."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
    groups = [{"params": list(part.parameters())} for part in (model[:2], model[2:])]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model[0].weight.requires_grad_(False)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def saved_by(kind: str, state: dict[str, Any], folder: Path) -> Path:
    if kind == "stock":
        return stock(folder, state)
    if kind == "writer":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(state, storage_writer=Writer(folder), no_dist=True)
        return folder
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, state, blocking=True)
    return folder


@pytest.mark.parametrize("kind", ["checkpointer", "writer", "stock"])
def test_an_optimizer_takes_its_state_from_a_file_of_torch(tmp_path: Path, kind: str) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    saved = saved_by(kind, state, tmp_path / "saved")
    ckpt("export", saved, "--to", tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert equal(state, loaded), loaded
    _, fresh = trained()
    fresh.state.clear()
    fresh.load_state_dict(loaded["optim"])
    assert len(fresh.state) == 11
    assert equal(fresh.state_dict(), optimizer.state_dict())


def test_a_state_by_names_keeps_its_names(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"optim": get_optimizer_state_dict(model, optimizer), "state": {"0": torch.ones(2)}}
    ckpt("export", stock(tmp_path / "saved", state), "--to", tmp_path / "all.pt")
    assert equal(state, torch.load(tmp_path / "all.pt", weights_only=True))


def test_a_stock_checkpoint_becomes_one_file(tmp_path: Path) -> None:
    state = model_state()
    saved = stock(tmp_path / "saved", state)
    assert ckpt("verify", saved)["sound"] is True
    ckpt("export", saved, "--to", tmp_path / "all.pt")
    assert equal(state, torch.load(tmp_path / "all.pt", weights_only=True))
    ckpt("diff", saved, tmp_path / "all.pt", "--select", "model.*")
