//! Epochs: which writer a checkpoint root belongs to.
//!
//! A job that starts to write claims the next number. From then on writers with lower numbers are fenced off: they are
//! refused when they begin and before they publish, and what they had under way is withdrawn. Steps that an old writer
//! still got in are complete, but not on the new writer's line, so `latest` does not follow them.

use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forebay_error::{Code, Error, Result};

use super::id::RunId;
use super::names::{EPOCHS, step_folder};
use super::record::{EpochClaim, decode, encode};
use super::root::{LIST_MAX, RECORD_BYTES_MAX, Root};

/// How many other claimants may be quicker.
const CLAIM_TRIES: u32 = 64;
/// How long a first save waits for farther roots to say what was claimed there: some dozen requests as a rule.
const ANSWER_MAX: Duration = Duration::from_secs(15);

/// Claims the next epoch of a root for a run, to be called by one rank, once per life of the job, before its first
/// save. `parent` is the step that it restored. Withdraws what writers of lower epochs have under way.
///
/// Returns the epoch, which the caller hands to the other ranks. Errors: I/O; `timeout` if others are always quicker;
/// `invalid_metadata` where the commit of `parent` is damaged, because its epoch is not known then.
pub fn claim(root: &Root, run: RunId, parent: Option<u64>, who: &str) -> Result<u64> {
    let place = parent.map(|step| place_of(root, step)).transpose()?.flatten();
    claim_after(root, run, parent.map(|step| (step, place.unwrap_or_default())), 0, who)
}

/// A step, its epoch, and which save of its run it was.
type ParentPlace = (u64, (u64, Option<u32>));

/// Claims the next number, `least` at the lowest.
fn claim_after(
    root: &Root,
    run: RunId,
    of_parent: Option<ParentPlace>,
    least: u64,
    who: &str,
) -> Result<u64> {
    let parent = of_parent.map(|(step, (epoch, _))| (step, epoch));
    let parent_save = of_parent.and_then(|(_, (_, save))| save);
    for _ in 0..CLAIM_TRIES {
        let epoch = after_newest(root)?.max(least);
        let who = who.to_owned();
        let claim = EpochClaim {
            epoch,
            run: run.0,
            parent,
            parent_save,
            who,
            nonce: forebay_store::random(),
        };
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
/// A root that cannot be opened and asked within 15 seconds stops nobody. What was claimed there is not known then, and
/// a number that is taken there could never come to it: the time is claimed, in seconds since 1970, which is above
/// whatever was counted, and above what an earlier life has claimed in this way.
///
/// Errors: as [`claim`]; `already_exists` where the roots are of different jobs; that of a root that cannot be asked
/// where `parent` is in none of the others.
pub fn claim_among(
    root: &Root,
    others: Vec<Other>,
    run: RunId,
    parent: Option<u64>,
    who: &str,
) -> Result<u64> {
    let mut silent: Option<Error> = None;
    let mut place = parent.map(|step| place_of(root, step)).transpose()?.flatten();
    for told in ask_all(others, parent) {
        match told {
            Ok(told) => {
                take_over(&told.name, &told.claims, root)?;
                if place.is_none() && parent.is_some() {
                    place = told.parent?;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "what was claimed on a farther tier is not known");
                silent.get_or_insert(error);
            }
        }
    }
    let least = silent.as_ref().map_or(0, |_| unix());
    if let Some(error) = silent.filter(|_| parent.is_some() && place.is_none()) {
        return Err(error.hint("the step that was restored may be there: its epoch is not known"));
    }
    let of_parent = parent.map(|step| (step, place.unwrap_or_default()));
    claim_after(root, run, of_parent, least, who)
}

/// Opens another root of a job; `None` where there is none yet.
pub type Other = Box<dyn FnOnce() -> Result<Option<Root>> + Send>;

/// What another root says.
struct Told {
    name: String,
    /// The claims there, by number, as they were written.
    claims: Vec<(u64, Vec<u8>)>,
    /// The place of the step that was restored.
    parent: Result<Option<(u64, Option<u32>)>>,
}

/// Asks them all at once. A thread whose root hangs is left behind: it ends when its call does.
fn ask_all(others: Vec<Other>, parent: Option<u64>) -> Vec<Result<Told>> {
    let ask = |open: Other| {
        let (tell, hear) = mpsc::sync_channel(1);
        let asked = std::thread::Builder::new()
            .name("forebay-epochs".to_owned())
            .spawn(move || tell.send(open().and_then(|root| told_by(root.as_ref(), parent))));
        asked.map(|_| hear).map_err(|error| Error::io("cannot start a thread", error))
    };
    let asked: Vec<_> = others.into_iter().map(ask).collect();
    let until = Instant::now() + ANSWER_MAX;
    let hear = |hear: Result<mpsc::Receiver<Result<Told>>>| {
        hear?.recv_timeout(until.saturating_duration_since(Instant::now())).unwrap_or_else(|_| {
            let what = format!("a tier has not said in {ANSWER_MAX:?} what was claimed there");
            Err(Error::new(Code::Timeout, what))
        })
    };
    asked.into_iter().map(hear).collect()
}

fn told_by(root: Option<&Root>, parent: Option<u64>) -> Result<Told> {
    let Some(root) = root else {
        return Ok(Told { name: String::new(), claims: Vec::new(), parent: Ok(None) });
    };
    let mut claims = Vec::new();
    for number in all(root)? {
        if let Some((bytes, _)) = root.store.get(&key(number), RECORD_BYTES_MAX)? {
            claims.push((number, bytes));
        }
    }
    let parent = match parent.map(|step| place_of(root, step)) {
        // Damage is told where it matters.
        Some(Err(error)) if error.code() == Code::InvalidMetadata => Err(error),
        place => Ok(place.transpose()?.flatten()),
    };
    Ok(Told { name: root.store.name(), claims, parent })
}

/// Makes known here what others have claimed.
fn take_over(from: &str, claims: &[(u64, Vec<u8>)], to: &Root) -> Result<()> {
    for (number, bytes) in claims {
        // One that is damaged is not carried further.
        if !matches!(decode::<EpochClaim>(bytes), Ok(Some(_))) {
            continue;
        }
        let key = key(*number);
        if !to.create_once(&key, bytes)? {
            let what = format!("epoch {number} was claimed by another job than in {from}");
            let error = Error::new(Code::AlreadyExists, what).at(to.place(&key));
            return Err(error.hint("these are not places of one job: use another folder"));
        }
    }
    Ok(())
}

fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
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

/// The epoch of a step's commit, and which save of its run it was; `None` where it is not there.
fn place_of(root: &Root, step: u64) -> Result<Option<(u64, Option<u32>)>> {
    let commit =
        super::steps::step_state(root, step, Duration::ZERO)?.and_then(|state| state.commit);
    let Some(commit) = commit else { return Ok(None) };
    match commit.damage {
        None => Ok(Some((commit.epoch, commit.attempt.map(|attempt| attempt.save)))),
        Some(damage) => {
            let what = format!("the commit of step {step} is damaged: its epoch is not known");
            let error = Error::new(Code::InvalidMetadata, what).at(root.place(&step_folder(step)));
            Err(error.hint(damage).hint("or restore another step"))
        }
    }
}
