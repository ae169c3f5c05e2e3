//! Retention: which commits stay, and how the others go.
//!
//! Only commits count, and only those of the newest line: a job that was started afresh in the wrong folder must not
//! prune the months of work before it. The newest is never removed. A removal takes `.metadata` away first, so that no
//! reader can find a step that lacks files; it waits out a grace time and the leases of readers, looks again, and then
//! removes the data as a collector does. One that is interrupted anywhere is finished by the next collection.
//!
//! Between the first look and the removal lie a listing and a wait, in which somebody may pin or hold a step: marks are
//! read again after the announcement, right before each step goes, and who marks a step looks for announcements
//! ([`super::keep`]). One of the two sees the other.

use std::collections::BTreeSet;
use std::time::Duration;

use forebay_error::{Code, Error, Result};

use super::aside::{Announced, announce, announced_since, is_announced, take_back, unpublish};
use super::gc::{GcOptions, GcReport, gc, settle, sweep};
use super::id::AttemptId;
use super::keep::Keep;
use super::line;
use super::marks::Marks;
use super::names::Layout;
use super::root::Root;
use super::steps::{StepState, steps};

/// How long a remover may take from its announcement to the removal: some seconds a step as a rule, of 64 steps at the
/// most ([`retire_while`] asks before each).
const ANNOUNCED_MAX: Duration = Duration::from_secs(600);

/// Which commits stay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// The last so many that were committed, whatever their numbers; at least one stays.
    pub keep_last: usize,
    /// And every step that this divides.
    pub keep_every: Option<u64>,
    /// And these.
    pub pins: BTreeSet<u64>,
}

/// How a prune goes about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PruneOptions {
    /// As of a collection.
    pub gc: GcOptions,
    /// Waits out the grace time and removes the data in this call; else the data stay until a prune or collection
    /// that comes after the grace time. On a file system without room to note when that began it waits in any case.
    pub wait: bool,
}

/// What was done.
#[derive(Debug, Default)]
pub struct PruneReport {
    /// Steps that are not commits any more (or would not be), in the order of their commits.
    pub unpublished: Vec<u64>,
    /// Bytes of each of them; none from [`retire`], which is not told.
    pub unpublished_bytes: Vec<u64>,
    /// Commits that are on no line that `latest` follows, or damaged: never pruned, for a person to look at.
    pub off_line: Vec<u64>,
    /// Steps that could not be unpublished, and why.
    pub failed: Vec<(u64, Error)>,
    /// What was removed.
    pub gc: GcReport,
}

impl Retention {
    /// Which of the commits `line`, in the order in which they were made, go.
    pub fn doomed(&self, line: &[u64]) -> Vec<u64> {
        let kept = line.len().saturating_sub(self.keep_last.max(1));
        let every = |step: u64| self.keep_every.is_some_and(|n| n > 0 && step.is_multiple_of(n));
        let goes = |step: &u64| !every(*step) && !self.pins.contains(step);
        line.iter().take(kept).copied().filter(goes).collect()
    }
}

