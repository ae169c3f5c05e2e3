//! Ranks that died: first a suspicion by hints, then a look at the store, then a decision for all.
//!
//! See [`hints`](super::hints) for what makes a rank suspect and why that alone decides nothing. One rank looks: the
//! lowest that is not suspect itself.

use std::collections::HashMap;
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use forebay_store::Store;

use super::attempt::Attempt;
use super::hints::{OFF, Suspect, pulse_key};
use super::lease::LeaseWatch;
use super::policy::Policy;
use super::record::{Beat, Decision, Failure, encode};

/// Between two looks at signs of life.
const LOOK: Duration = Duration::from_secs(1);
/// Most suspects that are looked at: one that is dead is enough.
const LOOKED_AT_MAX: usize = 8;

/// Signs of life in the store, of those that are suspect now.
#[derive(Default)]
pub(crate) struct Pulses {
    watches: HashMap<u32, Watched>,
    looked: Option<Duration>,
}

struct Watched {
    watch: LeaseWatch,
    /// Looks at which it stood still, so that one long pause of this rank proves nothing.
    still: u32,
}

impl Pulses {
    /// Whether it is time to look.
    fn is_due(&mut self, now: Duration) -> bool {
        let due = self.looked.is_none_or(|looked| now.saturating_sub(looked) >= LOOK);
        if due {
            // Whoever was not looked at for long is looked at anew.
            if self.looked.is_some_and(|looked| now.saturating_sub(looked) >= LOOK * 4) {
                self.watches.clear();
            }
            self.looked = Some(now);
        }
        due
    }

    /// Takes the sign that a rank gives now; whether it is dead.
    fn see(&mut self, rank: u32, sign: Option<u64>, now: Duration, policy: &Policy) -> bool {
        if sign == Some(OFF) {
            self.watches.remove(&rank);
            return false;
        }
        let watched = self
            .watches
            .entry(rank)
            .or_insert_with(|| Watched { watch: LeaseWatch::new(now), still: 0 });
        let time = watched.watch.see(sign, now);
        watched.still = if time.is_zero() { 0 } else { watched.still + 1 };
        time >= policy.pulse && watched.still >= 3
    }
}

impl Attempt {
    /// Whether this rank stands in for `chief`: that one is suspect, and so is every rank before this one. A mistake is
    /// harmless: two ranks then do what one should.
    pub(crate) fn is_heir(&self, chief: u32) -> bool {
        let Some(hints) = &self.hints else { return false };
        let suspects = hints.suspects();
        let before = suspects.iter().zip(0..).take_while(|(one, rank)| one.rank == *rank).count();
        before as u64 >= u64::from(self.spec.rank) && suspects.iter().any(|one| one.rank == chief)
    }

    /// Why the attempt cannot succeed, if a rank is dead that has not contributed its part. Costs nothing without
    /// suspects. Errors are of the store.
    pub(crate) fn look_for_dead(&self) -> Result<Option<Failure>> {
        let Some(hints) = &self.hints else { return Ok(None) };
        hints.attend(self.spec.attempt);
        if self.spec.rank != 0 && !self.is_heir(0) {
            return Ok(None);
        }
        let suspects = hints.suspects();
        let now = self.root.clock.now();
        let mut pulses = self.pulses.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        pulses.watches.retain(|rank, _| suspects.iter().any(|suspect| suspect.rank == *rank));
        if suspects.is_empty() || !pulses.is_due(now) {
            return Ok(None);
        }
        for suspect in suspects.iter().take(LOOKED_AT_MAX) {
            if self.has(&self.record_of("part", suspect.rank))? {
                continue;
            }
            // A rank that saves no more gives no sign; if it has begun, it will end.
            let sign = match suspect.left {
                true if self.has(&self.record_of("begin", suspect.rank))? => Some(OFF),
                true => None,
                false => self.sign(suspect.rank)?,
            };
            if pulses.see(suspect.rank, sign, now, &self.policy) {
                return Ok(Some(failure(suspect, &self.policy)));
            }
        }
        Ok(None)
    }

