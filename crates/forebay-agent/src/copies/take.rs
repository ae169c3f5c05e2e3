//! A copy that comes: what the doors ask of a drive.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use forebay_error::{Code, Error, Result};
use forebay_tier::copies::{Begun, DriveId, be_modest};
use forebay_tier::status::{CopyState, Status};
use tokio::sync::{mpsc, oneshot};

use super::client::{There, ThereFile};
use super::drive::Drive;

/// What came of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answered {
    /// It was there.
    There,
    /// It is there now.
    Taken,
}

impl Drive {
    /// What is here of a step. `busy`: whether no copy is taken now. Blocks.
    ///
    /// Errors: those of [`forebay_tier::copies::Receiver::files`].
    pub(crate) fn has(&self, step: u64, busy: bool) -> Result<There> {
        let opened = self.opened()?;
        let status = self.runner.status();
        let landed = Self::landed(&status).iter().any(|(landed, _)| *landed == step);
        let files = opened.receiver.files(step)?;
        let files = files.into_iter().map(|file| ThereFile { name: file.name, bytes: file.bytes });
        let busy = busy || opened.side.limits.is_paused();
        let (drive, room) = (opened.id.to_string(), self.room(&status, 0));
        Ok(There { drive, files: files.collect(), landed, room, busy })
    }

    /// Bytes that there is room for: what the next save of this node's own needs is none, or training would wait for
    /// the copies of others. `counted`: the asker's own bytes of those that are coming.
    fn room(&self, status: &Status, counted: u64) -> Option<u64> {
        let room = self.runner.room()?;
        let newest = status
            .steps
            .last()
            .filter(|step| step.copies.first().is_some_and(|copy| *copy == CopyState::OnNodes));
        let own = newest.map_or(0, |step| {
            let held = self.known().held.get(&step.step).map_or(0, |(_, bytes)| *bytes);
            step.bytes.saturating_sub(held)
        });
        let coming = self.coming.load(Ordering::Relaxed).saturating_sub(counted);
        Some(room.saturating_sub(coming).saturating_sub(own))
    }

    /// Takes a file whose bytes come in order, from one drive for another, which this must be. `ready` is told once
    /// they may come; where it is dropped instead none are needed. Blocks until the last has come and is on the disk;
    /// for a thread of its own.
    ///
    /// Errors: those of [`forebay_tier::copies::Receiver::begin`] and of what follows there; `timeout` while the tier
    /// is paused; `no_space`; `not_found` where it is for another drive; `usage` where it is this one's own.
    pub(crate) fn take(
        &self,
        (step, name, bytes): (u64, &str, u64),
        (of, to): (DriveId, DriveId),
        ready: oneshot::Sender<()>,
        mut coming: mpsc::Receiver<Bytes>,
    ) -> Result<Answered> {
        be_modest(self.runner.tiers().config().moving.io_priority);
        let opened = self.opened()?;
        if to != opened.id {
            let what = format!("drive {} is here, and not {to}", opened.id);
            return Err(Error::new(Code::NotFound, what));
        }
        if of == opened.id {
            return Err(Error::new(Code::Usage, "a drive's own file is no copy on it"));
        }
        if opened.side.limits.is_paused() {
            return Err(Error::new(Code::Timeout, "the tier is paused"));
        }
        // Counted before it is compared: several that come at once do not all get the last room.
        let _coming = Coming::new(&self.coming, bytes);
        if self.room(&self.runner.status(), bytes).is_some_and(|room| room < bytes) {
            return Err(Error::new(Code::NoSpace, "there is no room for a copy"));
        }
        let mut incoming = match opened.receiver.begin(step, name, bytes, of)? {
            Begun::There => return Ok(Answered::There),
            Begun::Incoming(incoming) => incoming,
        };
        // Who asked may be gone.
        let _ = ready.send(());
        while let Some(part) = coming.blocking_recv() {
            incoming.write(&part)?;
        }
        let attempt = incoming.attempt().to_string();
        incoming.finish()?;
        self.known().received += bytes;
        let from = self.host_of(of);
        self.log("take_copy", step, &attempt, from, opened.side.root.store.name());
        Ok(Answered::Taken)
    }

    fn host_of(&self, drive: DriveId) -> String {
        let known = self.known();
        let peer = known.peers.iter().find(|peer| peer.drive == drive);
        peer.map_or_else(|| format!("drive {drive}"), |peer| peer.told.url.clone())
    }
}

/// Bytes that are about to be on the drive.
struct Coming<'a>(&'a AtomicU64, u64);

impl<'a> Coming<'a> {
    fn new(all: &'a AtomicU64, bytes: u64) -> Self {
        all.fetch_add(bytes, Ordering::Relaxed);
        Self(all, bytes)
    }
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}
