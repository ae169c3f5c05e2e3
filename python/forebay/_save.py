"""Saving: one file, a module, or a folder of files with an index.

Files are byte for byte those of the safetensors library. They appear whole or not at all, and are on the disk when the
call returns: the bytes go to a hidden file beside the destination, which then takes its name in one step.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from forebay import _native, _options
from forebay._catalog import PathLike
from forebay._errors import SharedTensorsError, make, quoted, usage
from forebay._frameworks import _TORCH_NAMES, BITS, Shape, Tensor
from forebay._urls import home_of, place_of

#: Tensors by name.
Tensors = Mapping[str, Tensor]

_NAMES = {long: name for name, long in _TORCH_NAMES.items()}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}

Spec = tuple[str, str, Shape]


def save_file(tensors: Tensors, path: PathLike, metadata: Mapping[str, str] | None = None) -> None:
    """Saves tensors (torch or numpy) as a safetensors file.

    Tensors must be dense and contiguous, and must not share memory, as the safetensors library wants them.

    Raises:
        UsageError: tensors that cannot be saved as they are. SharedTensorsError: some share memory.
        IoError: the system said no; what was at `path` before is untouched.
    """
    specs, ready = _prepared(tensors)
    save = _native.Save.file(home_of(place_of(path), "save_file"), specs, _pairs(metadata))
    _write(save, ready)


def save_model(
    module: Any,
    path: PathLike,
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Saves a torch module as one file. Of tensors that share memory one is saved; the names of the others are put into
    the metadata, as the safetensors library does it. `load_file(into=module)` ties them again."""
    tensors, named = _of_module(module, metadata, force_contiguous)
    save_file(tensors, path, named)


def save_sharded(
    tensors: Any,
    folder: PathLike,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
) -> list[str]:
    """Saves tensors, or a torch module, as a folder of files with a `model.safetensors.index.json`, or one
    `model.safetensors` if all fit; returns the names of the files.

    The model in the folder before stays readable until the new one takes its place in one step; then the files that only
    the old index names are removed. A tensor larger than `max_shard_size` gets a file of its own.
    """
    if not isinstance(tensors, Mapping):
        tensors, metadata = _of_module(tensors, metadata, True)
    specs, ready = _prepared(tensors)
    limit = parse_size(max_shard_size)
    save = _native.Save.folder(home_of(place_of(folder), "save_sharded"), specs, _pairs(metadata), limit)
    files: list[str] = _write(save, ready)["files"]
    return files


def parse_size(size: int | str) -> int:
    """Bytes of "5GB", "500MB", "2GiB" or a number."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(size).upper())
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise usage(f"{size!r} is no size", "say '5GB', '500MB', '2GiB' or a number of bytes")
    return int(float(match[1]) * unit)


def _pairs(metadata: Mapping[str, str] | None) -> list[tuple[str, str]] | None:
    if metadata is None:
        return None
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise usage(f"metadata has {key!r}: {value!r}, text is needed for both")
    return list(metadata.items())


def _write(save: _native.Save, tensors: list[Tensor]) -> dict[str, Any]:
    """The data path: the tensors of each device together, by the engine of that device."""
    try:
        by_device: dict[str, list[int]] = {}
        for number, tensor in enumerate(tensors):
            by_device.setdefault(_device_of(tensor), []).append(number)
        for device, numbers in by_device.items():
            owners = [tensors[number] for number in numbers]
            stream = None
            if device == "other":
                # A device that no engine knows: through host memory, one by one.
                for number, owner in zip(numbers, owners, strict=True):
                    copy = owner.cpu()
                    save.write(_engine("host"), [(number, *_memory(copy))], copy)
                    del copy
                continue
            if device != "host":
                torch = sys.modules["torch"]
                stream = int(torch.cuda.current_stream(owners[0].device).cuda_stream)
            pairs = zip(numbers, owners, strict=True)
            parts = [(number, *_memory(owner)) for number, owner in pairs]
            save.write(_engine(device), parts, owners, None, stream)
        return save.commit()
    except BaseException:
        save.abandon()
        raise


def _engine(device: str) -> _native.Engine:
    return _options.engine(device, _options.parse(None, None))


def _device_of(tensor: Tensor) -> str:
    """The engine's name of the device that a tensor is on."""
    if not hasattr(tensor, "is_meta") or tensor.device.type == "cpu":
        return "host"
    return f"cuda:{tensor.device.index}" if tensor.is_cuda else "other"


def _memory(tensor: Tensor) -> tuple[int, int]:
    if hasattr(tensor, "is_meta"):
        return int(tensor.data_ptr()), int(tensor.numel()) * int(tensor.element_size())
    return int(tensor.__array_interface__["data"][0]), int(tensor.nbytes)


