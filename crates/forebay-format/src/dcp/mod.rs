//! Checkpoints of `torch.distributed.checkpoint` (DCP): `.metadata` and `.distcp` files.

pub mod hf;
mod items;
mod items_zstd;
pub mod metadata;
mod write;

pub use items::{
    ItemSpan, MAX_OBJECT_BYTES, TRANSFORMS, TensorItem, check_object, check_pickle, open_tensor,
    pickle_of_item, read_object, verify_object, verify_tensor,
};
pub use write::{
    FILE_ALIGN, FileLayout, GlueSource, ItemLayout, ItemSpec, KeyStep, LayoutOptions,
    MetadataWriter, ObjectItem, PlacedItem, PlainValue, SMALL_ALIGN, Segment, StorageMeta,
    TensorProps, TorchDtype, plan_files,
};
