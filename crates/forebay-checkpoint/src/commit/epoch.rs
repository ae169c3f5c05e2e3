//! Epochs: which writer a checkpoint root belongs to.
//!
//! A job that starts to write claims the next number. From then on writers with lower numbers are fenced off: they are
//! refused when they begin and before they publish, and what they had under way is withdrawn. Steps that an old writer
//! still got in are complete, but not on the new writer's line, so `latest` does not follow them.

use std::time::Duration;

use forebay_error::{Code, Error, Result};

use super::id::RunId;
use super::names::{EPOCHS, step_folder};
use super::record::{EpochClaim, decode, encode};
use super::root::{LIST_MAX, RECORD_BYTES_MAX, Root};

/// How many other claimants may be quicker.
const CLAIM_TRIES: u32 = 64;

/// Claims the next epoch of a root for a run, to be called by one rank, once per life of the job, before its first
/// save. `parent` is the step that it restored. Withdraws what writers of lower epochs have under way.
///
/// Returns the epoch, which the caller hands to the other ranks. Errors: I/O; `timeout` if others are always quicker;
/// `invalid_metadata` where the commit of `parent` is damaged, because its epoch is not known then.
pub fn claim(root: &Root, run: RunId, parent: Option<u64>, who: &str) -> Result<u64> {
    let place = parent.map(|step| place_of(root, step)).transpose()?;
    claim_after(root, run, parent.zip(place), who)
}

/// A step, its epoch, and which save of its run it was.
type ParentPlace = (u64, (u64, Option<u32>));

fn claim_after(root: &Root, run: RunId, of_parent: Option<ParentPlace>, who: &str) -> Result<u64> {
    let parent = of_parent.map(|(step, (epoch, _))| (step, epoch));
    let parent_save = of_parent.and_then(|(_, (_, save))| save);
    for _ in 0..CLAIM_TRIES {
        let epoch = after_newest(root)?;
        let who = who.to_owned();
        let claim =
            EpochClaim { epoch, run: run.0, parent, parent_save, who, nonce: super::random() };
        if root.create_once(&key(epoch), &encode(&claim, &[])?)? {
            super::withdraw::fence_off(root, epoch)?;
            return Ok(epoch);
        }
    }
    let what = "no epoch could be claimed: other jobs were always quicker";
    Err(Error::new(Code::Timeout, what).at(root.store.name()))
}

/// The same for a job that keeps its steps in several roots and writes to this one: the next number is above those of
/// all of them, whose claims are copied here before, and `parent` may be in any of them. So a job that goes on from a
/// farther root, on a drive that has nothing yet, stays on its line.
///
/// Errors: as [`claim`]; `already_exists` where the roots are of different jobs.
pub fn claim_among(
    root: &Root,
    others: &[Root],
    run: RunId,
    parent: Option<u64>,
    who: &str,
) -> Result<u64> {
    for other in others {
        copy_claims(other, root)?;
    }
    let Some(step) = parent else { return claim(root, run, None, who) };
    let mut place = place_of(root, step)?;
    for other in others {
        if place == (0, None) {
            place = place_of(other, step)?;
        }
    }
    claim_after(root, run, Some((step, place)), who)
}

/// Copies what others have claimed, as they wrote it.
fn copy_claims(from: &Root, to: &Root) -> Result<()> {
    for number in all(from)? {
        let key = key(number);
        let Some((bytes, _)) = from.store.get(&key, RECORD_BYTES_MAX)? else { continue };
        // One that is damaged is not carried further.
        if !matches!(decode::<EpochClaim>(&bytes), Ok(Some(_))) {
            continue;
        }
        if !to.create_once(&key, &bytes)? {
            let what =
                format!("epoch {number} was claimed by another job than in {}", from.store.name());
            let error = Error::new(Code::AlreadyExists, what).at(to.place(&key));
            return Err(error.hint("these are not places of one job: use another folder"));
        }
    }
    Ok(())
}

fn key(epoch: u64) -> String {
    format!("{EPOCHS}{epoch:08x}")
}

/// The newest epoch that was claimed; 0 where none was.
pub(crate) fn newest(root: &Root) -> Result<u64> {
    Ok(all(root)?.last().copied().unwrap_or(0))
}

fn after_newest(root: &Root) -> Result<u64> {
    let newest = newest(root)?;
    newest.checked_add(1).ok_or_else(|| {
        let what = "there is no number left for another epoch";
        let error = Error::new(Code::Unsupported, what).at(root.place(&key(newest)));
        error.hint("no job has claimed that many: remove this record, it is none of ours")
    })
}

/// The epochs that were claimed, in order.
pub(crate) fn all(root: &Root) -> Result<Vec<u64>> {
    let names = match root.store.names(EPOCHS, LIST_MAX) {
        Ok(names) => names,
        Err(error) if error.code() == Code::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    // In their one spelling: what has another is none of ours.
    let parse = |(name, _): (String, bool)| {
        let epoch = u64::from_str_radix(&name, 16).ok()?;
        (format!("{epoch:08x}") == name).then_some(epoch)
    };
    let mut epochs: Vec<u64> = names.into_iter().filter_map(parse).collect();
    epochs.sort_unstable();
    Ok(epochs)
}

/// What a claimant said; `None` where nobody claimed that epoch. Errors: I/O; those of a damaged record, and
/// `truncated` for an empty one.
pub(crate) fn read(root: &Root, epoch: u64) -> Result<Option<EpochClaim>> {
    let key = key(epoch);
    let Some((bytes, _)) = root.store.get(&key, RECORD_BYTES_MAX)? else { return Ok(None) };
    match decode::<EpochClaim>(&bytes) {
        Ok(Some((claim, _))) => Ok(Some(claim)),
        Ok(None) => Err(Error::new(Code::Truncated, "record is empty").at(root.place(&key))),
        Err(error) => Err(error.at(root.place(&key))),
    }
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

/// The epoch of a step's commit, and which save of its run it was.
fn place_of(root: &Root, step: u64) -> Result<(u64, Option<u32>)> {
    let commit =
        super::steps::step_state(root, step, Duration::ZERO)?.and_then(|state| state.commit);
    let Some(commit) = commit else { return Ok((0, None)) };
    match commit.damage {
        None => Ok((commit.epoch, commit.attempt.map(|attempt| attempt.save))),
        Some(damage) => {
            let what = format!("the commit of step {step} is damaged: its epoch is not known");
            let error = Error::new(Code::InvalidMetadata, what).at(root.place(&step_folder(step)));
            Err(error.hint(damage).hint("or restore another step"))
        }
    }
}
