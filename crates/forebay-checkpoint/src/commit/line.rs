//! Which commit is the latest: the newest epoch's line.
//!
//! A job that restarts from step 900 after an older life of it got to 1,000 goes on from 900; the step 1,000 that is
//! still there is of another line. The line of the newest epoch is: its own commits, then those of its parent's epoch
//! up to the parent, and so on. An epoch without commits and without a parent (a fresh start that came to nothing) is
//! skipped, so that it hides nothing.
//!
//! A line is in the order of its commits, not of their numbers: a job may go on with lower ones (a new phase that
//! counts from 0), and what it has just saved must be neither passed over nor pruned. The order is that of epochs,
//! and within one that of the run's saves ([`AttemptId::place`]). Only where that is not known,
//! because the commits are not all of one run, do numbers count.
//!
//! Damage is never stepped over in silence: a commit that cannot be read keeps its place on the line as far as that is
//! known (one of no known epoch: by its number), and a damaged claim ends the walk, because below it nobody knows.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use forebay_error::{Code, Error, Result};

use super::census::is_damage;
use super::epoch;
use super::id::{AttemptId, place_of_save};
use super::names::step_folder;
use super::record::EpochClaim;
use super::root::Root;
use super::steps::{CommitInfo, State, StepState, step_state, steps};

/// Most steps that an error lists.
const LISTED_MAX: usize = 12;

/// The newest epoch's line.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// Its commits that can be read, in the order in which they were made.
    pub(crate) steps: Vec<u64>,
    /// The newest commit that is on it, or may be, where that one cannot be read.
    pub(crate) newest_is_damaged: Option<u64>,
    /// Why it is not known how it goes on below the steps: the claim of an epoch is damaged.
    pub(crate) cut: Option<Error>,
}

/// What is known of a commit's place on a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    step: u64,
    /// 0 stands for writers that claimed none.
    epoch: u64,
    /// Whose it is, where that can be read.
    attempt: Option<AttemptId>,
}

/// Up to where the commits of an epoch are on a line.
#[derive(Clone, Copy, Debug)]
enum Bound {
    /// All of them.
    All,
    /// Up to this save of the run.
    Save(u32),
    /// Up to this number.
    Step(u64),
}

/// The commits of one epoch in their order, and whether that is the order of saves.
fn in_order(commits: &[Place], epoch: u64) -> (Vec<Place>, bool) {
    let of_epoch = commits.iter().copied().filter(|commit| commit.epoch == epoch);
    let mut found: Vec<Place> = of_epoch.collect();
    let run = |commit: &Place| commit.attempt.map(|attempt| attempt.run);
    let first = found.first().and_then(run);
    let by_saves = epoch != 0 && first.is_some() && found.iter().all(|commit| run(commit) == first);
    let save = |commit: &Place| commit.attempt.filter(|_| by_saves).map(AttemptId::place);
    found.sort_unstable_by_key(|commit| (save(commit), commit.step));
    (found, by_saves)
}

/// The bound that a claim sets: its parent, as the claim recorded it, else as it is there now, else by its number.
fn bound_of(commits: &[Place], claim: &EpochClaim, (step, epoch): (u64, u64)) -> Bound {
    let (found, by_saves) = in_order(commits, epoch);
    let there = found.iter().find(|commit| commit.step == step);
    let save = claim.parent_save.or_else(|| there?.attempt.map(|attempt| attempt.save));
    save.filter(|_| by_saves).map_or(Bound::Step(step), Bound::Save)
}

/// The commits of an epoch that are on the line, the newest first.
fn of_epoch(commits: &[Place], epoch: u64, bound: Bound) -> Vec<Place> {
    let is_on = |commit: &Place| match (bound, commit.attempt) {
        (Bound::All, _) | (Bound::Save(_), None) => true,
        (Bound::Save(last), Some(attempt)) => attempt.place() <= place_of_save(last),
        (Bound::Step(last), _) => commit.step <= last,
    };
    let found = in_order(commits, epoch).0.into_iter().rev();
    found.filter(is_on).collect()
}