/// Removes the commits that neither the retention nor a [pin or hold](Marks) keeps, and what a collection would: steps
/// removed before whose grace time is over among them. Dry runs change nothing.
///
/// Errors: I/O; `invalid_metadata` where a pin cannot be read.
pub fn prune(root: &Root, retention: &Retention, options: &PruneOptions) -> Result<PruneReport> {
    let mut keep = Keep::marked(root)?;
    let states = steps(root, Duration::ZERO)?;
    // What is damaged does not count as kept, and stays for a person to look at.
    let line = line::of_listing(root, &states)?.steps;
    let committed = states.iter().filter(|state| state.commit.is_some());
    let off_line = committed.map(|state| state.step).filter(|step| !line.contains(step)).collect();
    let mut report = PruneReport { off_line, ..PruneReport::default() };
    let doomed = retention.doomed(&line).into_iter().filter(|step| !keep.had(*step));
    let mut commits = Vec::new();
    for step in doomed.collect::<Vec<_>>() {
        match states.iter().find(|state| state.step == step).and_then(own) {
            Some(attempt) => commits.push((step, attempt)),
            None => {
                let what = "the step was not written by Forebay, or its commit cannot be read";
                let error = Error::new(Code::Unsupported, what);
                report.failed.push((step, error.hint("remove its folder by hand")));
            }
        }
    }
    // What was removed before has waited: it goes first, and not once more through the wait for the others.
    let collects_first = options.wait && !options.gc.dry_run;
    if collects_first {
        report.gc = gc(root, &options.gc)?;
    }
    let mut rules = Rules { keep: &mut keep, may_go: &mut |_, _| Ok(true) };
    let gone = remove(root, commits, options, &mut rules, &mut report)?;
    if gone.is_empty() && !collects_first {
        report.gc = gc(root, &options.gc)?;
    }
    let bytes = |step: &u64| states.iter().find(|state| state.step == *step).map_or(0, bytes_of);
    report.unpublished_bytes = report.unpublished.iter().map(bytes).collect();
    Ok(report)
}

fn bytes_of(state: &StepState) -> u64 {
    state.commit.as_ref().map_or(0, |commit| commit.bytes)
}

/// Removes these commits, whatever retention says: for callers that have decided by rules of their own. What is held is
/// left alone, and told as failed; so is what is pinned after the call began.
pub fn retire(
    root: &Root,
    commits: &[(u64, AttemptId)],
    options: &PruneOptions,
) -> Result<PruneReport> {
    retire_while(root, commits, options, &mut |_, _| Ok(true))
}

/// The same for callers that remove a commit because of something outside this root, a copy elsewhere as a rule:
/// `may_go` is asked after the removal was announced, right before the step goes. Where it says no, or fails, the
/// announcement is taken back and the step stays. Two callers that each rely on the copy that the other removes both
/// announce before they ask, so the later one finds the other with [`is_being_removed`].
pub fn retire_while(
    root: &Root,
    commits: &[(u64, AttemptId)],
    options: &PruneOptions,
    may_go: MayGo<'_>,
) -> Result<PruneReport> {
    let mut report = PruneReport::default();
    let mut keep = Keep::held(root)?;
    let mut free = Vec::new();
    for (step, attempt) in commits {
        match Marks::check_unheld(root, *step) {
            Ok(()) => free.push((*step, *attempt)),
            Err(error) => report.failed.push((*step, error)),
        }
    }
    let mut rules = Rules { keep: &mut keep, may_go };
    remove(root, free, options, &mut rules, &mut report)?;
    Ok(report)
}

/// Whether somebody has announced that a commit goes, and has not taken that back: it may be gone the next moment. An
/// announcement of more than ten minutes ago is of a remover that was killed, and is taken back, so that one that only
/// slept finds that it is gone.
pub fn is_being_removed(root: &Root, step: u64, attempt: AttemptId) -> Result<bool> {
    let layout = Layout::of_step(step);
    match announced_since(root, &layout, attempt)? {
        Some(age) if age > ANNOUNCED_MAX => take_back(root, &layout, attempt).map(|()| false),
        announced => Ok(announced.is_some()),
    }
}

/// Says whether a commit may still go.
pub type MayGo<'a> = &'a mut dyn FnMut(u64, AttemptId) -> Result<bool>;

/// What is asked right before a step goes.
struct Rules<'a> {
    keep: &'a mut Keep,
    may_go: MayGo<'a>,
}

impl Rules<'_> {
    fn stays(&mut self, root: &Root, doomed: &Doomed) -> Result<bool> {
        Ok(self.keep.stays(root, doomed.step)? || !(self.may_go)(doomed.step, doomed.attempt)?)
    }
}

/// A commit whose removal is announced.
struct Doomed {
    step: u64,
    layout: Layout,
    attempt: AttemptId,
    /// Whether there was room to say so.
    written: bool,
}

