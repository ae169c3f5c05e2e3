//! Alignment that `O_DIRECT` asks of offsets, lengths and memory.
//!
//! Since Linux 6.1 a file says so itself (`STATX_DIOALIGN`), and says also that it cannot be read directly at all.
//! Before, the logical block size of the device is the rule of the kernel's block layer, for offsets and memory both.
//! Where neither is known (network file systems), 4096 fits every device in use. Page size is asked for: aarch64
//! has kernels with 64 KiB pages.

use std::os::fd::AsFd;

use forebay_error::{Error, Result};
use rustix::fs::{AtFlags, StatxAttributes, StatxFlags};

use crate::Root;

/// Alignment in use where nothing says better.
const ASSUMED_BYTES: u32 = 4096;

/// An alignment above this is taken for nonsense: no arena could keep to it.
const ALIGN_BYTES_MAX: u32 = 16 << 20;

/// Who said so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlignSource {
    /// The file, by statx.
    Statx,
    /// The block device below, by its logical block size.
    BlockDevice,
    /// Nobody; 4096.
    Assumed,
}

/// What `O_DIRECT` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAlign {
    /// Alignment of memory, a power of two.
    pub memory_bytes: u32,
    /// Alignment of offset and length, a power of two.
    pub offset_bytes: u32,
    /// Who said so.
    pub source: AlignSource,
}

/// Size of a page of memory.
pub fn page_size() -> usize {
    rustix::param::page_size()
}

/// Alignment for direct reads of a file; `None` when the file says that it cannot be read directly.
pub fn direct_align(file: impl AsFd) -> Result<Option<DirectAlign>> {
    let flags = StatxFlags::DIOALIGN;
    if let Ok(stat) = rustix::fs::statx(&file, "", AtFlags::EMPTY_PATH, flags) {
        if stat.stx_mask & flags.bits() != 0 {
            return Ok(from_statx(stat.stx_dio_mem_align, stat.stx_dio_offset_align));
        }
    }
    let stat = rustix::fs::fstat(&file)
        .map_err(|error| Error::io("cannot ask for the state of a file", error.into()))?;
    let device = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    Ok(Some(from_block_device(&Root::live(), device)))
}

/// Whether a file bypasses the page cache for good because it lies on persistent memory. Old kernels do not say: no.
pub fn is_dax(file: impl AsFd) -> bool {
    rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).is_ok_and(|stat| {
        (stat.stx_attributes & stat.stx_attributes_mask).contains(StatxAttributes::DAX)
    })
}

/// Zeros mean "not supported for this file".
fn from_statx(memory: u32, offset: u32) -> Option<DirectAlign> {
    if memory == 0 || offset == 0 {
        return None;
    }
    let fits = |align: u32| align.is_power_of_two() && align <= ALIGN_BYTES_MAX;
    if !fits(memory) || !fits(offset) {
        return None;
    }
    Some(DirectAlign { memory_bytes: memory, offset_bytes: offset, source: AlignSource::Statx })
}

/// A partition has no queue of its own: its disk, the folder above, has.
fn from_block_device(root: &Root, (major, minor): (u32, u32)) -> DirectAlign {
    let device = format!("sys/dev/block/{major}:{minor}");
    let sizes = ["queue/logical_block_size", "../queue/logical_block_size"];
    let size = sizes.iter().find_map(|size| root.read_number::<u32>(format!("{device}/{size}")));
    match size.filter(|size| size.is_power_of_two() && *size <= ALIGN_BYTES_MAX) {
        Some(size) => {
            DirectAlign { memory_bytes: size, offset_bytes: size, source: AlignSource::BlockDevice }
        }
        None => DirectAlign {
            memory_bytes: ASSUMED_BYTES,
            offset_bytes: ASSUMED_BYTES,
            source: AlignSource::Assumed,
        },
    }
}
