//! What the threads of a runner share, behind one lock that is never held while a store is asked.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forebay_checkpoint::commit::Root;
use forebay_checkpoint::progress::Progress;
use forebay_error::{Code, Error, Result};

use super::journal::{Journal, checksum_of, unlogged};
use super::picture::{Known, Picture};
use super::rates::Rate;
use super::retry::{Retry, health_of};
use super::sight::Sight;
use super::tiers::Tiers;
use super::{Duties, Reach};
use crate::audit_log::Event;
use crate::policy::Order;
use crate::status::{ERRORS_MAX, Health, Trouble};
use crate::told::Told;

/// A look that takes longer is told; one that takes [`GONE`] counts as no answer.
pub(crate) const SLOW: Duration = Duration::from_secs(10);
pub(crate) const GONE: Duration = Duration::from_secs(60);
/// How long a tier that had an error counts as troubled.
const TROUBLED: Duration = Duration::from_secs(60);

/// All of it.
pub(crate) struct Shared {
    pub(crate) tiers: Arc<Tiers>,
    pub(crate) journal: Journal,
    pub(crate) duties: Duties,
    pub(crate) started: Instant,
    /// Ends everything.
    pub(crate) stop: AtomicBool,
    state: Mutex<State>,
    /// Something has changed: for whoever waits.
    changed: Condvar,
}

/// See the module.
pub(crate) struct State {
    /// Of [`Tiers`].
    job: Option<String>,
    pub(crate) reach: Reach,
    pub(crate) tiers: Vec<TierState>,
    pub(crate) moving: Vec<Arc<Moving>>,
    /// Moves that failed, by step and destination.
    pub(crate) retries: BTreeMap<(u64, usize), Retry>,
    /// Removals and collections that failed, by step and tier.
    pub(crate) tidies: BTreeMap<(u64, usize), Retry>,
    pub(crate) troubles: VecDeque<Trouble>,
    /// Those that are in the log.
    told: Told,
    /// Rises with every change that the planner has to see.
    pub(crate) changes: u64,
    /// What was wanted when the planner looked last.
    pub(crate) wanted: Vec<Order>,
    /// Steps that are held and were to be replaced: told already.
    pub(crate) held_back: BTreeSet<(usize, u64)>,
}

/// One tier.
#[derive(Default)]
pub(crate) struct TierState {
    pub(crate) sight: Option<Arc<Sight>>,
    /// Looks that failed.
    pub(crate) looks: Retry,
    /// Why the last look failed.
    pub(crate) look_error: Option<Arc<Error>>,
    pub(crate) looking_since: Option<Instant>,
    /// Looks that were begun. They are numbered from 1.
    pub(crate) begun: u64,
    /// The look that was finished last.
    pub(crate) looked: u64,
    /// The look that sees all that is known to have changed.
    pub(crate) owed: u64,
    pub(crate) look_now: bool,
    /// Steps to look at again.
    pub(crate) stale: BTreeSet<u64>,
    /// Writes that failed, and what that says.
    pub(crate) gate: Retry,
    pub(crate) blocked: Option<Health>,
    pub(crate) last_trouble: Option<Instant>,
    /// Steps that are being removed, and those that were: with the look that shows what came of it.
    pub(crate) removing: BTreeMap<u64, Option<u64>>,
    /// Something is removed or collected there now.
    pub(crate) tidying: bool,
    /// When leftovers are collected next.
    pub(crate) collect_at: Option<Instant>,
    /// When what lies beside the steps is collected next.
    pub(crate) beside_at: Option<Instant>,
    /// What the store honours, once it was asked.
    pub(crate) notes: Vec<String>,
    /// Whether commits can be made there at all.
    pub(crate) unfit: bool,
    /// How often it was found unfit in a row, and when its store is asked again.
    pub(crate) unfits: u32,
    pub(crate) ask_at: Option<Instant>,
    pub(crate) rates: (Rate, Rate),
}

/// A step under way.
pub(crate) struct Moving {
    pub(crate) order: Order,
    pub(crate) tries: u32,
    pub(crate) total: AtomicU64,
    pub(crate) done: AtomicU64,
    pub(crate) rate: Mutex<Rate>,
}

