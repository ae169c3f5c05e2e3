//! Waiting for the outcome: every rank looks, one commits, all hear the same answer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_error::{Code, Error, Result};

use super::attempt::{Attempt, lock};
use super::hints::Hint;
use super::id::AttemptId;
use super::lease::LeaseWatch;
use super::publish::{Assembled, Gathered};
use super::record::{Commit, Decision, Failure, Outcome};
use super::survey::{Move, Survey, judge};
use super::withdraw::is_blank;

/// How many looks past the deadline a rank takes before it answers with what it knows.
const LOOKS_PAST_DEADLINE: u32 = 4;

/// A step was committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// By which attempt.
    pub attempt: AttemptId,
    /// By which rank.
    pub by: u32,
    /// Whether the store could promise that it survives a loss of power.
    pub durable: bool,
    /// Bytes of all its files, `.metadata` included.
    pub bytes: u64,
}

/// How it ended.
pub(crate) enum Verdict {
    Committed(Committed),
    Failed(Error),
}

/// What a waiting rank remembers between two looks.
pub(crate) struct Watch {
    since: Duration,
    pause: Duration,
    errors: u32,
    late: u32,
    survey: Survey,
    /// The committer's counter.
    pub(crate) committer: LeaseWatch,
    bumped: (u64, Duration),
    /// When the commit decision was first seen.
    decided: Option<Duration>,
    /// The rank wrote a manifest.
    assembled: bool,
}

impl Attempt {
    /// Waits until the step is committed or the attempt has failed, and commits it if it is this rank's turn.
    /// `assemble` makes `.metadata` and the manifest from all parts; it runs on one rank as a rule, on more where a
    /// committer was slow, so it must give the same checkpoint for the same parts everywhere.
    ///
    /// Errors: the first failure of any rank, with its code; `structure_mismatch`, `lost_commit`, `fenced`, `timeout`,
    /// `not_shared`; I/O of this rank. Ends within the policy's deadline and a few takeover times, come what may.
    pub fn wait_or_commit(
        self,
        assemble: &mut dyn FnMut(Gathered) -> Result<Assembled>,
    ) -> Result<Committed> {
        self.wait_or_commit_unless(&AtomicBool::new(false), assemble)
    }

    /// The same, until it is `cancelled`: then the attempt fails for all ranks, unless a commit is decided.
    pub fn wait_or_commit_unless(
        mut self,
        cancelled: &AtomicBool,
        assemble: &mut dyn FnMut(Gathered) -> Result<Assembled>,
    ) -> Result<Committed> {
        if self.own_part.is_none() {
            let error = Error::new(Code::Usage, "a rank waits before it has published its part");
            return Err(self.fail(error));
        }
        let now = self.root.clock.now();
        let mut watch = Watch {
            since: now,
            pause: self.policy.poll.0,
            errors: 0,
            late: 0,
            survey: Survey::new(),
            committer: LeaseWatch::new(now),
            bumped: (0, now),
            decided: None,
            assembled: false,
        };
        loop {
            match self.look(&mut watch, cancelled, assemble) {
                Ok(Some(verdict)) => return self.end(&watch, verdict),
                Ok(None) => watch.errors = 0,
                Err(error) => {
                    watch.errors += 1;
                    if watch.errors >= self.policy.poll_errors_max {
                        return Err(self.give_up(error));
                    }
                }
            }
            self.pause(&mut watch);
        }
    }

    /// One look; a verdict if there is one. Errors are of the store, and may pass.
    fn look(
        &mut self,
        watch: &mut Watch,
        cancelled: &AtomicBool,
        assemble: &mut dyn FnMut(Gathered) -> Result<Assembled>,
    ) -> Result<Option<Verdict>> {
        let now = self.root.clock.now();
        match self.root.decision(&self.layout, self.spec.attempt)? {
            Some(Decision::Abort(failure)) => Ok(Some(Verdict::Failed(failure.to_error()))),
            Some(Decision::Commit(commit)) => self.follow(watch, &commit, now),
            None if now.saturating_sub(watch.since) >= self.late_after() => {
                watch.late += 1;
                if watch.late > LOOKS_PAST_DEADLINE {
                    return Ok(Some(Verdict::Failed(self.collected())));
                }
                let what = format!("not committed within {:?}", self.policy.deadline);
                let mut failure = Failure::new(Code::Timeout, &what);
                failure.rank = Some(self.spec.rank);
                self.abort(&failure)?;
                Ok(None)
            }
            None if cancelled.load(Ordering::Relaxed) => {
                let error = Error::new(Code::Cancelled, "the save was cancelled");
                self.abort(&Failure::of(self.spec.rank, &error))?;
                Ok(None)
            }
            None => self.act(watch, assemble, now).map(|()| None),
        }
    }

    /// The committer has the better words for a timeout, so the others leave it a little more time.
    fn late_after(&self) -> Duration {
        let turn = self.policy.turn(self.spec.rank.max(1), self.seed());
        self.policy.deadline + turn.min(self.policy.deadline)
    }