/// The commits of the newest epoch's line, in the order of commits, and why there may be more below. `claim` gives the
/// claims, asked newest first.
fn walk(
    commits: &[Place],
    epochs: &[u64],
    mut claim: impl FnMut(u64) -> Result<Option<EpochClaim>>,
) -> Result<(Vec<Place>, Option<Error>)> {
    let (mut on_line, mut cut) = (Vec::new(), None);
    let mut bound = Bound::All;
    let known = || epochs.iter().copied().chain(commits.iter().map(|commit| commit.epoch));
    let mut next = known().max();
    while let Some(epoch) = next {
        on_line.extend(of_epoch(commits, epoch, bound));
        let below = || known().filter(|known| *known < epoch).max();
        let claimed = if epoch == 0 { Ok(None) } else { claim(epoch) };
        let claimed = match claimed {
            Ok(claimed) => claimed,
            Err(error) if is_damage(&error) => {
                cut = Some(error);
                break;
            }
            Err(error) => return Err(error),
        };
        next = match claimed.as_ref().and_then(|claim| Some((claim, claim.parent?))) {
            // Only downwards: a claim that says otherwise is damaged.
            Some((claim, parent)) if parent.1 < epoch => {
                bound = bound_of(commits, claim, parent);
                Some(parent.1)
            }
            Some((_, (step, _))) => {
                bound = Bound::Step(step);
                below()
            }
            None if on_line.is_empty() => below(),
            None => None,
        };
    }
    on_line.reverse();
    Ok((on_line, cut))
}

/// The newest line, of a listing.
pub(crate) fn of_listing(root: &Root, states: &[StepState]) -> Result<Line> {
    let commits = states.iter().filter_map(|state| Some((state.step, state.commit.as_ref()?)));
    let commits: Vec<_> = commits.collect();
    of_commits(&commits, &epoch::all(root)?, |epoch| epoch::read(root, epoch))
}

fn of_commits(
    commits: &[(u64, &CommitInfo)],
    epochs: &[u64],
    claim: impl FnMut(u64) -> Result<Option<EpochClaim>>,
) -> Result<Line> {
    let known = commits.iter().filter(|(_, commit)| !commit.epoch_lost);
    let known: Vec<Place> = known
        .map(|(step, commit)| Place { step: *step, epoch: commit.epoch, attempt: commit.attempt })
        .collect();
    let (order, cut) = walk(&known, epochs, claim)?;
    let mut order: Vec<u64> = order.into_iter().map(|commit| commit.step).collect();
    let lost = commits.iter().filter(|(_, commit)| commit.epoch_lost).map(|(step, _)| *step);
    for step in lost {
        let at = order.iter().rposition(|on_line| *on_line < step).map_or(0, |at| at + 1);
        order.insert(at, step);
    }
    let is_damaged =
        |step: u64| commits.iter().any(|(of, commit)| *of == step && commit.damage.is_some());
    Ok(Line::new(order, is_damaged, cut))
}

impl CommitInfo {
    /// Whether it is known to have been made before another one: in an older epoch, or in the same one by an earlier
    /// save of the same run. Of writers without an epoch nothing is known.
    pub fn is_before(&self, other: &Self) -> bool {
        let is_known = |commit: &Self| !commit.epoch_lost && commit.damage.is_none();
        if !is_known(self) || !is_known(other) || self.epoch != other.epoch || self.epoch == 0 {
            return is_known(self) && is_known(other) && self.epoch < other.epoch;
        }
        let saves = self.attempt.zip(other.attempt);
        saves.is_some_and(|(a, b)| a.run == b.run && a.place() < b.place())
    }
}

/// The claims of epochs of one or more roots that hold commits of the same job.
#[derive(Clone, Default)]
pub struct Claims {
    known: BTreeMap<u64, Option<EpochClaim>>,
}

/// Commits in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranked {
    /// Those of the newest epoch's line that can be read, the newest last.
    pub line: Vec<u64>,
    /// Those that can be read and are on no line that goes on: of lives of the job that were left behind, or below a
    /// claim that is damaged.
    pub off_line: Vec<u64>,
}

