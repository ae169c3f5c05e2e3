//! The limits of the manifest format. Writers keep them, readers refuse what goes beyond; with the rule that no count
//! may exceed the bytes that are there, they bound what a hostile file can make a reader allocate.

/// Ranks of a job: 64 times the largest that the sizes are planned for.
pub const MAX_RANKS: u64 = 1 << 20;
/// Named values of a checkpoint.
pub const MAX_ENTRIES: u64 = 1 << 24;
/// Bytes of one name.
pub const MAX_NAME_BYTES: u64 = 1 << 16;
/// Steps of the way to a value.
pub const MAX_PATH_STEPS: u64 = 1 << 10;
/// Dimensions of a tensor (torch has 64) and of a mesh.
pub const MAX_DIMS: u64 = 64;
/// Meshes, and layouts on them.
pub const MAX_LAYOUTS: u64 = 1 << 16;
/// Files of one rank.
pub const MAX_FILES: u64 = 1 << 16;
/// Bytes of a file's name: what file systems take.
pub const MAX_FILE_NAME_BYTES: u64 = 255;
/// Bytes of the info text.
pub const MAX_INFO_BYTES: u64 = 1 << 20;
/// Bytes of what a reader reads at once when it opens a manifest: header, info, meshes, table, index.
pub const MAX_HEAD_BYTES: u64 = 1 << 30;
/// Bytes of one rank's part.
pub const MAX_PART_BYTES: u64 = 1 << 26;
/// Sections of a manifest.
pub const MAX_SECTIONS: u64 = 64;
/// In sorted lists every sixteenth name is written in full, so that a list of names unfolds at most sixteenfold.
pub const NAME_RESTART: usize = 16;