    /// The commit is decided: publish it, or give the committer time to.
    fn follow(
        &mut self,
        watch: &mut Watch,
        commit: &Commit,
        now: Duration,
    ) -> Result<Option<Verdict>> {
        let key = self.layout.record(self.spec.attempt, "outcome");
        match self.root.read::<Outcome>(&key)? {
            Some(Outcome::Committed { durable }) => {
                return Ok(Some(self.committed(commit, durable)));
            }
            Some(Outcome::Failed(failure)) => {
                return Ok(Some(Verdict::Failed(failure.to_error())));
            }
            None => {}
        }
        let first = *watch.decided.get_or_insert(now);
        let own = commit.by == self.spec.rank;
        let patience = self.policy.turn(self.spec.rank.max(1), self.seed());
        let late = now.saturating_sub(watch.since) >= self.late_after();
        let patient = now.saturating_sub(first) < patience && !self.is_heir(commit.by);
        if own || late || !patient {
            return self.publish_decided(commit).map(Some);
        }
        Ok(None)
    }

    /// Nothing is decided: gather parts, if it is this rank's turn.
    fn act(
        &mut self,
        watch: &mut Watch,
        assemble: &mut dyn FnMut(Gathered) -> Result<Assembled>,
        now: Duration,
    ) -> Result<()> {
        if let Some(failure) = self.look_for_dead()? {
            return self.abort(&failure).map(drop);
        }
        if !self.is_turn(watch, now)? {
            return Ok(());
        }
        let waited = now.saturating_sub(watch.since);
        self.bump(&mut watch.bumped);
        let Watch { survey, bumped, .. } = watch;
        let sight = survey.look(self, &mut || self.bump(bumped))?;
        match judge(&sight, self.spec.world, waited, &self.policy) {
            Move::Wait => Ok(()),
            Move::Abort(failure) => self.abort(&failure).map(drop),
            Move::Assemble => {
                let survey = std::mem::replace(&mut watch.survey, Survey::new());
                watch.assembled = true;
                let parts = survey.into_parts();
                let decided = self.bumping(&mut watch.bumped, || self.decide(parts, assemble));
                if let Err(error) = decided {
                    let failure = Failure::of(self.spec.rank, &error);
                    self.tell(&Hint::Failed(failure.clone()));
                    self.abort(&failure)?;
                }
                Ok(())
            }
        }
    }

    /// Waits for a hint or a while. A failure that comes as a hint is written down, in case its rank could not.
    fn pause(&mut self, watch: &mut Watch) {
        let time = watch.pause;
        watch.pause = (watch.pause * 3 / 2).min(self.pause_max());
        let Some(hints) = &self.hints else { return self.root.clock.sleep(time) };
        let heard = hints.wait(self.spec.attempt, time);
        if !heard.is_empty() {
            watch.pause = self.policy.poll.0;
        }
        for hint in heard {
            if let Hint::Failed(failure) = hint
                && let Err(error) = self.abort(&failure)
            {
                tracing::debug!(%error, "a failure that was heard of cannot be written down");
            }
        }
    }

    /// Hints wake who waits for news; who looks after a suspect has to look itself.
    fn pause_max(&self) -> Duration {
        let hints = self.hints.as_ref().filter(|hints| hints.hears());
        match hints {
            Some(hints) if hints.suspects().is_empty() => self.policy.poll_hinted,
            _ => self.policy.poll.1,
        }
    }

    pub(crate) fn committed(&self, commit: &Commit, durable: bool) -> Verdict {
        let files = commit.files.iter().map(|file| file.bytes);
        Verdict::Committed(Committed {
            attempt: self.spec.attempt,
            by: commit.by,
            durable,
            bytes: files.chain([commit.metadata_bytes]).fold(0, u64::saturating_add),
        })
    }

    /// Cleans up behind an outcome and hands it over.
    fn end(mut self, watch: &Watch, verdict: Verdict) -> Result<Committed> {
        self.tell(&Hint::Decided);
        match verdict {
            Verdict::Committed(committed) => {
                let mut rest = Vec::new();
                if watch.assembled && committed.by != self.spec.rank {
                    rest.push(self.layout.file(&self.manifest_name()));
                }
                if committed.by == self.spec.rank && self.spec.world > 1 {
                    rest.push(self.layout.record(self.spec.attempt, "committer"));
                }
                self.clean_up(rest);
                Ok(committed)
            }
            Verdict::Failed(error) => {
                let decision = self.root.decision(&self.layout, self.spec.attempt);
                // Only an abort makes it certain that no rank can publish what is removed here.
                if let Ok(Some(Decision::Abort(_))) = decision {
                    if watch.assembled {
                        lock(&self.files).push(self.layout.file(&self.manifest_name()));
                    }
                    self.discard();
                }
                Err(error)
            }
        }
    }

    /// The store does not answer this rank any more.
    fn give_up(mut self, error: Error) -> Error {
        let failure = Failure::of(self.spec.rank, &error);
        self.tell(&Hint::Failed(failure.clone()));
        match self.abort(&failure) {
            Ok(Decision::Abort(first)) => {
                self.discard();
                if first == failure || is_blank(&first) { error } else { first.to_error() }
            }
            _ => error.hint("whether the step was committed is not known here: list the steps"),
        }
    }

    pub(crate) fn seed(&self) -> u64 {
        u64::from(self.spec.attempt.run.0) << 32 | u64::from(self.spec.attempt.save)
    }
}
