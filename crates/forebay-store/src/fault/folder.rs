//! Faults below a store in a folder: at each call to the kernel that changes something.
//!
//! Looks (stat, open for reading, listings) are the kernel's own and never fail here: a dead process reads nothing that
//! matters. A client that was killed changes nothing any more; its locks go when its store is dropped.

use std::io;
use std::path::Path;
use std::sync::Arc;

use forebay_error::Result;
use rustix::io::Errno;

use super::client::{Client, Go, Refusal};
use super::plan::{Action, Call, Plan, Step, When};
use crate::posix::{Files, Handle, Locked, PosixStore, RealFiles, Root, Synced};

/// One client of a folder, with faults. See the module.
pub struct FaultFolder {
    root: Arc<Root>,
    client: Arc<Client>,
}

impl FaultFolder {
    /// A client of the folder, which exists.
    pub fn open(folder: &Path, plan: Plan) -> Result<Self> {
        Ok(Self { root: Root::open(folder)?, client: Arc::new(Client::new(plan)) })
    }

    /// The client's store.
    pub fn store(&self) -> PosixStore {
        let real = RealFiles::new(Arc::clone(&self.root));
        let files = FaultFiles { real, client: Arc::clone(&self.client) };
        PosixStore::with_files(Arc::clone(&self.root), Arc::new(files))
    }

    /// How many faults struck.
    pub fn fired(&self) -> u64 {
        self.client.fired()
    }

    /// What the steps were.
    pub fn log(&self) -> Vec<Step> {
        self.client.log()
    }

    /// Whether it was killed.
    pub fn killed(&self) -> bool {
        self.client.killed()
    }
}

/// The kernel's calls, with faults.
struct FaultFiles {
    real: RealFiles,
    client: Arc<Client>,
}

fn errno(refusal: &Refusal) -> Errno {
    Errno::from_raw_os_error(refusal.errno())
}

impl FaultFiles {
    fn call<T>(
        &self,
        call: Call,
        path: &str,
        real: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let action = Action::File(call);
        let step = |when| self.client.step(action, when, path).map_err(|no| errno(&no));
        let go = step(When::Before)?;
        let done = real()?;
        if go == Go::LoseReply {
            return Err(Errno::TIMEDOUT);
        }
        step(When::After)?;
        Ok(done)
    }
}

impl Files for FaultFiles {
    fn make_folder(&self, path: &str) -> Result<(), Errno> {
        self.call(Call::Mkdir, path, || self.real.make_folder(path))
    }

    fn create(&self, path: &str) -> Result<Handle, Errno> {
        self.call(Call::Open, path, || self.real.create(path))
    }

    fn write_at(&self, handle: &Handle, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let action = Action::File(Call::Pwrite);
        let step = |when| self.client.step(action, when, "").map_err(|no| no.into_io());
        let half = bytes.get(..bytes.len().div_ceil(2)).unwrap_or_default();
        let written = match step(When::Before)? {
            Go::Short => self.real.write_at(handle, half, offset)?,
            Go::Torn => {
                self.real.write_at(handle, half, offset)?;
                return Err(io::Error::from(Errno::IO));
            }
            Go::LoseReply => {
                self.real.write_at(handle, bytes, offset)?;
                return Err(io::Error::from(Errno::TIMEDOUT));
            }
            Go::Whole | Go::NotDurable => self.real.write_at(handle, bytes, offset)?,
        };
        step(When::After)?;
        Ok(written)
    }

    fn flush_soon(&self, handle: &Handle, offset: u64, len: u64) {
        if self.client.alive().is_ok() {
            self.real.flush_soon(handle, offset, len);
        }
    }

    fn open_alone(&self, path: &str) -> Result<(Handle, bool), Errno> {
        self.call(Call::Open, path, || self.real.open_alone(path))
    }

    fn reserve(&self, handle: &Handle, len: u64) -> Result<(), Errno> {
        self.call(Call::Fallocate, "", || self.real.reserve(handle, len))
    }

    fn set_len(&self, handle: &Handle, len: u64) -> Result<(), Errno> {
        self.call(Call::Ftruncate, "", || self.real.set_len(handle, len))
    }

    fn sync(&self, handle: &Handle) -> Result<(), Errno> {
        self.call(Call::Fsync, "", || self.real.sync(handle))
    }

    fn sync_folder(&self, path: &str) -> Result<Synced, Errno> {
        self.call(Call::FsyncFolder, path, || self.real.sync_folder(path))
    }

    fn link(&self, from: &str, to: &str) -> Result<(), Errno> {
        self.call(Call::Link, to, || self.real.link(from, to))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), Errno> {
        self.call(Call::Rename, to, || self.real.rename(from, to))
    }

    fn rename_new(&self, from: &str, to: &str) -> Result<(), Errno> {
        self.call(Call::RenameNew, to, || self.real.rename_new(from, to))
    }

    fn remove(&self, path: &str) -> Result<(), Errno> {
        self.call(Call::Unlink, path, || self.real.remove(path))
    }

    fn remove_folder(&self, path: &str) -> Result<(), Errno> {
        self.call(Call::Rmdir, path, || self.real.remove_folder(path))
    }

    fn try_lock(&self, path: &str) -> Result<Locked, Errno> {
        self.call(Call::Flock, path, || self.real.try_lock(path))
    }
}