impl Claims {
    /// Reads those of a root that are not known yet: a claim never changes. One that is damaged here may be sound in
    /// another root.
    pub fn add(&mut self, root: &Root) -> Result<()> {
        for number in epoch::all(root)? {
            if matches!(self.known.get(&number), Some(Some(_))) {
                continue;
            }
            match epoch::read(root, number) {
                Ok(Some(claim)) => drop(self.known.insert(number, Some(claim))),
                Ok(None) => {}
                Err(error) if is_damage(&error) => drop(self.known.entry(number).or_default()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Those of others, too.
    pub fn merge(&mut self, other: &Self) {
        for (number, claim) in &other.known {
            let known = self.known.entry(*number).or_default();
            if known.is_none() {
                known.clone_from(claim);
            }
        }
    }

    fn claim(&self, number: u64) -> Result<Option<EpochClaim>> {
        match self.known.get(&number) {
            Some(Some(claim)) => Ok(Some(claim.clone())),
            Some(None) => {
                Err(Error::new(Code::InvalidMetadata, "the claim of an epoch is damaged"))
            }
            None => Ok(None),
        }
    }

    /// Of several commits of one step, in different roots, the one that counts: the last on the newest epoch's line;
    /// where none is on it, that of the newest epoch, and of that the last save.
    pub fn choose<'a>(&self, commits: &[(u64, &'a CommitInfo)]) -> BTreeMap<u64, &'a CommitInfo> {
        let places = commits.iter().map(|(step, commit)| Place {
            step: *step,
            epoch: commit.epoch,
            attempt: commit.attempt,
        });
        let epochs: Vec<u64> = self.known.keys().copied().collect();
        let line = walk(&places.collect::<Vec<_>>(), &epochs, |number| self.claim(number));
        // As in `rank`: errors cannot come of what is in memory.
        let line = line.map(|(line, _)| line).unwrap_or_default();
        let on_line: HashMap<_, _> = line
            .iter()
            .enumerate()
            .map(|(at, place)| ((place.step, place.epoch, place.attempt), at))
            .collect();
        let order = |step: u64, commit: &CommitInfo| {
            let at = on_line.get(&(step, commit.epoch, commit.attempt));
            (at.copied(), commit.epoch, commit.attempt.map(AttemptId::place))
        };
        let mut chosen: BTreeMap<u64, &CommitInfo> = BTreeMap::new();
        for (step, commit) in commits {
            let known = chosen.entry(*step).or_insert(commit);
            if order(*step, commit) > order(*step, known) {
                *known = commit;
            }
        }
        chosen
    }

    /// Puts commits of different steps in their order.
    pub fn rank(&self, commits: &[(u64, &CommitInfo)]) -> Ranked {
        let epochs: Vec<u64> = self.known.keys().copied().collect();
        // Errors that are not damage cannot come of what is in memory.
        let line = of_commits(commits, &epochs, |number| self.claim(number));
        let line = line.map(|line| line.steps).unwrap_or_default();
        let on_line: HashSet<u64> = line.iter().copied().collect();
        let sound = commits.iter().filter(|(_, commit)| commit.damage.is_none());
        let mut off: Vec<_> = sound.filter(|(step, _)| !on_line.contains(step)).collect();
        let save = |commit: &CommitInfo| commit.attempt.map(AttemptId::place);
        off.sort_by_key(|(step, commit)| (commit.epoch, save(commit), *step));
        Ranked { line, off_line: off.into_iter().map(|(step, _)| *step).collect() }
    }
}

impl Line {
    fn new(order: Vec<u64>, is_damaged: impl Fn(u64) -> bool, cut: Option<Error>) -> Self {
        let newest_is_damaged = order.last().copied().filter(|step| is_damaged(*step));
        let steps = order.into_iter().filter(|step| !is_damaged(*step)).collect();
        Self { steps, newest_is_damaged, cut }
    }
}

/// The newest commit of the newest epoch's line; `None` where nothing is committed.
///
/// Errors: I/O; `invalid_metadata` where damage leaves open which it is: a commit that cannot be read is newer, or the
/// record of the newest epoch cannot be read. An older step is never taken for the latest without a word.
pub fn latest(root: &Root) -> Result<Option<StepState>> {
    latest_of(root, &super::listing(root, Duration::ZERO)?)
}

