//! The commit: assemble, stage, decide, publish.
//!
//! The order is what makes it safe. The manifest and the staged `.metadata` are durable before the decision is created,
//! the decision names the one source that may be published, and the publication checks as late as possible that the
//! rank has not been fenced off or withdrawn, and that what it replaces has not been put on hold since the save began.
//! After the decision any rank can finish the work: they all publish the same source, and the store lets one of them.

use std::collections::HashMap;
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use forebay_store::{Expect, Published, check_key};

use super::aside::let_removers_pass;
use super::attempt::Attempt;
use super::epoch;
use super::hints::Hint;
use super::id::AttemptId;
use super::marks::Marks;
use super::record::{Begin, Commit, Decision, Failure, FileRef, Outcome, encode};
use super::root::{Current, LIST_MAX};
use super::watch::Verdict;

/// How often a publication is tried that the store failed to answer, or that met a fenced writer's commit.
const PUBLISH_TRIES: u32 = 4;
/// How often the committer looks for files that a listing does not show yet.
const FILE_LOOKS: u32 = 4;

/// What the closure of a committer gets.
#[derive(Clone, Debug)]
pub struct Gathered {
    /// What each rank gave to [`publish_part`](Attempt::publish_part), in the order of ranks.
    pub parts: Vec<Vec<u8>>,
    /// The name under which the manifest will be stored.
    pub manifest_name: String,
}

/// What it makes of it.
#[derive(Clone, Debug)]
pub struct Assembled {
    /// The bytes of `.metadata`; they must lead [`Identify`](super::Identify) to the attempt.
    pub metadata: Vec<u8>,
    /// The bytes of the manifest.
    pub manifest: Vec<u8>,
    /// Every other file of the step that the commit needs, side files included, with its size.
    pub files: Vec<FileRef>,
}

impl Attempt {
    /// From parts to a decision. Errors are this rank's failures; without one the decision is there, if perhaps
    /// another's.
    pub(crate) fn decide(
        &self,
        parts: Vec<Vec<u8>>,
        assemble: &mut dyn FnMut(Gathered) -> Result<Assembled>,
    ) -> Result<()> {
        let manifest_name = self.manifest_name();
        let Some(base) = self.base()? else { return Ok(()) };
        let assembled = assemble(Gathered { parts, manifest_name: manifest_name.clone() })?;
        epoch::check(&self.root, self.spec.epoch)?;
        self.root.store.put(&self.layout.file(&manifest_name), &assembled.manifest)?;
        let manifest_bytes = assembled.manifest.len() as u64;
        let mut files = assembled.files;
        files.push(FileRef { name: manifest_name.clone(), bytes: manifest_bytes });
        self.check_files(&files)?;
        let staged = self.record_of("metadata", self.spec.rank);
        self.note_made(staged.clone());
        self.root.store.put(&staged, &assembled.metadata)?;
        let decision = Decision::Commit(Commit {
            attempt: self.begin.attempt.clone(),
            step: self.spec.step,
            by: self.spec.rank,
            world: self.writers,
            structure: self.begin.structure.clone(),
            epoch: self.spec.epoch,
            parent: self.spec.parent,
            base,
            manifest: manifest_name,
            files,
            metadata_bytes: assembled.metadata.len() as u64,
        });
        let key = self.layout.record(self.spec.attempt, "decision");
        // Whoever decided first, the next look reads what stands.
        match self.root.create_once(&key, &encode(&decision, &[])?) {
            Err(error) if error.code() == Code::NotDurable => self.renounce(&error),
            created => created.map(drop),
        }
    }

    /// The decision to commit is there for all to see and could not be made durable. It cannot be taken back; what it
    /// names is, so that nobody can publish it, unless another rank was quicker.
    fn renounce(&self, error: &Error) -> Result<()> {
        self.root.store.remove(&self.record_of("metadata", self.spec.rank))?;
        if self.is_ours(self.root.current(&self.layout)?.as_ref()) {
            return Ok(());
        }
        let failure = Failure::of(self.spec.rank, error);
        let key = self.layout.record(self.spec.attempt, "outcome");
        self.root.create_once(&key, &encode(&Outcome::Failed(failure), &[])?)?;
        self.tell(&Hint::Decided);
        Ok(())
    }

