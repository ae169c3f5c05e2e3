//! Removing what dead attempts left.
//!
//! In two passes with a pause between: first every doomed attempt loses its right to publish
//! ([`withdraw`](super::withdraw)); then, when a publication under way has had time to show, the commit point is read
//! again and only then data is removed. Nothing that the commit refers to is ever removed, nor anything that does not
//! carry an attempt's name; a folder whose commit cannot be read is left alone.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use forebay_store::Listed;

use super::aside::{UNPUBLISHED, rescue};
use super::census::Census;
use super::epoch;
use super::hints::ALIVE;
use super::id::{AttemptId, RunId};
use super::names::Layout;
use super::readers::{READ_LEASE, wait_for_readers};
use super::record::Failure;
use super::root::{LIST_MAX, Root};
use super::steps::CommitInfo;
use super::strays;
use super::uploads;
use super::withdraw::{is_awake, layouts, withdraw};

/// No write of a small object takes that long: its temporary object may go.
pub(super) const TEMP_AGE: Duration = Duration::from_secs(3600);

/// No reader that lives leaves its lease alone for that long: it writes it anew three times a minute.
const DEAD_READER: Duration = Duration::from_secs(3600);

/// How a collection goes about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GcOptions {
    /// How old, by the store's clock, everything of an attempt must be; and how long ago a commit must have been
    /// replaced or unpublished, for readers that take no leases.
    pub grace: Duration,
    /// Between taking the right to publish and removing data: longer than a publication takes that has been sent off.
    pub settle: Duration,
    /// How long to wait for readers with a lease.
    pub patience: Duration,
    /// Only say what would be removed.
    pub dry_run: bool,
}

impl Default for GcOptions {
    fn default() -> Self {
        Self {
            grace: Duration::from_secs(900),
            settle: Duration::from_secs(2),
            patience: READ_LEASE * 2,
            dry_run: false,
        }
    }
}

/// What was removed, what not, and why.
#[derive(Debug, Default)]
pub struct GcReport {
    /// Removed (or to be), with their bytes.
    pub removed: Vec<(String, u64)>,
    /// Attempts that were left alone: their step's folder, which, why.
    pub kept: Vec<(String, AttemptId, String)>,
    /// Folders and objects at which something went wrong; the rest was done.
    pub failed: Vec<(String, Error)>,
}

impl GcReport {
    /// Bytes of what was removed.
    pub fn bytes(&self) -> u64 {
        self.removed.iter().map(|(_, bytes)| bytes).sum()
    }

    fn keep(&mut self, layout: &Layout, attempt: AttemptId, why: &str) {
        self.kept.push((layout.prefix().to_owned(), attempt, why.to_owned()));
    }
}

/// Collects in all step folders of a root, in the root itself where steps were saved to it (a folder that is one
/// checkpoint), and what was left beside them.
pub fn gc(root: &Root, options: &GcOptions) -> Result<GcReport> {
    let mut folders = layouts(root)?;
    if strays::holds_attempts(root)? {
        folders.push(Layout::new(""));
    }
    let mut report = collect(root, &folders, options, &|| false);
    beside(root, &folders, options, &mut report);
    Ok(report)
}

/// The part of [`gc`] that is not of one step: uploads that nobody ends, signs of life of runs that ended, notes for
/// listings whose step is gone, temporary objects beside the steps. For callers that collect folder by folder.
///
/// Errors: the steps cannot be listed. What else goes wrong is told in the report.
pub fn gc_beside(root: &Root, options: &GcOptions) -> Result<GcReport> {
    let mut report = GcReport::default();
    beside(root, &layouts(root)?, options, &mut report);
    Ok(report)
}

fn beside(root: &Root, folders: &[Layout], options: &GcOptions, report: &mut GcReport) {
    uploads::forget(root, folders, options, report);
    remove_pulses(root, options, report);
    super::index::tidy(root, options, report);
    strays::remove_temps(root, options, report);
}

/// Signs of life of runs that ended without removing them. The run that has the root keeps its own.
fn remove_pulses(root: &Root, options: &GcOptions, report: &mut GcReport) {
    let found = alive_of_others(root);
    match found {
        Ok(listed) => {
            for object in listed.iter().filter(|object| object.age.0 >= options.grace) {
                match options.dry_run {
                    true => report.removed.push((object.key.clone(), object.bytes)),
                    false => drop(remove(root, object, report)),
                }
            }
        }
        Err(error) if error.code() == Code::NotFound => {}
        Err(error) => report.failed.push((ALIVE.to_owned(), error)),
    }
}

fn alive_of_others(root: &Root) -> Result<Vec<Listed>> {
    let mut listed = root.store.list(ALIVE, LIST_MAX)?;
    if listed.is_empty() {
        return Ok(listed);
    }
    let newest = epoch::read(root, epoch::newest(root)?)?;
    let own = newest.map(|claim| format!("{ALIVE}{}/", RunId(claim.run)));
    listed.retain(|object| own.as_ref().is_none_or(|own| !object.key.starts_with(own)));
    Ok(listed)
}

