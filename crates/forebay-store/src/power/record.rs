//! The layer under a store that does what it is asked, and writes it down.
//!
//! One lock is held over the call of the kernel and the note about it, so that the order of the notes is the order of
//! the effects. A call that fails leaves no note: the tests' file systems are local, so it had no effect.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_error::{Error, Result};
use rustix::io::Errno;

use super::Survival;
use super::disk::{Change, Disk, Folder, Target};
use super::image::Image;
use crate::posix::{Files, Handle, Locked, RealFiles, Root, Synced, split};

pub(super) struct Recorder {
    real: RealFiles,
    notes: Mutex<Notes>,
}

struct Notes {
    /// Before the first change.
    start: Disk,
    /// After the last one.
    now: Disk,
    changes: Vec<Change>,
    /// The next number of a file or folder.
    next: u64,
}

impl Recorder {
    pub(super) fn start(root: Arc<Root>, folder: &Path) -> Result<Self> {
        let mut notes =
            Notes { start: Disk::default(), now: Disk::default(), changes: Vec::new(), next: 1 };
        notes
            .read_folder(0, folder)
            .map_err(|error| Error::io("cannot read what is there", error).at(folder.display()))?;
        notes.start = notes.now.clone();
        Ok(Self { real: RealFiles::new(root), notes: Mutex::new(notes) })
    }

    pub(super) fn len(&self) -> usize {
        self.notes().changes.len()
    }

    pub(super) fn describe(&self, index: usize) -> String {
        match self.notes().changes.get(index) {
            Some(Change::Write { node, offset, bytes }) => {
                format!("write of {} bytes at {offset} to file {node}", bytes.len())
            }
            Some(change) => format!("{change:?}"),
            None => "no such change".to_owned(),
        }
    }

    pub(super) fn image(&self, changes: usize, survival: Survival) -> Image {
        let notes = self.notes();
        let mut disk = notes.start.clone();
        for change in notes.changes.iter().take(changes) {
            disk.apply(change);
        }
        Image::of(&disk, survival)
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Notes {
    fn note(&mut self, change: Change) {
        self.now.apply(&change);
        self.changes.push(change);
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The number of a folder, by the names that readers see. What the recording has not seen made is nowhere.
    fn folder(&self, path: &str) -> Result<Folder, Errno> {
        let mut at = 0;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            match self.now.target(at, name) {
                Some(Target::Folder(folder)) => at = folder,
                _ => return Err(Errno::NOENT),
            }
        }
        Ok(at)
    }

    /// Folder and name of a path.
    fn name(&self, path: &str) -> Result<(Folder, String), Errno> {
        let (folder, name) = split(path);
        Ok((self.folder(folder)?, name.to_owned()))
    }

    fn target(&self, path: &str) -> Result<Target, Errno> {
        let (folder, name) = self.name(path)?;
        self.now.target(folder, &name).ok_or(Errno::NOENT)
    }

    fn set(&mut self, path: &str, target: Option<Target>) -> Result<(), Errno> {
        let (folder, name) = self.name(path)?;
        self.note(Change::Name { folder, name, target });
        Ok(())
    }

    fn moved(&mut self, from: &str, to: &str) -> Result<(), Errno> {
        let target = self.target(from)?;
        let (from, to) = (self.name(from)?, self.name(to)?);
        // A rename between two names of one file does nothing.
        if self.now.target(to.0, &to.1) != Some(target) {
            self.note(Change::Rename { from, to, target });
        }
        Ok(())
    }

    fn read_folder(&mut self, folder: Folder, path: &Path) -> io::Result<()> {
        self.now.folders.entry(folder).or_default();
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let number = self.number();
            let target = if entry.file_type()?.is_dir() {
                self.read_folder(number, &entry.path())?;
                Target::Folder(number)
            } else {
                let file = self.now.files.entry(number).or_default();
                file.synced = std::fs::read(entry.path())?;
                file.len = file.synced.len() as u64;
                Target::File(number)
            };
            let names = self.now.folders.entry(folder).or_default();
            names.entry(name).or_default().synced = Some(target);
        }
        Ok(())
    }
}

impl Files for Recorder {
    fn make_folder(&self, path: &str) -> Result<(), Errno> {
        let mut notes = self.notes();
        self.real.make_folder(path)?;
        let number = notes.number();
        notes.set(path, Some(Target::Folder(number)))
    }

