//! What a committer sees of the other ranks, and what it makes of it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use forebay_error::{Code, Error, Result};

use super::attempt::Attempt;
use super::lease::LeaseWatch;
use super::names::rank_of;
use super::policy::Policy;
use super::record::{Beat, Begin, Decision, Failure, PartHead, decode};

/// Most ranks that an error names.
const NAMED_MAX: usize = 8;

/// What was seen so far. Parts are read once.
pub(crate) struct Survey {
    parts: BTreeMap<u32, Vec<u8>>,
    bytes: u64,
    watches: HashMap<u32, LeaseWatch>,
    beats_read: Option<Duration>,
}

/// One look.
#[derive(Debug, Default)]
pub(crate) struct Sight {
    /// Ranks whose part is not there.
    pub(crate) missing: BTreeSet<u32>,
    /// Those of them that never began.
    pub(crate) absent: BTreeSet<u32>,
    /// Those of them whose counter stood still for a lease, and who they are.
    pub(crate) silent: BTreeMap<u32, String>,
    /// What makes a commit impossible.
    pub(crate) fault: Option<Failure>,
}

/// What a committer does next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Move {
    Wait,
    Assemble,
    Abort(Failure),
}

/// The decision, from what was seen: `waited` since the rank began to wait, with nobody's clock but its own.
pub(crate) fn judge(sight: &Sight, world: u32, waited: Duration, policy: &Policy) -> Move {
    if let Some(failure) = &sight.fault {
        return Move::Abort(failure.clone());
    }
    if sight.missing.is_empty() {
        return Move::Assemble;
    }
    if let Some((rank, who)) = sight.silent.first_key_value() {
        let mut what = format!("rank {rank} ({who}) shows no sign of life");
        if sight.silent.len() > 1 {
            what = format!("ranks {} show no sign of life", ranks(sight.silent.keys()));
        }
        let failure = Failure::new(Code::Timeout, &format!("{what} for {:?}", policy.lease));
        return Move::Abort(failure);
    }
    if !sight.absent.is_empty() && waited >= policy.appear {
        return Move::Abort(never_began(sight, world, policy));
    }
    if waited >= policy.deadline {
        let late = ranks(sight.missing.iter());
        let what = format!("no part from rank {late} within {:?}", policy.deadline);
        return Move::Abort(Failure::new(Code::Timeout, &what));
    }
    Move::Wait
}

fn never_began(sight: &Sight, world: u32, policy: &Policy) -> Failure {
    let after = policy.appear;
    let alone = sight.absent.len() as u64 + 1 == u64::from(world);
    let (code, what) = if alone {
        let what = format!("no record of any of the other {} ranks appears here", world - 1);
        (Code::NotShared, format!("{what} within {after:?}"))
    } else {
        let late = ranks(sight.absent.iter());
        (Code::Timeout, format!("rank {late} of {world} never began within {after:?}"))
    };
    let mut failure = Failure::new(code, &what);
    failure.hints = vec![
        "save to storage that all nodes share: this folder may be local to each".to_owned(),
        "or those ranks never came to the save: look at their logs".to_owned(),
    ];
    failure
}

fn ranks<'a>(ranks: impl ExactSizeIterator<Item = &'a u32>) -> String {
    let more = ranks.len().saturating_sub(NAMED_MAX);
    let named: Vec<String> = ranks.take(NAMED_MAX).map(u32::to_string).collect();
    let named = named.join(", ");
    if more == 0 { named } else { format!("{named} and {more} more") }
}

impl Survey {
    pub(crate) fn new() -> Self {
        Self { parts: BTreeMap::new(), bytes: 0, watches: HashMap::new(), beats_read: None }
    }

    /// The parts in the order of ranks, once none is missing.
    pub(crate) fn into_parts(self) -> Vec<Vec<u8>> {
        self.parts.into_values().collect()
    }

    /// Looks around. `tick` is called between two objects: there may be thousands to read. Errors are of the store;
    /// what the others did wrong is in the sight.
    pub(crate) fn look(&mut self, attempt: &Attempt, tick: &mut dyn FnMut()) -> Result<Sight> {
        let spec = &attempt.spec;
        if let Some(own) = &attempt.own_part {
            self.parts.entry(spec.rank).or_insert_with(|| own.clone());
        }
        let mut sight = Sight { missing: (0..spec.world).collect(), ..Sight::default() };
        sight.absent.clone_from(&sight.missing);
        if spec.world > 1 {
            self.look_at_records(attempt, &mut sight, tick)?;
        }
        sight.missing.retain(|rank| !self.parts.contains_key(rank));
        sight.absent.retain(|rank| *rank != spec.rank && sight.missing.contains(rank));
        if !sight.missing.is_empty() && sight.fault.is_none() {
            self.look_at_beats(attempt, &mut sight, tick)?;
        }
        Ok(sight)
    }

    fn look_at_records(
        &mut self,
        attempt: &Attempt,
        sight: &mut Sight,
        tick: &mut dyn FnMut(),
    ) -> Result<()> {
        let spec = &attempt.spec;
        let prefix = attempt.layout.records(spec.attempt);
        // Begin, beat, room, part, fail and metadata of each rank, and some.
        let limit = (spec.world as usize).saturating_mul(8).saturating_add(64);
        for (name, _) in attempt.root.store.names(&prefix, limit)? {
            if let Some(rank) = rank_of(&name, "begin") {
                sight.absent.remove(&rank);
                if rank >= spec.world {
                    let what = format!("rank {rank} takes part, of {} ranks", spec.world);
                    sight.fault = Some(Failure::new(Code::StructureMismatch, &what));
                }
            }
            if let Some(rank) = rank_of(&name, "part").filter(|rank| !self.parts.contains_key(rank))
            {
                tick();
                self.read_part(attempt, rank, sight)?;
            }
        }
        Ok(())
    }

