//! One client: counts its steps, asks the plan, and is dead when it was killed.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_error::{Code, Error, Result};

use super::plan::{Action, Fault, Plan, Step, When};

/// Most steps that are remembered; more are counted only.
const LOG_MAX: usize = 1 << 20;

pub(super) struct Client {
    state: Mutex<State>,
}

struct State {
    plan: Plan,
    next: u64,
    fired: u64,
    /// The step at which it was killed.
    killed: Option<u64>,
    log: Vec<Step>,
}

/// What a step does when it does not fail at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Go {
    Whole,
    /// Half of it, successfully.
    Short,
    /// Half of it, then EIO.
    Torn,
    /// All of it, then ETIMEDOUT.
    LoseReply,
    /// All of it, then `not_durable`.
    NotDurable,
}

/// Why a call fails.
#[derive(Debug)]
pub(super) struct Refusal {
    what: String,
    errno: i32,
}

impl Refusal {
    /// With the kind of its errno, and the text, which names step and seed.
    pub(super) fn into_io(self) -> io::Error {
        io::Error::new(io::Error::from_raw_os_error(self.errno).kind(), self.what)
    }

    /// Its number alone, for what knows no more.
    pub(super) fn errno(&self) -> i32 {
        self.errno
    }

    pub(super) fn not_durable(self, place: &str) -> Error {
        Error::new(Code::NotDurable, self.what).at(place)
    }

    pub(super) fn into_error(self, place: &str) -> Error {
        Error::io(self.what, io::Error::from_raw_os_error(self.errno)).at(place)
    }
}

impl Client {
    pub(super) fn new(plan: Plan) -> Self {
        let state = State { plan, next: 0, fired: 0, killed: None, log: Vec::new() };
        Self { state: Mutex::new(state) }
    }

    /// Counts a step, and says how it ends.
    pub(super) fn step(&self, action: Action, when: When, key: &str) -> Result<Go, Refusal> {
        let fault = self.locked().count(action, when, key)?;
        let Some((fault, index)) = fault else { return Ok(Go::Whole) };
        let place = || self.describe(index, action, when, key);
        let fail = |errno| Err(Refusal { what: format!("injected fault {}", place()), errno });
        match fault {
            Fault::Errno(errno) => fail(errno),
            Fault::Torn if action.writes() && when == When::Before => Ok(Go::Torn),
            Fault::Torn => fail(libc::EIO),
            Fault::Short => Ok(Go::Short),
            Fault::LostReply if when == When::Before => Ok(Go::LoseReply),
            Fault::LostReply => fail(libc::ETIMEDOUT),
            Fault::NotDurable => Ok(Go::NotDurable),
            Fault::Slow(time) => {
                std::thread::sleep(time);
                Ok(Go::Whole)
            }
            Fault::Kill => {
                self.locked().killed = Some(index);
                self.alive().map(|()| Go::Whole)
            }
        }
    }

    /// Fails if the client was killed.
    pub(super) fn alive(&self) -> Result<(), Refusal> {
        self.locked().alive()
    }

    /// The error of a step whose effect happened only in part, or without the caller's hearing of it.
    pub(super) fn refusal(&self, errno: i32, action: Action, key: &str) -> Refusal {
        let index = self.locked().next.saturating_sub(1);
        let what = format!("injected fault {}", self.describe(index, action, When::Before, key));
        Refusal { what, errno }
    }

    pub(super) fn kill(&self) {
        let mut state = self.locked();
        state.killed = Some(state.next);
    }

    pub(super) fn killed(&self) -> bool {
        self.locked().killed.is_some()
    }

    pub(super) fn steps(&self) -> u64 {
        self.locked().next
    }

    pub(super) fn fired(&self) -> u64 {
        self.locked().fired
    }

    pub(super) fn log(&self) -> Vec<Step> {
        self.locked().log.clone()
    }

    fn describe(&self, index: u64, action: Action, when: When, key: &str) -> String {
        let seed = self.locked().seed_text();
        format!("at step {index} ({when:?} {action:?} of `{key}`{seed})")
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn alive(&self) -> Result<(), Refusal> {
        let Some(step) = self.killed else { return Ok(()) };
        let what = format!("{} at step {step}{}", super::KILLED, self.seed_text());
        Err(Refusal { what, errno: libc::EIO })
    }

    fn seed_text(&self) -> String {
        self.plan.seed().map(|seed| format!(", seed {seed}")).unwrap_or_default()
    }

    fn count(
        &mut self,
        action: Action,
        when: When,
        key: &str,
    ) -> Result<Option<(Fault, u64)>, Refusal> {
        self.alive()?;
        let index = self.next;
        self.next += 1;
        if self.log.len() < LOG_MAX {
            self.log.push(Step { index, action, when, key: key.to_owned() });
        }
        let fault = self.plan.fault(index, action, when);
        self.fired += u64::from(fault.is_some());
        Ok(fault.map(|fault| (fault, index)))
    }
}
