//! A save comes: where it goes, and when.

use std::time::{Duration, Instant};

use forebay_checkpoint::commit::AttemptId;
use forebay_error::{Code, Error, Result};

use super::picture::Picture;
use super::state::{Shared, State};
use super::tidy;
use crate::policy::{Admission, Backlog};

/// Longest sleep of a save that waits for room.
const LOOK: Duration = Duration::from_millis(200);
/// How long a save that may be left out waits for what goes at once, where nothing removed is kept for readers.
const SKIP_WAIT: Duration = Duration::from_secs(4);

/// Where a save goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admitted {
    /// To this tier: 0 as a rule.
    Save(usize),
    /// It is left out: there is no room, and that is what was configured.
    Skip,
}

/// What can be said now.
#[derive(Default)]
struct Found {
    /// Where it goes.
    admitted: Option<Admitted>,
    /// What has to be removed before a save has room.
    task: Option<tidy::Task>,
    /// What it waits for.
    lacks: Option<Lack>,
}

/// A tier that has no room for so many bytes: what is free there, and what it may hold, where that is known.
#[derive(Clone, Copy)]
struct Lack {
    tier: usize,
    bytes: u64,
    free: Option<u64>,
    capacity: Option<u64>,
}

/// Waits until a save of `bytes`, or of as many as the newest step has, has a place. Where saves are left out instead,
/// nothing is waited for, but for what goes at once, and what makes room for a later one is handed to `begin`. See
/// [`super::Runner::admit`].
pub(crate) fn admit(
    shared: &Shared,
    bytes: Option<u64>,
    patience: Duration,
    begin: impl Fn(tidy::Task),
) -> Result<Admitted> {
    let until = Instant::now() + patience;
    let goes_at_once = shared.tiers.config.moving.grace < Duration::from_secs(1);
    let skips_from = Instant::now() + if goes_at_once { SKIP_WAIT } else { Duration::ZERO };
    let mut told = false;
    loop {
        let Found { admitted, task, lacks } = {
            let mut state = shared.lock();
            look(shared, &mut state, bytes, Instant::now() >= skips_from)?
        };
        if let Some(admitted) = admitted {
            task.into_iter().for_each(begin);
            return Ok(admitted);
        }
        if let Some(lack) = lacks.filter(|_| !std::mem::replace(&mut told, true)) {
            tell(shared, lack);
        }
        // In this thread: whoever saves waits for it anyway. What cannot be removed is left alone for a while, so that
        // this comes to an end.
        if let Some(task) = &task {
            tidy::run(shared, task);
        }
        if shared.is_stopping() {
            return Err(Error::new(Code::Cancelled, "the tiers were stopped"));
        }
        let now = Instant::now();
        if now >= until {
            let bytes = bytes.map_or("the next save".to_owned(), |bytes| format!("{bytes} bytes"));
            let what = format!("no tier has had room for {bytes} for {patience:?}");
            return Err(Error::new(Code::Timeout, what).hint("`forebay tier status` says why"));
        }
        if task.is_none() {
            drop(shared.wait(shared.lock(), (until - now).min(LOOK)));
        }
    }
}

/// Once a save: it may take long, and whoever looks at the log should see why.
fn tell(shared: &Shared, Lack { tier, bytes, free, capacity }: Lack) {
    let name = shared.tiers.tiers.get(tier).map(|tier| tier.config.name.as_str());
    let job = shared.tiers.job.as_deref();
    tracing::info!(job, tier = name, bytes, free, capacity, "a save waits for room");
}

/// `late`: a save that may be left out waits no longer.
fn look(shared: &Shared, state: &mut State, bytes: Option<u64>, late: bool) -> Result<Found> {
    let first = state.tiers.first();
    let Some(first) = first.filter(|tier| tier.sight.is_some() || tier.is_down()) else {
        return Ok(Found::default());
    };
    let picture = shared.picture(state);
    // What is expected is known only now that something was seen.
    let bytes = bytes.or_else(|| picture.newest_bytes()).unwrap_or(0);
    let to = |admitted| Found { admitted: Some(admitted), ..Found::default() };
    if first.is_down() {
        return Ok(to(Admitted::Save(around(shared, state, &picture, bytes))));
    }
    let (tier, task) = match picture.rules.admit(&picture.view, bytes) {
        Admission::Skip => return Ok(to(Admitted::Skip)),
        Admission::Never => {
            let what = format!("no tier can ever hold {bytes} bytes");
            let error = Error::new(Code::NoSpace, what);
            return Err(error.hint("raise `capacity`, or `backlog = \"straight\"`"));
        }
        Admission::Wait => (0, None),
        // What was removed is going, and takes room until its grace time is over.
        Admission::Save { tier, evict } if evict.is_empty() => {
            if picture.fits_now(tier, bytes) {
                return Ok(to(Admitted::Save(tier)));
            }
            (tier, None)
        }
        Admission::Save { tier, evict } => (tier, task(state, &picture, tier, evict)),
    };
    let capacity = picture.rules.tiers.get(tier).and_then(|tier| tier.capacity);
    let lack = Lack { tier, bytes, free: picture.room(tier), capacity };
    let skips = late && shared.tiers.config.moving.backlog == Backlog::Skip;
    Ok(Found { admitted: skips.then_some(Admitted::Skip), task, lacks: Some(lack) })
}

/// The first tier does not answer: the nearest later one that does and has room, where saves may go there, else the
/// first all the same, and the save finds out by itself.
fn around(shared: &Shared, state: &State, picture: &Picture, bytes: u64) -> usize {
    if shared.tiers.config.moving.backlog != Backlog::Straight {
        return 0;
    }
    let answers =
        |tier: &usize| state.tiers.get(*tier).is_some_and(|of| of.sight.is_some() && !of.is_down());
    let later = 1..state.tiers.len();
    later.filter(answers).find(|tier| picture.fits_now(*tier, bytes)).unwrap_or(0)
}

fn task(state: &mut State, picture: &Picture, tier: usize, evict: Vec<u64>) -> Option<tidy::Task> {
    let goes = |step: &u64| state.tiers.iter().any(|tier| tier.removing.contains_key(step));
    let commit = |step: u64| Some((step, picture.commit(tier, step)?));
    let free = evict.into_iter().filter(|step| !goes(step));
    let remove: Vec<(u64, AttemptId)> = free.filter_map(commit).collect();
    let of_tier = state.tiers.get_mut(tier)?;
    if of_tier.tidying || remove.is_empty() {
        return None;
    }
    of_tier.tidying = true;
    of_tier.removing.extend(remove.iter().map(|(step, _)| (*step, None)));
    let others = remove.iter().map(|(step, attempt)| picture.others(tier, *step, *attempt));
    let others = others.collect();
    Some(tidy::Task { tier, remove, others, collect: Vec::new(), beside: false })
}
