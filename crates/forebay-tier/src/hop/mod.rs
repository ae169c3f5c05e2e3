//! One committed step from one store to another.
//!
//! # What happens
//!
//! 1. The commit is read and checked ([`Adoption`]), the manifest against the hash in `.metadata`, the checksums of
//!    files out of the manifest (`expected`). A reader's lease holds off a prune of the source meanwhile.
//! 2. Each mover copies the files of its [`Share`], a few at a time, in parts. A part is summed up as it passes; before
//!    a file gets its name there, the sum must be that of the manifest and the bytes there must be the same: read back,
//!    or by the store's own checksums where it has them ([`ReadBack`]).
//! 3. Whoever then finds every file there opens the manifest that has arrived and publishes `.metadata`.
//!
//! # Resuming, and several at once
//!
//! The destination is the journal. A file has its name there only when it is whole, checked and durable: on a store
//! that shows data while it is written, it is written under a name of the mover's own among the records of the attempt,
//! and published; a bucket shows an object when it is complete, so there it is written under its name. Two that copy
//! the same file do no harm: one of them is told that it is there. There is nothing beside it that could be lost, or
//! say something else than what is there.
//!
//! A mover that was killed at any instant goes on within the files that it had under way: it sends again the parts that
//! were on their way (into a folder one for each file that it copies at a time, into a bucket one for each request),
//! where the store can tell what it has of a file (folders on the same machine, S3), and else these files; see
//! `landing`.
//!
//! Errors leave what has arrived: the same call later goes on. What nobody goes on with is an attempt that shows no
//! sign of life, and a collector of that store removes it.

mod copy;
mod expected;
mod landing;
mod pulse;
mod share;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use forebay_checkpoint::commit::{
    Adopted, Adoption, AttemptId, FileRef, Layout, ReadLease, Root, Standing,
};
use forebay_checkpoint::manifest::Manifest;
use forebay_checkpoint::progress::Progress;
use forebay_checkpoint::save::Seal;
use forebay_error::{Code, Error, Result};

use crate::copies;
use crate::limits::{Limits, Priority};
use copy::{Copier, Tally};
pub(crate) use expected::Expected;
use landing::Landing;
use pulse::Pulse;
use share::Here;
pub use share::Share;
pub(crate) use share::rank_of;

/// Most files at a time.
const FILES_MAX: usize = 64;
/// The largest part.
const PART_BYTES_MAX: u64 = 256 << 20;

/// How it is known that what arrived is what was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadBack {
    /// By the store's checksums where it compares or returns them, else by reading it.
    Auto,
    /// By reading it.
    Always,
}

/// How a step is moved.
#[derive(Clone, Debug)]
pub struct HopOptions {
    /// Which files this mover copies. Where the source is on the drives of several nodes ([`Store::sees_all`]), those
    /// of this node, whatever is said here.
    ///
    /// [`Store::sees_all`]: forebay_store::Store::sees_all
    pub share: Share,
    /// Bytes of a part: what passes the limits at once, and the memory of each file that is copied.
    pub part_bytes: u64,
    /// Files at a time.
    pub files_at_once: usize,
    /// How often a file is copied whose bytes changed on the way, until one of the two stores is called damaged.
    pub tries: u32,
    /// See there.
    pub read_back: ReadBack,
    /// Who goes first at the limits.
    pub priority: Priority,
    /// The older commit of the step that this one replaces there, if any.
    pub replaces: Option<AttemptId>,
    /// Host and process, for people.
    pub who: String,
}

impl Default for HopOptions {
    fn default() -> Self {
        Self {
            share: Share::all(),
            part_bytes: 8 << 20,
            files_at_once: 4,
            tries: 3,
            read_back: ReadBack::Auto,
            priority: Priority::Archive,
            replaces: None,
            who: String::new(),
        }
    }
}

/// A tier as a hop sees it.
#[derive(Clone)]
pub struct Side {
    /// The checkpoints.
    pub root: Root,
    /// What holds for all who move to or from it.
    pub limits: Arc<Limits>,
}

/// How the step stands there after a hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Committed there.
    Committed {
        /// Whether by this mover, now.
        by_us: bool,
        /// Whether the store could promise that it survives a loss of power.
        durable: bool,
    },
    /// Other movers have files to bring.
    Waiting {
        /// How many are not there.
        files: usize,
    },
}

/// What a hop did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopReport {
    /// Which commit was moved.
    pub attempt: AttemptId,
    /// How it stands.
    pub arrival: Arrival,
    /// Files that were copied now, and those of the share that were there.
    pub files: (usize, usize),
    /// Bytes that were sent, those sent twice included, `.metadata` not.
    pub bytes_sent: u64,
    /// Bytes that were read back there.
    pub bytes_read_back: u64,
    /// Files that were copied again because their bytes changed on the way.
    pub repeats: u32,
}