    fn has(&self, key: &str) -> Result<bool> {
        match self.root.store.open_data(key) {
            Ok(_) => Ok(true),
            Err(error) if error.code() == Code::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn sign(&self, rank: u32) -> Result<Option<u64>> {
        let beat: Option<Beat> = self.root.read(&pulse_key(self.spec.attempt.run, rank))?;
        Ok(beat.map(|beat| beat.count))
    }

    /// Fails the attempt for all ranks because one is dead, from a rank that is still at work on its own part. Returns
    /// that failure, or the one that was decided before. Errors are of the store.
    pub(crate) fn check_for_dead(&self) -> Result<Option<Error>> {
        let Some(failure) = self.look_for_dead()? else { return Ok(None) };
        let key = self.layout.record(self.spec.attempt, "decision");
        let written = encode(&Decision::Abort(failure.clone()), &[])
            .and_then(|bytes| self.root.create_once(&key, &bytes));
        if let Err(error) = written {
            // It is tried again with the room that was set aside, by who gets this.
            tracing::debug!(%error, "the death of a rank could not be written down");
            return Ok(Some(failure.to_error()));
        }
        Ok(match self.root.decision(&self.layout, self.spec.attempt)? {
            Some(Decision::Commit(_)) => None,
            Some(Decision::Abort(first)) => Some(first.to_error()),
            None => Some(self.collected()),
        })
    }
}

fn failure(suspect: &Suspect, policy: &Policy) -> Failure {
    let Suspect { rank, who, left } = suspect;
    let who = if who.is_empty() { String::new() } else { format!(" ({who})") };
    let mut failure = if *left {
        let what = format!("rank {rank}{who} has closed its side and does not take part");
        let mut failure = Failure::new(Code::Timeout, &what);
        failure.hints = vec!["every rank must make the same saves: look at its log".to_owned()];
        failure
    } else {
        let for_seconds = (super::hints::SILENT + policy.pulse).as_secs();
        let what = format!("rank {rank}{who} has died: no sign of life for {for_seconds} s");
        let mut failure = Failure::new(Code::Timeout, &what);
        failure.hints = vec![
            "look at its log, and at its node's for a process killed for memory".to_owned(),
            "steps committed before are untouched: restart the job from the latest".to_owned(),
        ];
        failure
    };
    failure.rank = None;
    failure
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn look(pulses: &mut Pulses, sign: Option<u64>, now: u64) -> bool {
        assert!(pulses.is_due(at(now)));
        pulses.see(1, sign, at(now), &Policy::default())
    }

    #[test]
    fn a_sign_that_stands_still_is_death_and_one_that_moves_is_not() {
        let mut pulses = Pulses::default();
        assert!((0..5).all(|now| !look(&mut pulses, Some(0), now)));
        assert!(look(&mut pulses, Some(0), 5));
        let mut pulses = Pulses::default();
        assert!((0..60).all(|now| !look(&mut pulses, Some(now / 4), now)));
        // No object: the rank never came so far, or it has been removed.
        let mut pulses = Pulses::default();
        assert!((0..6).any(|now| look(&mut pulses, None, now)));
    }

    #[test]
    fn a_rank_that_does_without_hints_is_never_judged_by_them() {
        let mut pulses = Pulses::default();
        assert!((0..60).all(|now| !look(&mut pulses, Some(OFF), now)));
        assert!((60..65).all(|now| !look(&mut pulses, Some(9), now)), "from here on, anew");
    }

    #[test]
    fn an_observer_that_was_away_begins_anew() {
        let mut pulses = Pulses::default();
        assert!((0..5).all(|now| !look(&mut pulses, Some(0), now)));
        assert!(!look(&mut pulses, Some(0), 500));
        assert!(!pulses.is_due(at(500)), "not twice at a time");
        assert!((501..505).all(|now| !look(&mut pulses, Some(0), now)));
        assert!(look(&mut pulses, Some(0), 505));
    }
}