impl Shared {
    pub(crate) fn new(tiers: Arc<Tiers>, duties: Duties, reach: Reach) -> Self {
        let journal = Journal::new(tiers.config.moving.audit_log.as_deref());
        let of_tiers = (0..tiers.count()).map(|_| TierState::default()).collect();
        let state = State {
            job: tiers.job.clone(),
            reach,
            tiers: of_tiers,
            moving: Vec::new(),
            retries: BTreeMap::new(),
            tidies: BTreeMap::new(),
            troubles: VecDeque::new(),
            told: Told::default(),
            changes: 0,
            wanted: Vec::new(),
            held_back: BTreeSet::new(),
        };
        Self {
            tiers,
            journal,
            duties,
            started: Instant::now(),
            stop: AtomicBool::new(false),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Changes something, and wakes whoever waits.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let result = change(&mut state);
        state.changes += 1;
        drop(state);
        self.changed.notify_all();
        result
    }

    /// Waits until something changes, at most that long.
    pub(crate) fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        time: Duration,
    ) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, time);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Wakes all.
    pub(crate) fn wake_all(&self) {
        self.change(|_| ());
    }

    /// Notes in the audit log; what cannot be written is told as trouble.
    pub(crate) fn log(&self, event: Event) {
        let step = event.step;
        if let Err(error) = self.journal.note(event) {
            self.change(|state| state.trouble(None, step, &unlogged(&error), None));
        }
    }

    /// The same for what is about to happen: it is written before, if the log can be written.
    pub(crate) fn log_before(&self, event: Event) {
        let step = event.step;
        if let Err(error) = self.journal.note_before(event) {
            self.change(|state| state.trouble(None, step, &unlogged(&error), None));
        }
    }

    /// What a step's bytes are known by, for the audit log; none is asked for where there is none.
    pub(crate) fn checksum_of(&self, root: &Root, step: u64) -> Option<String> {
        self.journal.is_kept().then(|| checksum_of(root, step))?
    }

    /// What the rules decide on, as of now. What cannot be removed now counts as in use.
    pub(crate) fn picture(&self, state: &State) -> Picture {
        let now = Instant::now();
        let fails = |step: u64, tier: usize| !state.may_tidy(step, tier, now);
        let known = (0..state.tiers.len()).map(|tier| state.known(tier, &fails));
        Picture::of(&self.tiers, &known.collect::<Vec<_>>())
    }

    /// The same, as if every removal that failed could be tried now.
    pub(crate) fn picture_of_all(&self, state: &State) -> Picture {
        let known = (0..state.tiers.len()).map(|tier| state.known(tier, &|_, _| false));
        Picture::of(&self.tiers, &known.collect::<Vec<_>>())
    }
}

impl State {
    /// Notes an error, for people.
    pub(crate) fn trouble(
        &mut self,
        tier: Option<usize>,
        step: Option<u64>,
        error: &Error,
        again: Option<Duration>,
    ) {
        let what = one_line(error);
        let job = self.job.as_deref();
        match self.told.is_new(tier, step, &what, Instant::now()) {
            true => tracing::warn!(job, tier, step, %error, "trouble between tiers"),
            false => tracing::debug!(job, tier, step, %error, "the same trouble between tiers"),
        }
        if let Some(tier) = tier.and_then(|tier| self.tiers.get_mut(tier)) {
            tier.last_trouble = Some(Instant::now());
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let trouble = Trouble {
            at: since.as_secs_f64(),
            tier,
            step,
            code: error.code().as_str().to_owned(),
            what,
            again_seconds: again.map(|again| again.as_secs_f64()),
        };
        if self.troubles.len() >= ERRORS_MAX {
            self.troubles.pop_front();
        }
        self.troubles.push_back(trouble);
    }

    /// Whether a removal or collection of a step on a tier is not one that has just failed.
    pub(crate) fn may_tidy(&self, step: u64, tier: usize, now: Instant) -> bool {
        self.tidies.get(&(step, tier)).is_none_or(|retry| retry.is_due(now))
    }

    /// Failures are forgotten of what is not there any more.
    pub(crate) fn forget_failures(&mut self, line: &BTreeSet<u64>) {
        self.retries.retain(|(step, _), _| line.contains(step));
        let (tiers, tidies) = (&self.tiers, &mut self.tidies);
        tidies.retain(|(step, tier), _| {
            let sight = tiers.get(*tier).and_then(|tier| tier.sight.as_ref());
            sight.is_none_or(|sight| sight.steps.contains_key(step))
        });
    }

    fn known(&self, tier: usize, fails: &dyn Fn(u64, usize) -> bool) -> Known<'_> {
        let state = self.tiers.get(tier);
        let sources = self.moving.iter().filter(|moving| moving.order.from == tier);
        let mut in_use: BTreeSet<u64> = sources.map(|moving| moving.order.step).collect();
        let failed = self.tidies.keys().filter(|(step, of)| *of == tier && fails(*step, *of));
        in_use.extend(failed.map(|(step, _)| *step));
        Known {
            sight: state.and_then(|state| state.sight.as_deref()),
            usable: state.map_or((false, false), TierState::usable),
            in_use,
            going: state.into_iter().flat_map(|state| state.removing.keys().copied()).collect(),
        }
    }
}