    fn read_part(&mut self, attempt: &Attempt, rank: u32, sight: &mut Sight) -> Result<()> {
        let key = attempt.record_of("part", rank);
        let left = attempt.policy.parts_bytes_max.saturating_sub(self.bytes);
        let Some((bytes, _)) = attempt.root.store.get(&key, left)? else { return Ok(()) };
        let part = decode::<PartHead>(&bytes).and_then(|decoded| {
            let missing = || Error::new(Code::Truncated, "part record is empty");
            decoded.ok_or_else(missing)
        });
        let (head, body) = match part {
            Ok(part) => part,
            Err(error) => {
                // It was sealed before it got this name, so it will not get better.
                let mut failure = Failure::of(rank, &error.at(attempt.root.place(&key)));
                failure.what = format!("its part cannot be read: {}", failure.what);
                sight.fault = Some(failure);
                return Ok(());
            }
        };
        if let Some(failure) = disagreement(attempt, rank, &head) {
            sight.fault = Some(failure);
            return Ok(());
        }
        self.bytes += bytes.len() as u64;
        self.parts.insert(rank, body.to_vec());
        Ok(())
    }

    /// Reads the counters of ranks without a part, four times a lease.
    fn look_at_beats(
        &mut self,
        attempt: &Attempt,
        sight: &mut Sight,
        tick: &mut dyn FnMut(),
    ) -> Result<()> {
        let now = attempt.root.clock.now();
        let lease = attempt.policy.lease;
        if self.beats_read.is_some_and(|read| now.saturating_sub(read) < lease / 4) {
            return Ok(());
        }
        self.beats_read = Some(now);
        for rank in sight.missing.difference(&sight.absent) {
            tick();
            let beat: Option<Beat> = attempt.root.read(&attempt.record_of("beat", *rank))?;
            let watch = self.watches.entry(*rank).or_insert_with(|| LeaseWatch::new(now));
            if watch.see(beat.map(|beat| beat.count), now) < lease {
                continue;
            }
            // A rank that could write its failure but not publish it.
            let fail: Result<Option<Decision>> =
                attempt.root.read(&attempt.record_of("fail", *rank));
            if let Ok(Some(Decision::Abort(failure))) = fail {
                sight.fault = Some(failure);
                return Ok(());
            }
            let begin: Option<Begin> = attempt.root.read(&attempt.record_of("begin", *rank))?;
            sight.silent.insert(*rank, begin.map(|begin| begin.who).unwrap_or_default());
        }
        Ok(())
    }
}

/// Why a part does not belong to the attempt as this rank knows it.
fn disagreement(attempt: &Attempt, rank: u32, head: &PartHead) -> Option<Failure> {
    let ours = &attempt.begin;
    let what = if head.world != ours.world {
        format!("rank {rank} counts {} ranks, rank {} counts {}", head.world, ours.rank, ours.world)
    } else if head.structure != ours.structure {
        let short = |hash: &str| hash.chars().take(12).collect::<String>();
        let (theirs, own) = (short(&head.structure), short(&ours.structure));
        format!(
            "the state of rank {rank} is built differently ({theirs}) from rank {}'s ({own})",
            ours.rank
        )
    } else if (head.rank, &head.attempt, head.epoch) != (rank, &ours.attempt, ours.epoch) {
        format!("the part of rank {rank} is of attempt {}, epoch {}", head.attempt, head.epoch)
    } else {
        return None;
    };
    let mut failure = Failure::new(Code::StructureMismatch, &what);
    failure.hints = vec!["all ranks must save the same names, shapes and layouts".to_owned()];
    Some(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sight(missing: &[u32], absent: &[u32], silent: &[u32]) -> Sight {
        Sight {
            missing: missing.iter().copied().collect(),
            absent: absent.iter().copied().collect(),
            silent: silent.iter().map(|rank| (*rank, format!("host:{rank}"))).collect(),
            fault: None,
        }
    }

    fn abort_of(chosen: Move) -> (Code, String) {
        let Move::Abort(failure) = chosen else { panic!("{chosen:?}") };
        (failure.to_error().code(), failure.what)
    }

    #[test]
    fn a_committer_waits_assembles_or_says_who_is_missing() {
        let policy = Policy::default();
        let at = |sight, seconds| judge(&sight, 16, Duration::from_secs(seconds), &policy);
        assert_eq!(at(sight(&[], &[], &[]), 9999), Move::Assemble);
        assert_eq!(at(sight(&[3], &[3], &[]), 119), Move::Wait);
        let (code, what) = abort_of(at(sight(&[3], &[3], &[]), 120));
        assert_eq!((code, what.contains("rank 3 of 16")), (Code::Timeout, true), "{what}");
        let others: Vec<u32> = (1..16).collect();
        let (code, what) = abort_of(at(sight(&others, &others, &[]), 120));
        assert_eq!((code, what.contains("other 15 ranks")), (Code::NotShared, true), "{what}");
        let (code, what) = abort_of(at(sight(&[3, 4], &[], &[4]), 1));
        assert_eq!((code, what.contains("rank 4 (host:4)")), (Code::Timeout, true), "{what}");
        let (_, what) = abort_of(at(sight(&others, &[], &[]), 600));
        assert!(what.contains("1, 2, 3, 4, 5, 6, 7, 8 and 7 more"), "{what}");
        let mut bad = sight(&[], &[], &[]);
        bad.fault = Some(Failure::new(Code::StructureMismatch, "x"));
        assert_eq!(abort_of(at(bad, 0)).0, Code::StructureMismatch);
    }
}
