//! A store on file systems that refuse, fail, or lose replies: what a local disk does not do by itself.

mod durability;
mod fallbacks;
mod replies;

use std::io;
use std::sync::{Arc, Mutex};

use rustix::io::Errno;

use super::files::{Files, Handle, Locked, RealFiles, Synced};
use super::{PosixStore, Root};

/// A call of [`Files`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    MakeFolder,
    Create,
    Write,
    Reserve,
    SetLen,
    Sync,
    SyncFolder,
    Link,
    Rename,
    RenameNew,
    Remove,
    RemoveFolder,
    TryLock,
}

/// What becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Go,
    /// Nothing happens, and this is said.
    Refuse(Errno),
    /// It happens, and this is said.
    DoThenSay(Errno),
}

type Hook = dyn Fn(Call, &str) -> Answer + Send + Sync;

/// The kernel behind a hook that sees every call first; and a record of the calls.
pub(super) struct Hooked {
    real: RealFiles,
    hook: Box<Hook>,
    calls: Mutex<Vec<(Call, String)>>,
}

impl Hooked {
    fn answer<T>(
        &self,
        call: Call,
        path: &str,
        real: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        self.calls.lock().unwrap().push((call, path.to_owned()));
        match (self.hook)(call, path) {
            Answer::Go => real(),
            Answer::Refuse(errno) => Err(errno),
            Answer::DoThenSay(errno) => {
                real()?;
                Err(errno)
            }
        }
    }

    pub(super) fn count(&self, call: Call) -> usize {
        self.calls.lock().unwrap().iter().filter(|(made, _)| *made == call).count()
    }
}

impl Files for Hooked {
    fn make_folder(&self, path: &str) -> Result<(), Errno> {
        self.answer(Call::MakeFolder, path, || self.real.make_folder(path))
    }

    fn create(&self, path: &str) -> Result<Handle, Errno> {
        self.answer(Call::Create, path, || self.real.create(path))
    }

    fn open_alone(&self, path: &str) -> Result<(Handle, bool), Errno> {
        self.answer(Call::Create, path, || self.real.open_alone(path))
    }

    fn write_at(&self, handle: &Handle, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let real = || {
            let written = self.real.write_at(handle, bytes, offset);
            written.map_err(|error| Errno::from_io_error(&error).unwrap())
        };
        Ok(self.answer(Call::Write, "", real)?)
    }

    fn flush_soon(&self, _handle: &Handle, _offset: u64, _len: u64) {}

    fn reserve(&self, handle: &Handle, len: u64) -> Result<(), Errno> {
        self.answer(Call::Reserve, "", || self.real.reserve(handle, len))
    }

    fn set_len(&self, handle: &Handle, len: u64) -> Result<(), Errno> {
        self.answer(Call::SetLen, "", || self.real.set_len(handle, len))
    }

    fn sync(&self, handle: &Handle) -> Result<(), Errno> {
        self.answer(Call::Sync, "", || self.real.sync(handle))
    }

    fn sync_folder(&self, path: &str) -> Result<Synced, Errno> {
        match self.answer(Call::SyncFolder, path, || self.real.sync_folder(path)) {
            Err(Errno::INVAL) => Ok(Synced::Unproven),
            result => result,
        }
    }

    fn link(&self, from: &str, to: &str) -> Result<(), Errno> {
        self.answer(Call::Link, to, || self.real.link(from, to))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), Errno> {
        self.answer(Call::Rename, to, || self.real.rename(from, to))
    }

    fn rename_new(&self, from: &str, to: &str) -> Result<(), Errno> {
        self.answer(Call::RenameNew, to, || self.real.rename_new(from, to))
    }

    fn remove(&self, path: &str) -> Result<(), Errno> {
        self.answer(Call::Remove, path, || self.real.remove(path))
    }

    fn remove_folder(&self, path: &str) -> Result<(), Errno> {
        self.answer(Call::RemoveFolder, path, || self.real.remove_folder(path))
    }

    fn try_lock(&self, path: &str) -> Result<Locked, Errno> {
        self.answer(Call::TryLock, path, || self.real.try_lock(path))
    }
}

/// A store on a file system with a hook.
pub(super) struct Fixture {
    pub(super) store: PosixStore,
    pub(super) files: Arc<Hooked>,
    pub(super) folder: tempfile::TempDir,
}

pub(super) fn store(hook: impl Fn(Call, &str) -> Answer + Send + Sync + 'static) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let root = Root::open(folder.path()).unwrap();
    let real = RealFiles::new(Arc::clone(&root));
    let files = Arc::new(Hooked { real, hook: Box::new(hook), calls: Mutex::default() });
    Fixture { store: PosixStore::with_files(root, files.clone()), files, folder }
}

/// A hook that refuses some calls.
pub(super) fn refusing(
    refused: &'static [(Call, Errno)],
) -> impl Fn(Call, &str) -> Answer + Send + Sync {
    move |call, _| {
        let answer = refused.iter().find(|(refused, _)| *refused == call);
        answer.map_or(Answer::Go, |(_, errno)| Answer::Refuse(*errno))
    }
}

/// The names in a fixture's folder, records aside.
pub(super) fn names(fixture: &Fixture) -> Vec<String> {
    let entries = std::fs::read_dir(fixture.folder.path()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name != ".forebay").collect();
    names.sort();
    names
}
