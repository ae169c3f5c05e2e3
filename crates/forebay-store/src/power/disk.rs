//! A disk and what is on its way there: files by number, folders by number, names between them.
//!
//! Every state keeps two things apart: what is on the disk for sure, and what came since, in order. An fsync moves the
//! second into the first.

use std::collections::BTreeMap;

/// Number of a file.
pub(super) type Node = u64;
/// Number of a folder; 0 is the root.
pub(super) type Folder = u64;

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    File(Node),
    Folder(Folder),
}

/// One change, as it is written down.
#[derive(Clone, Debug)]
pub(super) enum Change {
    /// A name gets a meaning, or loses it.
    Name { folder: Folder, name: String, target: Option<Target> },
    /// Two names change in one call.
    Rename { from: (Folder, String), to: (Folder, String), target: Target },
    /// Bytes are written.
    Write { node: Node, offset: u64, bytes: Vec<u8> },
    /// The length is set, without bytes; only ever upwards if `grow`.
    Length { node: Node, len: u64, grow: bool },
    /// A file is forced to the disk.
    Sync(Node),
    /// A folder is.
    SyncFolder(Folder),
}

/// Bytes of a file that may not be on the disk yet.
#[derive(Clone, Debug)]
pub(super) enum Pending {
    Bytes { offset: u64, bytes: Vec<u8> },
    Length(u64),
}

#[derive(Clone, Debug, Default)]
pub(super) struct FileState {
    pub(super) synced: Vec<u8>,
    pub(super) pending: Vec<Pending>,
    /// As readers see it now.
    pub(super) len: u64,
}

/// A name: what the disk says, and what it was since.
#[derive(Clone, Debug, Default)]
pub(super) struct NameState {
    pub(super) synced: Option<Target>,
    pub(super) since: Vec<Option<Target>>,
}

impl NameState {
    /// What readers see.
    pub(super) fn now(&self) -> Option<Target> {
        self.since.last().copied().unwrap_or(self.synced)
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    pub(super) files: BTreeMap<Node, FileState>,
    pub(super) folders: BTreeMap<Folder, BTreeMap<String, NameState>>,
}

impl Disk {
    /// Makes a change, which is not on the disk yet.
    pub(super) fn apply(&mut self, change: &Change) {
        match change {
            Change::Name { folder, name, target } => self.set_name(*folder, name, *target),
            Change::Rename { from, to, target } => {
                self.set_name(to.0, &to.1, Some(*target));
                self.set_name(from.0, &from.1, None);
            }
            Change::Write { node, offset, bytes } => {
                let file = self.files.entry(*node).or_default();
                file.len = file.len.max(offset + bytes.len() as u64);
                file.pending.push(Pending::Bytes { offset: *offset, bytes: bytes.clone() });
            }
            Change::Length { node, len, grow } => {
                let file = self.files.entry(*node).or_default();
                file.len = if *grow { file.len.max(*len) } else { *len };
                file.pending.push(Pending::Length(file.len));
            }
            Change::Sync(node) => {
                let file = self.files.entry(*node).or_default();
                file.synced = super::image::all_bytes(file);
                file.pending.clear();
            }
            Change::SyncFolder(folder) => {
                for name in self.folders.entry(*folder).or_default().values_mut() {
                    name.synced = name.now();
                    name.since.clear();
                }
            }
        }
    }

    /// What a name stands for now.
    pub(super) fn target(&self, folder: Folder, name: &str) -> Option<Target> {
        self.folders.get(&folder)?.get(name)?.now()
    }

    fn set_name(&mut self, folder: Folder, name: &str, target: Option<Target>) {
        let names = self.folders.entry(folder).or_default();
        names.entry(name.to_owned()).or_default().since.push(target);
    }
}
