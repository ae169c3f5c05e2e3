//! What lies about in a checkpoint root beside its step folders: temporary objects of writers that were killed, and
//! attempts at a checkpoint that is the root itself.

use std::collections::BTreeSet;

use forebay_error::{Code, Error, Result};
use forebay_store::{Listed, is_temp};

use super::gc::{GcOptions, GcReport, TEMP_AGE, remove};
use super::id::AttemptId;
use super::names::{EPOCHS, attempt_of_file};
use super::root::{LIST_MAX, Root};

/// Whether files or records of an attempt lie in the root itself.
pub(super) fn holds_attempts(root: &Root) -> Result<bool> {
    let is_file = |(name, folder): &(String, bool)| !folder && attempt_of_file(name).is_some();
    if root.store.names("", LIST_MAX)?.iter().any(is_file) {
        return Ok(true);
    }
    let is_record = |(name, folder): &(String, bool)| *folder && name.parse::<AttemptId>().is_ok();
    Ok(root.store.names(".forebay/", LIST_MAX)?.iter().any(is_record))
}

/// Removes temporary objects of the root and of its epochs; those of steps and of signs of life are found with them.
pub(super) fn remove_temps(root: &Root, options: &GcOptions, report: &mut GcReport) {
    let found = match find_temps(root) {
        Ok(found) => found,
        Err(error) => return report.failed.push((EPOCHS.to_owned(), error)),
    };
    let gone: BTreeSet<String> = report.removed.iter().map(|(key, _)| key.clone()).collect();
    let age = options.grace.max(TEMP_AGE);
    for object in found.iter().filter(|object| object.age.0 >= age && !gone.contains(&object.key)) {
        match options.dry_run {
            true => report.removed.push((object.key.clone(), object.bytes)),
            false => drop(remove(root, object, report)),
        }
    }
}

fn find_temps(root: &Root) -> Result<Vec<Listed>> {
    let mut found = match root.store.list(EPOCHS, LIST_MAX) {
        Ok(listed) => listed,
        Err(error) if error.code() == Code::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    let names = |prefix| -> Result<bool, Error> {
        Ok(root.store.names(prefix, LIST_MAX)?.iter().any(|(name, _)| is_temp(name)))
    };
    // A listing with ages is one of all steps too: only where there is something to find.
    if names("")? || names(".forebay/")? {
        let above = |object: &Listed| {
            let rest = object.key.strip_prefix(".forebay/").unwrap_or(&object.key);
            !rest.contains('/')
        };
        found.extend(root.store.list("", LIST_MAX)?.into_iter().filter(above));
    }
    found.retain(|object| is_temp(&object.key));
    Ok(found)
}
