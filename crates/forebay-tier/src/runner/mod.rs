//! The runner: the threads that see to it that every step is where it should be. It runs in a training process, in the
//! agent and in `forebay tier drain`, and is the same in each.
//!
//! ```text
//!   watch (one thread a tier)   looks at the tier, gives a Sight
//!        |
//!   plan (one thread)           all Sights -> Picture -> rules -> what to start
//!        |            \
//!   transfer (some)    tidy (one a tier)
//!   a hop each         removes what the rules let go, collects what is left of it
//! ```
//!
//! Nothing here is remembered that is not in the stores: a runner that is killed and started again looks, and goes on.
//! Two runners over the same tiers do no harm to each other: hops of one step meet in the destination, removals are
//! announced there.
//!
//! A tier that does not answer is `down`: nothing is sent there and nothing is expected from there, farther tiers get
//! what is for them from those that answer, and the tier is asked again after half a second, a second, ... a minute. A
//! tier that refuses writes (full, read-only, permission) is left alone in the same way, then one step finds out
//! whether it takes something again.
//!
//! | module | what it does |
//! | --- | --- |
//! | `tiers`, `mounted` | the tiers as configured and opened; whether their file systems are mounted still |
//! | `sight`, `watch` | one look at a tier; when |
//! | `picture`, `plan` | what was seen, for the rules; what they say is started |
//! | `transfer`, `tidy` | moving; removing |
//! | `admit` | room for saves |
//! | `action`, `act`, `promote`, `inside` | what people ask for |
//! | `show` | what people see |
//! | `state`, `retry`, `rates`, `journal` | what is shared: state, waits, rates, the audit log |
//! | `io_priority` | **unsafe**: a system call |

mod act;
mod action;
mod admit;
mod inside;
pub(crate) mod io_priority;
mod journal;
mod mounted;
mod picture;
mod plan;
mod promote;
mod rates;
mod retry;
mod show;
mod sight;
mod state;
mod tidy;
mod tiers;
mod transfer;
mod watch;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_error::{Error, Result};

pub use action::{Action, Outcome, RemovedStep};
pub use admit::Admitted;
pub use tiers::Tiers;

use crate::audit_log::Event;
use crate::policy::Order;
use crate::status::Status;
use state::Shared;

/// How long [`Runner::stop`] waits for threads that are in the middle of a call of a store, for all of them together.
const JOIN_WAIT: Duration = Duration::from_secs(10);
/// And at least for the one that writes the audit log.
const SCRIBE_WAIT: Duration = Duration::from_secs(3);

/// Keeps the tiers as they should be until it is stopped or dropped. See the module.
pub struct Runner {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The one that writes the audit log: it ends last.
    scribe: Mutex<Option<JoinHandle<()>>>,
}

/// What a runner does by itself. Actions are carried out by all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Duties {
    /// It looks: for commands that only ask.
    Look,
    /// And removes what the rules let go.
    Remove,
    /// And moves steps.
    All,
}

/// What a runner does it for, where the first tier is on the drives of nodes. Elsewhere all do all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Everything: the drive of this node, and what is beyond.
    All,
    /// What is on the drive of this node: one runner of each node.
    OwnDrive,
    /// What is beyond: one runner of the job, whose node has another for its drive.
    Beyond,
}

impl Reach {
    /// Whether moves from, and removals on, a tier are this runner's.
    pub(crate) fn has(self, partial: bool) -> bool {
        match self {
            Self::All => true,
            Self::OwnDrive => partial,
            Self::Beyond => !partial,
        }
    }
}

/// Failures in a row from which on a removal counts as one that cannot be done now.
const STUCK_AFTER: u32 = 4;

/// What is not done yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// Steps under way.
    pub moving: usize,
    /// Hops that wait.
    pub waiting: usize,
    /// Commits that are to be removed.
    pub removing: usize,
    /// Commits that were to be removed and cannot be: several tries have failed, and others follow.
    pub stuck: usize,
    /// Hops to tiers whose stores take no commits at all: nothing is to be waited for.
    pub refused: usize,
    /// Tiers that were not looked at yet, or do not answer.
    pub unseen: Vec<String>,
}

