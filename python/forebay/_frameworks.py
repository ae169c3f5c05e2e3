"""torch and numpy behind one interface: dtypes, allocation, addresses, casts.

Neither is imported before it is needed. A framework lacks some dtypes of the format; with `raw=True` tensors of those
are handed out as unsigned integers of the same bits instead of an error:

- torch has all but the two F6. F4 is `float4_e2m1fn_x2`, two elements in a byte, so its last dimension is halved.
- numpy has the integers, F16, F32, F64, BOOL and C64. The `ml_dtypes` package, where it is installed, adds BF16 and F8.

Raw BF16 is `uint16` and raw F8 `uint8` in the same shape. Raw F4 and F6 are bytes: the last dimension counts bytes where
rows are whole bytes, else the tensor is flat.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from forebay import _native
from forebay._errors import Error, make, quoted, usage

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
#: A dtype of a framework.
FrameworkDtype = Any
#: A tensor or array.
Tensor = Any

BITS: dict[str, int] = dict(_native.dtypes())

#: Dtypes of the format and their names in torch; F6 has none.
_TORCH_NAMES: dict[str, str] = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

#: The floating-point dtypes, those that a cast applies to.
FLOATING = frozenset(name for name in BITS if name.startswith(("F", "BF")))

#: Dtypes that numpy has itself.
_NUMPY_OWN = frozenset(
    ("BOOL", "U8", "I8", "I16", "U16", "F16", "I32", "U32", "F32", "C64", "F64", "I64", "U64")
)

_RAW_NAMES: dict[str, str] = {"BF16": "uint16"}


class Framework(Protocol):
    """What the rest of the package asks of a framework."""

    name: str

    def dtype(self, name: str, raw: bool) -> tuple[FrameworkDtype, int]:
        """The dtype for one of the format, and how many elements of the format one of it holds (0: bytes)."""

    def parse_dtype(self, value: object) -> FrameworkDtype:
        """Reads a dtype that a caller named."""

    def holds_floats(self, dtype: FrameworkDtype) -> bool:
        """Whether floating-point numbers can be cast to it."""

    def empty(self, shape: Shape, dtype: FrameworkDtype) -> Tensor:
        """New memory."""

    def empty_many(
        self, shapes: Sequence[Shape], dtypes: Sequence[FrameworkDtype]
    ) -> tuple[list[Tensor], list[int]]:
        """New memory for several tensors, and its addresses."""

    def address(self, tensor: Tensor) -> int:
        """Where a tensor's memory starts."""

    def stream(self) -> int | None:
        """The handle of the stream that allocations belong to, for a GPU."""

    def cast(self, tensor: Tensor, dtype: FrameworkDtype, name: str) -> Tensor:
        """A tensor of another dtype; `name` is the dtype of the format that `tensor` came from."""

    def view(self, shape: Shape) -> Tensor:
        """A tensor of this shape that takes no memory, to try an index on."""

    def own(self, tensor: Tensor) -> Tensor:
        """A tensor that is contiguous and owns no more than it shows."""

    def pick(self, tensor: Tensor, index: object) -> Tensor:
        """`tensor[index]`, always a tensor."""


def have_torch() -> bool:
    """Whether torch can be imported. Imports it."""
    try:
        importlib.import_module("torch")
    except ImportError:
        return False
    return True


def lacks(framework: str, name: str, *hints: str) -> Error:
    """The error for a dtype that a framework does not have."""
    raw = f"pass raw=True to get {name} tensors as unsigned integers of the same bits"
    return make("unsupported", f"{framework} has no dtype for {name}", None, [*hints, raw])


