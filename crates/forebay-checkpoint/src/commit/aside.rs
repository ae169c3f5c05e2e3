//! Taking a commit's `.metadata` away, so that nothing is lost if somebody commits the step anew meanwhile.
//!
//! 1. A `removing` record says what is going to happen. A writer that wants to replace that commit looks for it right
//!    before it publishes, and lets the remover pass ([`let_removers_pass`]).
//! 2. The remover gives publications that are under way the time to show, and looks whether the commit is still the
//!    one and whether somebody has marked it meanwhile ([`super::keep`]).
//! 3. It moves `.metadata` aside, into the records of its attempt, and looks at what it has moved. If that is somebody
//!    else's commit after all, it puts it back; a remover that is killed in between leaves that to the next collection.
//!
//! A full file system (no inode is left) has no room for the record, and there a prune must work above all: it goes on
//! without, and waits the grace time out itself. What the record is for can hardly happen then, since a writer needs
//! room for files of its own; one that had them all before may lose its step as told in [`super`].
//!
//! The wait matters on stores whose move is two steps: with link and unlink, a replacement between them would be
//! unlinked.

use std::time::Duration;

use forebay_error::{Code, Error, Result};
use forebay_store::{Expect, Published};

use super::id::AttemptId;
use super::names::Layout;
use super::record::Failure;
use super::root::{LIST_MAX, RECORD_BYTES_MAX, Root};
use super::withdraw::withdraw;

/// How names of what was `.metadata` of a pruned step start.
pub(crate) const UNPUBLISHED: &str = "unpublished";
/// The record that announces a removal.
const REMOVING: &str = "removing";
/// How long a writer waits for a remover that has announced itself; one that takes longer was killed.
const REMOVER_WAIT: Duration = Duration::from_secs(30);
const LOOKS: u32 = 60;

/// What came of an announcement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Announced {
    /// It is written. The grace time counts from here, by the store's clock.
    Written,
    /// There is no room for it: nothing tells others when the grace time began.
    NoRoom,
    /// The commit is not there any more.
    Gone,
}

/// Says that a commit is going to be removed.
pub(crate) fn announce(root: &Root, layout: &Layout, attempt: AttemptId) -> Result<Announced> {
    rescue(root, layout, attempt)?;
    if root.committed(layout)? != Some(Some(attempt)) {
        return Ok(Announced::Gone);
    }
    match root.store.put(&layout.record(attempt, REMOVING), &[]) {
        Ok(_) => Ok(Announced::Written),
        Err(error) if error.code() == Code::NoSpace => Ok(Announced::NoRoom),
        Err(error) => Err(error),
    }
}

/// Takes an announcement back: the commit stays after all.
pub(crate) fn take_back(root: &Root, layout: &Layout, attempt: AttemptId) -> Result<()> {
    root.store.remove(&layout.record(attempt, REMOVING)).map(drop)
}

/// Whether a commit's removal is announced now.
pub(crate) fn is_announced(root: &Root, layout: &Layout, attempt: AttemptId) -> Result<bool> {
    Ok(root.store.get(&layout.record(attempt, REMOVING), RECORD_BYTES_MAX)?.is_some())
}

/// How long ago, by the store's clock, a commit's removal was announced, if it is.
pub(crate) fn announced_since(
    root: &Root,
    layout: &Layout,
    attempt: AttemptId,
) -> Result<Option<Duration>> {
    let key = layout.record(attempt, REMOVING);
    let listed = match root.store.list_here(&layout.records(attempt), LIST_MAX) {
        Ok(listed) => listed,
        Err(error) if error.code() == Code::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(listed.into_iter().find(|object| object.key == key).map(|object| object.age.0))
}

/// Takes a commit's `.metadata` away after it was [announced](announce); whether it was there and is gone.
pub(crate) fn unpublish(root: &Root, layout: &Layout, attempt: AttemptId) -> Result<bool> {
    if root.committed(layout)? != Some(Some(attempt)) {
        return Ok(false);
    }
    let what = "the step was pruned";
    withdraw(root, layout, attempt, Failure::new(Code::Fenced, what))?;
    // A name of its own: two removers must not take each other's find away.
    let aside = layout.record(attempt, &format!("{UNPUBLISHED}-{:016x}", forebay_store::random()));
    match root.store.publish(&layout.metadata(), &aside, &Expect::Absent) {
        Ok(Published::Done { .. } | Published::Withdrawn) => {}
        Ok(Published::Lost) => return Ok(false),
        // It may be back after a loss of power, and must then find its files.
        Err(error) if error.code() == Code::NotDurable => return Err(error),
        Err(error) => {
            if root.committed(layout)? == Some(Some(attempt)) {
                remove_in_place(root, layout, attempt, error)?;
            }
        }
    }
    rescue(root, layout, attempt)?;
    Ok(root.committed(layout)? != Some(Some(attempt)))
}

/// Some file systems (tmpfs) need an inode for a second name as well. Without one there is no moving aside, nor can
/// another writer publish: `.metadata` is removed where it is, and what that frees has room for the announcement.
fn remove_in_place(root: &Root, layout: &Layout, attempt: AttemptId, error: Error) -> Result<()> {
    if error.code() != Code::NoSpace {
        return Err(error);
    }
    root.store.remove(&layout.metadata())?;
    if let Err(error) = root.store.put(&layout.record(attempt, REMOVING), &[]) {
        tracing::debug!(%error, "removed without an announcement");
    }
    Ok(())
}

/// Waits while a remover is about to take `attempt`'s commit away.
pub(crate) fn let_removers_pass(root: &Root, layout: &Layout, attempt: AttemptId) -> Result<()> {
    // Counted in looks as well: a clock that stands still must not hold a save up for ever.
    for _ in 0..LOOKS {
        let announced = is_announced(root, layout, attempt)?;
        if !announced || root.committed(layout)? != Some(Some(attempt)) {
            return Ok(());
        }
        root.clock.sleep(REMOVER_WAIT / LOOKS);
    }
    Ok(())
}

/// Puts a commit back that was moved aside for another: one that was published between a remover's last look and its
/// move.
pub(crate) fn rescue(root: &Root, layout: &Layout, attempt: AttemptId) -> Result<()> {
    let prefix = layout.records(attempt);
    for (name, _) in root.store.names(&prefix, LIST_MAX)? {
        if name.starts_with(UNPUBLISHED) {
            rescue_from(root, layout, attempt, &format!("{prefix}{name}"))?;
        }
    }
    Ok(())
}

fn rescue_from(root: &Root, layout: &Layout, attempt: AttemptId, aside: &str) -> Result<()> {
    let source = match root.store.open_data(aside) {
        Ok(source) => source,
        Err(error) if error.code() == Code::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if root.identify.attempt(source.as_ref())? == Some(attempt) {
        return Ok(());
    }
    match root.store.publish(aside, &layout.metadata(), &Expect::Absent)? {
        Published::Done { .. } | Published::Withdrawn => Ok(()),
        // Somebody has committed since: what was moved aside has been replaced.
        Published::Lost => root.store.remove(aside).map(drop),
    }
}
