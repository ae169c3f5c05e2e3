//! The thread that keeps a drive's part of the ring: it says that the drive is there, looks who else is, and removes
//! copies that nobody needs any more.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use forebay_error::Result;
use forebay_tier::copies::{Announcement, DriveId, Mark, Peers, announce, mark_lacking};

use super::client::{ASK_TIME, Client};
use super::drive::Drive;

/// How often the others are looked for, as long as there are none. Else it is as often as they say that they are there.
const PEERS_EVERY: Duration = Duration::from_secs(5);
/// Looks at the others after which all that they say is read anew.
const ANEW_EVERY: u64 = 20;
/// How often copies are looked through.
const TIDY_EVERY: Duration = Duration::from_secs(2);
/// How often owners are asked whether they have what is copied here, and how old a copy is then at least: as long as it
/// is younger its owner is at work.
const ASK_EVERY: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 60 });
/// After something failed.
const AGAIN: Duration = Duration::from_secs(5);
/// Longest sleep.
const LOOK: Duration = Duration::from_millis(500);

/// Until the drive is stopped.
pub(super) fn run(drive: &Drive, client: &Client) {
    let now = Instant::now();
    let (mut tell, mut see, mut clean) = (now, now, now);
    let (mut all, mut looks) = (Peers::default(), 0);
    let mut asking = Asking { held: Vec::new(), left: VecDeque::new(), next: now + ASK_EVERY };
    while !drive.is_stopping() {
        due(drive, &mut tell, drive.gone / 4, || say(drive));
        let every = match drive.known().peers.len() {
            0 | 1 => PEERS_EVERY.min(drive.gone / 4),
            _ => drive.gone / 4,
        };
        due(drive, &mut see, every, || {
            looks += 1;
            look(drive, &mut all, looks % ANEW_EVERY == 0)
        });
        due(drive, &mut clean, TIDY_EVERY, || clean_up(drive).map(|marks| asking.held = marks));
        asking.go_on(drive, client);
        drive.pause(LOOK);
    }
}

/// Does something whose time has come, and says when it comes again.
fn due(drive: &Drive, at: &mut Instant, every: Duration, what: impl FnOnce() -> Result<()>) {
    if Instant::now() < *at || drive.is_stopping() {
        return;
    }
    let done = what();
    *at = Instant::now() + if done.is_ok() { every } else { AGAIN };
    if let Err(error) = done {
        drive.own_trouble(&error);
    }
}

fn say(drive: &Drive) -> Result<()> {
    let opened = drive.opened()?;
    let told = Announcement {
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        job: drive.job.clone(),
        url: drive.url.clone(),
        gone_seconds: drive.gone.as_secs(),
    };
    announce(&opened.side.root, opened.id, &told)?;
    drive.known().own_error = None;
    Ok(())
}

/// `anew`: whatever is known. What is said of those with whom something is wrong is always read.
fn look(drive: &Drive, all: &mut Peers, anew: bool) -> Result<()> {
    if anew {
        *all = Peers::default();
    }
    let doubted = drive.known().errors.keys().copied().collect();
    let found = all.look(&drive.opened()?.side.root, &doubted)?;
    let mut known = drive.known();
    known.errors.retain(|id, _| found.iter().any(|peer| peer.drive == *id));
    known.peers = found;
    Ok(())
}

fn clean_up(drive: &Drive) -> Result<Vec<Mark>> {
    let opened = drive.opened()?;
    let status = drive.runner.status();
    let grace = drive.runner.tiers().config().moving.grace;
    opened.receiver.collect(grace)?;
    let tidied = opened.receiver.tidy(&Drive::landed(&status))?;
    if let Some(error) = &tidied.trouble {
        drive.own_trouble(error);
    }
    let mut held: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for (mark, bytes) in &tidied.held {
        let (files, all) = held.entry(mark.step).or_default();
        (*files, *all) = (*files + 1, *all + bytes);
    }
    drive.known().held = held;
    if !tidied.removed.is_empty() {
        tracing::info!(job = drive.job, files = tidied.removed.len(), "copies were removed");
    }
    Ok(tidied.held.into_iter().map(|(mark, _)| mark).collect())
}

/// Asks owners that are alive whether they still have what is copied here. What one has not is this node's to bring.
///
/// One question a turn, and none that takes longer than the time between two announcements: many owners that do not
/// answer must not make this drive look as if it were gone.
struct Asking {
    /// Copies, as of the last look.
    held: Vec<Mark>,
    /// Owners and steps of which is to be asked in this round.
    left: VecDeque<(DriveId, u64)>,
    /// When the next round begins.
    next: Instant,
}

impl Asking {
    fn go_on(&mut self, drive: &Drive, client: &Client) {
        if self.left.is_empty() && Instant::now() >= self.next {
            self.next = Instant::now() + ASK_EVERY;
            let mut all: Vec<_> = self.old().map(|mark| (mark.of, mark.step)).collect();
            all.sort_unstable();
            all.dedup();
            self.left = all.into();
        }
        let Some((owner, step)) = self.left.pop_front().filter(|_| !drive.is_stopping()) else {
            return;
        };
        if let Err(error) = self.ask(drive, client, owner, step) {
            drive.trouble(owner, &error);
        }
    }

    fn old(&self) -> impl Iterator<Item = &Mark> {
        self.held.iter().filter(|mark| !mark.lacking && mark.age >= ASK_EVERY)
    }

    fn ask(&self, drive: &Drive, client: &Client, owner: DriveId, step: u64) -> Result<()> {
        let peer = drive.known().peers.iter().find(|peer| peer.drive == owner).cloned();
        let Some(peer) = peer.filter(|peer| peer.is_alive()) else { return Ok(()) };
        let there = client.files(&peer, step, ASK_TIME.min(drive.gone / 4))?;
        let of_it = self.old().filter(|mark| mark.of == owner && mark.step == step);
        for mark in of_it.filter(|mark| !there.has(&mark.name) && !there.landed) {
            mark_lacking(&drive.opened()?.side.root, mark)?;
        }
        Ok(())
    }
}