    /// What is to be replaced, as rank 0 saw it when it began; `None` where rank 0's record is gone, which is either a
    /// commit that is done or a withdrawal: the next look says.
    #[expect(clippy::option_option, reason = "no record, and a record of nothing, differ")]
    fn base(&self) -> Result<Option<Option<super::record::Base>>> {
        if self.spec.rank == 0 {
            return Ok(Some(self.begin.base.clone()));
        }
        let begin: Option<Begin> = self.root.read(&self.record_of("begin", 0))?;
        Ok(begin.map(|begin| begin.base))
    }

    /// Looks for every file that the commit will refer to: a file that a collector took, or that went to another node's
    /// disk, must not become part of a commit.
    fn check_files(&self, files: &[FileRef]) -> Result<()> {
        for file in files {
            let fault = |what: &str| Error::new(Code::UnsafePath, what).at(&file.name);
            check_key(&file.name)?;
            if file.name.contains('/') || file.name.starts_with('.') {
                return Err(fault("a checkpoint's file is not in its folder"));
            }
        }
        if !self.policy.check_files {
            return Ok(());
        }
        let mut pause = Duration::from_millis(100);
        let mut left = FILE_LOOKS;
        loop {
            let fault = self.missing_file(files)?;
            let Some(fault) = fault else { return Ok(()) };
            left -= 1;
            if left == 0 {
                return Err(fault);
            }
            // Network file systems may show a new file a little later on another node.
            self.root.clock.sleep(pause);
            pause *= 4;
        }
    }

    fn missing_file(&self, files: &[FileRef]) -> Result<Option<Error>> {
        let prefix = self.layout.prefix();
        let listed = self.root.store.list(prefix, LIST_MAX)?;
        let sizes: HashMap<&str, u64> = listed
            .iter()
            .filter_map(|object| Some((object.key.strip_prefix(prefix)?, object.bytes)))
            .collect();
        for file in files {
            let place = self.root.place(&self.layout.file(&file.name));
            match sizes.get(file.name.as_str()) {
                Some(bytes) if *bytes == file.bytes => {}
                Some(bytes) => {
                    let what = format!("file has {bytes} bytes, its rank wrote {}", file.bytes);
                    return Ok(Some(Error::new(Code::Truncated, what).at(place)));
                }
                // On the drive of its rank's node, as the rank has said in its part.
                None if !self.root.store.sees_all() => {}
                None => {
                    let error = Error::new(Code::MissingFile, "a rank's file is not there");
                    let hint = "is the folder on storage that all nodes share?";
                    return Ok(Some(error.at(place).hint(hint)));
                }
            }
        }
        Ok(None)
    }

    /// Publishes what was decided, or finds out who did. Errors are of the store and leave the outcome open.
    pub(crate) fn publish_decided(&mut self, commit: &Commit) -> Result<Verdict> {
        let source = self.record_of("metadata", commit.by);
        let to = self.layout.metadata();
        let mut expect =
            commit.base.as_ref().map_or(Expect::Absent, |base| Expect::Version(base.version()));
        let mut replaced =
            commit.base.as_ref().and_then(|base| base.attempt.as_ref()?.parse().ok());
        let mut pause = Duration::from_millis(10);
        let mut last = None;
        for _ in 0..PUBLISH_TRIES {
            if let Some(replaced) = replaced {
                let_removers_pass(&self.root, &self.layout, replaced)?;
            }
            if let Some(verdict) = self.refused(commit)? {
                return Ok(verdict);
            }
            if expect != Expect::Absent
                && let Some(verdict) = self.held(commit)?
            {
                return Ok(verdict);
            }
            let published = self.root.store.publish(&source, &to, &expect);
            if let Ok(Published::Done { durable }) = published {
                return Ok(self.conclude(commit, durable));
            }
            let proven = published.is_ok() && self.root.store.abilities().durable_publish;
            let current = self.root.current(&self.layout)?;
            if self.is_ours(current.as_ref()) {
                return Ok(self.conclude(commit, proven));
            }
            match published {
                Ok(Published::Withdrawn) => return self.withdrawn(commit),
                Ok(_) => match self.next_expectation(current)? {
                    Some(next) => (expect, replaced) = next,
                    None => return self.lost(commit),
                },
                Err(error) => {
                    last = Some(error);
                    self.root.clock.sleep(pause);
                    pause *= 4;
                }
            }
        }
        match last {
            Some(error) => Err(error),
            None => self.lost(commit),
        }
    }

    fn is_ours(&self, current: Option<&Current>) -> bool {
        current.is_some_and(|current| current.attempt == Some(self.spec.attempt))
    }

