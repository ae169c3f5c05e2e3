//! Alignment that `O_DIRECT` asks of offsets, lengths and memory.
//!
//! Since Linux 6.1 a file says so itself (`STATX_DIOALIGN`), and says also that it cannot be read
//! directly at all. Before, the logical block size of the device is the rule of the kernel's block
//! layer, for offsets and memory both. Where neither is known (network file systems), 4096 fits
//! every device in use. Page size is asked for: aarch64 has kernels with 64 KiB pages.

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
    if let Ok(stat) = rustix::fs::statx(&file, "", AtFlags::EMPTY_PATH, flags)
        && stat.stx_mask & flags.bits() != 0
    {
        return Ok(from_statx(stat.stx_dio_mem_align, stat.stx_dio_offset_align));
    }
    let stat = rustix::fs::fstat(&file)
        .map_err(|error| Error::io("cannot ask for the state of a file", error.into()))?;
    let device = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    Ok(Some(from_block_device(&Root::live(), device)))
}

/// Whether a file bypasses the page cache for good because it lies on persistent memory. Old
/// kernels do not say: no.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_and_nonsense_mean_not_supported() {
        assert_eq!(from_statx(0, 0), None);
        assert_eq!(from_statx(0, 512), None);
        assert_eq!(from_statx(3, 512), None);
        assert_eq!(from_statx(4, 1 << 30), None);
        let align = from_statx(4, 512).unwrap();
        assert_eq!((align.memory_bytes, align.offset_bytes), (4, 512));
        assert_eq!(align.source, AlignSource::Statx);
    }

    /// A captured tree: a disk of 4096-byte blocks, and its partition without a queue.
    #[test]
    fn the_block_device_says_and_its_disk_speaks_for_a_partition() {
        let tree = tempfile::tempdir().unwrap();
        let disk = tree.path().join("sys/devices/nvme0n1");
        std::fs::create_dir_all(disk.join("queue")).unwrap();
        std::fs::create_dir_all(disk.join("nvme0n1p1")).unwrap();
        std::fs::write(disk.join("queue/logical_block_size"), "4096\n").unwrap();
        let links = tree.path().join("sys/dev/block");
        std::fs::create_dir_all(&links).unwrap();
        std::os::unix::fs::symlink(&disk, links.join("259:0")).unwrap();
        std::os::unix::fs::symlink(disk.join("nvme0n1p1"), links.join("259:1")).unwrap();
        let root = Root::at(tree.path());
        for minor in [0, 1] {
            let align = from_block_device(&root, (259, minor));
            assert_eq!(align.offset_bytes, 4096);
            assert_eq!(align.source, AlignSource::BlockDevice);
        }
        assert_eq!(from_block_device(&root, (0, 44)).source, AlignSource::Assumed);
        std::fs::write(disk.join("queue/logical_block_size"), "4095").unwrap();
        assert_eq!(from_block_device(&root, (259, 0)).source, AlignSource::Assumed);
    }

    /// What is claimed must work: reads with that alignment succeed.
    #[test]
    fn a_direct_read_with_the_alignment_works() {
        use std::os::unix::fs::{FileExt, OpenOptionsExt};
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7_u8; 1 << 20]).unwrap();
        let plain = std::fs::File::open(&path).unwrap();
        let Some(align) = direct_align(&plain).unwrap() else {
            println!("skipped: the file system of the build folder has no direct reads");
            return;
        };
        assert!(!is_dax(&plain));
        let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
        let file = match std::fs::OpenOptions::new().read(true).custom_flags(direct).open(&path) {
            Ok(file) => file,
            Err(error) => {
                println!("skipped: O_DIRECT was refused: {error}");
                return;
            }
        };
        let (memory, offset) = (align.memory_bytes as usize, align.offset_bytes as usize);
        let len = offset.max(page_size());
        let mut buffer = vec![0_u8; len + memory];
        let start = buffer.as_ptr().align_offset(memory);
        let aligned = &mut buffer[start..start + len];
        assert_eq!(file.read_at(aligned, offset as u64).unwrap(), len);
        assert!(aligned.iter().all(|byte| *byte == 7));
    }
}
