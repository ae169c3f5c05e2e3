//! Which commit is the latest: the newest epoch's line.
//!
//! A job that restarts from step 900 after an older life of it got to 1,000 goes on from 900; the step 1,000 that is
//! still there is of another line. The line of the newest epoch is: its own commits, then those of its parent's epoch
//! up to the parent step, and so on. An epoch without commits and without a parent (a fresh start that came to
//! nothing) is skipped, so that it hides nothing.

use forebay_error::{Code, Error, Result};

use super::epoch;
use super::record::EpochClaim;
use super::root::Root;
use super::steps::{State, StepState, steps};

/// Most steps that an error lists.
const LISTED_MAX: usize = 12;

/// The steps of the newest epoch's line, in order. `commits` are (step, epoch); `claims` gives the claims, newest
/// first; epoch 0 stands for writers that claimed none.
pub(crate) fn line(
    commits: &[(u64, u64)],
    epochs: &[u64],
    mut claim: impl FnMut(u64) -> Result<Option<EpochClaim>>,
) -> Result<Vec<u64>> {
    let mut on_line = Vec::new();
    let mut bound = u64::MAX;
    let newest_of_commits = commits.iter().map(|(_, epoch)| *epoch).max();
    let mut next = epochs.iter().copied().max().max(newest_of_commits);
    while let Some(epoch) = next {
        let of_epoch = commits.iter().filter(|(step, by)| *by == epoch && *step <= bound);
        let before = on_line.len();
        on_line.extend(of_epoch.map(|(step, _)| *step));
        let below = |at: u64| {
            let known = epochs.iter().copied().chain(commits.iter().map(|(_, epoch)| *epoch));
            known.filter(|known| *known < at).max()
        };
        let parent = if epoch == 0 { None } else { claim(epoch)?.and_then(|claim| claim.parent) };
        next = match parent {
            // Only downwards: a claim that says otherwise is damaged.
            Some((step, by)) if by < epoch => {
                bound = bound.min(step);
                Some(by)
            }
            Some(_) => below(epoch),
            None if on_line.len() == before && on_line.is_empty() => below(epoch),
            None => None,
        };
    }
    on_line.sort_unstable();
    on_line.dedup();
    Ok(on_line)
}

/// The commits that are on the newest line, of a listing.
pub(crate) fn of_listing(root: &Root, states: &[StepState]) -> Result<Vec<u64>> {
    let commit = |state: &StepState| Some((state.step, state.commit.as_ref()?.epoch));
    let commits: Vec<_> = states.iter().filter_map(commit).collect();
    line(&commits, &epoch::all(root)?, |epoch| epoch::read(root, epoch))
}

/// The newest commit of the newest epoch's line; `None` where nothing is committed.
pub fn latest(root: &Root) -> Result<Option<StepState>> {
    let mut states = steps(root, std::time::Duration::ZERO)?;
    let newest = of_listing(root, &states)?.last().copied();
    Ok(newest.and_then(|step| {
        let at = states.iter().position(|state| state.step == step)?;
        Some(states.swap_remove(at))
    }))
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
    let committed = states.iter().filter(|state| state.commit.is_some());
    let names: Vec<String> = committed.map(|state| state.step.to_string()).collect();
    let (more, last) = names.split_at(names.len().saturating_sub(LISTED_MAX));
    let hint = match (last.is_empty(), more.len()) {
        (true, _) => "nothing is committed there: is it the right folder?".to_owned(),
        (false, 0) => format!("committed steps: {}", last.join(", ")),
        (false, more) => format!("committed steps: {}, and {more} before", last.join(", ")),
    };
    Err(Error::new(code, what).at(root.store.name()).hint(hint))
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
        line(commits, &epochs, claim).unwrap()
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
