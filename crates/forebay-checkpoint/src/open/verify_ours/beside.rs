//! What else lies in the folder.

use std::collections::HashSet;

use forebay_error::Result;
use forebay_format::Folder;
use forebay_format::dcp::metadata::DcpMetadata;

use super::gather::Files;
use super::{Ours, Verified};
use crate::commit::{MANIFEST_PREFIX, attempt_of_file};
use crate::open::Concern;
use crate::open::files::MAX_NAMES;

/// The one manifest in the folder that may belong to a `.metadata` that does not name it: of the attempt of its files.
pub(super) fn lost_manifest(
    folder: &Folder,
    table: Option<&DcpMetadata>,
) -> Result<Option<String>> {
    let attempts: Option<HashSet<_>> =
        table.map(|table| table.files().iter().filter_map(|file| attempt_of_file(file)).collect());
    let mut names = Vec::new();
    for name in names_in(folder)? {
        let attempt = attempt_of_file(&name).filter(|_| name.starts_with(MANIFEST_PREFIX));
        let fits = |attempt| attempts.as_ref().is_none_or(|known| known.contains(&attempt));
        if attempt.is_some_and(fits) {
            names.push(name);
        }
    }
    let only = if names.len() == 1 { names.pop() } else { None };
    Ok(only)
}

/// What lies in the folder and belongs to other attempts.
pub(super) fn leftovers(own: &Ours<'_>, files: &Files, found: &mut Verified) -> Result<()> {
    found.warnings.extend(crate::open::dcp::leftovers(own.listing));
    let names: Vec<String> = files.names().map(str::to_owned).collect();
    found.warnings.extend(crate::open::dcp::stale_files(own.folder, own.listing, &names));
    let known: HashSet<&str> =
        names.iter().map(String::as_str).chain([own.name.as_str()]).collect();
    for name in names_in(own.folder)? {
        // Data files were told above.
        let told = known.contains(name.as_str()) || name.ends_with(".distcp");
        if !told && attempt_of_file(&name).is_some() {
            let text = format!("{name:?} is left from another save of this step; it is not read");
            found.warn(Concern::Leftover, text);
        }
    }
    Ok(())
}

/// The names in a folder.
fn names_in(folder: &Folder) -> Result<Vec<String>> {
    // A name that is no text is none of ours.
    let mut names = folder.names(MAX_NAMES)?;
    names.sort_unstable();
    Ok(names)
}
