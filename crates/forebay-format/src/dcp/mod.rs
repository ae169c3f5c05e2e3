//! Checkpoints of `torch.distributed.checkpoint` (DCP): `.metadata` and `.distcp` files.

pub mod metadata;
mod write;

pub use write::{
    FILE_ALIGN, FileLayout, GlueSource, ItemLayout, ItemSpec, KeyStep, LayoutOptions,
    MetadataWriter, ObjectItem, PlacedItem, PlainValue, SMALL_ALIGN, Segment, StorageMeta,
    TensorProps, TorchDtype, plan_files,
};
