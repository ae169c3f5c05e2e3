//! From a disk with changes on the way to it, to what it may hold.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forebay_error::{Error, Result};

use super::Survival;
use super::disk::{Disk, FileState, Folder, Node, Pending, Target};
use crate::fault::mix;

/// The unit in which a disk writes.
const SECTOR_BYTES: u64 = 512;
/// Deepest folder that is made; deeper ones cannot be, because the recording's folder could not hold them.
const DEPTH_MAX: usize = 600;

/// What a disk may hold.
#[derive(Clone, Debug)]
pub struct Image {
    files: BTreeMap<Node, Vec<u8>>,
    folders: BTreeMap<Folder, BTreeMap<String, Target>>,
}

/// Decides by a seed, the same way every time.
struct Dice(u64);

impl Dice {
    /// A number below `sides`; 0 for none.
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0).checked_rem(sides).unwrap_or(0)
    }
}

impl Image {
    pub(super) fn of(disk: &Disk, survival: Survival) -> Self {
        let mut dice = match survival {
            Survival::Seeded(seed) => Dice(mix(seed)),
            Survival::Everything | Survival::Synced => Dice(0),
        };
        let mut files = BTreeMap::new();
        for (node, file) in &disk.files {
            let bytes = match survival {
                Survival::Everything => all_bytes(file),
                Survival::Synced => file.synced.clone(),
                Survival::Seeded(_) => some_bytes(file, &mut dice),
            };
            files.insert(*node, bytes);
        }
        let mut folders = BTreeMap::new();
        for (folder, names) in &disk.folders {
            let mut kept = BTreeMap::new();
            for (name, state) in names {
                let target = match survival {
                    Survival::Everything => state.now(),
                    Survival::Synced => state.synced,
                    Survival::Seeded(_) => {
                        let pick = dice.roll(state.since.len() as u64 + 1);
                        let since = usize::try_from(pick).ok().and_then(|n| n.checked_sub(1));
                        since.and_then(|n| state.since.get(n)).copied().unwrap_or(state.synced)
                    }
                };
                if let Some(target) = target {
                    kept.insert(name.clone(), target);
                }
            }
            folders.insert(*folder, kept);
        }
        Self { files, folders }
    }

    /// Puts it in an empty folder.
    pub fn write_to(&self, folder: &Path) -> Result<()> {
        let mut written = BTreeMap::new();
        self.write_folder(0, folder, 0, &mut written)
            .map_err(|error| Error::io("cannot write an image", error).at(folder.display()))
    }

    /// The files that can be reached, by path, with their bytes.
    pub fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut todo = vec![(0, String::new(), 0)];
        while let Some((folder, prefix, depth)) = todo.pop() {
            for (name, target) in self.folders.get(&folder).into_iter().flatten() {
                match target {
                    Target::File(node) => {
                        let bytes = self.files.get(node).cloned().unwrap_or_default();
                        found.insert(format!("{prefix}{name}"), bytes);
                    }
                    Target::Folder(inner) if depth < DEPTH_MAX => {
                        todo.push((*inner, format!("{prefix}{name}/"), depth + 1));
                    }
                    Target::Folder(_) => {}
                }
            }
        }
        found
    }

    fn write_folder(
        &self,
        folder: Folder,
        path: &Path,
        depth: usize,
        written: &mut BTreeMap<Node, PathBuf>,
    ) -> std::io::Result<()> {
        for (name, target) in self.folders.get(&folder).into_iter().flatten() {
            let path = path.join(name);
            match target {
                Target::Folder(inner) if depth < DEPTH_MAX => {
                    std::fs::create_dir(&path)?;
                    self.write_folder(*inner, &path, depth + 1, written)?;
                }
                Target::Folder(_) => {}
                Target::File(node) => match written.get(node) {
                    Some(first) => std::fs::hard_link(first, &path)?,
                    None => {
                        std::fs::write(&path, self.files.get(node).map_or(&[][..], Vec::as_slice))?;
                        written.insert(*node, path);
                    }
                },
            }
        }
        Ok(())
    }
}

/// The bytes that readers see.
pub(super) fn all_bytes(file: &FileState) -> Vec<u8> {
    let mut bytes = file.synced.clone();
    for pending in &file.pending {
        match pending {
            Pending::Bytes { offset, bytes: piece } => put(&mut bytes, *offset, piece),
            Pending::Length(len) => bytes.resize(usize::try_from(*len).unwrap_or(0), 0),
        }
    }
    bytes
}

/// Some of what is pending, by the sector, and one of the lengths.
fn some_bytes(file: &FileState, dice: &mut Dice) -> Vec<u8> {
    let synced_len = file.synced.len() as u64;
    let mut lens = vec![synced_len];
    let mut bytes = file.synced.clone();
    let mut len = synced_len;
    // Half of the time all or none, since those are likely and a mix of many pieces never is either.
    let mood = dice.roll(4);
    for pending in &file.pending {
        match pending {
            Pending::Bytes { offset, bytes: piece } => {
                len = len.max(offset + piece.len() as u64);
                let mut at = *offset;
                for sector in sectors(*offset, piece) {
                    let kept = match mood {
                        0 => true,
                        1 => false,
                        _ => dice.roll(2) == 0,
                    };
                    if kept {
                        put(&mut bytes, at, sector);
                    }
                    at += sector.len() as u64;
                }
            }
            Pending::Length(set) => len = *set,
        }
        lens.push(len);
    }
    let pick = usize::try_from(dice.roll(lens.len() as u64)).unwrap_or(0);
    let len = lens.get(pick).copied().unwrap_or(synced_len);
    bytes.resize(usize::try_from(len).unwrap_or(0), 0);
    bytes
}

/// The pieces of a write that lie in one sector each.
fn sectors(offset: u64, bytes: &[u8]) -> Vec<&[u8]> {
    let first = usize::try_from(SECTOR_BYTES - offset % SECTOR_BYTES).unwrap_or(0);
    let (head, rest) = bytes.split_at(first.min(bytes.len()));
    let rest = rest.chunks(usize::try_from(SECTOR_BYTES).unwrap_or(1));
    std::iter::once(head).chain(rest).filter(|piece| !piece.is_empty()).collect()
}

fn put(bytes: &mut Vec<u8>, offset: u64, piece: &[u8]) {
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let Some(end) = start.checked_add(piece.len()) else { return };
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    if let Some(target) = bytes.get_mut(start..end) {
        target.copy_from_slice(piece);
    }
}