/// Copies this mover's share of a step, and commits it there if nothing is missing. `watch` hears of bytes of the
/// share.
///
/// Errors: those of [`Adoption::read`] and [`Adoption::publish`]; `checksum`, naming the store at fault, where bytes
/// are not those that were saved; `file_changed` where the source was pruned or replaced meanwhile; `cancelled`; I/O of
/// either store. After any of them the same call goes on where it was.
pub fn hop(
    from: &Side,
    to: &Side,
    step: u64,
    options: &HopOptions,
    watch: &impl Progress,
) -> Result<HopReport> {
    options.check()?;
    let adoption = Adoption::read(&from.root, step)?.replacing(options.replaces);
    if let Some(report) = there_already(&adoption, to)? {
        return Ok(report);
    }
    let Some(share) = share_of(&from.root, &adoption, options)? else {
        let missing = adoption.missing(&to.root)?;
        let arrival = Arrival::Waiting { files: missing.len() };
        return Ok(report(&adoption, arrival, (0, 0), Tally::default()));
    };
    if !from.root.store.sees_all() {
        // Who has brought all of its own only looks.
        let missing = adoption.missing(&to.root)?;
        if !missing.is_empty() && !missing.iter().any(|file| share.has(file)) {
            let arrival = Arrival::Waiting { files: missing.len() };
            return Ok(report(&adoption, arrival, (0, 0), Tally::default()));
        }
    }
    let options = &HopOptions { share, ..options.clone() };
    let error = match (Mover { from, to, options, adoption: &adoption }).run(watch) {
        Err(error) if error.code() != Code::Cancelled => error,
        moved => return moved,
    };
    // Whoever was faster has tidied up what this one was at.
    if let Ok(Some(report)) = there_already(&adoption, to) {
        let what = "another mover has committed the step meanwhile";
        match error.code() {
            // What is damaged stays so, whoever was faster.
            Code::Checksum => tracing::warn!(%error, step, "{what}"),
            _ => tracing::debug!(%error, step, "{what}"),
        }
        return Ok(report);
    }
    match adoption.is_at(&from.root) {
        Ok(false) => {
            let what = "the step was removed or replaced while it was moved";
            let place = format!("{}/{}", from.root.store.name(), adoption.layout().prefix());
            Err(Error::new(Code::FileChanged, what).at(place).with_source(error))
        }
        _ => Err(error),
    }
}

/// Which files this mover brings; `None` where none of the step's data are on this node.
fn share_of(from: &Root, adoption: &Adoption, options: &HopOptions) -> Result<Option<Share>> {
    if from.store.sees_all() {
        return Ok(Some(options.share.clone()));
    }
    let (missing, copies) = copies::here(from, adoption)?;
    let elsewhere: HashSet<&str> = missing.iter().map(|file| file.name.as_str()).collect();
    let here = |file: &FileRef| match elsewhere.contains(file.name.as_str()) {
        true => Here::No,
        false => match copies.get(&file.name) {
            None => Here::Own,
            Some(true) => Here::Left,
            Some(false) => Here::No,
        },
    };
    // Nobody else has the number of this drive.
    let number = || copies::drive_id(from).map(|drive| drive.number());
    Share::of_node(adoption.files(), here, number)
}

fn there_already(adoption: &Adoption, to: &Side) -> Result<Option<HopReport>> {
    match adoption.standing(&to.root)? {
        // Before anything is sent; again right before it is published.
        Standing::Open | Standing::Other(_) => adoption.check_welcome(&to.root).map(|()| None),
        Standing::There => {
            let durable = to.root.store.abilities().durable_publish;
            let adopted = adoption.conclude(&to.root, Adopted { published: false, durable });
            let arrival = Arrival::Committed { by_us: adopted.published, durable };
            let files = (0, adoption.files().len());
            Ok(Some(report(adoption, arrival, files, Tally::default())))
        }
    }
}

fn report(adoption: &Adoption, arrival: Arrival, files: (usize, usize), tally: Tally) -> HopReport {
    HopReport {
        attempt: adoption.attempt(),
        arrival,
        files,
        bytes_sent: tally.sent,
        bytes_read_back: tally.read_back,
        repeats: tally.repeats,
    }
}

impl HopOptions {
    fn check(&self) -> Result<()> {
        let parts = (1..=PART_BYTES_MAX).contains(&self.part_bytes);
        let files = (1..=FILES_MAX).contains(&self.files_at_once);
        if !parts || !files || self.tries == 0 {
            let what = format!(
                "a hop with parts of {} bytes, {} files at a time, {} tries",
                self.part_bytes, self.files_at_once, self.tries
            );
            return Err(Error::new(Code::Usage, what));
        }
        self.share.check()
    }
}

/// One mover at work.
struct Mover<'a> {
    from: &'a Side,
    to: &'a Side,
    options: &'a HopOptions,
    adoption: &'a Adoption,
}

