//! Epochs: which writer a checkpoint root belongs to.
//!
//! A job that starts to write claims the next number. From then on writers with lower numbers are fenced off: they are
//! refused when they begin and before they publish, and what they had under way is withdrawn. Steps that an old writer
//! still got in are complete, but not on the new writer's line, so `latest` does not follow them.

use forebay_error::{Code, Error, Result};

use super::id::RunId;
use super::names::EPOCHS;
use super::record::{EpochClaim, encode};
use super::root::{LIST_MAX, Root};

/// How many other claimants may be quicker.
const CLAIM_TRIES: u32 = 64;

/// Claims the next epoch of a root for a run, to be called by one rank, once per life of the job, before its first
/// save. `parent` is the step that it restored. Withdraws what writers of lower epochs have under way.
///
/// Returns the epoch, which the caller hands to the other ranks. Errors: I/O; `timeout` if others are always quicker.
pub fn claim(root: &Root, run: RunId, parent: Option<u64>, who: &str) -> Result<u64> {
    let parent = parent.map(|step| Ok::<_, Error>((step, epoch_of(root, step)?))).transpose()?;
    for _ in 0..CLAIM_TRIES {
        let epoch = newest(root)? + 1;
        let who = who.to_owned();
        let claim = EpochClaim { epoch, run: run.0, parent, who, nonce: super::random() };
        if root.create_once(&key(epoch), &encode(&claim, &[])?)? {
            super::withdraw::fence_off(root, epoch)?;
            return Ok(epoch);
        }
    }
    let what = "no epoch could be claimed: other jobs were always quicker";
    Err(Error::new(Code::Timeout, what).at(root.store.name()))
}

fn key(epoch: u64) -> String {
    format!("{EPOCHS}{epoch:08x}")
}

/// The newest epoch that was claimed; 0 where none was.
pub(crate) fn newest(root: &Root) -> Result<u64> {
    Ok(all(root)?.last().copied().unwrap_or(0))
}

/// The epochs that were claimed, in order.
pub(crate) fn all(root: &Root) -> Result<Vec<u64>> {
    let names = match root.store.names(EPOCHS, LIST_MAX) {
        Ok(names) => names,
        Err(error) if error.code() == Code::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    let parse = |(name, _): (String, bool)| u64::from_str_radix(&name, 16).ok();
    let mut epochs: Vec<u64> = names.into_iter().filter_map(parse).collect();
    epochs.sort_unstable();
    Ok(epochs)
}

/// What a claimant said.
pub(crate) fn read(root: &Root, epoch: u64) -> Result<Option<EpochClaim>> {
    root.read(&key(epoch))
}

/// Fails with `fenced` if a later writer has the root.
pub(crate) fn check(root: &Root, epoch: u64) -> Result<()> {
    let newest = newest(root)?;
    if newest <= epoch {
        return Ok(());
    }
    let who = read(root, newest).ok().flatten().map(|claim| claim.who).unwrap_or_default();
    let what = format!("epoch {newest} has taken over from epoch {epoch}");
    let error = Error::new(Code::Fenced, what).at(root.store.name());
    Err(error.hint(format!("stop this job: another one writes here ({who})")))
}

fn epoch_of(root: &Root, step: u64) -> Result<u64> {
    let commit = super::steps::step_state(root, step)?.and_then(|state| state.commit);
    Ok(commit.map_or(0, |commit| commit.epoch))
}