impl Pending {
    /// Whether everything is where it should be.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Whether there is nothing to wait for: what is left is copies that cannot be removed, or never made.
    pub fn is_over(&self) -> bool {
        *self == Self { stuck: self.stuck, refused: self.refused, ..Self::default() }
    }
}

impl Runner {
    /// Starts the threads. Errors: a thread cannot be started.
    pub fn start(tiers: Arc<Tiers>) -> Result<Self> {
        Self::start_with(tiers, Duties::All)
    }

    /// The same with fewer duties.
    pub fn start_with(tiers: Arc<Tiers>, duties: Duties) -> Result<Self> {
        Self::start_for(tiers, duties, Reach::All)
    }

    /// The same for some of what there is.
    pub fn start_for(tiers: Arc<Tiers>, duties: Duties, reach: Reach) -> Result<Self> {
        tiers.tiers.iter().for_each(|tier| tier.limits.reopen());
        let shared = Arc::new(Shared::new(tiers, duties, reach));
        let scribe = Mutex::default();
        let runner = Self { shared: Arc::clone(&shared), threads: Mutex::default(), scribe };
        if shared.journal.is_kept() {
            let of = Arc::clone(&shared);
            let scribe = spawn("tier-log", move || journal::run(&of))?;
            *runner.scribe.lock().unwrap_or_else(PoisonError::into_inner) = Some(scribe);
        }
        for number in 0..shared.tiers.count() {
            let of = Arc::clone(&shared);
            runner.spawn(&format!("tier-look-{number}"), move || watch::run(&of, number))?;
        }
        if duties > Duties::Look {
            let of = Arc::clone(&shared);
            runner.spawn("tier-plan", move || plan::run(&of))?;
        }
        Ok(runner)
    }

    fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = spawn(name, run)?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// Does it for something else from now on. What is under way goes on.
    pub fn set_reach(&self, reach: Reach) {
        self.shared.change(|state| state.reach = reach);
    }

    /// The tiers.
    pub fn tiers(&self) -> &Arc<Tiers> {
        &self.shared.tiers
    }

    /// How everything stands. Asks no store: it is what was seen last.
    pub fn status(&self) -> Status {
        show::status(&self.shared)
    }

    /// Something was saved: look now.
    pub fn wake(&self) {
        act::wake(&self.shared);
    }

    /// Does what somebody asks for, who is named in the audit log. Pins, holds and promotions ask the stores, and a
    /// promotion takes as long as a copy does.
    ///
    /// Errors: `usage` for names of tiers that are none, and what is no name; `not_found` for a step that no tier has,
    /// a pin or hold that is none; those of the stores where nothing could be done.
    pub fn act(&self, action: &Action, who: &str) -> Result<Outcome> {
        act::act(&self.shared, action, who)
    }

    /// Waits until a save of so many bytes has room, at most `patience`, and says where it goes: tier 0, or where the
    /// configuration says so and tier 0 is full, a later one, or nowhere. Room is made as far as the rules allow. It is
    /// not kept: who saves next asks next. Where a save without room is left out, only the first look is waited for.
    ///
    /// Errors: `no_space` where no tier can ever hold it; `timeout`; `cancelled` when the runner stops.
    pub fn admit(&self, bytes: u64, patience: Duration) -> Result<Admitted> {
        admit::admit(&self.shared, Some(bytes), patience, |task| self.begin(task))
    }

    /// The same for a save as large as the newest step that was seen on any tier; none needs no room.
    pub fn admit_next(&self, patience: Duration) -> Result<Admitted> {
        admit::admit(&self.shared, None, patience, |task| self.begin(task))
    }

    /// Removes something, while others go on.
    fn begin(&self, task: tidy::Task) {
        let thread = plan::begin_tidy(&self.shared, task);
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        threads.extend(thread);
    }

    /// Bytes that the first tier has room for, as of the last look; `None` where that is not known to be limited.
    pub fn room(&self) -> Option<u64> {
        let state = self.shared.lock();
        self.shared.picture(&state).room(0)
    }

    /// Notes in the audit log what others did with its tiers.
    pub fn note(&self, event: Event) {
        self.shared.log(event);
    }

