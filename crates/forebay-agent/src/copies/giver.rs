//! The thread that sends copies: of every step that is in no one place yet, the newest first, this node's own files to
//! as many others as are wanted.
//!
//! A copy that is there counts wherever it is, so a ring that changes moves nothing. A buddy that fails is asked again
//! after a second, two, ... a minute; one that is full or has failed four times in a row is passed over, and the next
//! in the ring gets its copies. After each file everything is looked at anew: a newer step waits for one file at most.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_error::{Code, Error, Result};
use forebay_tier::copies::{DriveId, Giving, Peer, be_modest, buddies};
use forebay_tier::limits::Priority;
use forebay_tier::status::{CopyState, Status};

use super::client::{ASK_TIME, Client, Failed, Sending};
use super::drive::{Drive, KnownStep, Opened};
use super::rest::Rest;

/// Between two looks where there is nothing to do.
const LOOK: Duration = Duration::from_secs(1);

/// Until the drive is stopped.
pub(super) fn run(drive: &Arc<Drive>, client: Client) {
    let drive_of = Arc::clone(drive);
    let (steps, rests, unread) = Default::default();
    let mut giver = Giver { drive: drive_of, client, steps, rests, unread };
    while !drive.is_stopping() {
        match giver.pass() {
            Ok(true) => {}
            Ok(false) => drive.pause(LOOK),
            Err(error) => {
                drive.own_trouble(&error);
                drive.pause(LOOK);
            }
        }
    }
}

struct Giver {
    drive: Arc<Drive>,
    client: Client,
    /// Steps that were looked at.
    steps: BTreeMap<u64, Arc<Giving>>,
    /// Of those that failed.
    rests: BTreeMap<DriveId, Rest>,
    /// Of steps that could not be read here.
    unread: BTreeMap<u64, Rest>,
}

/// What came of one look at a buddy.
enum Gave {
    /// It has all.
    All,
    /// It got a file, and may lack others.
    One,
    /// The step is in one place.
    NotNeeded,
}

impl Giver {
    /// Sends one file, if there is one to be sent; whether there was.
    fn pass(&mut self) -> Result<bool> {
        let opened = self.drive.opened()?;
        let status = self.drive.runner.status();
        let steps = wanted(&status);
        self.forget(&steps);
        if opened.side.limits.is_paused() {
            return Ok(false);
        }
        let peers = self.drive.known().peers.clone();
        let living: Vec<Peer> = peers.into_iter().filter(Peer::is_alive).collect();
        let ring = buddies(&living, opened.id, self.drive.jump);
        for (number, (step, attempt)) in steps.iter().enumerate() {
            let now = Instant::now();
            if self.unread.get(step).is_some_and(|rest| !rest.is_due(now)) {
                continue;
            }
            let priority = if number == 0 { Priority::Newest } else { Priority::Archive };
            let giving = self.giving(&opened, *step, attempt);
            let given =
                giving.and_then(|giving| self.give(&opened, *step, &giving, &ring, priority));
            match given {
                Ok(true) => return Ok(true),
                Ok(false) => drop(self.unread.remove(step)),
                Err(error) if error.code() == Code::Cancelled => return Err(error),
                // It was removed a moment ago.
                Err(error) if error.code() == Code::NotCommitted => {}
                Err(error) => {
                    self.drive.own_trouble(&error);
                    self.unread.entry(*step).or_default().fail(now, &error);
                }
            }
        }
        Ok(false)
    }

    /// What is not to be copied any more needs no memory.
    fn forget(&mut self, steps: &[(u64, String)]) {
        let attempt = |step: u64| steps.iter().find(|(s, _)| *s == step).map(|(_, a)| a.as_str());
        self.unread.retain(|step, _| attempt(*step).is_some());
        self.steps.retain(|step, giving| attempt(*step) == Some(&giving.attempt().to_string()));
        let mut known = self.drive.known();
        known.steps.retain(|step, known| attempt(*step) == Some(&known.attempt));
        let is_known = |drive: &DriveId| known.peers.iter().any(|peer| peer.drive == *drive);
        self.rests.retain(|drive, _| is_known(drive));
    }

