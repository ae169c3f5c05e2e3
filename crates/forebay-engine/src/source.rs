//! Where bytes come from.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::{Arc, OnceLock};

use forebay_error::{Code, Error, Result};
use forebay_format::remote::RemoteObject;
use forebay_format::{Handle, OpenFile};
use forebay_topology::{DirectAlign, FsProfile};

/// An object that can be read in ranges: a file here, an object of a store or a peer elsewhere.
///
/// Called from many worker threads at once; a call may block, and a call that hangs holds one worker and its staging
/// slot, nothing else. The buffer is the caller's and is not used after the call.
pub trait RangeSource: Send + Sync {
    /// What errors call it.
    fn name(&self) -> String;

    /// Its length in bytes.
    fn len(&self) -> u64;

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads at `offset`, as much as it likes up to `into.len()`; 0 means the end.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Fills several ranges `(offset, bytes)`, which do not overlap. Where a request is a round trip, near ranges are
    /// read by one and others at once; here, one after the other.
    fn read_many(&self, parts: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        for (offset, into) in parts {
            fill(|rest, at| self.read_at(rest, at), into, *offset)?;
        }
        Ok(())
    }

    /// The file behind it, if it is one: page-cache DMA and direct reads need that.
    fn local(&self) -> Option<&LocalFile> {
        None
    }

    /// Fails when the object is not the one any more that it was when it was opened.
    fn check_unchanged(&self) -> Result<()>;
}

/// A local file: the descriptor that its header was read from, so that header and bytes belong together.
pub struct LocalFile {
    open: Arc<OpenFile>,
    handle: Arc<Handle>,
    profile: FsProfile,
    device: u64,
    dax: bool,
    direct: OnceLock<std::result::Result<DirectFile, DirectRefusal>>,
}

/// A second descriptor of the same file, for direct reads.
pub struct DirectFile {
    /// Opened with `O_DIRECT`.
    pub file: File,
    /// What the file asks for.
    pub align: DirectAlign,
}

/// Why a file is not read directly.
#[derive(Clone, Debug)]
pub struct DirectRefusal {
    /// The file system accepts O_DIRECT for no file; else it is this file, or this moment.
    pub by_file_system: bool,
    /// In words.
    pub why: String,
}

/// Greatest block that direct reads align to: a slot has room for one on either side.
const MAX_ALIGN: u64 = 64 << 10;

impl LocalFile {
    /// Wraps an open file. Errors: `io` when the file system cannot be asked; `internal` for a remote object.
    pub fn new(open: Arc<OpenFile>) -> Result<Self> {
        let Some(handle) = open.local().cloned() else {
            let what = "an object of a store is no file of this machine";
            return Err(Error::new(Code::Internal, what).at(open.path.display()));
        };
        let profile = forebay_topology::file_profile(&handle.file, &open.path)?;
        let dax = forebay_topology::direct::is_dax(&handle.file);
        let device = handle.identity.dev;
        Ok(Self { open, handle, profile, device, dax, direct: OnceLock::new() })
    }

    /// The descriptor for buffered reads and mappings.
    pub fn file(&self) -> &File {
        &self.handle.file
    }

    /// What kind of file system it is on, and how to read it.
    pub fn profile(&self) -> &FsProfile {
        &self.profile
    }

    /// The file system's device number: refusals are remembered by it.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// Whether it lies on persistent memory without a page cache.
    pub fn is_dax(&self) -> bool {
        self.dax
    }

    /// A descriptor for direct reads, opened at the first call.
    pub fn direct(&self) -> std::result::Result<&DirectFile, &DirectRefusal> {
        self.direct.get_or_init(|| self.open_direct()).as_ref()
    }

    fn open_direct(&self) -> std::result::Result<DirectFile, DirectRefusal> {
        // Through /proc, so that it is the same file even if its name was given to another one meanwhile.
        let path = format!("/proc/self/fd/{}", self.handle.file.as_fd().as_raw_fd());
        let opened = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT | libc::O_CLOEXEC)
            .open(path);
        let file = opened.map_err(|error| DirectRefusal {
            // Only these speak of the file system; want of descriptors, say, passes.
            by_file_system: matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)),
            why: format!("O_DIRECT not accepted: {error}"),
        })?;
        let cannot = |why: &str| DirectRefusal { by_file_system: false, why: why.to_owned() };
        let align = forebay_topology::direct::direct_align(&file).ok().flatten();
        let align = align.ok_or_else(|| cannot("this file cannot be read directly"))?;
        let page = rustix::param::page_size() as u64;
        if u64::from(align.offset_bytes) > MAX_ALIGN || u64::from(align.memory_bytes) > page {
            return Err(cannot("its blocks are larger than staging memory allows for"));
        }
        Ok(DirectFile { file, align })
    }
}

impl RangeSource for LocalFile {
    fn name(&self) -> String {
        self.open.path.display().to_string()
    }

    fn len(&self) -> u64 {
        self.handle.identity.size
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self.handle.file.read_at(into, offset)
    }

    fn local(&self) -> Option<&LocalFile> {
        Some(self)
    }

    fn check_unchanged(&self) -> Result<()> {
        self.open.check_unchanged()
    }
}

/// An object that is not on this machine.
struct RemoteFile {
    name: String,
    object: Arc<dyn RemoteObject>,
}

impl RangeSource for RemoteFile {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn len(&self) -> u64 {
        self.object.size()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self.object.read_at(into, offset)
    }

    fn read_many(&self, parts: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        self.object.read_many(parts)
    }

    fn check_unchanged(&self) -> Result<()> {
        self.object.check_unchanged()
    }
}

/// The sources of a model's files.
pub fn sources_of(files: &[Arc<OpenFile>]) -> Result<Vec<Arc<dyn RangeSource>>> {
    files.iter().map(source_of).collect()
}

/// The source of a file, or of an object that is not on this machine.
pub fn source_of(open: &Arc<OpenFile>) -> Result<Arc<dyn RangeSource>> {
    Ok(match open.remote_object() {
        None => Arc::new(LocalFile::new(open.clone())?),
        Some(object) => {
            let name = open.path.display().to_string();
            Arc::new(RemoteFile { name, object: object.clone() })
        }
    })
}

/// Fills `into` from `offset` on, through short reads and interruptions.
///
/// Errors: `file_changed` at an early end, `io` and its kin otherwise, naming object and byte.
pub fn read_exact_at(source: &dyn RangeSource, into: &mut [u8], offset: u64) -> Result<()> {
    let mut done = 0;
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let at = offset + done as u64;
        match source.read_at(rest, at) {
            Ok(0) => return Err(ended_early(source, offset, into.len() as u64, at)),
            Ok(count) => done += count.min(rest.len()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                let what = format!("cannot read {} bytes at byte {at}", rest.len());
                return Err(Error::io(what, error).at(source.name()));
            }
        }
    }
    Ok(())
}

/// Fills a buffer through short reads and interruptions; `UnexpectedEof` at an early end.
fn fill(
    read: impl Fn(&mut [u8], u64) -> io::Result<usize>,
    into: &mut [u8],
    offset: u64,
) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match read(rest, offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count.min(rest.len()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The error for a file that ends before it should. Every range was inside the file when it was opened, so it shrank.
pub(crate) fn ended_early(source: &dyn RangeSource, offset: u64, len: u64, at: u64) -> Error {
    let wanted = offset + len;
    let text = format!("file ends at byte {at}, byte {wanted} was to be read");
    Error::new(Code::FileChanged, text)
        .at(source.name())
        .hint("the file shrank since it was opened: load again once its writer is done")
}