impl Mover<'_> {
    fn run(&self, watch: &impl Progress) -> Result<HopReport> {
        let (adoption, options) = (self.adoption, self.options);
        let lease = ReadLease::on(&self.from.root, adoption.layout())?;
        let seal = self.seal()?;
        let expected = Expected::read(&self.from.root, adoption, &seal)?;
        adoption.begin(&self.to.root, options.share.number(), &options.who)?;
        let landing = Landing::find(&self.to.root, adoption, options.share.number().0)?;
        let missing = adoption.missing(&self.to.root)?;
        let (wanted, found) = self.plan(&missing, &landing);
        watch.total(wanted.iter().map(|file| file.bytes).sum());
        let pulse = Pulse::new(&self.to.root, adoption, options.share.number().0, &lease);
        let copier = Copier {
            from: self.from,
            to: self.to,
            adoption,
            options,
            landing: &landing,
            expected: &expected,
            pulse: &pulse,
            bad: Mutex::default(),
        };
        let tally = each(&wanted, options.files_at_once, |file| copier.bring(file, watch))?;
        if let Some(error) = copier.bad.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        let arrival = self.finish(&seal)?;
        Ok(report(adoption, arrival, (wanted.len(), found), tally))
    }

    fn seal(&self) -> Result<Seal> {
        let found = Seal::find(&self.adoption.metadata_source())?;
        found.ok_or_else(|| Error::new(Code::InvalidMetadata, "`.metadata` names no manifest"))
    }

    /// The files of the share that are to be looked after, and how many are there and need nothing.
    fn plan(&self, missing: &[FileRef], landing: &Landing<'_>) -> (Vec<FileRef>, usize) {
        let of_share = self.adoption.files().iter().filter(|file| self.options.share.has(file));
        let all: Vec<FileRef> = of_share.cloned().collect();
        let count = all.len();
        // Where a file has its name before it was read back, it is read now.
        let proven = landing.proves() || !self.reads_back();
        let wanted: Vec<FileRef> =
            all.into_iter().filter(|file| !proven || missing.contains(file)).collect();
        let found = count - wanted.len();
        (wanted, found)
    }

    fn reads_back(&self) -> bool {
        self.options.read_back.applies(&self.to.root)
    }

    /// Commits, if nothing is missing.
    fn finish(&self, seal: &Seal) -> Result<Arrival> {
        let (adoption, root) = (self.adoption, &self.to.root);
        let missing = adoption.missing(root)?;
        if !missing.is_empty() {
            if let Some(own) = missing.iter().find(|file| self.options.share.has(file)) {
                return Err(self.gone(own));
            }
            return match adoption.standing(root)? {
                Standing::There => {
                    let durable = root.store.abilities().durable_publish;
                    Ok(Arrival::Committed { by_us: false, durable })
                }
                _ => Ok(Arrival::Waiting { files: missing.len() }),
            };
        }
        check_manifest(root, adoption.layout(), seal)?;
        let adopted = adoption.publish(root, self.options.share.number().0)?;
        Ok(Arrival::Committed { by_us: adopted.published, durable: adopted.durable })
    }

    /// The error where a file of this mover's is not there any more.
    fn gone(&self, file: &FileRef) -> Error {
        let key = self.adoption.layout().file(&file.name);
        let what = "a file that was copied is not there any more: it was collected meanwhile";
        let place = format!("{}/{key}", self.to.root.store.name());
        Error::new(Code::Fenced, what).at(place)
    }
}

impl ReadBack {
    fn applies(self, to: &Root) -> bool {
        let can = to.store.abilities();
        self == Self::Always || !(can.rejects_bad_checksums || can.returns_checksums)
    }
}

/// The manifest that has arrived must be the one that `.metadata` names, whole.
fn check_manifest(root: &Root, layout: &Layout, seal: &Seal) -> Result<()> {
    let source = root.store.open_data(&layout.file(&seal.manifest))?;
    Manifest::open(source, Some(&seal.hash))?.check_sections()
}

/// Calls `bring` for each file, several at a time. After the first error none is begun.
fn each(
    files: &[FileRef],
    at_once: usize,
    bring: impl Fn(&FileRef) -> Result<Tally> + Sync,
) -> Result<Tally> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Result<Tally>> = Mutex::new(Ok(Tally::default()));
    let lock = || done.lock().unwrap_or_else(PoisonError::into_inner);
    let work = || {
        while lock().is_ok() {
            let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
            let brought = bring(file);
            let mut done = lock();
            match (done.as_mut(), brought) {
                (Ok(sum), Ok(tally)) => sum.add(&tally),
                (Ok(_), Err(error)) => *done = Err(error),
                (Err(_), _) => return,
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..at_once.min(files.len()) {
            scope.spawn(work);
        }
        work();
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner)
}