/// The same, of a listing that was made just now. What a hint told of the step is read here; if it is not so, or not
/// sound, all are.
pub fn latest_of(root: &Root, states: &[StepState]) -> Result<Option<StepState>> {
    if root.store.is_remote() {
        let found = newest_of(root, states)?;
        let read = found
            .as_ref()
            .map(|found| step_state(root, found.step, Duration::ZERO))
            .transpose()?
            .flatten();
        let same = |found: &StepState, read: &StepState| match (&found.commit, &read.commit) {
            (Some(found), Some(read)) => {
                let (a, b) = ((found.attempt, found.epoch), (read.attempt, read.epoch));
                a == b && read.damage.is_none()
            }
            _ => false,
        };
        match (found, read) {
            (None, _) => return Ok(None),
            (Some(found), Some(read)) if same(&found, &read) => return Ok(Some(read)),
            _ => return newest_of(root, &steps(root, Duration::ZERO)?),
        }
    }
    newest_of(root, states)
}

fn newest_of(root: &Root, states: &[StepState]) -> Result<Option<StepState>> {
    let line = of_listing(root, states)?;
    let newest = line.steps.last().copied();
    if let Some(step) = line.newest_is_damaged {
        return Err(newest_is_damaged(root, states, step, newest));
    }
    match (&line.cut, newest) {
        (Some(cut), None) => return Err(no_parent(root, cut, states)),
        (Some(cut), Some(_)) => tracing::warn!(%cut, "the claim of an epoch is damaged"),
        (None, _) => {}
    }
    warn_of_lost(states, newest);
    Ok(newest.and_then(|step| states.iter().find(|state| state.step == step).cloned()))
}

