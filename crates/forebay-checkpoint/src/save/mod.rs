//! Saving: from the memory of all ranks to a committed step. **unsafe**: it reads memory by address.
//!
//! What happens in which order:
//!
//! 1. A [`SavePlan`] says what this rank holds and writes; it is made once for a structure and used for each save.
//! 2. [`Save::start`] lays out the files (sizes of objects may differ from save to save) and starts to stage the
//!    memory in the pool at once: the caller waits for nothing but [`Save::wait_staged`].
//! 3. A thread of its own meanwhile begins the attempt and creates the files, with room set aside. From then on staged
//!    pieces are checksummed and written as they come, several files at a time.
//! 4. The thread makes all files durable, contributes the rank's part, and waits for the commit, or is the one that
//!    makes it: [`assemble`] turns the parts of all ranks into manifest and `.metadata`. The structure that the parts
//!    refer to comes from the committer's own plan; ranks with another one would not be in the same attempt.
//!
//! A failure anywhere ends the attempt on all ranks with the same error; the step that was there before stays.

mod assemble;
mod bequest;
mod files;
mod part;
mod plan;
mod run;
mod seal;
mod shared;
mod sketch;
pub(crate) mod stamp;
mod write;

pub(crate) use assemble::metadata;
pub use assemble::{Facts, assemble};
pub use bequest::{Bequest, MAX_BEQUEST_BYTES};
pub use files::Source;
pub use plan::{SaveItem, SavePlan, What};
pub(crate) use plan::{torch_dtype, torch_shape};
pub(crate) use seal::{ATTRIBUTE, refuse_ours};
pub use seal::{OurMetadata, Seal};
pub use sketch::{Sketch, sketch_part};

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_device::Arena;
use forebay_engine::Engine;
use forebay_engine::stage::{StageOptions, StageReport, Staging};
use forebay_error::{Error, Result};
use forebay_format::dcp::{LayoutOptions, ObjectItem};

use crate::commit::{Hints, Policy, Root, Spec};
use crate::manifest::Info;
use files::Files;
use write::{Writer, internal, lock};

/// Who makes the commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    /// The protocol of [`crate::commit`], among the ranks.
    Protocol,
    /// Somebody else, who collects the parts ([`Save::part`]).
    External,
}

/// A file that is committed with the step.
#[derive(Clone, Debug)]
pub struct SideFile {
    /// Its name: one name, no folder.
    pub name: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// An object of the state.
#[derive(Clone, Debug)]
pub enum Object {
    /// A pickle, to be put into an archive.
    Pickle(Vec<u8>),
    /// An archive as `torch.save` makes it.
    Archive(Vec<u8>),
}

/// All that one save needs beside the memory.
pub struct Request {
    /// What is written.
    pub plan: Arc<SavePlan>,
    /// Where.
    pub root: Root,
    /// Times and limits.
    pub policy: Policy,
    /// A faster way to hear of other ranks.
    pub hints: Option<Arc<dyn Hints>>,
    /// The attempt.
    pub spec: Spec,
    /// What the manifest says of the save as a whole; world and attempt are those of `spec`.
    pub info: Info,
    /// Files to commit with the step.
    pub side_files: Vec<SideFile>,
    /// Files a rank: as many as are written at a time.
    pub files: usize,
    /// Threads that write; `None`: what the machine allows, at most 8.
    pub writers: Option<usize>,
    /// The stream that device memory was last written on.
    pub stream: Option<usize>,
    /// Host memory stays as it is until the save is done.
    pub in_place: bool,
    /// Who commits.
    pub commit: Commit,
}

impl Request {
    /// The step's place, for people.
    fn place(&self) -> String {
        match self.spec.folder.is_empty() {
            true => self.root.store.name(),
            false => format!("{}/{}", self.root.store.name(), self.spec.folder),
        }
    }
}

/// What a save did.
#[derive(Clone, Debug, Default)]
pub struct SaveReport {
    /// Bytes of the files of this rank.
    pub bytes: u64,
    /// Files of this rank.
    pub files: usize,
    /// Staging and writing.
    pub stage: StageReport,
    /// Seconds from the start until this rank's data was durable.
    pub durable_seconds: f64,
    /// Seconds from there to the commit.
    pub commit_seconds: f64,
    /// Whether the store promises that the commit survives a loss of power.
    pub durable: bool,
}

/// How the thread ended.
#[derive(Debug)]
struct Outcome {
    durable: bool,
    durable_seconds: f64,
    commit_seconds: f64,
    part: Vec<u8>,
}

/// What a save's thread and its handle share.
struct Job {
    staging: Staging,
    started: Instant,
    cancelled: AtomicBool,
    outcome: Mutex<Option<Result<Outcome>>>,
    ended: Condvar,
}

/// A save under way. Dropping the handle does not end it.
pub struct Save {
    job: Arc<Job>,
    bytes: u64,
    files: usize,
}

impl Save {
    /// Starts a save of memory at `sources`, one for each tensor of the plan that is written, and of `objects`. `keep`
    /// owns the memory and is let go when it is not needed any more, which for a save that has failed may be after its
    /// outcome was told, where storage hangs. Without it a save that fails tells its outcome only when nobody reads the
    /// memory any more, however long storage hangs.
    ///
    /// Errors: `usage` for lists that do not fit the plan; those of [`Engine::stage`]. Everything else is told by
    /// [`Self::wait_staged`] and [`Self::wait`].
    ///
    /// # Safety
    /// Each source is valid memory for the bytes of its region, and written by nobody, until the save is staged (with
    /// `in_place`: done), and valid for as long as `keep` lives; without `keep` until then, or until [`Self::wait`] has
    /// returned an error ([`Self::wait_staged`] may do so earlier). Without `in_place` another process may write to it
    /// all the same, and spoils what is saved. `stream`, if given, is a live stream of the device.
    pub unsafe fn start(
        engine: &Arc<Engine>,
        pool: &Arc<Arena>,
        request: Request,
        sources: &[Source],
        objects: Vec<Object>,
        keep: Option<Box<dyn Any + Send>>,
    ) -> Result<Self> {
        let started = Instant::now();
        // Before the staging, so that it is dropped after it: if no thread can be started, say.
        let kept = Arc::new(Mutex::new(keep));
        let objects: Vec<Vec<u8>> = objects.into_iter().map(archive).collect();
        let options = LayoutOptions { files: request.files.max(1), ..LayoutOptions::default() };
        let slot = pool.slot_bytes() as u64;
        let mut files = Files::new(&request.plan, sources, &objects, &options, slot)?;
        let (pieces, runs) = (std::mem::take(&mut files.pieces), std::mem::take(&mut files.runs));
        let (bytes, count) = (files.bytes(), files.files.len());
        let writer = Arc::new(Writer::new(files, objects));
        let stage = StageOptions {
            takers: request.writers,
            stream: request.stream,
            in_place: request.in_place,
        };
        // SAFETY: by this function's own contract: the runs are stretches of the sources.
        let staging = unsafe { engine.stage(pool, pieces, runs, writer.clone(), stage)? };
        let job = Arc::new(Job {
            staging,
            started,
            cancelled: AtomicBool::new(false),
            outcome: Mutex::new(None),
            ended: Condvar::new(),
        });
        let (own, own_kept) = (job.clone(), kept.clone());
        let thread = std::thread::Builder::new().name("forebay-save".to_owned());
        let spawned = thread.spawn(move || run::thread(&own, &request, &writer, &own_kept));
        spawned.map_err(|error| {
            job.staging.cancel();
            Error::io("cannot start the thread of a save", error)
        })?;
        Ok(Self { job, bytes, files: count })
    }

