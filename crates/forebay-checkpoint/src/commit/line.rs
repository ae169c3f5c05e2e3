//! Which commit is the latest: the newest epoch's line.
//!
//! A job that restarts from step 900 after an older life of it got to 1,000 goes on from 900; the step 1,000 that is
//! still there is of another line. The line of the newest epoch is: its own commits, then those of its parent's epoch
//! up to the parent step, and so on. An epoch without commits and without a parent (a fresh start that came to
//! nothing) is skipped, so that it hides nothing.
//!
//! Damage is never stepped over in silence: a commit that cannot be read keeps its place on the line as far as that is
//! known, and a damaged claim ends the walk, because below it nobody knows.

use forebay_error::{Code, Error, Result};

use super::census::is_damage;
use super::epoch;
use super::names::step_folder;
use super::record::EpochClaim;
use super::root::Root;
use super::steps::{State, StepState, steps};

/// Most steps that an error lists.
const LISTED_MAX: usize = 12;

/// The newest epoch's line.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// Its commits that can be read, in order.
    pub(crate) steps: Vec<u64>,
    /// Commits that are on it, or may be, and cannot be read; in order.
    pub(crate) damaged: Vec<u64>,
    /// Why it is not known how it goes on below the steps: the claim of an epoch is damaged.
    pub(crate) cut: Option<Error>,
}

/// The steps of the newest epoch's line, in order, and why there may be more below. `commits` are (step, epoch);
/// `claim` gives the claims, asked newest first; epoch 0 stands for writers that claimed none.
fn walk(
    commits: &[(u64, u64)],
    epochs: &[u64],
    mut claim: impl FnMut(u64) -> Result<Option<EpochClaim>>,
) -> Result<(Vec<u64>, Option<Error>)> {
    let (mut on_line, mut cut) = (Vec::new(), None);
    let mut bound = u64::MAX;
    let newest_of_commits = commits.iter().map(|(_, epoch)| *epoch).max();
    let mut next = epochs.iter().copied().max().max(newest_of_commits);
    while let Some(epoch) = next {
        let of_epoch = commits.iter().filter(|(step, by)| *by == epoch && *step <= bound);
        on_line.extend(of_epoch.map(|(step, _)| *step));
        let below = |at: u64| {
            let known = epochs.iter().copied().chain(commits.iter().map(|(_, epoch)| *epoch));
            known.filter(|known| *known < at).max()
        };
        let claimed = if epoch == 0 { Ok(None) } else { claim(epoch) };
        let parent = match claimed {
            Ok(claimed) => claimed.and_then(|claim| claim.parent),
            Err(error) if is_damage(&error) => {
                cut = Some(error);
                break;
            }
            Err(error) => return Err(error),
        };
        next = match parent {
            // Only downwards: a claim that says otherwise is damaged.
            Some((step, by)) if by < epoch => {
                bound = bound.min(step);
                Some(by)
            }
            Some(_) => below(epoch),
            None if on_line.is_empty() => below(epoch),
            None => None,
        };
    }
    on_line.sort_unstable();
    on_line.dedup();
    Ok((on_line, cut))
}

/// The newest line, of a listing.
pub(crate) fn of_listing(root: &Root, states: &[StepState]) -> Result<Line> {
    let commits = || states.iter().filter_map(|state| Some((state.step, state.commit.as_ref()?)));
    let known = commits().filter(|(_, commit)| !commit.epoch_lost);
    let known: Vec<(u64, u64)> = known.map(|(step, commit)| (step, commit.epoch)).collect();
    let (on_line, cut) = walk(&known, &epoch::all(root)?, |epoch| epoch::read(root, epoch))?;
    let is_damaged =
        |step: u64| commits().any(|(of, commit)| of == step && commit.damage.is_some());
    let lost = commits().filter(|(_, commit)| commit.epoch_lost).map(|(step, _)| step);
    let (mut damaged, steps): (Vec<u64>, Vec<u64>) =
        on_line.into_iter().partition(|step| is_damaged(*step));
    damaged.extend(lost);
    damaged.sort_unstable();
    Ok(Line { steps, damaged, cut })
}

/// The newest commit of the newest epoch's line; `None` where nothing is committed.
///
/// Errors: I/O; `invalid_metadata` where damage leaves open which it is: a commit that cannot be read is newer, or the
/// record of the newest epoch cannot be read. An older step is never taken for the latest without a word.
pub fn latest(root: &Root) -> Result<Option<StepState>> {
    let mut states = steps(root, std::time::Duration::ZERO)?;
    let line = of_listing(root, &states)?;
    let newest = line.steps.last().copied();
    if let Some(step) = line.damaged.last().copied().filter(|step| Some(*step) > newest) {
        return Err(newest_is_damaged(root, &states, step, newest));
    }
    match (&line.cut, newest) {
        (Some(cut), None) => return Err(no_parent(root, cut, &states)),
        (Some(cut), Some(_)) => tracing::warn!(%cut, "the claim of an epoch is damaged"),
        (None, _) => {}
    }
    Ok(newest.and_then(|step| {
        let at = states.iter().position(|state| state.step == step)?;
        Some(states.swap_remove(at))
    }))
}

