//! One direction of a tier: a token bucket that is a point in time, and who waits for it.
//!
//! `paid` is when everything that was let through so far is paid for at the cap. Whoever is first in the line goes once
//! that time has come, whatever the size of the part, and moves it on by what the part takes. Time that nobody used
//! counts for [`BURST`], so that a wait that ends a little late costs no bandwidth.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::time::Duration;

use super::Priority;

/// How much unused time is made up for.
pub const BURST: Duration = Duration::from_millis(50);

/// A place in the line.
pub(super) type Ticket = (Priority, u64);

pub(super) struct Lane {
    cap: Option<NonZeroU64>,
    paid: Duration,
    waiting: BTreeSet<Ticket>,
    tickets: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Go,
    /// Ask again after that time.
    Wait(Duration),
}

impl Lane {
    pub(super) fn new(cap: Option<NonZeroU64>) -> Self {
        let (paid, waiting) = (Duration::ZERO, BTreeSet::new());
        Self { cap, paid, waiting, tickets: 0 }
    }

    pub(super) fn set_cap(&mut self, cap: Option<NonZeroU64>) {
        self.cap = cap;
        // What was owed at the old cap is not owed at the new one.
        self.paid = Duration::ZERO;
    }

    pub(super) fn cap(&self) -> Option<NonZeroU64> {
        self.cap
    }

    /// Stands in the line.
    pub(super) fn queue(&mut self, priority: Priority) -> Ticket {
        self.tickets += 1;
        let ticket = (priority, self.tickets);
        self.waiting.insert(ticket);
        ticket
    }

    /// Leaves it.
    pub(super) fn leave(&mut self, ticket: Ticket) {
        self.waiting.remove(&ticket);
    }

    /// Whether `bytes` may go at `now`; then the ticket is spent.
    pub(super) fn ask(
        &mut self,
        ticket: Ticket,
        now: Duration,
        bytes: u64,
        paused: bool,
    ) -> Answer {
        // Somebody else's turn, or nobody's: how long is not known.
        let unknown = Answer::Wait(Duration::MAX);
        if paused {
            return unknown;
        }
        if let Some(cap) = self.cap {
            if self.waiting.first() != Some(&ticket) {
                return unknown;
            }
            if self.paid > now {
                return Answer::Wait(self.paid - now);
            }
            let start = self.paid.max(now.saturating_sub(BURST));
            self.paid = start.saturating_add(time_of(bytes, cap));
        }
        self.leave(ticket);
        Answer::Go
    }
}

/// How long `bytes` take.
fn time_of(bytes: u64, cap: NonZeroU64) -> Duration {
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(cap.get());
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    /// Whoever asks is let through as soon as that is allowed; returns when each part of `bytes` went.
    fn run(cap: u64, bytes: u64, parts: u32, late: impl Fn(u32) -> Duration) -> Vec<Duration> {
        let mut lane = Lane::new(NonZeroU64::new(cap));
        let mut now = Duration::from_secs(100);
        let mut went = Vec::new();
        for part in 0..parts {
            let ticket = lane.queue(Priority::Archive);
            loop {
                match lane.ask(ticket, now, bytes, false) {
                    Answer::Go => break went.push(now),
                    Answer::Wait(time) => now += time + late(part),
                }
            }
        }
        went
    }

    proptest! {
        /// The promise of `Limits`, over every window of 10 s that starts with a part, with sleeps that end late.
        #[test]
        fn a_cap_holds_from_above_and_below(
            lates in prop::collection::vec(0u32..40, 1..50), bytes in 1_000_000u64..8_388_609,
        ) {
            let cap = 100_000_000;
            let window = Duration::from_secs(10);
            let parts = (2_500_000_000 / bytes) as u32;
            let went = run(cap, bytes, parts, |part| MS * lates[part as usize % lates.len()]);
            let end = *went.last().unwrap();
            for (at, start) in went.iter().enumerate().step_by(7) {
                if *start + window > end {
                    break;
                }
                let inside = went[at..].iter().take_while(|time| **time < *start + window).count();
                let moved = inside as u64 * bytes;
                prop_assert!(moved <= 1_005_000_000 + bytes, "{moved} bytes in 10 s");
                prop_assert!(moved + bytes >= 995_000_000, "{moved} bytes in 10 s");
                prop_assert!((950_000_000..=1_050_000_000).contains(&moved));
            }
        }
    }

    #[test]
    fn time_that_nobody_used_counts_for_a_burst_only() {
        let mut lane = Lane::new(NonZeroU64::new(1000));
        let ticket = lane.queue(Priority::Archive);
        assert_eq!(lane.ask(ticket, Duration::from_secs(500), 1000, false), Answer::Go);
        let ticket = lane.queue(Priority::Archive);
        let left = Duration::from_secs(1) - BURST;
        assert_eq!(lane.ask(ticket, Duration::from_secs(500), 1, false), Answer::Wait(left));
    }

    #[test]
    fn the_more_urgent_goes_first_and_equals_in_their_order() {
        let mut lane = Lane::new(NonZeroU64::new(1000));
        let order = [Priority::Archive, Priority::Newest, Priority::Archive, Priority::Restore];
        let mut waiting: Vec<(usize, Ticket)> =
            order.iter().map(|priority| lane.queue(*priority)).enumerate().collect();
        let mut now = Duration::from_secs(1);
        let mut went = Vec::new();
        while !waiting.is_empty() {
            now += Duration::from_secs(1);
            waiting.retain(|(number, ticket)| {
                let goes = lane.ask(*ticket, now, 1000, false) == Answer::Go;
                went.extend(goes.then_some(*number));
                !goes
            });
        }
        assert_eq!(went, [3, 1, 0, 2]);
    }

    #[test]
    fn a_pause_holds_everything_and_without_a_cap_nobody_waits() {
        let mut lane = Lane::new(None);
        let (first, second) = (lane.queue(Priority::Archive), lane.queue(Priority::Archive));
        assert_ne!(lane.ask(first, MS, 1, true), Answer::Go);
        assert_eq!(lane.ask(second, MS, 1 << 40, false), Answer::Go);
        assert_eq!(lane.ask(first, MS, 1, false), Answer::Go);
    }
}
