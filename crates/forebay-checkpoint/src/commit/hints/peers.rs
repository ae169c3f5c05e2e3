//! What a rank makes of the other ranks' counters.

use std::time::Duration;

use super::{SILENT, Suspect, notice};

/// Between two rounds of looking at counters.
const PERIOD: Duration = Duration::from_secs(1);
/// What a round may take of the store for each rank, in large jobs.
const PERIOD_PER_RANK: Duration = Duration::from_micros(200);
/// A rank hears well if its last good round is not older than so many periods.
const FRESH_ROUNDS: u32 = 3;
/// Good rounds in which a counter must have stood still, so that one long pause of this rank proves nothing.
const ROUNDS_MIN: u32 = 4;
/// Lowest ranks that every rank looks at: more than those of one node.
const HEIRS: u32 = 16;

/// Another rank's counter.
#[derive(Clone, Debug, Default)]
struct Peer {
    value: Vec<u8>,
    since: Duration,
    /// Good rounds in which it stood still.
    still: u32,
}

/// See the module. Times are those of the caller's monotonic clock.
pub(super) struct Peers {
    rank: u32,
    who: Vec<String>,
    /// By rank, as far as they are looked at.
    peers: Vec<Peer>,
    last_round: Option<Duration>,
    /// Who was silent after that.
    last_silent: Vec<u32>,
}

impl Peers {
    /// `who` names each rank, for people.
    pub(super) fn new(rank: u32, who: Vec<String>) -> Self {
        Self { rank, who, peers: Vec::new(), last_round: None, last_silent: Vec::new() }
    }

    pub(super) fn world(&self) -> u32 {
        self.who.len() as u32
    }

    pub(super) fn period(&self) -> Duration {
        PERIOD.max(PERIOD_PER_RANK * self.world())
    }

    /// Whose counters to read: those of the others that matter to this rank, and last its own.
    pub(super) fn watched(&self, now: Duration) -> impl Iterator<Item = u32> + use<> {
        let (own, all) = (self.rank, self.is_in_charge(now));
        let end = if all { self.world() } else { own.min(HEIRS) };
        (0..end).filter(move |rank| *rank != own).chain([own])
    }

    /// Takes counters as they are now. What this rank knows of its own (`count`, as acknowledged when it asked) tells
    /// whether it may believe the rest. Whether the suspects have changed.
    pub(super) fn round(
        &mut self,
        keys: &[String],
        mut values: Vec<Vec<u8>>,
        count: i64,
        now: Duration,
    ) -> bool {
        let own = values.last().and_then(|value| notice::count(value));
        if values.len() != keys.len() || own.is_none_or(|own| own < count) {
            return false;
        }
        values.pop();
        let anew = !self.is_fresh(now);
        self.last_round = Some(now);
        let all = keys.len() == self.who.len();
        let end = if all { self.world() } else { self.rank.min(HEIRS) };
        // Nothing is known of those that are not looked at.
        self.peers.truncate(end as usize);
        self.peers.resize_with(end as usize, Peer::default);
        let own = self.rank;
        let others = (0..).zip(&mut self.peers).filter(|(rank, _)| *rank != own);
        for ((_, peer), value) in others.zip(values) {
            let known = value == notice::CLOSED || notice::count(&value).is_some();
            // What cannot be understood is taken for a sign of life: better slow than wrong.
            if anew || value != peer.value || !known {
                *peer = Peer { value, since: now, still: 0 };
            } else {
                peer.still += 1;
            }
        }
        let silent = self.silent(now).collect();
        let before = std::mem::replace(&mut self.last_silent, silent);
        self.last_silent != before
    }

    /// Whether this rank hears well.
    pub(super) fn is_fresh(&self, now: Duration) -> bool {
        let fresh = self.period() * FRESH_ROUNDS;
        self.last_round.is_some_and(|round| now.saturating_sub(round) < fresh)
    }

