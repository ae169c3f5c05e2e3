//! Loss of power: what a folder may hold when the machine comes back.
//!
//! A [`Recording`] is a folder in which stores work for real, while every change they ask of the kernel is written
//! down, in the order in which it took effect. From the record, [`Recording::image`] makes what a disk may hold if
//! the power fails after the n-th change, and [`Image::write_to`] puts that in another folder, where a test opens it
//! again and looks whether every promise was kept. A *kill* of the process is the special case in which nothing is
//! lost: [`Survival::Everything`].
//!
//! # What is modelled
//!
//! The model is POSIX at its weakest, after the ALICE study (Pillai et al., OSDI 2014): what no fsync has covered may
//! be on the disk or not, in any combination.
//!
//! - **Bytes.** A write is cut at the borders of sectors (512 bytes). Until the file's fsync each piece may be on the
//!   disk
//!   or not, whatever the others do; a piece that is not reads as what the disk had there, zeros past the old end.
//! - **Lengths.** Until the fsync the length may be the old one or any that the file had since, with or without the
//!   bytes.
//! - **Names.** An entry of a folder is its own object: until the folder's fsync each name may have any of the values
//!   that
//!   it had since the last one, whatever the other names do. So the two halves of a rename are apart: the new name may
//!   be there and the old one too, or neither. The order is kept only for one name and itself.
//! - **Files and names are apart.** The fsync of a file does not save its name; the fsync of a folder saves no bytes,
//!   and
//!   not the folder's own name in its parent. A name without synced bytes is an empty or torn file.
//! - **fsync** covers what came before it, from any client. One that fails covers nothing.
//! - Links: all names of one file show the same bytes, and the image links them again.
//!
//! Journaling file systems promise more (ext4 and XFS order renames, and ext4 saves a new file's name with its bytes),
//! so what holds here holds there.
//!
//! # What is not
//!
//! - A disk that lies about its caches, loses synced sectors or tears inside of a sector.
//! - Pages that the kernel drops after a failed write and later calls clean: a failed fsync is final for a store, which
//!   the tests of the store show by refusing one.
//! - Writes through mappings, and changes by programs that are not stores of the recording.
//! - Modes, owners and times; images have today's. So versions from before the loss mean nothing after it.
//! - Locks, which no crash outlives.
//!
//! ```
//! use forebay_store::{Store, power::{Recording, Survival}};
//! let (live, after) = (tempfile::tempdir()?, tempfile::tempdir()?);
//! let recording = Recording::start(live.path())?;
//! let store = recording.store();
//! store.put("a", b"1")?;
//! recording.image(recording.changes(), Survival::Synced).write_to(after.path())?;
//! assert_eq!(std::fs::read(after.path().join("a"))?, b"1");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod disk;
mod image;
mod record;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

use forebay_error::Result;

pub use image::Image;

use crate::posix::{PosixStore, Root};
use record::Recorder;

/// Which of the changes that no fsync has covered are on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survival {
    /// All: as after a kill of the processes.
    Everything,
    /// None: only what was synced.
    Synced,
    /// Some, by this seed.
    Seeded(u64),
}

/// A folder in which every change of its stores is written down. See the module.
pub struct Recording {
    root: Arc<Root>,
    recorder: Arc<Recorder>,
}

impl Recording {
    /// Starts with what is in the folder, taken as on the disk.
    pub fn start(folder: &Path) -> Result<Self> {
        let root = Root::open(folder)?;
        let recorder = Arc::new(Recorder::start(Arc::clone(&root), folder)?);
        Ok(Self { root, recorder })
    }

    /// Another client, as of another process: clients share nothing but the folder.
    pub fn store(&self) -> PosixStore {
        PosixStore::with_files(Arc::clone(&self.root), self.recorder.clone())
    }

    /// How many changes were made so far.
    pub fn changes(&self) -> usize {
        self.recorder.len()
    }

    /// The `index`-th change in words, for messages of tests.
    pub fn describe(&self, index: usize) -> String {
        self.recorder.describe(index)
    }

    /// What the disk may hold if the power fails after that many changes.
    pub fn image(&self, changes: usize, survival: Survival) -> Image {
        self.recorder.image(changes, survival)
    }
}