impl TierState {
    /// Something has changed there: the next look to begin is to see it.
    pub(crate) fn look_again(&mut self, steps: impl IntoIterator<Item = u64>) {
        self.stale.extend(steps);
        self.look_now = true;
        self.owed = self.begun + 1;
    }

    /// Whether all that is known to have changed was looked at.
    pub(crate) fn is_seen(&self) -> bool {
        self.sight.is_some() && !self.is_down() && self.looked >= self.owed
    }

    /// Whether it is not worth waiting for to know what is there: it was seen, or does not answer (in time).
    pub(crate) fn is_known(&self) -> bool {
        let slow = self.looking_since.is_some_and(|since| since.elapsed() >= SLOW);
        self.sight.is_some() || self.is_down() || slow
    }

    /// Whether it does not answer.
    pub(crate) fn is_down(&self) -> bool {
        let hangs = self.looking_since.is_some_and(|since| since.elapsed() >= GONE);
        self.look_error.is_some() || hangs
    }

    /// Whether steps can go there, and come from there. A tier whose writes fail is passed over for a farther one only
    /// once it has failed a few times.
    fn usable(&self) -> (bool, bool) {
        let reads = self.sight.is_some() && !self.is_down();
        let refuses = self.unfit || (self.blocked.is_some() && self.gate.fails >= 4);
        (reads && !refuses, reads)
    }

    /// Whether a write is to find out now if it still refuses them.
    pub(crate) fn is_retried(&self, now: Instant) -> bool {
        !self.unfit && self.gate.is_due(now)
    }

    /// A write to it failed; returns how long it is left alone.
    pub(crate) fn block(&mut self, error: &Error, seed: u64) -> Duration {
        self.blocked = Some(health_of(error));
        self.gate.fail(Instant::now(), seed)
    }

    /// A write to it was good.
    pub(crate) fn unblock(&mut self) {
        (self.blocked, self.gate) = (None, Retry::default());
    }

    /// How it stands; `full`: there is no room for what is to come.
    pub(crate) fn health(&self, full: bool) -> Health {
        let slow = self.looking_since.is_some_and(|since| since.elapsed() >= SLOW);
        let lately = self.last_trouble.is_some_and(|at| at.elapsed() < TROUBLED);
        match (self.is_down(), self.sight.is_some()) {
            (true, _) => Health::Down,
            (false, false) => Health::Unknown,
            _ if self.unfit => Health::ReadOnly,
            _ => match self.blocked {
                Some(Health::Troubled) | None if full => Health::Full,
                Some(health) => health,
                None if slow || lately => Health::Troubled,
                None => Health::Ok,
            },
        }
    }
}

impl Moving {
    pub(crate) fn new(order: Order, tries: u32) -> Self {
        Self {
            order,
            tries,
            total: AtomicU64::new(0),
            done: AtomicU64::new(0),
            rate: Mutex::default(),
        }
    }
}

/// What a hop tells while it goes on; ends it when the runner stops.
pub(crate) struct Watch<'a> {
    pub(crate) moving: &'a Moving,
    pub(crate) stop: &'a AtomicBool,
}

impl Progress for Watch<'_> {
    fn total(&self, bytes: u64) {
        self.moving.total.store(bytes, Ordering::Relaxed);
    }

    fn add(&self, bytes: u64) -> Result<()> {
        self.moving.done.fetch_add(bytes, Ordering::Relaxed);
        if self.stop.load(Ordering::Relaxed) {
            return Err(Error::new(Code::Cancelled, "movements between tiers were stopped"));
        }
        Ok(())
    }
}

/// The first line of an error with its causes.
pub(crate) fn one_line(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(2000).collect()
}