    fn giving(&mut self, opened: &Opened, step: u64, attempt: &str) -> Result<Arc<Giving>> {
        if let Some(giving) = self.steps.get(&step) {
            return Ok(Arc::clone(giving));
        }
        let giving = Arc::new(Giving::of(&opened.side.root, step)?);
        if giving.attempt().to_string() != attempt {
            let what = format!("step {step} was replaced");
            return Err(Error::new(Code::NotCommitted, what));
        }
        let bytes = giving.own().iter().map(|file| file.bytes).sum();
        let own = Some((giving.own().len() as u64, bytes));
        let known = KnownStep { attempt: attempt.to_owned(), own, ..KnownStep::default() };
        self.drive.known().steps.insert(step, known);
        self.steps.insert(step, Arc::clone(&giving));
        Ok(giving)
    }

    /// Sends one file of a step, if some buddy lacks one.
    fn give(
        &mut self,
        opened: &Opened,
        step: u64,
        giving: &Giving,
        ring: &[Peer],
        priority: Priority,
    ) -> Result<bool> {
        if giving.own().is_empty() {
            return Ok(false);
        }
        let on = self.drive.known().steps.get(&step).map(|known| known.on.clone());
        let on = on.unwrap_or_default();
        let holders = ring.iter().filter(|peer| on.contains(&peer.drive)).count();
        let mut left = self.drive.copies.saturating_sub(holders);
        for peer in ring.iter().filter(|peer| !on.contains(&peer.drive)) {
            if left == 0 || self.drive.is_stopping() {
                break;
            }
            let now = Instant::now();
            if let Some(rest) = self.rests.get(&peer.drive).filter(|rest| !rest.is_due(now)) {
                left -= usize::from(!rest.is_given_up());
                continue;
            }
            match self.give_to(opened, step, giving, peer, priority) {
                Ok(Gave::One) => return Ok(true),
                Ok(Gave::NotNeeded) => return Ok(false),
                Ok(Gave::All) => {
                    self.has_all(opened, step, giving, peer);
                    left -= 1;
                }
                Err(Failed::Here(error)) => return Err(error),
                Err(Failed::There(error)) => {
                    self.drive.trouble(peer.drive, &error);
                    let rest = self.rests.entry(peer.drive).or_default();
                    rest.fail(now, &error);
                    left -= usize::from(!rest.is_given_up());
                }
            }
        }
        Ok(false)
    }

    fn give_to(
        &self,
        opened: &Opened,
        step: u64,
        giving: &Giving,
        peer: &Peer,
        priority: Priority,
    ) -> std::result::Result<Gave, Failed> {
        let there = self.client.files(peer, step, ASK_TIME).map_err(Failed::There)?;
        if there.landed {
            return Ok(Gave::NotNeeded);
        }
        let Some(file) = giving.own().iter().find(|file| !there.has(&file.name)) else {
            return Ok(Gave::All);
        };
        if there.busy || there.room.is_some_and(|room| room < file.bytes) {
            let (code, what) = match there.busy {
                true => (Code::Timeout, "it takes as many copies as it can, or is paused"),
                false => (Code::NoSpace, "there is no room for a copy"),
            };
            return Err(Failed::There(Error::new(code, what).at(peer.told.url.clone())));
        }
        let moving = &self.drive.runner.tiers().config().moving;
        let (part_bytes, io_priority) = (moving.part_bytes, moving.io_priority);
        let sending = Sending { to: peer, step, file, own: opened.id };
        let is_stopping = || self.drive.is_stopping();
        self.client.send(&sending, &is_stopping, |each| {
            be_modest(io_priority);
            giving.read(&opened.side, file, part_bytes, priority, each)
        })?;
        self.drive.known().sent += file.bytes;
        Ok(Gave::One)
    }

    fn has_all(&mut self, opened: &Opened, step: u64, giving: &Giving, peer: &Peer) {
        self.rests.remove(&peer.drive);
        let is_new = {
            let mut known = self.drive.known();
            known.errors.remove(&peer.drive);
            known.steps.get_mut(&step).is_some_and(|known| known.on.insert(peer.drive))
        };
        if is_new {
            tracing::info!(job = self.drive.job, step, host = peer.told.host, "copied");
            let (from, to) = (opened.side.root.store.name(), peer.told.url.clone());
            self.drive.log("copy", step, &giving.attempt().to_string(), from, to);
        }
    }
}

/// Steps on the drives of nodes that are in no one place, the newest first, with their attempts.
fn wanted(status: &Status) -> Vec<(u64, String)> {
    let landed = Drive::landed(status);
    let on_nodes = status
        .steps
        .iter()
        .rev()
        .filter(|step| step.copies.first().is_some_and(|copy| *copy == CopyState::OnNodes));
    let wanted = on_nodes.map(|step| (step.step, step.attempt.clone()));
    wanted.filter(|step| !landed.contains(step)).collect()
}
