//! The memory of a staged save: what is asked of its descriptors, and the mapping. **unsafe**: it maps memory that
//! another process may write to.

use std::ptr::{self, NonNull};

use forebay_checkpoint::save::{Bequest, MAX_BEQUEST_BYTES};
use forebay_error::{Code, Error, Result};
use rustix::fd::OwnedFd;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// What `fstatfs` calls the file system of huge pages.
const HUGETLBFS: u32 = 0x9584_58f6;

/// Bytes of a block in a file's count of them.
const BLOCK_BYTES: u64 = 512;

/// Tensors, and what to do with them.
pub(super) struct Memory {
    data: OwnedFd,
    data_bytes: u64,
    bequest: OwnedFd,
    bequest_bytes: u64,
}

impl Memory {
    /// Checks what came: memory that cannot become smaller, all of it there, and a bequest that cannot change.
    ///
    /// Errors: `usage`; `unsupported` for a bequest that is too large; I/O.
    pub(super) fn new(data: OwnedFd, bequest: OwnedFd) -> Result<Self> {
        let data_bytes = check(&data, SealFlags::SHRINK, "the memory")?;
        let stat = stat(&data)?;
        let blocks = u64::try_from(stat.st_blocks).unwrap_or_default();
        if blocks.saturating_mul(BLOCK_BYTES) < data_bytes {
            // Where there is none a page would be taken when it is read, which may fail.
            let what = "not all of the memory is there";
            return Err(Error::new(Code::Usage, what).hint("fill it before it is staged"));
        }
        let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
        let bequest_bytes = check(&bequest, sealed, "the bequest")?;
        if bequest_bytes > MAX_BEQUEST_BYTES {
            let what = format!("a bequest of {bequest_bytes} bytes");
            return Err(Error::new(Code::Unsupported, what));
        }
        let memory = Self { data, data_bytes, bequest, bequest_bytes };
        // That it can be mapped is known now.
        memory.map().map(drop)?;
        Ok(memory)
    }

    /// Bytes of both.
    pub(super) fn bytes(&self) -> u64 {
        self.data_bytes.saturating_add(self.bequest_bytes)
    }

    /// Reads the bequest. Errors: those of [`Bequest::decode`]; `out_of_memory`; I/O.
    pub(super) fn bequest(&self) -> Result<Bequest> {
        let bytes = self.read()?;
        Bequest::decode(&bytes, self.data_bytes, "the bequest of a save")
    }

    fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let len = usize::try_from(self.bequest_bytes).ok();
        let Some(len) = len.filter(|len| bytes.try_reserve_exact(*len).is_ok()) else {
            return Err(Error::new(Code::OutOfMemory, "no memory for a bequest"));
        };
        bytes.resize(len, 0);
        let mut at = 0;
        while at < len {
            let into = bytes.get_mut(at..).unwrap_or_default();
            let got = rustix::io::retry_on_intr(|| {
                rustix::io::pread(&self.bequest, &mut *into, at as u64)
            });
            match got.map_err(|errno| Error::io("cannot read a bequest", errno.into()))? {
                0 => return Err(Error::new(Code::Truncated, "a bequest broke off")),
                got => at += got,
            }
        }
        Ok(bytes)
    }

    /// Maps the tensors. Errors: I/O.
    pub(super) fn map(&self) -> Result<Mapping> {
        let len = usize::try_from(self.data_bytes).unwrap_or(usize::MAX);
        if len == 0 {
            return Ok(Mapping { start: NonNull::dangling(), len });
        }
        let (read, shared) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: a mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap(ptr::null_mut(), len, read, shared, &self.data, 0) };
        let start = start.map_err(|errno| Error::io("cannot map staged memory", errno.into()))?;
        let start = NonNull::new(start.cast::<u8>());
        let nowhere = || Error::new(Code::Internal, "staged memory was mapped at 0");
        Ok(Mapping { start: start.ok_or_else(nowhere)?, len })
    }
}

/// The tensors' memory, to be read as long as this lives: it cannot shrink. Other processes may write to it, so it is
/// copied from, and never seen as bytes of Rust's: whoever is given its address makes no reference to it.
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it is an address that any thread may read at; nothing of it belongs to one.
unsafe impl Send for Mapping {}

impl Mapping {
    /// The address of its first byte.
    pub(super) fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: it is this value's own mapping, and nobody reads it any more who holds to its life.
            if let Err(errno) = unsafe { munmap(self.start.as_ptr().cast(), self.len) } {
                tracing::debug!(%errno, "staged memory was not unmapped");
            }
        }
    }
}

/// Its size, if it has these seals. Errors: `usage`; I/O.
fn check(fd: &OwnedFd, wanted: SealFlags, what: &str) -> Result<u64> {
    let refused = |why: &str| {
        let hint = "memory of memfd_create with its seals is needed, see docs/AGENT.md";
        Err(Error::new(Code::Usage, format!("{what} of a staged save {why}")).hint(hint))
    };
    let kind = fstatfs(fd).map_err(|errno| Error::io("cannot stat staged memory", errno.into()))?;
    let is_huge = kind.f_type as u32 == HUGETLBFS;
    match fcntl_get_seals(fd) {
        // Where its owner takes a page back, ordinary memory gives another to who reads there; this kind need not have
        // one, and kills him.
        _ if is_huge => refused("has huge pages"),
        Err(_) => refused("is no memfd"),
        Ok(seals) if !seals.contains(wanted) => refused("may change: its seals are missing"),
        Ok(_) => Ok(u64::try_from(stat(fd)?.st_size).unwrap_or_default()),
    }
}

fn stat(fd: &OwnedFd) -> Result<rustix::fs::Stat> {
    fstat(fd).map_err(|errno| Error::io("cannot stat staged memory", errno.into()))
}
