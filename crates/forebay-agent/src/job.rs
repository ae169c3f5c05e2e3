//! The jobs that an agent works for, and what is remembered of each between two looks: the last answer, a few minutes
//! of rates, how many errors there were.
//!
//! Pages, metrics and terminals ask often and at once. An answer is used for [`FRESH`], and who asks meanwhile waits
//! for the one that is on its way, so that many viewers cost what one does.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_error::{Code, Error, Result};
use forebay_tier::status::Status;
use serde_json::Value;

use crate::work::Work;

/// The job that is configured, as opposed to those that clients hand over.
pub(crate) const CONFIGURED: &str = "default";

/// Most jobs of an agent.
pub(crate) const JOBS_MAX: usize = 64;

/// How long an answer is good.
const FRESH: Duration = Duration::from_millis(250);

/// Rates that are remembered: five minutes, one every [`SAMPLE_EVERY`].
pub(crate) const SAMPLES_MAX: usize = 150;

/// See there.
pub(crate) const SAMPLE_EVERY: Duration = Duration::from_secs(2);

/// Codes of errors that are counted each; there are about fifty.
const CODES_MAX: usize = 200;

/// One job.
pub(crate) struct Job {
    name: String,
    work: Arc<dyn Work>,
    last: Mutex<Option<(Instant, Arc<Status>)>>,
    memory: Mutex<Memory>,
}

#[derive(Default)]
struct Memory {
    /// For each tier, the oldest first: bytes a second read and written.
    rates: Vec<VecDeque<(f64, f64)>>,
    /// By code.
    errors: BTreeMap<String, u64>,
    /// When the newest counted error was.
    counted_to: f64,
}

impl Job {
    fn new(name: &str, work: Arc<dyn Work>) -> Self {
        let memory = Mutex::new(Memory::default());
        Self { name: name.to_owned(), work, last: Mutex::new(None), memory }
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// How it stands, or stood a quarter of a second ago. May block.
    pub(crate) fn status(&self) -> Arc<Status> {
        let mut last = lock(&self.last);
        if let Some((at, status)) = last.as_ref()
            && at.elapsed() < FRESH
        {
            return Arc::clone(status);
        }
        let status = Arc::new(self.work.status());
        *last = Some((Instant::now(), Arc::clone(&status)));
        status
    }

    /// See [`Work::wake`].
    pub(crate) fn wake(&self) {
        self.work.wake();
    }

    /// The same for those who are not this agent's user: what it could do for itself, and they not, it does not do for
    /// them. A promotion goes to one of the tiers, not to a path.
    ///
    /// Errors: `permission_denied` for a path; those of [`Work::act`].
    pub(crate) fn act_for_others(&self, action: &Value, who: &str) -> Result<Value> {
        if let Some(to) = action.get("to").filter(|to| !to.is_null()) {
            let is_tier = self.status().tiers.iter().any(|tier| to.as_str() == Some(&tier.name));
            if !is_tier {
                let what = "copies go to one of the tiers: a path may be given by the agent's user";
                return Err(Error::new(Code::PermissionDenied, what));
            }
        }
        self.act(action, who)
    }

    /// See [`Work::act`]; who asks next sees what came of it.
    pub(crate) fn act(&self, action: &Value, who: &str) -> Result<Value> {
        let name = action.get("action").and_then(Value::as_str).unwrap_or_default();
        let span = tracing::info_span!("action", job = %self.name, action = %name, who = %who);
        let _entered = span.enter();
        let done = self.work.act(action, who);
        *lock(&self.last) = None;
        match &done {
            // Whose, what and by whom says the span.
            Ok(_) => tracing::info!("done"),
            Err(error) => tracing::warn!(%error, "refused"),
        }
        done
    }

    /// Looks, and remembers.
    pub(crate) fn sample(&self) {
        let status = self.status();
        let mut memory = lock(&self.memory);
        memory.rates.resize_with(status.tiers.len(), VecDeque::new);
        for (rates, tier) in memory.rates.iter_mut().zip(&status.tiers) {
            if rates.len() >= SAMPLES_MAX {
                rates.pop_front();
            }
            rates.push_back((tier.read_rate, tier.write_rate));
        }
        memory.count(&status);
    }

    /// Rates of each tier, the oldest first.
    pub(crate) fn rates(&self) -> Vec<Vec<(f64, f64)>> {
        lock(&self.memory).rates.iter().map(|rates| rates.iter().copied().collect()).collect()
    }

    /// Errors since the start, by code.
    pub(crate) fn errors(&self, status: &Status) -> BTreeMap<String, u64> {
        let mut memory = lock(&self.memory);
        memory.count(status);
        memory.errors.clone()
    }
}

impl Memory {
    /// Counts what is new. Errors of one instant may be told apart by nothing, so those not newer than the newest that
    /// was counted are old.
    fn count(&mut self, status: &Status) {
        let from = self.counted_to;
        for trouble in status.errors.iter().filter(|trouble| trouble.at > from) {
            self.counted_to = self.counted_to.max(trouble.at);
            if self.errors.contains_key(&trouble.code) || self.errors.len() < CODES_MAX {
                *self.errors.entry(trouble.code.clone()).or_default() += 1;
            }
        }
    }
}

/// All jobs of an agent.
#[derive(Default)]
pub(crate) struct Jobs(Mutex<BTreeMap<String, Arc<Job>>>);

impl Jobs {
    /// Adds one. Errors: `already_exists` for a name that is taken, `unsupported` for more than [`JOBS_MAX`].
    pub(crate) fn add(&self, name: &str, work: Arc<dyn Work>) -> Result<Arc<Job>> {
        let mut jobs = lock(&self.0);
        if jobs.contains_key(name) {
            return Err(Error::new(Code::AlreadyExists, "a job of that name is there").at(name));
        }
        if jobs.len() >= JOBS_MAX {
            let what = format!("{JOBS_MAX} jobs are there, no more are taken");
            return Err(Error::new(Code::Unsupported, what).at(name));
        }
        let job = Arc::new(Job::new(name, work));
        jobs.insert(name.to_owned(), Arc::clone(&job));
        Ok(job)
    }

