//! Which files of a drive are copies, and of whose.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_checkpoint::commit::{Adoption, FileRef, Root, step_folder, step_of_folder};
use forebay_error::{Code, Error, Result};
use forebay_store::NODE_OWN;
use serde::{Deserialize, Serialize};

use super::peers::{DriveId, peer};

/// Most marks of a drive that are looked at.
const MARKS_MAX: usize = 1 << 20;
/// Most bytes of one.
const BYTES_MAX: u64 = 256;

/// A mark: the file of its name is a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Of which step.
    pub step: u64,
    /// The file.
    pub name: String,
    /// Whose it is.
    pub of: DriveId,
    /// Whether its owner was asked, and does not have it any more.
    pub lacking: bool,
    /// How old the mark is, by the store's clock.
    pub age: Duration,
}

/// As it is written.
#[derive(Serialize, Deserialize)]
struct Record {
    of: String,
    #[serde(default)]
    lacking: bool,
}

fn folder() -> String {
    format!("{NODE_OWN}copies/")
}

pub(super) fn key_of(step: u64, name: &str) -> String {
    format!("{}{}/{name}", folder(), step_folder(step))
}

/// Makes a mark, durably. Errors: I/O.
pub(super) fn make(root: &Root, step: u64, name: &str, of: DriveId, lacking: bool) -> Result<()> {
    let record = Record { of: of.to_string(), lacking };
    let bytes = serde_json::to_vec(&record)
        .map_err(|error| Error::new(Code::Internal, "cannot write a mark").with_source(error))?;
    root.store.put(&key_of(step, name), &bytes)
}

/// Notes that the owner of a copy lacks the file itself: it is this node's to bring to the next tier. Errors: I/O.
pub fn mark_lacking(root: &Root, mark: &Mark) -> Result<()> {
    make(root, mark.step, &mark.name, mark.of, true)
}

/// All marks of a drive, by step and name. One that cannot be read counts as that of a drive that is nowhere: its file
/// is a copy all the same. Errors: I/O.
pub fn marks(root: &Root) -> Result<Vec<Mark>> {
    let folder = folder();
    let mut found = Vec::new();
    for line in root.store.list(&folder, MARKS_MAX)? {
        let Some((step, name)) = line.key.strip_prefix(&folder).and_then(|k| k.split_once('/'))
        else {
            continue;
        };
        let Some(step) = step_of_folder(step) else { continue };
        let Some((of, lacking)) = read(root, &line.key) else { continue };
        found.push(Mark { step, name: name.to_owned(), of, lacking, age: line.age.0 });
    }
    Ok(found)
}

/// Whose file it is, and whether they lack it; `None` where there is no mark any more. One that cannot be read, for
/// whatever reason, still says that the file is a copy: it ends nothing that looks at others too.
fn read(root: &Root, key: &str) -> Option<(DriveId, bool)> {
    let nowhere = (DriveId(0), false);
    let bytes = match root.store.get(key, BYTES_MAX) {
        Ok(found) => found?.0,
        Err(error) => {
            tracing::warn!(%error, "the mark of a copy is not readable");
            return Some(nowhere);
        }
    };
    let record: Option<Record> = serde_json::from_slice(&bytes).ok();
    let known = record.and_then(|record| Some((record.of.parse().ok()?, record.lacking)));
    Some(known.unwrap_or(nowhere))
}

/// Files of a step that are not on the drive, and the names of its copies, as [`of_step`] says it. What is marked
/// either before or after the files are looked for is a copy: one that comes or goes meanwhile is no node's own.
/// Errors: I/O.
pub(crate) fn here(
    root: &Root,
    adoption: &Adoption,
) -> Result<(Vec<FileRef>, BTreeMap<String, bool>)> {
    let mut copies = of_step(root, adoption.step())?;
    let missing = adoption.missing(root)?;
    copies.extend(of_step(root, adoption.step())?);
    Ok((missing, copies))
}

/// The names of the files of a step that are copies here; true for those that this node is to bring to the next tier,
/// because their owner cannot. Errors: I/O.
fn of_step(root: &Root, step: u64) -> Result<BTreeMap<String, bool>> {
    let prefix = format!("{}{}/", folder(), step_folder(step));
    let names = root.store.names(&prefix, MARKS_MAX)?;
    if names.is_empty() {
        return Ok(BTreeMap::new());
    }
    let mut living: BTreeMap<DriveId, bool> = BTreeMap::new();
    let mut found = BTreeMap::new();
    for (name, _) in names {
        let Some((of, lacking)) = read(root, &format!("{prefix}{name}")) else { continue };
        let lives = match living.get(&of) {
            Some(lives) => *lives,
            None => peer(root, of)?.is_some_and(|peer| peer.is_alive()),
        };
        living.insert(of, lives);
        found.insert(name, lacking || !lives);
    }
    Ok(found)
}