    fn create(&self, path: &str) -> Result<Handle, Errno> {
        let mut notes = self.notes();
        let mut handle = self.real.create(path)?;
        handle.node = notes.number();
        let node = handle.node;
        notes.set(path, Some(Target::File(node)))?;
        Ok(handle)
    }

    fn open_alone(&self, path: &str) -> Result<(Handle, bool), Errno> {
        let mut notes = self.notes();
        let (mut handle, made) = self.real.open_alone(path)?;
        if made {
            handle.node = notes.number();
            let node = handle.node;
            notes.set(path, Some(Target::File(node)))?;
        } else {
            let Target::File(node) = notes.target(path)? else { return Err(Errno::INVAL) };
            handle.node = node;
        }
        Ok((handle, made))
    }

    fn write_at(&self, handle: &Handle, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let mut notes = self.notes();
        let written = self.real.write_at(handle, bytes, offset)?;
        let bytes = bytes.get(..written).unwrap_or_default().to_vec();
        notes.note(Change::Write { node: handle.node, offset, bytes });
        Ok(written)
    }

    fn flush_soon(&self, handle: &Handle, offset: u64, len: u64) {
        self.real.flush_soon(handle, offset, len);
    }

    fn reserve(&self, handle: &Handle, len: u64) -> Result<(), Errno> {
        let mut notes = self.notes();
        self.real.reserve(handle, len)?;
        notes.note(Change::Length { node: handle.node, len, grow: true });
        Ok(())
    }

    fn set_len(&self, handle: &Handle, len: u64) -> Result<(), Errno> {
        let mut notes = self.notes();
        self.real.set_len(handle, len)?;
        notes.note(Change::Length { node: handle.node, len, grow: false });
        Ok(())
    }

    fn sync(&self, handle: &Handle) -> Result<(), Errno> {
        let mut notes = self.notes();
        self.real.sync(handle)?;
        notes.note(Change::Sync(handle.node));
        Ok(())
    }

    fn sync_folder(&self, path: &str) -> Result<Synced, Errno> {
        let mut notes = self.notes();
        let synced = self.real.sync_folder(path)?;
        let folder = notes.folder(path)?;
        notes.note(Change::SyncFolder(folder));
        Ok(synced)
    }

    fn link(&self, from: &str, to: &str) -> Result<(), Errno> {
        let mut notes = self.notes();
        self.real.link(from, to)?;
        let target = notes.target(from)?;
        notes.set(to, Some(target))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), Errno> {
        let mut notes = self.notes();
        self.real.rename(from, to)?;
        notes.moved(from, to)
    }

    fn rename_new(&self, from: &str, to: &str) -> Result<(), Errno> {
        let mut notes = self.notes();
        self.real.rename_new(from, to)?;
        notes.moved(from, to)
    }

    fn remove(&self, path: &str) -> Result<(), Errno> {
        let mut notes = self.notes();
        self.real.remove(path)?;
        match notes.target(path) {
            Ok(_) => notes.set(path, None),
            // A lock, which no note was made of.
            Err(_) => Ok(()),
        }
    }

    fn remove_folder(&self, path: &str) -> Result<(), Errno> {
        let mut notes = self.notes();
        self.real.remove_folder(path)?;
        notes.set(path, None)
    }

    fn try_lock(&self, path: &str) -> Result<Locked, Errno> {
        self.real.try_lock(path)
    }
}