    /// Waits until the memory may change, at most `timeout`: true then. Errors: what ended the save.
    pub fn wait_staged(&self, timeout: Duration) -> Result<bool> {
        match self.job.staging.wait_staged(timeout) {
            // The thread knows why.
            Err(error) => match self.wait(Duration::from_secs(10)) {
                Ok(_) => Err(error),
                Err(cause) => Err(cause),
            },
            staged => staged,
        }
    }

    /// Waits until the step is committed (or with [`Commit::External`] the data durable), at most `timeout`: true then.
    ///
    /// Errors: what ended the save, on whatever rank.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        let until = Instant::now() + timeout;
        let mut outcome = lock(&self.job.outcome);
        loop {
            match outcome.as_ref() {
                Some(Ok(_)) => return Ok(true),
                Some(Err(error)) => return Err(error.again()),
                None => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let waited = self.job.ended.wait_timeout(outcome, left);
            outcome = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the save early, on all ranks, unless it is done.
    pub fn cancel(&self) {
        self.job.cancelled.store(true, Ordering::Relaxed);
        self.job.staging.cancel();
    }

    /// The encoded part, once the data is durable, with [`Commit::External`].
    ///
    /// Errors: what ended the save; `internal` before it is done.
    pub fn part(&self) -> Result<Vec<u8>> {
        match lock(&self.job.outcome).as_ref() {
            Some(Ok(outcome)) => Ok(outcome.part.clone()),
            Some(Err(error)) => Err(error.again()),
            None => Err(internal("the part was asked for before the data was durable")),
        }
    }

    /// Bytes that were written so far, and bytes in all.
    pub fn progress(&self) -> (u64, u64) {
        (self.job.staging.taken_bytes(), self.job.staging.report().bytes)
    }

    /// What it did so far.
    pub fn report(&self) -> SaveReport {
        let stage = self.job.staging.report();
        let mut report =
            SaveReport { bytes: self.bytes, files: self.files, stage, ..SaveReport::default() };
        if let Some(Ok(outcome)) = lock(&self.job.outcome).as_ref() {
            report.durable = outcome.durable;
            report.durable_seconds = outcome.durable_seconds;
            report.commit_seconds = outcome.commit_seconds;
        }
        report
    }
}

fn archive(object: Object) -> Vec<u8> {
    match object {
        Object::Pickle(bytes) => ObjectItem::encode(&bytes),
        Object::Archive(bytes) => bytes,
    }
}
