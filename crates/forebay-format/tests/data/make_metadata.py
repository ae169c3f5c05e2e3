"""Writes metadata.json: one `.metadata` for each spelling that torch, Python and others have, and some that nobody wrote.

    python3 make_metadata.py > metadata.json

The classes are stand-ins with the names and the state of torch's own, so that one Python writes what many versions of
torch write.
"""

import json
import pickle
import pickletools
import sys
import types

CHECKPOINT = "torch.distributed.checkpoint.metadata"


def make_class(module, name):
    """A class that pickles as a name; its instances as made without arguments, with their attributes as state."""
    if module in sys.modules and hasattr(sys.modules[module], name):
        return getattr(sys.modules[module], name)
    made = type(name, (), {"__module__": module, "__init__": lambda self, **fields: vars(self).update(fields)})
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        sys.modules.setdefault(path, types.ModuleType(path))
    setattr(sys.modules[module], name, made)
    return made


class Call:
    """Pickles as a call of a name."""

    def __init__(self, module, name, *args):
        self.function, self.args = make_class(module, name), args

    def __reduce__(self):
        return self.function, self.args


Metadata = make_class(CHECKPOINT, "Metadata")
MetadataIndex = make_class(CHECKPOINT, "MetadataIndex")
TensorStorageMetadata = make_class(CHECKPOINT, "TensorStorageMetadata")
BytesStorageMetadata = make_class(CHECKPOINT, "BytesStorageMetadata")
ChunkStorageMetadata = make_class(CHECKPOINT, "ChunkStorageMetadata")
StorageMeta = make_class(CHECKPOINT, "StorageMeta")
StorageInfo = make_class("torch.distributed.checkpoint.filesystem", "_StorageInfo")
NewProperties = make_class(CHECKPOINT, "TensorProperties")
OldProperties = make_class("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties")
for properties in (NewProperties, OldProperties):
    properties.__getstate__ = lambda self: self.fields


def size(*sides):
    return Call("torch", "Size", tuple(sides))


def properties(dtype="float32", old=False, strides=()):
    layout = Call("torch.serialization", "_get_layout", "torch.strided")
    if old:
        memory = Call("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING", 0)
    else:
        memory = Call(CHECKPOINT, "_MEM_FORMAT_ENCODING", 0)
    fields = (make_class("torch", dtype), layout, False, memory, False, *strides)
    return (OldProperties if old else NewProperties)(fields=fields)


def tensor(shape, chunks, **how):
    listed = [ChunkStorageMetadata(offsets=size(*offsets), sizes=size(*sides)) for offsets, sides in chunks]
    return TensorStorageMetadata(properties=properties(**how), size=size(*shape), chunks=listed)


def place(path="__0_0.distcp", offset=0, length=100, **more):
    return StorageInfo(relative_path=path, offset=offset, length=length, **more)


def key(fqn, offsets=None, **more):
    if offsets is not None:
        more["offset"] = size(*offsets)
    return MetadataIndex(fqn=fqn, **more)


ROWS = [((row, 0), (1, 2)) for row in range(4)]


def rows(**how):
    return {"w": tensor((4, 2), ROWS, **how)}


def rows_stored(hint=lambda row: row):
    return {key("w", (row, 0), index=hint(row)): place(offset=1000 * row) for row in range(4)}


def whole(*shape, **how):
    return {"w": tensor(shape, [((0,) * len(shape), shape)], **how)}, {key("w", (0,) * len(shape), index=0): place()}


def metadata(state, storage, planner=None, **more):
    return Metadata(state_dict_metadata=state, planner_data=planner, storage_data=storage, **more)


