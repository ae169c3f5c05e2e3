"""What this rank holds of a tensor: its global shape, how it is cut over ranks, and the local memory of each piece.

Four kinds of tensors say so in four ways:

- a plain tensor is held whole by every rank that has it;
- a DTensor by mesh and placements (`meshes`), or, where its local part is itself made of shards, by regions;
- a ShardedTensor, and any tensor with the fields of torch's checkpointable-tensor protocol (`global_shape`,
  `global_offsets`, `local_offsets`, `local_sizes`; torch 2.14), by regions;
- a tensor class with `__create_chunk_list__` and `__get_tensor_shard__`, by regions.

What is no strided memory (sparse, quantized, nested, wrapper classes) is refused by name. So are partial sums, and
local parts that are larger than their layout says: padding would be stored as if it were data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from forebay._ckpt.kinds import OWN_TYPES, dtype_name, is_dtensor, is_sharded_tensor, local_of
from forebay._ckpt.meshes import REPLICATE, MeshLayout, Placement, Region, Shape
from forebay._errors import make, quoted, usage

_PROTOCOL = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


@dataclass(frozen=True)
class Plain:
    """Every rank that has the name holds all of it."""


@dataclass(frozen=True)
class Explicit:
    """This rank holds these regions."""

    regions: tuple[Region, ...]


Layout = Plain | MeshLayout | Explicit
PLAIN = Plain()


@dataclass(slots=True)
class Held:
    """One tensor, as this rank has it."""

    #: torch's name of the dtype, without "torch.".
    dtype: str
    shape: Shape
    layout: Layout
    #: The regions held here.
    regions: list[Region]
    #: Where each starts in the local tensor; `None` where the local tensor is the one region.
    starts: list[Shape] | None = None
    #: Which readings of a strided layout fit the local shape: 1 the first, 2 the second, 3 both.
    fits: int = 1


class Describer:
    """Describes tensors; remembers meshes and what their layouts mean here."""

    def __init__(self, rank: int, group_rank: Callable[[int], int | None]) -> None:
        self.rank = rank
        #: From a rank of the job to one of the saving group.
        self.group_rank = group_rank
        #: By the mesh's id, with the mesh, so that the id stays its own.
        self._meshes: dict[int, tuple[Any, tuple[int, ...], Shape]] = {}
        self._layouts: dict[tuple[int, Any], MeshLayout] = {}
        self._second: dict[MeshLayout, MeshLayout] = {}
        self._plain: dict[tuple[torch.dtype, torch.Size], Held] = {}
        self._pieces: dict[tuple[MeshLayout, Shape], list[tuple[Region, Shape]]] = {}

    def describe(self, name: str, tensor: torch.Tensor) -> Held | None:
        """What this rank holds; `None` if it is not in the tensor's mesh. Errors: `unsupported`,
        `structure_mismatch`."""
        if type(tensor) in OWN_TYPES:
            _check_memory(name, tensor)
            if hasattr(tensor, "global_shape"):
                return self._by_fields(name, tensor)
            return self._whole(tensor)
        if is_dtensor(tensor):
            return self._dtensor(name, tensor)
        if is_sharded_tensor(tensor):
            return _sharded(name, tensor)
        if _has_chunks(tensor):
            return _by_chunks(name, tensor, tensor)
        if hasattr(tensor, "__tensor_flatten__"):
            kind = type(tensor).__name__
            hint = "save the tensors it wraps, or give it __create_chunk_list__ as DCP has it"
            raise make("unsupported", f"tensors of class {kind} are not stored", _at(name), [hint])
        _check_memory(name, tensor)
        if hasattr(tensor, "global_shape"):
            return self._by_fields(name, tensor)
        return self._whole(tensor)

    def _whole(self, tensor: torch.Tensor) -> Held:
        """A plain tensor; those of one dtype and shape share what is said of them."""
        key = (tensor.dtype, tensor.shape)
        found = self._plain.get(key)
        if found is None:
            shape = tuple(tensor.shape)
            found = Held(dtype_name(tensor.dtype), shape, PLAIN, [((0,) * len(shape), shape)])
            self._plain[key] = found
        return found

    def pieces(self, layout: MeshLayout, shape: Shape) -> list[tuple[Region, Shape]]:
        """The regions of a layout that are here, and where each starts in the local tensor."""
        found = self._pieces.get((layout, shape))
        if found is None:
            found = self._pieces[layout, shape] = layout.pieces(shape, self.rank)
        return found

    def _dtensor(self, name: str, tensor: Any) -> Held | None:
        layout = self.layout_of(name, tensor)
        if layout.coordinate(self.rank) is None:
            return None
        local = local_of(tensor)
        if _has_chunks(local):
            return _by_chunks(name, local, tensor)
        _check_memory(name, local)
        shape, here = tuple(tensor.shape), tuple(local.shape)
        fits = int(layout.local_shape(shape, self.rank) == here)
        if layout.is_strided:
            second = self._other(layout)
            fits |= 2 * int(second.local_shape(shape, self.rank) == here)
            if fits == 2:
                layout = second
        if not fits:
            what = f"the local part is {here}, its placements say {layout.local_shape(shape, self.rank)}"
            hint = "padded buffers: say which regions are data (checkpointable-tensor protocol)"
            raise make("structure_mismatch", what, _at(name), [hint])
        return self.with_layout(Held(dtype_name(tensor.dtype), shape, layout, [], fits=fits))

    def with_layout(self, held: Held) -> Held:
        """Fills in the regions of a mesh layout."""
        assert isinstance(held.layout, MeshLayout)
        pieces = self.pieces(held.layout, held.shape)
        held.regions = [region for region, _ in pieces]
        held.starts = [start for _, start in pieces] if len(pieces) > 1 else None
        return held

    def layout_of(self, name: str, tensor: Any) -> MeshLayout:
        """The layout of a DTensor, read from left to right. Errors: `unsupported` for partial sums."""
        mesh, placements = tensor.device_mesh, tensor.placements
        key = (id(mesh), placements)
        found = self._layouts.get(key)
        if found is None:
            _, ranks, sides = self._mesh(name, mesh)
            found = MeshLayout(ranks, sides, tuple(_placement(name, one) for one in placements))
            self._layouts[key] = found
        return found

    def _mesh(self, name: str, mesh: Any) -> tuple[Any, tuple[int, ...], Shape]:
        kept = self._meshes.get(id(mesh))
        if kept is None:
            ranks = []
            for rank in mesh.mesh.flatten().tolist():
                own = self.group_rank(int(rank))
                if own is None:
                    what = f"rank {rank} of the mesh is not in the process group that saves"
                    raise make("structure_mismatch", what, _at(name), ["pass process_group="])
                ranks.append(own)
            kept = self._meshes[id(mesh)] = (mesh, tuple(ranks), tuple(mesh.mesh.shape))
        return kept

    def _other(self, layout: MeshLayout) -> MeshLayout:
        found = self._second.get(layout)
        if found is None:
            found = MeshLayout(layout.ranks, layout.sides, layout.placements, 1)
            self._second[layout] = found
        return found

    def second_reading(self, held: Held) -> Held:
        """The same tensor with its strided layout read the other way."""
        assert isinstance(held.layout, MeshLayout)
        held.layout = self._other(held.layout)
        return self.with_layout(held)

    def _by_fields(self, name: str, tensor: Any) -> Held:
        missing = [key for key in _PROTOCOL if not hasattr(tensor, key)]
        if missing:
            what = f"a tensor with global_shape lacks {', '.join(missing)}"
            raise make("structure_mismatch", what, _at(name))
        shape = tuple(map(int, tensor.global_shape))
        fields = (tensor.global_offsets, tensor.local_offsets, tensor.local_sizes)
        if len({len(one) for one in fields}) != 1:
            what = "global_offsets, local_offsets and local_sizes differ in length"
            raise make("structure_mismatch", what, _at(name))
        regions: list[Region] = []
        starts: list[Shape] = []
        for offsets, start, sizes in zip(*fields, strict=True):
            region = (tuple(map(int, offsets)), tuple(map(int, sizes)))
            # Without a start the local tensor is the shard.
            place = tuple(map(int, start)) or (0,) * tensor.dim()
            _check_region(name, region, shape)
            _check_region(name, (place, region[1]), tuple(tensor.shape))
            regions.append(region)
            starts.append(place)
        return Held(dtype_name(tensor.dtype), shape, Explicit(tuple(regions)), regions, starts)


def _check_region(name: str, region: Region, shape: Shape) -> None:
    offsets, sizes = region
    sides = zip(offsets, sizes, shape, strict=False)
    inside = all(start >= 0 and side >= 0 and start + side <= whole for start, side, whole in sides)
    if len(offsets) != len(shape) or len(sizes) != len(shape) or not inside:
        what = f"a shard at {offsets} of {sizes} is not inside {shape}"
        raise make("structure_mismatch", what, _at(name))


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = str(tensor.layout).removeprefix("torch.")
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else kind
        hint = "save its parts as dense tensors"
        raise make("unsupported", f"a {kind} tensor is not stored", _at(name), [hint])
    if tensor.is_meta:
        hint = "it has no memory: module.to_empty(device=...) gives it some"
        raise usage("a tensor is on the meta device", hint, where=_at(name))
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    if fake is not None and isinstance(tensor, fake):
        hint = "save the tensor that it stands for"
        raise usage("a fake tensor has 0 bytes of memory", hint, where=_at(name))


def _placement(name: str, placement: Any) -> Placement:
    if placement.is_replicate():
        return REPLICATE
    if placement.is_partial():
        hint = "redistribute it to Replicate or Shard first: nobody holds its values"
        raise make("unsupported", "a tensor of partial sums is not stored", _at(name), [hint])
    # In some versions a strided shard is a Shard too.
    factor = getattr(placement, "split_factor", None)
    if factor is None:
        return ("S", int(placement.dim), 1)
    return ("_S", int(placement.dim), int(factor))


def _sharded(name: str, tensor: Any) -> Held:
    regions: list[Region] = []
    for shard in tensor.local_shards():
        if type(shard.tensor) not in OWN_TYPES:
            kind = type(shard.tensor).__name__
            what = f"a shard is itself of class {kind}"
            hint = "use the DTensor state dicts of FSDP (torch.distributed.checkpoint.state_dict)"
            raise make("unsupported", what, _at(name), [hint])
        offsets = tuple(map(int, shard.metadata.shard_offsets))
        regions.append((offsets, tuple(map(int, shard.metadata.shard_sizes))))
    dtype = tensor.metadata().tensor_properties.dtype
    shape = tuple(map(int, tensor.metadata().size))
    return Held(dtype_name(dtype), shape, Explicit(tuple(regions)), regions)


def _has_chunks(tensor: object) -> bool:
    return hasattr(tensor, "__create_chunk_list__") and hasattr(tensor, "__get_tensor_shard__")


def _by_chunks(name: str, source: Any, tensor: Any) -> Held:
    regions = [
        (tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes)))
        for chunk in source.__create_chunk_list__()
    ]
    shape = tuple(map(int, tensor.size()))
    # An empty wrapper says so with sizes of its own rank.
    regions = [region for region in regions if len(region[0]) == len(shape)]
    for region in regions:
        _check_region(name, region, shape)
    return Held(dtype_name(tensor.dtype), shape, Explicit(tuple(regions)), regions)


def memory_of(name: str, tensor: Any, held: Held) -> list[torch.Tensor]:
    """The memory of each region held here, as views: nothing is copied."""
    if isinstance(held.layout, Plain):
        return [tensor]
    if is_dtensor(tensor):
        tensor = local_of(tensor)
    if held.starts is not None:
        return [
            _box(tensor, start, sizes)
            for start, (_, sizes) in zip(held.starts, held.regions, strict=True)
        ]
    if isinstance(held.layout, MeshLayout):
        return [tensor]
    if is_sharded_tensor(tensor):
        parts = [shard.tensor for shard in tensor.local_shards()]
    else:
        index = _index_type()
        parts = [
            tensor.__get_tensor_shard__(index(name, offsets, place))
            for place, (offsets, _) in enumerate(held.regions)
        ]
    for part, (_, sizes) in zip(parts, held.regions, strict=True):
        _check_memory(name, part)
        if tuple(part.shape) != sizes:
            what = f"a shard is {tuple(part.shape)}, it says {sizes}"
            raise make("structure_mismatch", what, _at(name))
    return parts


def _box(tensor: torch.Tensor, start: Shape, sizes: Shape) -> torch.Tensor:
    for dim, (low, side) in enumerate(zip(start, sizes, strict=True)):
        tensor = tensor.narrow(dim, low, side)
    return tensor


def _index_type() -> Callable[..., Any]:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return MetadataIndex


def _at(name: str) -> str:
    return f"tensor {quoted(name)}"


def same_layout(layout: Layout, name: str, tensor: Any, describer: Describer) -> bool:
    """Whether a tensor is still cut over ranks as it was."""
    if isinstance(layout, Plain):
        return type(tensor) in OWN_TYPES and not hasattr(tensor, "global_shape")
    if isinstance(layout, MeshLayout):
        if not is_dtensor(tensor):
            return False
        now = describer.layout_of(name, tensor)
        was = (layout.ranks, layout.sides, layout.placements)
        return (now.ranks, now.sides, now.placements) == was
    held = describer.describe(name, tensor)
    return held is not None and held.layout == layout