fn newest_is_damaged(root: &Root, states: &[StepState], step: u64, sound: Option<u64>) -> Error {
    let commit = states.iter().find(|state| state.step == step);
    let damage = commit.and_then(|state| state.commit.as_ref()?.damage.clone());
    let what = format!("the commit of step {step} is damaged, and it may be the latest");
    let place = root.place(&step_folder(step));
    let error = Error::new(Code::InvalidMetadata, what).at(place).hint(damage.unwrap_or_default());
    let error = error.hint("`forebay ckpt verify` says what of it can be read");
    match sound {
        Some(sound) => error.hint(format!(
            "to go on from step {sound} instead, name it, and move the damaged folder away"
        )),
        None => error.hint("no other step can be read"),
    }
}

fn no_parent(root: &Root, cut: &Error, states: &[StepState]) -> Error {
    let what =
        "the record of the newest epoch is damaged: it is not known which step is its latest";
    let error = Error::new(Code::InvalidMetadata, what).at(root.store.name());
    let hint = format!("name the step to go on from; {}", committed(states));
    error.hint(cut.render()).hint(hint)
}

/// Which steps are committed, in words.
fn committed(states: &[StepState]) -> String {
    let committed = states.iter().filter(|state| state.commit.is_some());
    let names: Vec<String> = committed.map(|state| state.step.to_string()).collect();
    let (more, last) = names.split_at(names.len().saturating_sub(LISTED_MAX));
    match (last.is_empty(), more.len()) {
        (true, _) => "nothing is committed there: is it the right folder?".to_owned(),
        (false, 0) => format!("committed steps: {}", last.join(", ")),
        (false, more) => format!("committed steps: {}, and {more} before", last.join(", ")),
    }
}

/// A step that must be committed.
///
/// Errors: `not_committed` where there are only leftovers, `not_found` where there is nothing; both list what is there.
pub fn require(root: &Root, step: u64) -> Result<StepState> {
    let states = steps(root, std::time::Duration::ZERO)?;
    let found = states.iter().find(|state| state.step == step);
    if let Some(state) = found.filter(|state| state.state() == State::Committed) {
        return Ok(state.clone());
    }
    let (code, what) = match found {
        Some(_) => (Code::NotCommitted, format!("step {step} was never committed")),
        None => (Code::NotFound, format!("there is no step {step}")),
    };
    Err(Error::new(code, what).at(root.store.name()).hint(committed(&states)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(commits: &[(u64, u64)], parents: &[(u64, Option<(u64, u64)>)]) -> Vec<u64> {
        let epochs: Vec<u64> = parents.iter().map(|(epoch, _)| *epoch).collect();
        let claim = |epoch| {
            let found = parents.iter().find(|(known, _)| *known == epoch);
            let claim = |(epoch, parent): &(u64, Option<(u64, u64)>)| EpochClaim {
                epoch: *epoch,
                run: 0,
                parent: *parent,
                who: String::new(),
                nonce: 0,
            };
            Ok(found.map(claim))
        };
        let (steps, cut) = walk(commits, &epochs, claim).unwrap();
        assert!(cut.is_none());
        steps
    }

    #[test]
    fn latest_follows_the_newest_epochs_line() {
        // An older life got to 1000; the new one restored 900.
        let old = [(800, 1), (900, 1), (1000, 1)];
        assert_eq!(of(&old, &[(1, None)]), [800, 900, 1000]);
        assert_eq!(of(&old, &[(1, None), (2, Some((900, 1)))]), [800, 900]);
        let both = [(800, 1), (900, 1), (1000, 1), (950, 2)];
        assert_eq!(of(&both, &[(1, None), (2, Some((900, 1)))]), [800, 900, 950]);
        // A third life, from before the second's start.
        assert_eq!(of(&both, &[(1, None), (2, Some((900, 1))), (3, Some((800, 1)))]), [800]);
    }

    #[test]
    fn a_fresh_start_without_a_commit_hides_nothing_and_with_one_is_a_line() {
        let old = [(800, 1), (900, 1)];
        assert_eq!(of(&old, &[(1, None), (2, None), (3, None)]), [800, 900]);
        assert_eq!(of(&[(800, 1), (900, 1), (10, 2)], &[(1, None), (2, None)]), [10]);
    }

    #[test]
    fn steps_of_writers_without_an_epoch_count_where_nothing_newer_does() {
        assert_eq!(of(&[(5, 0), (6, 0)], &[]), [5, 6]);
        assert_eq!(of(&[(5, 0), (6, 0)], &[(1, None)]), [5, 6]);
        assert_eq!(of(&[(5, 0), (6, 0), (7, 1)], &[(1, Some((5, 0)))]), [5, 7]);
        assert_eq!(of(&[], &[(1, None)]), Vec::<u64>::new());
    }

    #[test]
    fn damaged_claims_end_the_walk() {
        assert_eq!(of(&[(5, 1)], &[(1, Some((9, 1)))]), [5]);
        assert_eq!(of(&[(5, 1)], &[(1, Some((9, 7)))]), [5]);
    }
}
