//! The thread that looks at one tier. A store that hangs hangs this thread and nothing else: the others go on without
//! that tier, and when it answers again it is back.
//!
//! A folder is looked at as often as is configured. A bucket costs money with every listing: while nothing happens
//! there the looks get rarer, down to one a minute; a wake, or a step that arrives, brings them back.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_error::{Code, Error, Result};
use forebay_store::Abilities;

use super::sight::{Looker, Sight};
use super::state::{Shared, TierState, one_line};

/// Longest time between two looks at a bucket where nothing happens.
const QUIET_MAX: Duration = Duration::from_secs(60);

/// When a store that honours too little for commits is asked again: what was asked may have gone wrong under load.
/// Twice that the next time, to [`ASK_MAX`].
const ASK: Duration = Duration::from_secs(60);
const ASK_MAX: Duration = Duration::from_secs(600);

/// Until the runner stops.
pub(crate) fn run(shared: &Shared, number: usize) {
    let mut looker = Looker::default();
    let mut every = shared.tiers.config.moving.look_every;
    let mut due = Instant::now();
    while let Some(stale) = next(shared, number, due) {
        let before = looked_at(shared, number);
        let looked = look(shared, number, &mut looker, &stale);
        let now = Instant::now();
        let wait = shared.change(|state| match state.tiers.get_mut(number) {
            Some(tier) => {
                let trouble = settle(tier, number as u64, looked, stale);
                let (failed, troubles) = trouble;
                for (step, error) in &troubles {
                    state.trouble(Some(number), *step, error, failed);
                }
                failed
            }
            None => None,
        });
        let quiet = before == looked_at(shared, number);
        every = interval(shared, number, every, quiet);
        due = now + wait.unwrap_or(every);
    }
}

/// What there was to see: steps, and whether any of them is unsettled.
fn looked_at(shared: &Shared, number: usize) -> Option<(usize, usize)> {
    let state = shared.lock();
    let sight = state.tiers.get(number)?.sight.as_ref()?;
    let commits = sight.steps.values().filter(|seen| seen.state.commit.is_some());
    Some((sight.steps.len(), commits.count()))
}

fn interval(shared: &Shared, number: usize, last: Duration, quiet: bool) -> Duration {
    let least = shared.tiers.config.moving.look_every;
    let is_folder = shared.tiers.tier(number).is_ok_and(|tier| tier.folder.is_some());
    match is_folder || !quiet {
        true => least,
        false => (last * 3 / 2).min(QUIET_MAX.max(least)),
    }
}

/// Waits until the tier is to be looked at; the steps that have changed. `None`: the end.
fn next(shared: &Shared, number: usize, due: Instant) -> Option<BTreeSet<u64>> {
    let mut state = shared.lock();
    loop {
        if shared.is_stopping() {
            return None;
        }
        let now = Instant::now();
        let tier = state.tiers.get_mut(number)?;
        if now >= due || tier.look_now {
            tier.look_now = false;
            tier.begun += 1;
            tier.looking_since = Some(now);
            return Some(std::mem::take(&mut tier.stale));
        }
        state = shared.wait(state, due - now);
    }
}

/// A look, and what the store honours, if it was asked now: in words, and whether commits can be made there.
type Looked = (Sight, Option<(Vec<String>, bool)>);
type Trouble = (Option<u64>, Arc<Error>);
type Troubles = Vec<Trouble>;

fn is_same((step, error): &Trouble, (other_step, other): &Trouble) -> bool {
    step == other_step && error.code() == other.code() && one_line(error) == one_line(other)
}

/// What a look has shown becomes known. Returns how long to wait after a failure, and what to tell.
fn settle(
    tier: &mut TierState,
    seed: u64,
    looked: Result<Looked>,
    stale: BTreeSet<u64>,
) -> (Option<Duration>, Troubles) {
    tier.looking_since = None;
    tier.looked = tier.begun;
    match looked {
        Ok((sight, found)) => {
            // What was wrong at the last look was told then; it is still wrong.
            let told = tier.sight.take();
            let told = told.as_ref().map_or(&[][..], |sight| &sight.troubles);
            let is_new = |trouble: &&Trouble| !told.iter().any(|told| is_same(told, trouble));
            let troubles = sight.troubles.iter().filter(is_new).cloned().collect();
            if !sight.troubles.is_empty() {
                tier.last_trouble = Some(Instant::now());
            }
            let looked = tier.looked;
            tier.removing.retain(|_, shown| shown.is_none_or(|look| looked < look));
            tier.sight = Some(Arc::new(sight));
            tier.look_error = None;
            tier.looks = Default::default();
            if let Some((notes, fit)) = found {
                (tier.notes, tier.unfit) = (notes, !fit);
                let wait = ASK.saturating_mul(1 << tier.unfits.min(9)).min(ASK_MAX);
                (tier.unfits, tier.ask_at) = match fit {
                    true => (0, None),
                    false => (tier.unfits.saturating_add(1), Some(Instant::now() + wait)),
                };
            }
            (None, troubles)
        }
        Err(error) if error.code() == Code::Cancelled => (Some(Duration::ZERO), Vec::new()),
        Err(error) => {
            tier.stale.extend(stale);
            let wait = tier.looks.fail(Instant::now(), seed);
            let error = Arc::new(error);
            tier.look_error = Some(Arc::clone(&error));
            // A hint of what is there is not lost: it may come back as it was.
            (Some(wait), vec![(None, error)])
        }
    }
}

/// Looks; after the first good look also at what the store honours, and now and then where that is too little.
fn look(
    shared: &Shared,
    number: usize,
    looker: &mut Looker,
    stale: &BTreeSet<u64>,
) -> Result<Looked> {
    let tier = shared.tiers.tier(number)?;
    let replaced = tier.was_replaced();
    if replaced {
        *looker = Looker::default();
    }
    let folder = tier.folder.as_deref();
    let sight = match shared.tiers.found(number)? {
        Some(root) => looker.look(&root, folder, stale, &shared.stop),
        None => Ok(Sight::of_nothing(folder)),
    };
    let mut sight = sight.inspect_err(|_| tier.close())?;
    if replaced {
        let what = "the folder is another one than before: what is there now counts";
        let error = Error::new(Code::FileChanged, what).at(tier.config.place.clone());
        sight.troubles.push((None, Arc::new(error)));
    }
    let Some(root) = shared.tiers.found(number)? else { return Ok((sight, None)) };
    let (known, again) = shared.lock().tiers.get(number).map_or((false, false), |tier| {
        let again = tier.ask_at.is_some_and(|at| Instant::now() >= at);
        (!tier.notes.is_empty(), again)
    });
    if again {
        root.store.forget_abilities();
    }
    let found = (!known || again).then(|| {
        let can = root.store.abilities();
        (notes(&can), can.create_if_absent)
    });
    Ok((sight, found))
}

/// What a store was found to honour, in words.
fn notes(can: &Abilities) -> Vec<String> {
    let mut notes = Vec::new();
    if !can.create_if_absent {
        notes.push("ignores preconditions: no checkpoint can be committed here".to_owned());
    } else if !can.replace_if_version {
        notes.push("steps can be created here, and not be replaced".to_owned());
    } else {
        notes.push("commits are atomic".to_owned());
    }
    notes.push(match can.durable_publish {
        true => "commits survive a loss of power".to_owned(),
        false => "whether commits survive a loss of power is not known".to_owned(),
    });
    if can.rejects_bad_checksums || can.returns_checksums {
        notes.push("the store checks what it is sent".to_owned());
    } else {
        notes.push("what is written is read back".to_owned());
    }
    notes
}

#[cfg(test)]
mod tests;