/// Collects in folders that hold a step each, until it is `stopped`. All are waited for at once, which in a bucket
/// takes a minute.
pub fn gc_folders(
    root: &Root,
    layouts: &[Layout],
    options: &GcOptions,
    stopped: &dyn Fn() -> bool,
) -> GcReport {
    collect(root, layouts, options, stopped)
}

fn collect(
    root: &Root,
    layouts: &[Layout],
    options: &GcOptions,
    stopped: &dyn Fn() -> bool,
) -> GcReport {
    let mut report = GcReport::default();
    let mut doomed: BTreeMap<usize, Vec<AttemptId>> = BTreeMap::new();
    for (at, layout) in layouts.iter().enumerate() {
        match mark(root, layout, options, &mut report) {
            Ok(attempts) if attempts.is_empty() => {}
            Ok(attempts) => drop(doomed.insert(at, attempts)),
            Err(error) => report.failed.push((layout.prefix().to_owned(), error)),
        }
    }
    if !options.dry_run && !doomed.is_empty() {
        root.clock.sleep(settle(root, options));
    }
    for (at, attempts) in doomed {
        let Some(layout) = layouts.get(at).filter(|_| !stopped()) else { continue };
        if let Err(error) = sweep(root, layout, &attempts, options, &mut report) {
            report.failed.push((layout.prefix().to_owned(), error));
        }
    }
    report
}

/// How long a publication that is under way may take to show: in a bucket it may have read its source already.
pub(super) fn settle(root: &Root, options: &GcOptions) -> Duration {
    options.settle.max(root.store.abilities().publish_time)
}

/// First pass: which attempts go; they lose the right to publish.
fn mark(
    root: &Root,
    layout: &Layout,
    options: &GcOptions,
    report: &mut GcReport,
) -> Result<Vec<AttemptId>> {
    let mut census = Census::take(root, layout)?;
    if !options.dry_run && census.attempts.keys().any(|attempt| census.has_aside(*attempt)) {
        for attempt in census.attempts.keys() {
            rescue(root, layout, *attempt)?;
        }
        census = Census::take(root, layout)?;
    }
    let commit = census.commit(root)?;
    if let Some(damage) = commit.as_ref().and_then(|commit| commit.damage.clone()) {
        let what = "the commit cannot be read, so nothing here is removed";
        return Err(Error::new(Code::InvalidMetadata, what).at(layout.metadata()).hint(damage));
    }
    let current = commit.as_ref().and_then(|commit| commit.attempt);
    let mut doomed = Vec::new();
    for attempt in census.attempts.keys().copied().filter(|attempt| Some(*attempt) != current) {
        match spared(&census, commit.as_ref(), attempt, options) {
            Some(why) => report.keep(layout, attempt, &why),
            None => doomed.push(attempt),
        }
    }
    check_unnamed(root, &census, |attempt| doomed.contains(&attempt))?;
    remove_temps(root, &census, options, report);
    remove_leases(root, &census, options, report);
    for attempt in doomed.iter().filter(|_| !options.dry_run) {
        let what = "the attempt was given up for dead and collected";
        withdraw(root, layout, *attempt, Failure::new(Code::Fenced, what))?;
    }
    if let Some(current) = current
        && census.age(current) >= options.grace
        && !options.dry_run
    {
        tidy_commit(root, &census, current, report);
    }
    Ok(doomed)
}

/// Fails where `.metadata` names files of an attempt that is to go: then it is not what it seems, and nothing goes.
fn check_unnamed(root: &Root, census: &Census, goes: impl Fn(AttemptId) -> bool) -> Result<()> {
    let Some(attempt) = census.mentioned(root, goes)? else { return Ok(()) };
    let what = format!("the commit names files of {attempt}, but is not its own: it is damaged");
    let error = Error::new(Code::InvalidMetadata, what).at(census.layout.metadata());
    Err(error.hint("nothing here is removed: look at it with `forebay ckpt verify`"))
}

fn spared(
    census: &Census,
    commit: Option<&CommitInfo>,
    attempt: AttemptId,
    options: &GcOptions,
) -> Option<String> {
    let left = |age: Duration| {
        let left = options.grace.checked_sub(age).filter(|left| !left.is_zero())?;
        Some(left.as_secs_f64().ceil())
    };
    if let Some(left) = left(census.age(attempt)) {
        return Some(match census.is_being_removed(attempt) {
            true => format!("it is removed, and its files go in {left} s, after the grace time"),
            false => format!("something of it is younger than the grace time, for {left} s more"),
        });
    }
    let left = left(commit?.age)?;
    Some(format!("it may have been replaced within the grace time, which takes {left} s more"))
}

