//! A thread for each drive of a node: it looks whether this agent is the one that moves what is beyond the drives of a
//! job ([`forebay_tier::lead`]), and has the job's runner do that, or leave it to another.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_error::{Error, Result};
use forebay_tier::copies::drive_id;
use forebay_tier::lead::Lead;
use forebay_tier::runner::{Reach, Runner};

/// After the records could not be reached.
const AGAIN: Duration = Duration::from_secs(5);

/// The thread. Dropped, it ends, and another agent may lead.
pub(crate) struct Leading {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Stop {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl Leading {
    /// Starts it for a job whose first tier is on the drives of nodes. Errors: no thread.
    pub(crate) fn start(job: &str, runner: &Arc<Runner>) -> Result<Self> {
        let stop = Arc::new(Stop::default());
        let (job, runner, of) = (job.to_owned(), Arc::clone(runner), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("forebay-lead".to_owned());
        let thread = thread.spawn(move || run(&job, &runner, &of));
        let thread = thread.map_err(|error| Error::io("cannot start a thread", error))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Leading {
    fn drop(&mut self) {
        *self.stop.is_set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.changed.notify_all();
        // One that hangs in a store ends when that answers.
        let until = Instant::now() + AGAIN;
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if Instant::now() >= until {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that looks who leads has panicked");
        }
    }
}

impl Stop {
    /// Waits; whether it is the end.
    fn wait(&self, time: Duration) -> bool {
        let is_set = self.is_set.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(is_set, time, |is_set| !*is_set);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

fn run(job: &str, runner: &Runner, stop: &Stop) {
    let mut lead: Option<Lead> = None;
    let mut leads = false;
    loop {
        let looked = look(runner, &mut lead);
        if let Err(error) = &looked {
            tracing::debug!(%error, job, "who leads is not known");
        }
        let now = *looked.as_ref().unwrap_or(&false);
        if now != leads {
            tracing::info!(job, leads = now, "what is beyond the drives of the nodes");
            runner.set_reach(if now { Reach::All } else { Reach::OwnDrive });
            leads = now;
        }
        let every = lead.as_ref().map_or(AGAIN, Lead::every);
        if stop.wait(if looked.is_ok() { every } else { AGAIN.min(every) }) {
            break;
        }
    }
    if let (true, Some(lead), Ok(root)) = (leads, &lead, runner.tiers().root(0))
        && let Err(error) = lead.leave(&root)
    {
        tracing::debug!(%error, job, "others see later that it ends");
    }
}

fn look(runner: &Runner, lead: &mut Option<Lead>) -> Result<bool> {
    let root = runner.tiers().root(0)?;
    let lead = match lead {
        Some(lead) => lead,
        None => {
            let every = runner.tiers().config().moving.look_every;
            lead.insert(Lead::new(drive_id(&root)?, runner.tiers().who(), every))
        }
    };
    lead.look(&root, Instant::now())
}