/// A commit whose `.metadata` is gone may have been the latest: which epoch it is of is not looked up, because a person
/// must decide anyway.
fn warn_of_lost(states: &[StepState], newest: Option<u64>) {
    let lost = states.iter().filter(|state| state.state() == State::Lost);
    for step in lost.map(|state| state.step).filter(|step| Some(*step) > newest) {
        tracing::warn!("step {step} was committed; its .metadata is missing");
    }
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
/// Errors: `invalid_metadata` where it was committed and its `.metadata` is gone; `not_committed` where there are only
/// leftovers, `not_found` where there is nothing; both list what is there.
pub fn require(root: &Root, step: u64) -> Result<StepState> {
    let found = step_state(root, step, Duration::ZERO)?;
    if let Some(state) = found.filter(|state| state.state() == State::Committed) {
        return Ok(state);
    }
    // What is there, to say so.
    let states = super::listing(root, Duration::ZERO)?;
    let found = states.iter().find(|state| state.step == step);
    if let Some(state) = found.filter(|state| state.state() == State::Committed) {
        return Ok(state.clone());
    }
    let lost = found.is_some_and(|state| state.state() == State::Lost);
    let (code, what) = match found {
        Some(_) if lost => {
            let what = format!("step {step} was committed; its .metadata is missing");
            (Code::InvalidMetadata, what)
        }
        Some(_) => (Code::NotCommitted, format!("step {step} was never committed")),
        None => (Code::NotFound, format!("there is no step {step}")),
    };
    Err(Error::new(code, what).at(root.store.name()).hint(committed(&states)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commit::id::RunId;

    /// A commit that was the `save`th of its epoch's run.
    fn saved(step: u64, epoch: u64, save: u32) -> Place {
        Place { step, epoch, attempt: Some(AttemptId { run: RunId(epoch as u32), save }) }
    }

    fn of(commits: &[(u64, u64)], parents: &[(u64, Option<(u64, u64)>)]) -> Vec<u64> {
        let unknown =
            |(step, epoch): &(u64, u64)| Place { step: *step, epoch: *epoch, attempt: None };
        of_saves(&commits.iter().map(unknown).collect::<Vec<_>>(), parents, None)
    }

    fn of_saves(
        commits: &[Place],
        parents: &[(u64, Option<(u64, u64)>)],
        parent_save: Option<u32>,
    ) -> Vec<u64> {
        let epochs: Vec<u64> = parents.iter().map(|(epoch, _)| *epoch).collect();
        let claim = |epoch| {
            let found = parents.iter().find(|(known, _)| *known == epoch);
            let claim = |(epoch, parent): &(u64, Option<(u64, u64)>)| EpochClaim {
                epoch: *epoch,
                run: 0,
                parent: *parent,
                parent_save,
                who: String::new(),
                nonce: 0,
            };
            Ok(found.map(claim))
        };
        let (line, cut) = walk(commits, &epochs, claim).unwrap();
        assert!(cut.is_none());
        line.into_iter().map(|commit| commit.step).collect()
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

    #[test]
    fn the_newest_commit_is_the_last_one_made_whatever_its_number() {
        let older = [saved(8, 1, 0), saved(9, 1, 1), saved(10, 1, 2)];
        // The same run goes on with lower numbers, or replaces a step.
        let down = [saved(1, 1, 3), saved(2, 1, 4)];
        assert_eq!(
            of_saves(&[older, [down[0]; 3]].concat()[..4], &[(1, None)], None),
            [8, 9, 10, 1]
        );
        assert_eq!(of_saves(&[saved(8, 1, 3), older[1], older[2]], &[(1, None)], None), [9, 10, 8]);
        // So does one that has restored 10.
        let both = [&older[..], &[saved(1, 2, 0), saved(2, 2, 1)]].concat();
        let parents = [(1, None), (2, Some((10, 1)))];
        assert_eq!(of_saves(&both, &parents, Some(2)), [8, 9, 10, 1, 2]);
        // Of numbers that went down, the parent's epoch counts up to the parent's save: there, or as recorded.
        let fell = [&older[..], &down[..]].concat();
        let restored = [(1, None), (2, Some((1, 1)))];
        for parent_save in [None, Some(3)] {
            assert_eq!(of_saves(&fell, &restored, parent_save), [8, 9, 10, 1]);
        }
        let pruned = [older[1], older[2], down[1]];
        assert_eq!(of_saves(&pruned, &restored, Some(3)), [9, 10]);
        assert_eq!(
            of_saves(&pruned, &restored, None),
            Vec::<u64>::new(),
            "only the number is known"
        );
    }

    #[test]
    fn a_save_that_others_have_finished_has_the_place_of_that_save() {
        let saves = |step, save| saved(step, 1, save);
        let mut finished = saves(9, 1);
        finished.attempt = finished.attempt.unwrap().successor();
        // Training went on meanwhile: its next save is newer.
        let commits = [saves(8, 0), finished, saves(10, 2)];
        assert_eq!(of_saves(&commits, &[(1, None)], None), [8, 9, 10]);
        assert_eq!(of_saves(&commits[..2], &[(1, None)], None), [8, 9]);
        // A job that has restored step 8, or the finished 9.
        for (step, save, line) in [(8, 0, vec![8]), (9, 1 << 31 | 1, vec![8, 9])] {
            let parents = [(1, None), (2, Some((step, 1)))];
            assert_eq!(of_saves(&commits, &parents, Some(save)), line);
        }
    }

    #[test]
    fn commits_of_several_runs_in_one_epoch_are_in_the_order_of_numbers() {
        let mut mixed = [saved(3, 1, 5), saved(4, 1, 1)];
        mixed[1].attempt = Some(AttemptId { run: RunId(9), save: 1 });
        assert_eq!(of_saves(&mixed, &[(1, None)], None), [3, 4]);
        mixed[1].attempt = None;
        assert_eq!(of_saves(&mixed, &[(1, None)], None), [3, 4]);
        assert_eq!(of_saves(&[saved(5, 0, 1), saved(6, 0, 0)], &[], None), [5, 6]);
    }

    #[test]
    fn damage_counts_where_it_is_the_last_commit() {
        let newest = |order: &[u64], damaged: u64| {
            Line::new(order.to_vec(), |step| step == damaged, None).newest_is_damaged
        };
        assert_eq!(newest(&[8, 9, 1], 9), None);
        assert_eq!(newest(&[8, 9, 1], 1), Some(1));
    }
}
