//! Uploads that writers began and were killed in: parts that no listing of objects shows ([`Store::unfinished`]).
//!
//! What is of an attempt whose signs of life are older than the grace time goes, and what is of one of which nothing
//! else is left. Whoever is alive keeps its uploads, however old: a sign of life is a change of its records.

use std::collections::{BTreeMap, BTreeSet};

use forebay_error::{Code, Error, Result};

use super::census::Census;
use super::gc::{GcOptions, GcReport};
use super::id::AttemptId;
use super::names::{Layout, Place};
use super::root::{LIST_MAX, Root};

/// Removes them, in these folders. What goes is told with 0 bytes: a store does not say how many there are.
pub(super) fn forget(root: &Root, layouts: &[Layout], options: &GcOptions, report: &mut GcReport) {
    let found = match root.store.unfinished("", LIST_MAX) {
        Ok(found) if found.is_empty() => return,
        Ok(found) => found,
        Err(error) => return report.failed.push(("unfinished uploads".to_owned(), error)),
    };
    let old = found.into_iter().filter(|upload| upload.age.0 >= options.grace);
    let keys: BTreeSet<String> = old.map(|upload| upload.key).collect();
    let mut folders: BTreeMap<usize, Census> = BTreeMap::new();
    for key in keys {
        let of = |layout: &Layout| match layout.place(&key) {
            Place::File(attempt) => Some(attempt),
            _ => None,
        };
        let place = layouts.iter().enumerate().find_map(|(at, layout)| Some((at, of(layout)?)));
        let forgotten = match place {
            Some((at, attempt)) => is_dead(root, layouts, at, attempt, options, &mut folders),
            // A folder of which nothing else is left is no step any more.
            None => Ok(of_lost_step(&key)),
        };
        let forgotten = forgotten.and_then(|dead| match (dead, options.dry_run) {
            (false, _) => Ok(0),
            (true, true) => Ok(1),
            (true, false) => root.store.forget_unfinished(&key),
        });
        match forgotten {
            Ok(0) => {}
            Ok(_) => report.removed.push((key, 0)),
            Err(error) => report.failed.push((key, error)),
        }
    }
}

fn is_dead(
    root: &Root,
    layouts: &[Layout],
    at: usize,
    attempt: AttemptId,
    options: &GcOptions,
    folders: &mut BTreeMap<usize, Census>,
) -> Result<bool> {
    if let std::collections::btree_map::Entry::Vacant(entry) = folders.entry(at) {
        let layout = layouts.get(at).ok_or_else(|| {
            Error::new(Code::Io, "a folder of the root is gone").at(root.store.name())
        })?;
        entry.insert(Census::take(root, layout)?);
    }
    let known = folders.get(&at).filter(|census| census.attempts.contains_key(&attempt));
    Ok(known.is_none_or(|census| census.age(attempt) >= options.grace))
}

/// Whether a key is that of an attempt's file in a step's folder.
fn of_lost_step(key: &str) -> bool {
    let Some((folder, _)) = key.rsplit_once('/') else { return false };
    let is_step = super::names::step_of_folder(folder).is_some();
    is_step && matches!(Layout::new(folder).place(key), Place::File(_))
}
