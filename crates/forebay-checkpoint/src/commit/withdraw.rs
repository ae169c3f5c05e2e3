//! Taking an attempt's right to publish, for good.
//!
//! A writer thought dead may wake up at any instruction. Two removals make it harmless, and need no room on a full
//! disk:
//!
//! 1. **Begin records.** A rank publishes only if its own begin record is still there, and looks after the decision.
//! 2. **Staged sources**, after that. A rank that looked before (1) had staged before, so its source is listed here and
//!    goes; the store's publication then finds nothing, or it was quicker and the step is committed.
//!
//! A rank that stages after (2) looks for its begin record after that, and finds none. What was published before (2)
//! shows when the commit point is read again, which every caller does before it removes a byte of data. A decision
//! record is made first, as far as there is room, because it carries the reason to the other ranks.

use forebay_error::{Code, Error, Result};
use forebay_store::{Expect, Published};

use super::census::is_damage;
use super::id::AttemptId;
use super::names::{Layout, rank_of, step_folder};
use super::record::{Begin, Decision, Failure, decode, encode};
use super::root::{LIST_MAX, RECORD_BYTES_MAX, Root};

/// What a decision without words says, by its bytes. Room that a rank had set aside for its failure is published by
/// whoever takes the attempt for dead, on a disk that is full; an empty record is all that the attempt itself could
/// make there (`abort_without_words`).
pub(crate) fn blank_decision(bytes: usize) -> Decision {
    let (code, why) = match bytes {
        0 => (Code::NoSpace, "the disk is full"),
        _ => (Code::Fenced, "it was taken for dead, or the disk is full"),
    };
    let what = format!("the attempt was given up, and there was no room to say why: {why}");
    Decision::Abort(Failure::new(code, &what))
}

/// Whether this is what a decision without words says.
pub(crate) fn is_blank(failure: &Failure) -> bool {
    [0, 1].into_iter().any(|bytes| blank_decision(bytes) == Decision::Abort(failure.clone()))
}

/// Withdraws an attempt. Errors are of the store; then it may be withdrawn in part, which does no harm.
pub(crate) fn withdraw(
    root: &Root,
    layout: &Layout,
    attempt: AttemptId,
    failure: Failure,
) -> Result<()> {
    if let Err(error) = say_so(root, layout, attempt, failure) {
        tracing::debug!(%error, "withdrawn without words");
    }
    for what in ["begin", "metadata"] {
        let prefix = layout.records(attempt);
        for (name, _) in root.store.names(&prefix, LIST_MAX)? {
            if rank_of(&name, what).is_some() {
                root.store.remove(&format!("{prefix}{name}"))?;
            }
        }
    }
    Ok(())
}

/// Whether a rank has begun, or staged, since the attempt was withdrawn.
pub(crate) fn is_awake(root: &Root, layout: &Layout, attempt: AttemptId) -> Result<bool> {
    let names = root.store.names(&layout.records(attempt), LIST_MAX)?;
    let right = |name: &str| ["begin", "metadata"].iter().any(|what| rank_of(name, what).is_some());
    Ok(names.iter().any(|(name, _)| right(name)))
}

/// Decides to abort, if nothing is decided: by a new record, or on a full disk by the room that a rank had set aside.
fn say_so(root: &Root, layout: &Layout, attempt: AttemptId, failure: Failure) -> Result<()> {
    if root.decision(layout, attempt)?.is_some() {
        return Ok(());
    }
    let key = layout.record(attempt, "decision");
    let error = match root.create_once(&key, &encode(&Decision::Abort(failure), &[])?) {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    let prefix = layout.records(attempt);
    for (name, _) in root.store.names(&prefix, LIST_MAX)? {
        if rank_of(&name, "fail").is_none() {
            continue;
        }
        let published = root.store.publish(&format!("{prefix}{name}"), &key, &Expect::Absent)?;
        if published != Published::Withdrawn {
            return Ok(());
        }
    }
    Err(error)
}

/// Withdraws what writers of lower epochs have under way.
pub(crate) fn fence_off(root: &Root, epoch: u64) -> Result<()> {
    for layout in layouts(root)? {
        for attempt in attempts(root, &layout)? {
            let prefix = layout.records(attempt);
            let names = root.store.names(&prefix, LIST_MAX)?;
            let begins = names.iter().filter(|(name, _)| rank_of(name, "begin").is_some());
            let mut begins = begins.map(|(name, _)| format!("{prefix}{name}"));
            if is_lower(root, &mut begins, epoch)? {
                let what = format!("epoch {epoch} has taken over");
                withdraw(root, &layout, attempt, Failure::new(Code::Fenced, &what))?;
            }
        }
    }
    Ok(())
}

/// Whether an attempt is of a lower epoch, by the first of its begin records that can be read. Where all are damaged it
/// counts as one: whoever it is, it can begin again, and the new job must not be kept from its work. No record, nothing
/// to withdraw.
fn is_lower(root: &Root, begins: &mut impl Iterator<Item = String>, epoch: u64) -> Result<bool> {
    let mut damaged = false;
    for key in begins {
        let Some((bytes, _)) = root.store.get(&key, RECORD_BYTES_MAX)? else { continue };
        match decode::<Begin>(&bytes) {
            Ok(Some((begin, _))) => return Ok(begin.epoch < epoch),
            Ok(None) => tracing::warn!(key, "a begin record is empty"),
            Err(error) if is_damage(&error) => {
                tracing::warn!(key, %error, "a begin record is damaged");
            }
            Err(error) => return Err(error.at(root.place(&key))),
        }
        damaged = true;
    }
    Ok(damaged)
}

/// The step folders of a root, in the order of steps.
pub(crate) fn layouts(root: &Root) -> Result<Vec<Layout>> {
    Ok(super::steps::numbers(root)?
        .into_iter()
        .map(|step| Layout::new(&step_folder(step)))
        .collect())
}

/// The attempts that have records in a step.
fn attempts(root: &Root, layout: &Layout) -> Result<Vec<AttemptId>> {
    let names = match root.store.names(&layout.file(".forebay/"), LIST_MAX) {
        Ok(names) => names,
        Err(error) if error.code() == Code::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    let parse = |(name, _): (String, bool)| name.parse().map_err(|_: Error| ()).ok();
    Ok(names.into_iter().filter_map(parse).collect())
}
