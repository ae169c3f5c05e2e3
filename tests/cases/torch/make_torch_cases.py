"""Writes small files of torch.save, and expected.json with what they hold, into this folder.

    python3 make_torch_cases.py        needs torch; made with 2.11.0

expected.json: for each file either `tensors` (name -> dtype, shape, sha256 of the row-major bytes), `objects` (name ->
value) and `left_out` (names that get a warning), or `error` (the code).
"""

import hashlib
import io
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import torch

HERE = Path(__file__).parent
NAMES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
expected = {}


class Calls:
    """What a hostile pickle would hold."""

    def __reduce__(self):
        return os.getcwd, ()


def row_major(tensor):
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def ramp(*shape, dtype=torch.float32):
    count = 1
    for side in shape:
        count *= side
    return (torch.arange(count) % 251 - 100).to(torch.float32).reshape(shape).to(dtype)


def save(name, state, tensors, objects=(), left_out=(), **how):
    torch.save(state, HERE / name, **how)
    describe(name, tensors, objects, left_out)


def describe(name, tensors, objects=(), left_out=()):
    rows = {
        key: {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "sha256": hashlib.sha256(row_major(tensor)).hexdigest(),
        }
        for key, tensor in tensors.items()
    }
    expected[name] = {"tensors": rows, "objects": dict(objects), "left_out": list(left_out)}


def refuse(name, code):
    expected[name] = {"error": code}


def rewrite(source, name, change, **how):
    """A copy of an archive, with records changed."""
    with zipfile.ZipFile(HERE / source) as old, zipfile.ZipFile(HERE / name, "w", **how) as new:
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info)), how.get("compression"))


def main():
    dtypes = {str(dtype).removeprefix("torch."): ramp(3, 5).to(dtype) for dtype in NAMES}
    dtypes |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 7), "long": ramp(40, 500)}
    save("dtypes.pt", dtypes, dtypes)

    base = ramp(6, 4)
    image = ramp(2, 3, 5, 7, dtype=torch.float16)
    strided = {
        "whole": base,
        "transposed": base.t(),
        "rows": base[2:5],
        "column": base[:, 1],
        "every_other": base[::2, ::3],
        "expanded": base[:1].expand(3, 4),
        "expanded_columns": base[:, :1].expand(6, 5),
        "channels_last": image.to(memory_format=torch.channels_last),
        "permuted": image.permute(3, 1, 0, 2),
        "windows": torch.arange(8.0).unfold(0, 3, 1),
        "one_row": base[3:4].t(),
        "tied": base,
        "tall": ramp(200, 50).t(),
    }
    save("strided.pt", strided, strided)

    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    module(ramp(5, 4) / 100).sum().backward()
    optimizer.step()
    nested = {
        "model": module.state_dict(),
        "optim": optimizer.state_dict(),
        "step": 3,
        "name": "run é",
        "none": None,
        "big": -(2**70),
        "list": [1, "two", 3.5, [None]],
        "tuple": (1, 2),
        "pair": (torch.ones(2), 5),
        "empty": {},
        "nan": float("nan"),
    }
    flat = {f"model.{key}": value for key, value in nested["model"].items()}
    for index, state in nested["optim"]["state"].items():
        flat |= {f"optim.state.{index}.{key}": value for key, value in state.items()}
    objects = {f"optim.param_groups.0.{key}": value for key, value in nested["optim"]["param_groups"][0].items()}
    objects |= {key: nested[key] for key in ("step", "name", "none", "big", "list", "tuple")}
    objects |= {"pair.1": 5, "nan": {"opaque": True}}
    save("nested.pt", nested, flat | {"pair.0": torch.ones(2)}, objects)

    marked = torch.nn.Parameter(ramp(2, 3))
    marked.tensor_model_parallel = True
    plain = torch.ones(3)
    plain.note = "x"
    params = OrderedDict(weight=torch.nn.Parameter(ramp(3, 2)), marked=marked, noted=plain)
    save("params.pth", params, params)

    odd = {
        "good": ramp(4),
        "sparse": torch.eye(3).to_sparse(),
        "double_complex": torch.zeros(2, dtype=torch.complex128),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
    }
    save("odd.pt", odd, {"good": odd["good"]}, (), [key for key in odd if key != "good"])
    save("alone.pt", ramp(2, 2), {"tensor": ramp(2, 2)})
    save("calls.pt", {"w": ramp(3), "evil": Calls()}, {"w": ramp(3)}, {"evil": {"forbidden": "getcwd"}})

    rewrite("alone.pt", "commented.pt", lambda _, data: data)
    with zipfile.ZipFile(HERE / "commented.pt", "a") as archive:
        archive.comment = b"a comment"
    describe("commented.pt", {"tensor": ramp(2, 2)})
    rewrite("alone.pt", "big_endian.pt", lambda name, data: b"big" if name.endswith("byteorder") else data)
    refuse("big_endian.pt", "unsupported")
    rewrite("alone.pt", "compressed.pt", lambda _, data: data * 40, compression=zipfile.ZIP_DEFLATED)
    refuse("compressed.pt", "invalid_item")
    torch.save({"w": ramp(3)}, HERE / "before_1_6.pt", _use_new_zipfile_serialization=False)
    refuse("before_1_6.pt", "unsupported")
    torch.save(torch.nn.Linear(1, 1), HERE / "module.pt")
    refuse("module.pt", "unsupported")
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), HERE / "script.pt")
    refuse("script.pt", "unsupported")
    (HERE / "bare_pickle.pt").write_bytes(pickle.dumps({"w": [1.0]}))
    refuse("bare_pickle.pt", "unknown_format")
    whole = io.BytesIO()
    torch.save({"w": ramp(30)}, whole)
    (HERE / "cut.pt").write_bytes(whole.getvalue()[:-30])
    refuse("cut.pt", "truncated")
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


main()