    fn silent(&self, now: Duration) -> impl Iterator<Item = u32> + '_ {
        let fresh = self.is_fresh(now);
        let ranks = (0..).zip(&self.peers).filter(move |(rank, peer)| {
            let long = now.saturating_sub(peer.since) >= SILENT || peer.value == notice::CLOSED;
            fresh && *rank != self.rank && long && peer.still >= ROUNDS_MIN
        });
        ranks.map(|(rank, _)| rank)
    }

    /// Ranks that were not heard of for long, or have said that they save no more.
    pub(super) fn suspects(&self, now: Duration) -> Vec<Suspect> {
        let suspect = |rank: u32| {
            let left = self.peers.get(rank as usize).is_some_and(|it| it.value == notice::CLOSED);
            let who = self.who.get(rank as usize).cloned().unwrap_or_default();
            Suspect { rank, who, left }
        };
        self.silent(now).map(suspect).collect()
    }

    /// Whether all ranks before this one are suspect.
    pub(super) fn is_in_charge(&self, now: Duration) -> bool {
        let before = self.silent(now).zip(0..).take_while(|(rank, at)| rank == at).count();
        self.rank == 0 || self.rank <= HEIRS && before as u64 >= u64::from(self.rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job of `world` ranks as `rank` sees it: one round a second, from second 100 on.
    struct Seen {
        peers: Peers,
        second: u64,
        own: i64,
    }

    impl Seen {
        fn new(rank: u32, world: u32) -> Self {
            let who = (0..world).map(|rank| format!("host:{rank}")).collect();
            Self { peers: Peers::new(rank, who), second: 100, own: 0 }
        }

        fn now(&self) -> Duration {
            Duration::from_secs(self.second)
        }

        /// A round in which each rank has the value that it is given.
        fn round(&mut self, value: impl Fn(u32) -> String) -> bool {
            self.second += 1;
            self.own += 1;
            let watched: Vec<u32> = self.peers.watched(self.now()).collect();
            let keys: Vec<String> = watched.iter().map(|rank| notice::beat(*rank)).collect();
            let own = self.peers.rank;
            let value = |rank: &u32| match *rank == own {
                true => self.own.to_string().into_bytes(),
                false => value(*rank).into_bytes(),
            };
            let values = watched.iter().map(value).collect();
            self.peers.round(&keys, values, self.own, self.now())
        }

        fn suspects(&self) -> Vec<u32> {
            self.peers.suspects(self.now()).iter().map(|one| one.rank).collect()
        }
    }

    #[test]
    fn a_rank_whose_counter_stands_still_for_five_seconds_is_suspect_until_it_moves() {
        let mut seen = Seen::new(0, 4);
        for second in 0..5 {
            seen.round(|rank| if rank == 2 { "7".to_owned() } else { second.to_string() });
            assert!(seen.suspects().is_empty());
        }
        assert!(seen.round(|rank| if rank == 2 { "7".to_owned() } else { "99".to_owned() }));
        assert_eq!(seen.suspects(), [2]);
        assert_eq!(seen.peers.suspects(seen.now())[0].who, "host:2");
        assert!(seen.round(|_| "100".to_owned()));
        assert!(seen.suspects().is_empty());
    }

    #[test]
    fn a_rank_that_does_not_hear_well_suspects_nobody() {
        let mut seen = Seen::new(0, 3);
        for _ in 0..9 {
            seen.round(|_| "7".to_owned());
        }
        assert_eq!(seen.suspects(), [1, 2]);
        // It was away.
        seen.second += 60;
        assert!(seen.suspects().is_empty());
        seen.round(|_| "7".to_owned());
        assert!(seen.suspects().is_empty(), "what stood still while it was away proves nothing");
        // The store gives old values: its own counter shows it.
        for _ in 0..9 {
            let keys: Vec<String> = [1, 2, 0].map(notice::beat).to_vec();
            let values = vec![b"7".to_vec(), b"7".to_vec(), b"3".to_vec()];
            seen.second += 1;
            assert!(!seen.peers.round(&keys, values, 4, seen.now()));
        }
        assert!(seen.suspects().is_empty());
        // Too few, or garbage.
        assert!(!seen.peers.round(&[notice::beat(1), notice::beat(0)], vec![], 0, seen.now()));
        for _ in 0..9 {
            seen.round(|rank| if rank == 1 { "\u{1}7".to_owned() } else { "7".to_owned() });
        }
        assert_eq!(seen.suspects(), [2], "garbage counts as a sign of life");
    }

    #[test]
    fn a_rank_that_closed_is_told_from_one_that_is_silent() {
        let mut seen = Seen::new(0, 2);
        for _ in 0..6 {
            seen.round(|_| "closed".to_owned());
        }
        let suspects = seen.peers.suspects(seen.now());
        assert_eq!((suspects[0].rank, suspects[0].left), (1, true));
    }

    #[test]
    fn the_lowest_rank_that_is_not_suspect_looks_at_all_the_others_look_at_few() {
        let watched = |seen: &Seen| seen.peers.watched(seen.now()).count();
        assert_eq!(watched(&Seen::new(0, 1000)), 1000);
        assert_eq!(watched(&Seen::new(999, 1000)), 17);
        let mut seen = Seen::new(2, 1000);
        assert_eq!(watched(&seen), 3);
        for _ in 0..6 {
            seen.round(|_| "7".to_owned());
        }
        assert_eq!((seen.suspects(), watched(&seen)), (vec![0, 1], 1000));
        for _ in 0..6 {
            seen.round(|rank| if rank < 9 { "7".to_owned() } else { "closed".to_owned() });
        }
        assert!(seen.suspects().contains(&500));
        // Rank 0 is back: what was known of ranks that are not looked at any more is forgotten.
        for second in 0..2 {
            seen.round(|rank| if rank == 0 { second.to_string() } else { "7".to_owned() });
        }
        assert_eq!((seen.suspects().contains(&500), watched(&seen)), (false, 3));
    }
}