def variants():
    yield "torch_2_2", metadata(rows(old=True), rows_stored(), {"w": ("w",)})
    yield "torch_2_15_strides", metadata(rows(strides=((2, 1),)), rows_stored(), version="1.0.0")
    yield "strides_none", metadata(rows(strides=(None,)), rows_stored())
    for name, path in (
        ("path_of_parts", Call("pathlib", "PosixPath", "/", "a", "b c")),
        ("path_of_python_3_13", Call("pathlib._local", "PosixPath", "/a/b c")),
        ("path_as_text", "/a/b c"),
        ("path_not_utf8", "/a/\udcff"),
        ("path_none", None),
    ):
        meta = StorageMeta(checkpoint_id=path, save_id="s", load_id=None, modules=["m"])
        yield name, metadata(*whole(2), storage_meta=meta)
    mcore = make_class("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")
    data = {"w": {"nd_reformulated_orig_global_shape": (8,)}}
    state, storage = whole(8)
    yield "megatron", mcore(
        state_dict_metadata=state, planner_data=None, storage_data=storage, mcore_data=data,
        backend=make_class("megatron.core.other", "Backend")(version=1),
    )
    yield "no_hints", metadata(rows(), rows_stored(lambda row: None))
    yield "wrong_hints", metadata(rows(), rows_stored(lambda row: 3 - row))
    yield "hints_out_of_range", metadata(rows(), rows_stored(lambda row: 2**40 if row else -1))
    empty = [((0, 0), (3, 2)), ((3, 0), (0, 2)), ((3, 0), (0, 2)), ((0, 0), (0, 2))]
    stored = {key("w", (0, 0), index=3): place(offset=7), key("w", (3, 0), index=1): place(offset=8)}
    yield "empty_pieces", metadata({"w": tensor((3, 2), empty)}, stored)
    yield "empty_pieces_not_stored", metadata({"w": tensor((3, 2), empty[:2])}, {key("w", (0, 0)): place()})
    yield "no_elements", metadata(*whole(0, 4))
    yield "no_dimensions", metadata(*whole())
    yield "key_without_offset", metadata(whole(4)[0], {key("w"): place()})
    yield "halves_of_bytes", metadata(
        {"w": tensor((2, 3), [((0, 0), (1, 3)), ((1, 0), (1, 3))], dtype="float4_e2m1fn_x2")},
        {key("w", (row, 0), index=None): place(offset=row) for row in range(2)},
    )
    yield "halves_of_bytes_0d", metadata(*whole(dtype="float4_e2m1fn_x2"))
    yield "complex128", metadata(*whole(2, dtype="complex128"))
    yield "quantized", metadata(*whole(2, dtype="quint8"))
    yield "large_numbers", metadata(*whole(2**40), planner={"w": ("w", 2**33)})
    yield "objects", metadata(
        {"a.0": BytesStorageMetadata(), "b": BytesStorageMetadata()},
        {key("a.0", index=None): place(), key("b"): place(transform_descriptors=["stream.zstd/1"])},
        {"a.0": ("a", 0), "b": ("b",)},
    )
    yield "planner_is_odd", metadata(*whole(2), planner={"w": ("w", 1.5), "gone": ("gone",)})
    yield "planner_is_a_list", metadata(*whole(2), planner=[1])
    plain = {"attempt": "00112233-1", "manifest": "forebay.manifest-1", "version": 1}
    yield "own_attribute", metadata(*whole(2), forebay=plain)
    yield "info_of_another_class", metadata(
        whole(2)[0],
        {key("w", (0,)): make_class("nobody.knows", "Info")(relative_path="f", offset=1, length=2, rank=3)},
    )
    yield "one_rank", metadata({"w": tensor((4, 2), ROWS[:2])}, dict(list(rows_stored().items())[:2]))

    # What must be refused.
    yield "place_overflows", metadata(whole(2)[0], {key("w", (0,)): place(offset=2**63 - 1, length=2**63 - 1)})
    yield "place_is_huge", metadata(whole(2)[0], {key("w", (0,)): place(length=2**64)})
    yield "path_with_backslashes", metadata(whole(2)[0], {key("w", (0,)): place("a\\..\\..\\x")})
    yield "path_with_nul", metadata(whole(2)[0], {key("w", (0,)): place("a\0")})
    yield "path_with_drive", metadata(whole(2)[0], {key("w", (0,)): place("C:x")})
    yield "path_not_text", metadata(whole(2)[0], {key("w", (0,)): place(b"x")})
    yield "stored_twice", metadata(whole(2)[0], {key("w", (0,)): place(), key("w", (0,), index=0): place()})
    yield "negative_side", metadata(*whole(-2))
    yield "too_many_sides", metadata(*whole(*[1] * 65))
    yield "too_many_elements", metadata(*whole(2**40, 2**40))
    yield "side_is_a_text", metadata(*whole("2"))
    yield "side_is_true", metadata(*whole(True))
    yield "no_dtype", metadata({"w": TensorStorageMetadata(properties=None, size=size(), chunks=[])}, {})
    yield "entry_of_another_class", metadata({"w": make_class("nobody.knows", "Entry")(a=1)}, {})
    yield "entry_is_a_number", metadata({"w": 5}, {})
    yield "name_is_a_number", metadata({5: BytesStorageMetadata()}, {})
    yield "storage_is_none", metadata(whole(2)[0], None)
    yield "key_is_a_text", metadata(whole(2)[0], {"w": place()})
    yield "transforms_are_numbers", metadata(whole(2)[0], {key("w", (0,)): place(transform_descriptors=[1])})
    yield "object_not_stored", metadata({"o": BytesStorageMetadata()}, {})
    yield "no_pieces", metadata({"w": tensor((2,), [])}, {})
    yield "layout_is_a_call", metadata(*whole(2), extra=Call("os", "system", "true"))


def main():
    cases = {name: pickle.dumps(value, 4) for name, value in variants()}
    sound = metadata(rows(), rows_stored(), {"w": ("w",)}, version="1.0.0")
    for protocol in (2, 3, 5):
        cases[f"protocol_{protocol}"] = pickle.dumps(sound, protocol)
    cases["without_memo"] = pickletools.optimize(cases["no_hints"])
    cases["bytes_behind"] = cases["no_dimensions"] + b"more"
    json.dump({name: data.hex() for name, data in cases.items()}, sys.stdout, indent=0)
    print()


main()