    /// Removes one.
    pub(crate) fn remove(&self, name: &str) -> Option<Arc<Job>> {
        lock(&self.0).remove(name)
    }

    /// All, by name.
    pub(crate) fn all(&self) -> Vec<Arc<Job>> {
        lock(&self.0).values().cloned().collect()
    }

    /// The one of a name; without a name the configured one, or the only one. Errors: `not_found`.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<Arc<Job>> {
        let jobs = lock(&self.0);
        let found = match name {
            Some(name) => jobs.get(name),
            None => jobs.get(CONFIGURED).or_else(|| match jobs.len() {
                1 => jobs.values().next(),
                _ => None,
            }),
        };
        let missing = || {
            let names: Vec<&str> = jobs.keys().map(String::as_str).collect();
            let hint = match names.as_slice() {
                [] => "the agent has no job".to_owned(),
                names => format!("jobs: {}", names.join(", ")),
            };
            Error::new(Code::NotFound, "no such job").at(name.unwrap_or(CONFIGURED)).hint(hint)
        };
        found.cloned().ok_or_else(missing)
    }
}

/// Why an action does not begin.
pub(crate) fn busy() -> Error {
    let what = "as many actions as are taken at a time are under way";
    Error::new(Code::Unsupported, what).hint("try again when one has ended")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Still;
    use forebay_tier::status::{TierStatus, Trouble};

    fn trouble(at: f64, code: &str) -> Trouble {
        Trouble { at, code: code.to_owned(), ..Trouble::default() }
    }

    #[test]
    fn each_error_is_counted_once() {
        let mut memory = Memory::default();
        let mut status = Status { errors: vec![trouble(1.0, "io")], ..Status::default() };
        memory.count(&status);
        memory.count(&status);
        status.errors.extend([trouble(2.0, "io"), trouble(2.0, "timeout")]);
        memory.count(&status);
        let expected = [("io".to_owned(), 2), ("timeout".to_owned(), 1)];
        assert_eq!(memory.errors, BTreeMap::from(expected));
    }

    #[test]
    fn rates_are_remembered_for_a_while() {
        let tiers = vec![TierStatus { write_rate: 5.0, ..TierStatus::default() }];
        let work = Still::new(Status { tiers, ..Status::default() });
        let job = Jobs::default().add("a", work).unwrap();
        for _ in 0..SAMPLES_MAX + 10 {
            job.sample();
        }
        assert_eq!(job.rates(), vec![vec![(0.0, 5.0); SAMPLES_MAX]]);
    }

    #[test]
    fn others_name_tiers_and_no_paths() {
        let work = Still::new(crate::testing::busy());
        let job = Jobs::default().add("a", Arc::clone(&work) as Arc<dyn Work>).unwrap();
        let promote = |to: Value| serde_json::json!({"action": "promote", "step": 1, "to": to});
        for bad in ["/etc", "../x", "", "s3://other/bucket"] {
            let refused = job.act_for_others(&promote(bad.into()), "somebody").unwrap_err();
            assert_eq!(refused.code(), Code::PermissionDenied, "{bad}");
        }
        assert!(job.act_for_others(&promote(serde_json::json!(["x"])), "somebody").is_err());
        for good in [Value::Null, "archive".into()] {
            job.act_for_others(&promote(good), "somebody").unwrap();
        }
        assert_eq!(work.acts.lock().unwrap().len(), 2);
        job.act(&promote("/etc".into()), "the agent's user").unwrap();
    }

    #[test]
    fn jobs_have_names_and_a_limit() {
        let jobs = Jobs::default();
        assert_eq!(jobs.find(None).err().unwrap().code(), Code::NotFound);
        jobs.add("a", Still::new(Status::default())).unwrap();
        assert_eq!(jobs.find(None).unwrap().name(), "a", "the only one");
        let again = jobs.add("a", Still::new(Status::default()));
        assert_eq!(again.err().unwrap().code(), Code::AlreadyExists);
        for number in 1..JOBS_MAX {
            jobs.add(&format!("j{number}"), Still::new(Status::default())).unwrap();
        }
        assert!(jobs.add("more", Still::new(Status::default())).is_err());
        assert!(jobs.find(None).is_err(), "which one?");
        jobs.remove("j1").unwrap();
        jobs.add(CONFIGURED, Still::new(Status::default())).unwrap();
        assert_eq!(jobs.find(None).unwrap().name(), CONFIGURED);
    }
}
