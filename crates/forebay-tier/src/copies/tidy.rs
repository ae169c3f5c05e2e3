//! Removes copies that nobody needs any more. Files without a mark are a node's own, and never touched.
//!
//! A copy goes once its step is committed in one place. Where the step itself goes, it goes with the step's other
//! files, by the same collector; its mark goes here.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use forebay_checkpoint::commit::{Layout, Root, attempt_of_file};
use forebay_error::{Code, Error, Result};

use super::damaged;
use super::marks::{Mark, key_of, marks};

/// A mark without its file is this old before it goes: who makes one gives the file its name at once.
const STALE: Duration = Duration::from_secs(120);

/// What there is, and what was removed.
#[derive(Debug, Default)]
pub struct Tidied {
    /// Copies that stay, with their bytes.
    pub held: Vec<(Mark, u64)>,
    /// Copies that went: step and name.
    pub removed: Vec<(u64, String)>,
    /// What went wrong first with one of them; the others were looked at all the same.
    pub trouble: Option<Error>,
}

/// Looks through the copies of a drive. `marking` is held by whoever makes or removes a mark and its file.
pub(super) fn tidy(
    root: &Root,
    landed: &BTreeSet<(u64, String)>,
    marking: &Mutex<()>,
) -> Result<Tidied> {
    let mut tidied = Tidied::default();
    for mark in marks(root)? {
        let attempt = attempt_of_file(&mark.name).map(|attempt| attempt.to_string());
        let is_landed = attempt.is_some_and(|attempt| landed.contains(&(mark.step, attempt)));
        let _marking = marking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = look_at(root, mark, is_landed, &mut tidied) {
            tidied.trouble.get_or_insert(error);
        }
    }
    if let Err(error) = damaged::tidy(root) {
        tidied.trouble.get_or_insert(error);
    }
    Ok(tidied)
}

fn look_at(root: &Root, mark: Mark, is_landed: bool, tidied: &mut Tidied) -> Result<()> {
    let store = &root.store;
    let (file, key) = (Layout::of_step(mark.step).file(&mark.name), key_of(mark.step, &mark.name));
    if is_landed {
        // The file first: what has no mark is a node's own.
        store.remove(&file)?;
        store.remove(&key)?;
        tidied.removed.push((mark.step, mark.name));
        return Ok(());
    }
    match store.open_data(&file) {
        Ok(source) => tidied.held.push((mark, source.len())),
        Err(error) if error.code() == Code::NotFound => {
            if mark.age >= STALE {
                store.remove(&key)?;
            }
        }
        Err(error) => return Err(error),
    }
    Ok(())
}
