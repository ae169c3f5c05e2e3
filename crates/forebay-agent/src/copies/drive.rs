//! A job's drive on this node, as far as copies go: what is known, and the threads that see to it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_error::{Code, Error, Result};
use forebay_tier::audit_log::Event;
use forebay_tier::copies::{DriveId, Peer, Receiver, drive_id, withdraw};
use forebay_tier::hop::Side;
use forebay_tier::runner::Runner;
use forebay_tier::status::{CopiesStatus, CopyNode, CopyState, CopyStep, Status};
use serde_json::Value;

use super::client::Client;
use super::{CopySettings, PeerSettings, giver, keeper};
use crate::work::Work;

/// How long an end waits for threads that are in the middle of a call of a store.
const JOIN_WAIT: Duration = Duration::from_secs(10);

/// See the module.
pub(crate) struct Drive {
    pub(super) job: String,
    pub(super) runner: Arc<Runner>,
    pub(super) copies: usize,
    pub(super) jump: u64,
    pub(super) gone: Duration,
    /// Where others reach this agent.
    pub(super) url: String,
    /// Bytes of copies that are coming.
    pub(super) coming: AtomicU64,
    opened: Mutex<Option<Arc<Opened>>>,
    known: Mutex<Known>,
    stop: AtomicBool,
    changed: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The drive, once it could be read.
pub(super) struct Opened {
    pub(super) side: Side,
    pub(super) id: DriveId,
    pub(super) receiver: Receiver,
}

/// What is known of copies.
#[derive(Default)]
pub(super) struct Known {
    /// All drives that were announced, this one too.
    pub(super) peers: Vec<Peer>,
    /// By step: steps that are in no one place yet, and of which this node has files.
    pub(super) steps: BTreeMap<u64, KnownStep>,
    /// What went wrong last with each of the others.
    pub(super) errors: BTreeMap<DriveId, String>,
    /// What went wrong last with this drive itself.
    pub(super) own_error: Option<String>,
    /// Copies of others' files here, by step: how many, and their bytes.
    pub(super) held: BTreeMap<u64, (u64, u64)>,
    /// Bytes.
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) failures: u64,
    /// Rises when something is to be looked at.
    wakes: u64,
}

/// A step that is to be copied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KnownStep {
    pub(super) attempt: String,
    /// Files of this node's own, and their bytes; `None` before they were looked at.
    pub(super) own: Option<(u64, u64)>,
    /// Drives that have all of them.
    pub(super) on: BTreeSet<DriveId>,
}

impl Drive {
    pub(super) fn start(
        job: &str,
        runner: Arc<Runner>,
        settings: &CopySettings,
        peer: &PeerSettings,
        (url, is_plain): &(String, bool),
    ) -> Result<Arc<Self>> {
        let drive = Arc::new(Self {
            job: job.to_owned(),
            runner,
            copies: settings.copies,
            jump: settings.jump,
            gone: settings.gone,
            url: url.clone(),
            coming: AtomicU64::new(0),
            opened: Mutex::default(),
            known: Mutex::default(),
            stop: AtomicBool::new(false),
            changed: Condvar::new(),
            threads: Mutex::default(),
        });
        let (keeping, giving) = (Client::new(peer, *is_plain)?, Client::new(peer, *is_plain)?);
        let of = Arc::clone(&drive);
        drive.spawn("copies-keep", move || keeper::run(&of, &keeping))?;
        if settings.copies > 0 {
            let of = Arc::clone(&drive);
            drive.spawn("copies-give", move || giver::run(&of, giving))?;
        }
        Ok(drive)
    }

    fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
        let thread = thread.map_err(|error| Error::io("cannot start a thread", error))?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// Ends its threads. What waits at the limits of its tier ends too: the runner is about to be stopped.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake_threads();
        if let Ok(side) = self.runner.tiers().side(0) {
            side.limits.close();
        }
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        let until = Instant::now() + JOIN_WAIT;
        for thread in threads {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(2));
            }
            if !thread.is_finished() {
                tracing::warn!(job = self.job, "a thread of copies hangs and is left behind");
            } else if thread.join().is_err() {
                tracing::error!(job = self.job, "a thread of copies has panicked");
            }
        }
    }

    /// Nothing is to be expected of it any more.
    pub(super) fn withdraw(&self) {
        let withdrawn = self.opened().and_then(|opened| withdraw(&opened.side.root, opened.id));
        if let Err(error) = withdrawn {
            self.own_trouble(&error);
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn wake_threads(&self) {
        self.known().wakes += 1;
        self.changed.notify_all();
    }

    /// Waits that long, or until something has changed, or the end.
    pub(super) fn pause(&self, time: Duration) {
        let known = self.known();
        let wakes = known.wakes;
        let same = |known: &mut Known| known.wakes == wakes && !self.is_stopping();
        let waited = self.changed.wait_timeout_while(known, time, same);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The drive. Errors: it cannot be read now.
    pub(super) fn opened(&self) -> Result<Arc<Opened>> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(opened) = opened.as_ref() {
            return Ok(Arc::clone(opened));
        }
        let tiers = self.runner.tiers();
        let side = tiers.side(0)?;
        let id = drive_id(&side.root)?;
        let receiver = Receiver::new(side.clone(), tiers.config().moving.part_bytes);
        let new = Arc::new(Opened { side, id, receiver });
        *opened = Some(Arc::clone(&new));
        Ok(new)
    }

    /// Steps that are in one place, with their attempts.
    pub(super) fn landed(status: &Status) -> BTreeSet<(u64, String)> {
        let is_landed =
            |copies: &[CopyState]| copies.iter().skip(1).any(|copy| *copy == CopyState::Committed);
        let landed = status.steps.iter().filter(|step| is_landed(&step.copies));
        landed.map(|step| (step.step, step.attempt.clone())).collect()
    }

    /// Notes a copy in the audit log.
    pub(super) fn log(&self, what: &str, step: u64, attempt: &str, from: String, to: String) {
        self.runner.note(Event {
            who: self.runner.tiers().who().to_owned(),
            what: what.to_owned(),
            origin: "copies".to_owned(),
            step: Some(step),
            attempt: Some(attempt.to_owned()),
            from: Some(from),
            to: Some(to),
            ..Event::default()
        });
    }

    fn copies_status(&self) -> CopiesStatus {
        let own = self.opened().ok().map(|opened| opened.id);
        let known = self.known();
        let host = |drive: &DriveId| {
            let peer = known.peers.iter().find(|peer| peer.drive == *drive);
            peer.map_or_else(|| drive.to_string(), |peer| peer.told.host.clone())
        };
        let steps = known.steps.iter().filter_map(|(step, known)| {
            let (files, bytes) = known.own.filter(|(files, _)| *files > 0)?;
            Some(CopyStep { step: *step, files, bytes, on: known.on.iter().map(host).collect() })
        });
        let others = known.peers.iter().filter(|peer| Some(peer.drive) != own);
        let nodes = others.map(|peer| CopyNode {
            host: peer.told.host.clone(),
            drive: peer.drive.to_string(),
            url: peer.told.url.clone(),
            is_alive: peer.is_alive(),
            error: known.errors.get(&peer.drive).cloned(),
        });
        CopiesStatus {
            drive: own.map(|own| own.to_string()).unwrap_or_default(),
            wanted: self.copies as u64,
            steps: steps.collect(),
            nodes: nodes.collect(),
            held_files: known.held.values().map(|(files, _)| files).sum(),
            held_bytes: known.held.values().map(|(_, bytes)| bytes).sum(),
            sent_bytes: known.sent,
            received_bytes: known.received,
            failures: known.failures,
            error: known.own_error.clone(),
        }
    }
}

impl Work for Drive {
    fn status(&self) -> Status {
        let mut status = Work::status(&*self.runner);
        let copied: BTreeMap<u64, String> = {
            let known = self.known();
            let done = known.steps.iter().filter(|(_, step)| {
                step.own.is_some_and(|own| own.0 > 0) && step.on.len() >= self.copies
            });
            done.map(|(step, known)| (*step, known.attempt.clone())).collect()
        };
        for step in status.steps.iter_mut().filter(|_| self.copies > 0) {
            if let Some(copy) = step.copies.first_mut()
                && *copy == CopyState::OnNodes
                && copied.get(&step.step) == Some(&step.attempt)
            {
                *copy = CopyState::Copied;
            }
        }
        status.copies = Some(self.copies_status());
        status
    }

    fn wake(&self) {
        Work::wake(&*self.runner);
        self.wake_threads();
    }

    fn act(&self, action: &Value, who: &str) -> Result<Value> {
        Work::act(&*self.runner, action, who)
    }
}

impl Drive {
    /// Notes what went wrong with this drive itself. The end is nothing that went wrong.
    pub(super) fn own_trouble(&self, error: &Error) {
        if error.code() == Code::Cancelled {
            return;
        }
        let text = error.to_string();
        let told = self.known().own_error.replace(text.clone());
        if told.as_ref() != Some(&text) {
            tracing::warn!(job = self.job, %error, "trouble with copies");
        }
    }

    /// Notes what went wrong with another.
    pub(super) fn trouble(&self, with: DriveId, error: &Error) {
        let text = error.to_string();
        let mut known = self.known();
        known.failures += 1;
        let told = known.errors.insert(with, text.clone());
        drop(known);
        if told.as_ref() != Some(&text) {
            tracing::warn!(job = self.job, drive = %with, %error, "trouble with a buddy");
        }
    }
}