    /// The last look before the publication: a writer that was fenced off, or whose begin record was taken, publishes
    /// nothing.
    fn refused(&mut self, commit: &Commit) -> Result<Option<Verdict>> {
        let fenced = match epoch::check(&self.root, self.spec.epoch) {
            Ok(()) => None,
            Err(error) if error.code() == Code::Fenced => Some(error),
            Err(error) => return Err(error),
        };
        let begin: Option<Begin> = self.root.read(&self.record_of("begin", self.spec.rank))?;
        if fenced.is_none() && begin.as_ref() == Some(&self.begin) {
            return Ok(None);
        }
        let current = self.root.current(&self.layout)?;
        if self.is_ours(current.as_ref()) {
            return Ok(Some(self.conclude(commit, self.root.store.abilities().durable_publish)));
        }
        Ok(Some(match fenced {
            Some(error) => Verdict::Failed(error),
            None => self.withdrawn(commit)?,
        }))
    }

    /// The source is gone and the step is not ours: another rank may have published it and a later save replaced it,
    /// else it was collected.
    fn withdrawn(&self, commit: &Commit) -> Result<Verdict> {
        let key = self.layout.record(self.spec.attempt, "outcome");
        Ok(match self.root.read::<Outcome>(&key)? {
            Some(Outcome::Committed { durable }) => self.committed(commit, durable),
            Some(Outcome::Failed(failure)) => Verdict::Failed(failure.to_error()),
            None => Verdict::Failed(self.collected()),
        })
    }

    /// What to expect instead and whose it is, after another commit was found: a fenced writer's may be replaced all
    /// the same, where steps may be replaced at all.
    fn next_expectation(
        &self,
        current: Option<Current>,
    ) -> Result<Option<(Expect, Option<AttemptId>)>> {
        let Some(current) = current else {
            // What was to be replaced has been pruned.
            return Ok(Some((Expect::Absent, None)));
        };
        let Some(winner) = current.attempt.filter(|_| self.policy.overwrite) else {
            return Ok(None);
        };
        let epoch = match self.root.decision(&self.layout, winner)? {
            Some(Decision::Commit(commit)) => commit.epoch,
            _ => return Ok(None),
        };
        let next = (Expect::Version(current.version), Some(winner));
        Ok((epoch < self.spec.epoch).then_some(next))
    }

    fn lost(&mut self, commit: &Commit) -> Result<Verdict> {
        let what = format!("another writer has committed step {} first", commit.step);
        let place = self.root.place(&self.layout.metadata());
        let error = Error::new(Code::LostCommit, what).at(place);
        let error = error.hint("two jobs write to one folder; the step that is there is whole");
        self.renounce_for_all(commit, error)
    }

    /// What is to be replaced was put on hold meanwhile: it stays.
    fn held(&mut self, commit: &Commit) -> Result<Option<Verdict>> {
        match Marks::check_replaceable(&self.root, &self.layout, commit.step) {
            Ok(()) => Ok(None),
            Err(error) if error.code() == Code::AlreadyExists => {
                self.renounce_for_all(commit, error).map(Some)
            }
            Err(error) => Err(error),
        }
    }

    /// Withdraws what was to be published for good, and says why: a rank that wakes up later must not find it when
    /// what is in the way has been pruned or released.
    fn renounce_for_all(&mut self, commit: &Commit, error: Error) -> Result<Verdict> {
        self.root.store.remove(&self.record_of("metadata", commit.by))?;
        let current = self.root.current(&self.layout)?;
        if self.is_ours(current.as_ref()) {
            return Ok(self.conclude(commit, self.root.store.abilities().durable_publish));
        }
        let mut failure = Failure::of(self.spec.rank, &error);
        failure.rank = None;
        self.tell_outcome(&Outcome::Failed(failure));
        Ok(Verdict::Failed(error))
    }

    fn conclude(&mut self, commit: &Commit, durable: bool) -> Verdict {
        self.tell_outcome(&Outcome::Committed { durable });
        super::index::note(&self.root, &self.layout, self.spec.attempt, commit);
        self.committed(commit, durable)
    }

    /// For the others, who find out by themselves if this fails.
    fn tell_outcome(&self, outcome: &Outcome) {
        if self.spec.world == 1 {
            return;
        }
        let key = self.layout.record(self.spec.attempt, "outcome");
        let written = encode(outcome, &[]).and_then(|bytes| self.root.create_once(&key, &bytes));
        if let Err(error) = written {
            tracing::debug!(%error, "an outcome could not be written down");
        }
        self.tell(&Hint::Decided);
    }
}