def stored_shape(shape: Shape, name: str, elements: int, tensor: str) -> Shape:
    """The shape that a framework shows for a tensor of dtype `name`; `elements` as `Framework.dtype` gives it."""
    if elements == 1:
        return shape
    bits = BITS[name]
    last = shape[-1] if shape else 1
    if last * bits % 8 == 0:
        return (*shape[:-1], last * bits // 8)
    if elements == 0:
        count = 1
        for side in shape:
            count *= side
        return (count * bits // 8,)
    what = f"rows of {last} elements of {name} are not whole bytes, which tensors of them need"
    raise make("unsupported", what, f"tensor {quoted(tensor)}", ["pass raw=True to get the bytes"])


class Torch:
    """torch on one device."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self.torch = importlib.import_module("torch")
        self.device = device
        self._dtypes: dict[tuple[str, bool], tuple[FrameworkDtype, int]] = {}

    def dtype(self, name: str, raw: bool) -> tuple[FrameworkDtype, int]:
        found = self._dtypes.get((name, raw))
        if found is None:
            found = self._dtypes[name, raw] = self._find_dtype(name, raw)
        return found

    def _find_dtype(self, name: str, raw: bool) -> tuple[FrameworkDtype, int]:
        known = _TORCH_NAMES.get(name)
        dtype = getattr(self.torch, known, None) if known is not None else None
        if dtype is not None:
            return dtype, 2 if name == "F4" else 1
        if not raw:
            newer = [f"a newer torch has {known}"] if known is not None else []
            raise lacks(f"torch {self.torch.__version__}", name, *newer)
        if BITS[name] < 8:
            return self.torch.uint8, 0
        return getattr(self.torch, _RAW_NAMES.get(name, f"uint{BITS[name]}")), 1

    def parse_dtype(self, value: object) -> FrameworkDtype:
        if isinstance(value, str):
            name = value.removeprefix("torch.")
            value = getattr(self.torch, _TORCH_NAMES.get(name, name), None) or value
        if not isinstance(value, self.torch.dtype):
            raise usage(f"dtype is {value!r}, a torch dtype or its name is needed")
        if not self.holds_floats(value):
            raise usage(f"floating-point tensors cannot be cast to {value}", "name a float dtype")
        return value

    def holds_floats(self, dtype: FrameworkDtype) -> bool:
        packed = "float4" in str(dtype)
        return bool(dtype.is_floating_point or dtype.is_complex) and not packed

    def empty(self, shape: Shape, dtype: FrameworkDtype) -> Tensor:
        if 0 in shape:
            # The strides of [0, 2^62, 2^62] overflow; reshaping does not mind.
            return self.torch.empty(0, dtype=dtype, device=self.device).reshape(shape)
        return self.torch.empty(shape, dtype=dtype, device=self.device)

    def empty_many(
        self, shapes: Sequence[Shape], dtypes: Sequence[FrameworkDtype]
    ) -> tuple[list[Tensor], list[int]]:
        empty, device = self.torch.empty, self.device
        pairs = zip(shapes, dtypes, strict=True)
        tensors = [
            empty(shape, dtype=dtype, device=device) if 0 not in shape else self.empty(shape, dtype)
            for shape, dtype in pairs
        ]
        return tensors, [tensor.data_ptr() for tensor in tensors]

    def address(self, tensor: Tensor) -> int:
        return int(tensor.data_ptr())

    def stream(self) -> int | None:
        if self.device.type != "cuda":
            return None
        return int(self.torch.cuda.current_stream(self.device).cuda_stream)

    def cast(self, tensor: Tensor, dtype: FrameworkDtype, name: str) -> Tensor:
        if name == "F4":
            hint = "F4 needs the scales of its blocks to become numbers: load it as it is"
            raise make("unsupported", "F4 tensors cannot be cast", None, [hint])
        return tensor.to(dtype)

    def view(self, shape: Shape) -> Tensor:
        # On the host whatever the caller's default device is.
        return self.torch.empty((), dtype=self.torch.uint8, device="cpu").expand(shape)

    def own(self, tensor: Tensor) -> Tensor:
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if whole and tensor.is_contiguous():
            return tensor
        return tensor.clone(memory_format=self.torch.contiguous_format)

    def pick(self, tensor: Tensor, index: object) -> Tensor:
        return tensor[index]


class Numpy:
    """numpy arrays in host memory."""

    name = "numpy"

    def __init__(self) -> None:
        try:
            self.numpy = importlib.import_module("numpy")
        except ImportError as error:
            hint = "install numpy, or torch and say device='cpu'"
            raise make("unsupported", "numpy is not installed", None, [hint]) from error
        self._dtypes: dict[tuple[str, bool], tuple[FrameworkDtype, int]] = {}

    def dtype(self, name: str, raw: bool) -> tuple[FrameworkDtype, int]:
        found = self._dtypes.get((name, raw))
        if found is None:
            found = self._dtypes[name, raw] = self._find_dtype(name, raw)
        return found

    def _find_dtype(self, name: str, raw: bool) -> tuple[FrameworkDtype, int]:
        if name in _NUMPY_OWN:
            return self.numpy.dtype(_TORCH_NAMES[name]), 1
        if BITS[name] == 8 or name == "BF16":
            try:
                extra = importlib.import_module("ml_dtypes")
                return self.numpy.dtype(getattr(extra, _TORCH_NAMES[name])), 1
            except (ImportError, AttributeError):
                if not raw:
                    raise lacks("numpy", name, "install the ml_dtypes package") from None
        if not raw:
            raise lacks("numpy", name)
        if BITS[name] < 8:
            return self.numpy.dtype("uint8"), 0
        return self.numpy.dtype(_RAW_NAMES.get(name, "uint8")), 1

    def parse_dtype(self, value: object) -> FrameworkDtype:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        if isinstance(value, str):
            value = _TORCH_NAMES.get(value, value)
            if value == "bfloat16" or value.startswith("float8"):
                short = {long: name for name, long in _TORCH_NAMES.items()}.get(value)
                if short is not None:
                    return self.dtype(short, raw=False)[0]
        try:
            dtype = self.numpy.dtype(value)
        except TypeError as error:
            raise usage(f"dtype is {value!r}, a numpy dtype or its name is needed") from error
        if not self.holds_floats(dtype):
            raise usage(f"floating-point arrays cannot be cast to {dtype}", "name a float dtype")
        return dtype

    def holds_floats(self, dtype: FrameworkDtype) -> bool:
        # "V" is how ml_dtypes registers its own.
        return dtype.kind in "fcV"

    def empty(self, shape: Shape, dtype: FrameworkDtype) -> Tensor:
        return self.numpy.empty(shape, dtype)

    def empty_many(
        self, shapes: Sequence[Shape], dtypes: Sequence[FrameworkDtype]
    ) -> tuple[list[Tensor], list[int]]:
        empty = self.numpy.empty
        arrays = [empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        # `ctypes.data` costs a microsecond more.
        return arrays, [array.__array_interface__["data"][0] for array in arrays]

    def address(self, tensor: Tensor) -> int:
        return int(tensor.__array_interface__["data"][0])

    def stream(self) -> int | None:
        return None

    def cast(self, tensor: Tensor, dtype: FrameworkDtype, name: str) -> Tensor:
        if BITS[name] < 8:
            raise make("unsupported", f"{name} tensors cannot be cast", None, ["load it raw"])
        if name == "BF16" and tensor.dtype == self.numpy.uint16:
            # A BF16 is the upper half of an F32.
            tensor = (tensor.astype(self.numpy.uint32) << 16).view(self.numpy.float32)
        elif name.startswith("F8") and tensor.dtype == self.numpy.uint8:
            raise lacks("numpy", name, "install the ml_dtypes package")
        return tensor.astype(dtype, copy=False)

    def view(self, shape: Shape) -> Tensor:
        return self.numpy.broadcast_to(self.numpy.uint8(0), shape)

    def own(self, tensor: Tensor) -> Tensor:
        base = tensor if tensor.base is None else tensor.base
        if tensor.flags.c_contiguous and getattr(base, "nbytes", -1) == tensor.nbytes:
            return tensor
        return tensor.copy(order="C")

    def pick(self, tensor: Tensor, index: object) -> Tensor:
        return self.numpy.asarray(tensor[index])