/// Records of the commit's own attempt that nobody needs any more: a rank that was killed after the commit left them.
fn tidy_commit(root: &Root, census: &Census, attempt: AttemptId, report: &mut GcReport) {
    let prefix = census.layout.records(attempt);
    for object in census.attempts.get(&attempt).into_iter().flatten() {
        let needed = ["decision", "outcome"];
        let record = object.key.strip_prefix(&prefix);
        if record.is_some_and(|name| !needed.contains(&name)) {
            remove(root, object, report);
        }
    }
}

/// Leases of readers that were killed.
fn remove_leases(root: &Root, census: &Census, options: &GcOptions, report: &mut GcReport) {
    for object in census.readers.iter().filter(|object| object.age.0 >= DEAD_READER) {
        if options.dry_run {
            report.removed.push((object.key.clone(), object.bytes));
        } else {
            remove(root, object, report);
        }
    }
}

fn remove_temps(root: &Root, census: &Census, options: &GcOptions, report: &mut GcReport) {
    let old = census.temps.iter().filter(|object| object.age.0 >= options.grace.max(TEMP_AGE));
    for object in old {
        if options.dry_run {
            report.removed.push((object.key.clone(), object.bytes));
        } else {
            remove(root, object, report);
        }
    }
}

/// Second pass: look again, then remove.
pub(crate) fn sweep(
    root: &Root,
    layout: &Layout,
    attempts: &[AttemptId],
    options: &GcOptions,
    report: &mut GcReport,
) -> Result<()> {
    for attempt in attempts {
        rescue(root, layout, *attempt)?;
    }
    let census = Census::take(root, layout)?;
    if !options.dry_run && !census.readers.is_empty() {
        let idle = wait_for_readers(root, layout, options.patience)?;
        if !idle {
            for attempt in attempts {
                report.keep(layout, *attempt, "a restore is reading the step");
            }
            return Ok(());
        }
    }
    // After the readers: everything that follows is decided by what is there now.
    let census = Census::take(root, layout)?;
    let commit = census.commit(root)?;
    let needed = needed(root, layout, commit.as_ref())?;
    let current = commit.as_ref().and_then(|commit| commit.attempt);
    check_unnamed(root, &census, |attempt| {
        attempts.contains(&attempt) && Some(attempt) != current
    })?;
    for attempt in attempts.iter().copied() {
        if current == Some(attempt) {
            report.keep(layout, attempt, "it was committed a moment ago");
        } else if !options.dry_run && is_awake(root, layout, attempt)? {
            report.keep(layout, attempt, "a rank of it has woken up");
        } else {
            remove_attempt(root, &census, attempt, &needed, options, report);
        }
    }
    Ok(())
}

/// Keys of the files that the commit refers to.
fn needed(root: &Root, layout: &Layout, commit: Option<&CommitInfo>) -> Result<HashSet<String>> {
    let Some(commit) = commit else { return Ok(HashSet::new()) };
    if let Some(damage) = &commit.damage {
        let what = "the commit cannot be read, so nothing here is removed";
        return Err(Error::new(Code::InvalidMetadata, what).at(layout.metadata()).hint(damage));
    }
    let recorded = commit.files.iter().map(|file| layout.file(&file.name));
    let mut needed: HashSet<String> = recorded.collect();
    if needed.is_empty()
        && let Some(source) = root.open_metadata(layout)?
    {
        let files = root.identify.files(source.as_ref())?;
        needed.extend(files.iter().map(|name| layout.file(name)));
    }
    Ok(needed)
}

/// When a record of a dead attempt goes: what explains the rest goes last.
fn turn(record: Option<&str>) -> u8 {
    match record {
        None => 0,
        Some("decision") => 3,
        // Without it what is left would look like a commit that was lost.
        Some("removing") => 4,
        Some(name) if name == "outcome" || name.starts_with(UNPUBLISHED) => 2,
        Some(_) => 1,
    }
}

/// Data first, and what explains it last, so that a collector that is killed leaves something the next one understands.
fn remove_attempt(
    root: &Root,
    census: &Census,
    attempt: AttemptId,
    needed: &HashSet<String>,
    options: &GcOptions,
    report: &mut GcReport,
) {
    let prefix = census.layout.records(attempt);
    let objects = census.attempts.get(&attempt).into_iter().flatten();
    let mut objects: Vec<&Listed> =
        objects.filter(|object| !needed.contains(&object.key)).collect();
    objects.sort_by_key(|object| turn(object.key.strip_prefix(&prefix)));
    for object in objects {
        if options.dry_run {
            report.removed.push((object.key.clone(), object.bytes));
        } else if !remove(root, object, report) {
            // Its explanation must outlive it.
            return;
        }
    }
}

/// Whether it is gone.
pub(super) fn remove(root: &Root, object: &Listed, report: &mut GcReport) -> bool {
    match root.store.remove(&object.key) {
        Ok(true) => report.removed.push((object.key.clone(), object.bytes)),
        Ok(false) => {}
        Err(error) => {
            report.failed.push((object.key.clone(), error));
            return false;
        }
    }
    true
}
