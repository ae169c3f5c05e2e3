"""Files of torch.save and distributed checkpoints of torch, read by load_file and safe_open as torch saved them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from support import raw

import forebay

CASES = Path(__file__).parents[2] / "tests" / "cases"
FILES = json.loads((CASES / "torch" / "expected.json").read_text(encoding="utf-8"))
FIXTURES = sorted(folder.name for folder in (CASES / "dcp").iterdir())


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(raw(tensor)).hexdigest()


@pytest.mark.parametrize("name", [name for name, case in FILES.items() if "tensors" in case])
def test_files_of_torch(name: str) -> None:
    wanted = FILES[name]["tensors"]
    tensors = forebay.load_file(CASES / "torch" / name, device="cpu")
    assert {key: digest(tensor) for key, tensor in tensors.items()} == {
        key: want["sha256"] for key, want in wanted.items()
    }
    assert all(list(tensors[key].shape) == want["shape"] for key, want in wanted.items())
    assert all(tensor.is_contiguous() for tensor in tensors.values())


@pytest.mark.parametrize("name", [name for name, case in FILES.items() if "error" in case])
def test_refused_files(name: str) -> None:
    with pytest.raises(Exception) as raised:
        forebay.load_file(CASES / "torch" / name, device="cpu")
    assert raised.value.code == FILES[name]["error"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FIXTURES)
def test_checkpoints(name: str) -> None:
    folder = CASES / "dcp" / name
    keys = json.loads((folder / "expected.json").read_text(encoding="utf-8"))["keys"]
    wanted = {key: want["sha256"] for key, want in keys.items() if want["kind"] == "tensor"}
    tensors = forebay.load_file(folder / "ckpt", device="cpu")
    assert {key: digest(tensor) for key, tensor in tensors.items()} == wanted
    with forebay.safe_open(folder / "ckpt", framework="pt") as opened:
        assert set(opened.keys()) == set(wanted)
        for key in opened.keys():
            whole = opened.get_tensor(key)
            assert digest(whole) == wanted[key]
            if whole.dim() and whole.shape[0] > 1:
                assert digest(opened.get_slice(key)[1:]) == digest(whole[1:])


def test_damage_of_one_tensor_leaves_the_others() -> None:
    folder = CASES / "dcp_broken" / "items_swapped"
    with pytest.raises(Exception, match="odd") as raised:
        forebay.load_file(folder, device="cpu")
    assert raised.value.code == "shape_mismatch"  # type: ignore[attr-defined]
    assert set(forebay.load_file(folder, device="cpu", names="rep")) == {"rep"}


@pytest.mark.parametrize("seed", range(20))
def test_any_view_arrives_as_torch_has_it(seed: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    state = {}
    for index in range(30):
        tensor = torch.randn([pick(1, 6) for _ in range(pick(1, 5))], generator=generator)
        tensor = tensor.to([torch.float32, torch.bfloat16, torch.float64, torch.uint8][pick(0, 4)])
        tensor = tensor.permute(torch.randperm(tensor.dim(), generator=generator).tolist())
        side = pick(0, tensor.dim())
        if tensor.shape[side] > 2:
            tensor = tensor.narrow(side, 1, tensor.shape[side] - 2)
        if pick(0, 3) == 0:
            tensor = tensor[..., :: pick(1, 3)]
        if pick(0, 4) == 0:
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
        state[f"t{index}"] = tensor
    path = tmp_path / "state.pt"
    torch.save({"inner": state, "step": seed}, path)
    loaded = forebay.load_file(path, device="cpu")
    assert set(loaded) == {f"inner.{key}" for key in state}
    for key, tensor in state.items():
        got = loaded[f"inner.{key}"]
        assert got.dtype == tensor.dtype and got.shape == tensor.shape
        assert digest(got) == digest(tensor), (key, tensor.shape, tensor.stride())


def test_a_module_is_filled_from_a_file_of_torch(tmp_path: Path) -> None:
    source = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5))
    torch.save(source.state_dict(), tmp_path / "m.bin")
    target = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5))
    forebay.load_file(tmp_path / "m.bin", device="cpu", into=target)
    for key, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], tensor)


def test_pairs_of_four_bits(tmp_path: Path) -> None:
    halves = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
    state = {"w": halves.view(torch.float4_e2m1fn_x2), "t": halves.view(torch.float4_e2m1fn_x2)[1:3]}
    torch.save(state, tmp_path / "f4.pt")
    loaded = forebay.load_file(tmp_path / "f4.pt", device="cpu")
    for key, tensor in state.items():
        assert loaded[key].dtype == tensor.dtype and loaded[key].shape == tensor.shape
        assert torch.equal(loaded[key].view(torch.uint8), tensor.view(torch.uint8))
