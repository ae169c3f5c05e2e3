//! Files of a node's own that could not be read, or were not what was saved: they are on the drive by name and length,
//! and nobody can have them from here.
//!
//! Whoever has copies is not told of such a file, so it finds that this node lacks it, and brings the copy itself. That
//! one is noted here which is whole after all, because its way here was bad, costs no more than that. A name is never
//! used for another file, so a note holds as long as the file is there.

use std::collections::BTreeSet;

use forebay_checkpoint::commit::{Layout, Root, step_folder, step_of_folder};
use forebay_error::{Code, Result};
use forebay_store::NODE_OWN;

/// Most notes that are looked at.
const NOTES_MAX: usize = 1 << 16;

fn folder() -> String {
    format!("{NODE_OWN}damaged/")
}

/// Notes such a file. What fails is told in the log alone: it comes again with the next try.
pub(crate) fn note(root: &Root, step: u64, name: &str) {
    let key = format!("{}{}/{name}", folder(), step_folder(step));
    if let Err(error) = root.store.put(&key, b"{}") {
        tracing::warn!(%error, step, name, "that a file is damaged is not noted");
    }
}

/// The names of such files of a step. Errors: I/O.
pub(super) fn of_step(root: &Root, step: u64) -> Result<BTreeSet<String>> {
    let prefix = format!("{}{}/", folder(), step_folder(step));
    let names = root.store.names(&prefix, NOTES_MAX)?;
    Ok(names.into_iter().map(|(name, _)| name).collect())
}

/// Removes notes of files that are gone. Errors: I/O.
pub(super) fn tidy(root: &Root) -> Result<()> {
    let folder = folder();
    for line in root.store.list(&folder, NOTES_MAX)? {
        let names = line.key.strip_prefix(&folder).and_then(|key| key.split_once('/'));
        let Some((step, name)) = names else { continue };
        let Some(step) = step_of_folder(step) else { continue };
        let file = Layout::of_step(step).file(name);
        if root.store.open_data(&file).is_err_and(|error| error.code() == Code::NotFound) {
            root.store.remove(&line.key)?;
        }
    }
    Ok(())
}