def _prepared(tensors: Tensors) -> tuple[list[Spec], list[Tensor]]:
    """Name, dtype and shape of each, and the tensors to write. Errors: `usage`."""
    if not isinstance(tensors, Mapping):
        raise usage(f"a dict of tensors is needed, not {type(tensors).__name__}")
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    specs: list[Spec] = []
    ready: list[Tensor] = []
    of_torch: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise usage(f"a tensor's name is {name!r}, text is needed")
        if torch is not None and isinstance(tensor, torch.Tensor):
            of_torch[name] = tensor
        elif numpy is None or not isinstance(tensor, numpy.ndarray):
            what = f"a torch tensor or numpy array is needed, not {type(tensor).__name__}"
            raise usage(what, where=f"tensor {quoted(name)}")
    if of_torch:
        _check_dense(of_torch)
        _check_apart(of_torch)
    for name, tensor in tensors.items():
        spec, tensor = _torch_spec(name, tensor) if name in of_torch else _numpy_spec(name, tensor)
        specs.append(spec)
        ready.append(tensor)
    return specs, ready


def _torch_spec(name: str, tensor: Tensor) -> tuple[Spec, Tensor]:
    where = f"tensor {quoted(name)}"
    if tensor.is_meta:
        raise usage("the tensor is on the meta device and has no bytes", where=where)
    if not tensor.is_contiguous():
        hint = f"save tensors[{name!r}].contiguous(), or the whole tensor that this is a part of"
        raise usage("the tensor is not contiguous", hint, where=where)
    dtype = _NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise _no_dtype(tensor.dtype, where)
    shape = tuple(tensor.shape)
    if BITS[dtype] == 4:
        # torch counts bytes of two elements in the last dimension.
        shape = (*shape[:-1], shape[-1] * 2) if shape else (2,)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return (name, dtype, shape), tensor.detach()


def _numpy_spec(name: str, array: Any) -> tuple[Spec, Tensor]:
    where = f"tensor {quoted(name)}"
    if not array.flags.c_contiguous:
        hint = f"save numpy.ascontiguousarray(tensors[{name!r}])"
        raise usage("the array is not contiguous", hint, where=where)
    dtype = _NAMES.get(array.dtype.name)
    if dtype is None or BITS[dtype] < 8:
        raise _no_dtype(array.dtype, where)
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.byteswap()
    return (name, dtype, tuple(array.shape)), array


def _no_dtype(dtype: object, where: str) -> Exception:
    hint = "cast it, or view it as integers of the same bits"
    return make("unsupported", f"safetensors has no dtype for {dtype}", where, [hint])


def _check_dense(tensors: Tensors) -> None:
    sparse = [name for name, tensor in tensors.items() if str(tensor.layout) != "torch.strided"]
    if sparse:
        hint = "make them dense with to_dense(); that may make a much larger file"
        raise usage(f"sparse tensors cannot be saved: {_some(sparse)}", hint)


def _check_apart(tensors: Tensors) -> None:
    shared = [group for group in _sharing(tensors) if len(group) > 1]
    if shared:
        groups = "; ".join(_some(group) for group in shared[:20])
        what = f"tensors share memory and would come apart when they are loaded again: {groups}"
        hints = [
            "of tied weights save one, or use forebay.save_model",
            "of views of one tensor save clones (.clone()), or the whole tensor",
        ]
        raise make_shared(what, hints)


def make_shared(what: str, hints: Iterable[str]) -> Exception:
    """The error for tensors that share memory."""
    return SharedTensorsError("usage", what, None, hints)


def _sharing(tensors: Tensors) -> list[list[str]]:
    """Names in groups that overlap in memory; the safetensors library's rule: same storage, and areas that overlap."""
    by_storage: dict[tuple[str, int, int], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() != 0 and storage.nbytes() != 0:
            key = (str(tensor.device), storage.data_ptr(), storage.nbytes())
            by_storage.setdefault(key, []).append(name)
    groups: list[list[str]] = []
    for names in by_storage.values():
        if len(names) == 1:
            groups.append(names)
            continue
        areas = sorted((*_area(tensors[name]), name) for name in names)
        reached = -1
        for start, end, name in areas:
            if start >= reached:
                groups.append([name])
            else:
                groups[-1].append(name)
            reached = end
    return groups


def _area(tensor: Tensor) -> tuple[int, int]:
    """The bytes that a tensor reaches over."""
    start = int(tensor.data_ptr())
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((side - 1) * stride for side, stride in steps) + 1
    return start, start + int(reach) * int(tensor.element_size())


def _of_module(
    module: Any, metadata: Mapping[str, str] | None, force_contiguous: bool
) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """The tensors of a module to save, one of each group that shares memory, and metadata that names the others."""
    if not hasattr(module, "state_dict"):
        raise usage(f"a torch module is needed, not {type(module).__name__}")
    tensors = {
        name: tensor for name, tensor in module.state_dict().items() if hasattr(tensor, "is_meta")
    }
    named = None if metadata is None else dict(metadata)
    for group in _sharing(tensors):
        if len(group) < 2:
            continue
        whole = sorted(name for name in group if _is_whole(tensors[name]))
        if not whole:
            what = f"tensors share memory that none of them covers: {_some(sorted(group))}"
            raise make_shared(what, ["save clones of them, or the whole tensor"])
        for name in sorted(group):
            if name != whole[0]:
                named = {} if named is None else named
                named.setdefault(name, whole[0])
                del tensors[name]
    if force_contiguous:
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return tensors, named


def _is_whole(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage()
    size = tensor.numel() * tensor.element_size()
    return bool(tensor.data_ptr() == storage.data_ptr() and size == storage.nbytes())


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
    return ", ".join(quoted(name) for name in listed[:20]) + more