    /// What is not done yet, as of the last look at each tier.
    pub fn pending(&self) -> Pending {
        let state = self.shared.lock();
        let picture = self.shared.picture_of_all(&state);
        let moving = state.moving.len();
        let under_way = |step: u64| state.moving.iter().any(|moving| moving.order.step == step);
        // What is on the drives of nodes and off the line may never be whole: a node of it may be gone.
        let partial = |tier: usize| picture.view.tiers.get(tier).is_some_and(|tier| tier.partial);
        let is_given_up =
            |order: &Order| picture.off_line.contains(&order.step) && partial(order.from);
        let mut wanted = picture.wanted();
        let unfit = |order: &Order| state.tiers.get(order.to).is_some_and(|tier| tier.unfit);
        let (refused, later): (Vec<_>, Vec<_>) = picture.refused().into_iter().partition(unfit);
        wanted.extend(later);
        wanted.retain(|order| !is_given_up(order));
        // Who looks after the rest waits for the drives too.
        let own_only = state.reach == Reach::OwnDrive;
        wanted.retain(|order| !own_only || partial(order.from));
        let tiers = (0..state.tiers.len()).filter(|tier| !own_only || partial(*tier));
        let removable = tiers.flat_map(|tier| {
            let steps = plan::removable(&state, &picture, tier);
            steps.into_iter().map(move |step| (step, tier))
        });
        let fails = |at: &(u64, usize)| state.tidies.get(at).map_or(0, |retry| retry.fails);
        let (stuck, removable): (Vec<_>, Vec<_>) =
            removable.partition(|at| fails(at) >= STUCK_AFTER);
        let name = |(number, _): (usize, &state::TierState)| {
            self.shared.tiers.tiers.get(number).map(|tier| tier.config.name.clone())
        };
        let under_removal = state.tiers.iter().map(|tier| tier.removing.len()).sum::<usize>();
        let unseen = state.tiers.iter().enumerate().filter(|(_, tier)| !tier.is_seen());
        Pending {
            moving,
            waiting: wanted.iter().filter(|order| !under_way(order.step)).count(),
            removing: under_removal + removable.len(),
            stuck: stuck.len(),
            refused: refused.len(),
            unseen: unseen.filter_map(name).collect(),
        }
    }

    /// Waits until every tier was looked at after this call, or does not answer; at most that long. Whether it was.
    pub fn look(&self, patience: Duration) -> bool {
        let owed: Vec<u64> = self.shared.change(|state| {
            state.tiers.iter_mut().for_each(|tier| tier.look_again([]));
            state.tiers.iter().map(|tier| tier.owed).collect()
        });
        let until = Instant::now() + patience;
        let mut state = self.shared.lock();
        loop {
            // A look that was under way began before the call, and is none of these.
            let fresh = state.tiers.iter().zip(&owed).all(|(tier, owed)| tier.looked >= *owed);
            let now = Instant::now();
            if fresh || now >= until || self.shared.is_stopping() {
                return fresh;
            }
            state = self.shared.wait(state, until - now);
        }
    }

    /// Ends transfers within one part, and joins the threads. One that hangs in a call of a store is left behind: it
    /// ends when the call does.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.tiers.tiers.iter().for_each(|tier| tier.limits.close());
        self.shared.wake_all();
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        let until = Instant::now() + JOIN_WAIT;
        threads.into_iter().for_each(|thread| join(thread, until));
        self.shared.journal.close();
        let scribe = self.scribe.lock().unwrap_or_else(PoisonError::into_inner).take();
        let until = until.max(Instant::now() + SCRIBE_WAIT);
        scribe.into_iter().for_each(|thread| join(thread, until));
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    thread.map_err(|error| Error::io("cannot start a thread", error))
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Waits for a thread, unless it hangs.
fn join(thread: JoinHandle<()>, until: Instant) {
    while !thread.is_finished() {
        if Instant::now() >= until {
            let name = thread.thread().name().unwrap_or_default();
            tracing::warn!(name, "a thread hangs in a call of a store and is left behind");
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    if thread.join().is_err() {
        tracing::error!("a thread between tiers has panicked");
    }
}