/// Takes commits away, and their data too if that is to be waited for; says of which the data are gone now.
fn remove(
    root: &Root,
    commits: Vec<(u64, AttemptId)>,
    options: &PruneOptions,
    rules: &mut Rules<'_>,
    report: &mut PruneReport,
) -> Result<Vec<(Layout, AttemptId)>> {
    if options.gc.dry_run {
        report.unpublished.extend(commits.iter().map(|(step, _)| *step));
        return Ok(Vec::new());
    }
    let mut announced: Vec<Doomed> = Vec::new();
    for (step, attempt) in commits {
        let layout = Layout::of_step(step);
        match announce(root, &layout, attempt) {
            Ok(Announced::Gone) => {}
            Ok(how) => {
                let written = how == Announced::Written;
                announced.push(Doomed { step, layout, attempt, written });
            }
            Err(error) => report.failed.push((step, error)),
        }
    }
    let no_room = announced.iter().any(|doomed| !doomed.written);
    let gone = take_away(root, announced, options, rules, report);
    if !(options.wait || no_room) || gone.is_empty() {
        return Ok(Vec::new());
    }
    root.clock.sleep(options.gc.grace.max(settle(root, &options.gc)));
    for (layout, attempt) in &gone {
        sweep(root, layout, &[*attempt], &options.gc, &mut report.gc)?;
    }
    Ok(gone)
}

/// Unpublishes what was announced and has no mark now; returns what is gone.
fn take_away(
    root: &Root,
    announced: Vec<Doomed>,
    options: &PruneOptions,
    rules: &mut Rules<'_>,
    report: &mut PruneReport,
) -> Vec<(Layout, AttemptId)> {
    let mut gone = Vec::new();
    if !announced.is_empty() {
        root.clock.sleep(settle(root, &options.gc));
        rules.keep.forget();
    }
    for doomed in announced {
        match take(root, &doomed, rules) {
            Ok(true) => {
                report.unpublished.push(doomed.step);
                gone.push((doomed.layout, doomed.attempt));
            }
            Ok(false) => {}
            Err(error) => report.failed.push((doomed.step, error)),
        }
    }
    gone
}

/// Takes one commit away; false where it stays, or another is there by now.
fn take(root: &Root, doomed: &Doomed, rules: &mut Rules<'_>) -> Result<bool> {
    let Doomed { layout, attempt, written, .. } = doomed;
    match rules.stays(root, doomed) {
        Ok(false) => {}
        stays => {
            let back = if *written { take_back(root, layout, *attempt) } else { Ok(()) };
            return stays.and(back).map(|()| false);
        }
    }
    // Another remover saw a mark that this one did not: whoever made it was told that the step stays.
    if *written && !is_announced(root, layout, *attempt)? {
        return Ok(false);
    }
    unpublish(root, layout, *attempt)
}

/// The attempt of a commit that can be removed file by file.
fn own(state: &StepState) -> Option<AttemptId> {
    let commit = state.commit.as_ref()?;
    commit.attempt.filter(|_| commit.damage.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_commit_stays_whatever_the_retention_says() {
        let line = [10, 20, 25, 30, 35];
        let keep = |keep_last, keep_every, pins: &[u64]| {
            let pins = pins.iter().copied().collect();
            Retention { keep_last, keep_every, pins }.doomed(&line)
        };
        assert_eq!(keep(0, None, &[]), [10, 20, 25, 30]);
        assert_eq!(keep(1, None, &[]), [10, 20, 25, 30]);
        assert_eq!(keep(2, Some(20), &[]), [10, 25]);
        assert_eq!(keep(2, Some(0), &[25]), [10, 20]);
        assert_eq!(keep(9, None, &[]), Vec::<u64>::new());
        let fell = Retention { keep_last: 2, ..Retention::default() }.doomed(&[9, 10, 1, 2]);
        assert_eq!(fell, [9, 10], "numbers that went down");
        assert_eq!(Retention::default().doomed(&[]), Vec::<u64>::new());
    }
}
