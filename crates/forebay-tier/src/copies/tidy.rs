//! Removes copies that nobody needs any more. Files without a mark are a node's own, and never touched.
//!
//! A copy goes once its step is committed in one place. Where the step itself goes, it goes with the step's other
//! files, by the same collector; its mark goes here.

use std::collections::BTreeSet;
use std::time::Duration;

use forebay_checkpoint::commit::{Layout, Root, attempt_of_file};
use forebay_error::{Code, Result};

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
}

/// Looks through the copies of a drive. `landed`: steps that are committed in one place, with their attempts.
///
/// Errors: I/O.
pub fn tidy(root: &Root, landed: &BTreeSet<(u64, String)>) -> Result<Tidied> {
    let mut tidied = Tidied::default();
    for mark in marks(root)? {
        let file = Layout::of_step(mark.step).file(&mark.name);
        let attempt = attempt_of_file(&mark.name).map(|attempt| attempt.to_string());
        let is_landed = attempt.is_some_and(|attempt| landed.contains(&(mark.step, attempt)));
        if is_landed {
            // The file first: what has no mark is a node's own.
            root.store.remove(&file)?;
            root.store.remove(&key_of(mark.step, &mark.name))?;
            tidied.removed.push((mark.step, mark.name));
            continue;
        }
        match root.store.open_data(&file) {
            Ok(source) => tidied.held.push((mark, source.len())),
            Err(error) if error.code() == Code::NotFound => {
                if mark.age >= STALE {
                    root.store.remove(&key_of(mark.step, &mark.name))?;
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(tidied)
}
