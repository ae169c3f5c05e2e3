//! Whose drives get copies of whose: a ring with a jump.
//!
//! All drives that are alive stand in a ring, in the order of their machines' names. The copies of one go to those that
//! are one jump, two jumps, ... ahead of it; where these come round before all were visited, to the next ones. Machines
//! of one rack often have names that follow each other and are lost together: a jump of a rack's size puts copies
//! into other racks. A drive of the same machine comes last: it is of use where one drive fails, not the machine.
//!
//! Every node makes the ring out of the same announcements. Two that see different ones for a moment make different
//! rings, and the worst that comes of it is a copy more.

use super::peers::{DriveId, Peer};

/// The drives that are to have copies of `own`'s files: all others, the first to be taken first. Empty where `own` is
/// not among the drives.
pub fn buddies(drives: &[Peer], own: DriveId, jump: u64) -> Vec<Peer> {
    let mut ring: Vec<&Peer> = drives.iter().collect();
    ring.sort_by(|a, b| (&a.told.host, a.drive).cmp(&(&b.told.host, b.drive)));
    ring.dedup_by_key(|peer| peer.drive);
    let Some(at) = ring.iter().position(|peer| peer.drive == own) else { return Vec::new() };
    let count = ring.len();
    let jump = usize::try_from(jump % count as u64).unwrap_or(1);
    let jumps = (1..count).map(|times| (at + times * jump) % count);
    let next = (1..count).map(|times| (at + times) % count);
    let mut order: Vec<usize> = Vec::new();
    for place in jumps.chain(next) {
        if place != at && !order.contains(&place) {
            order.push(place);
        }
    }
    let host = ring.get(at).map(|peer| peer.told.host.clone());
    let (near, far): (Vec<&Peer>, Vec<&Peer>) = order
        .into_iter()
        .filter_map(|place| ring.get(place).copied())
        .partition(|peer| Some(&peer.told.host) == host.as_ref());
    far.into_iter().chain(near).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copies::Announcement;
    use proptest::prelude::*;
    use std::time::Duration;

    fn peer(host: &str, drive: u64) -> Peer {
        let (host, job, url) = (host.to_owned(), String::new(), String::new());
        let told = Announcement { host, job, url, gone_seconds: 1 };
        Peer { drive: DriveId(drive), told, age: Duration::ZERO }
    }

    fn ids(peers: &[Peer]) -> Vec<u64> {
        peers.iter().map(|peer| peer.drive.0).collect()
    }

    #[test]
    fn copies_go_a_jump_ahead_and_round() {
        let ring: Vec<Peer> = (0..6).map(|n| peer(&format!("node-{n}"), n)).rev().collect();
        let of = |own, jump| ids(&buddies(&ring, DriveId(own), jump));
        assert_eq!(of(0, 1), [1, 2, 3, 4, 5]);
        assert_eq!(of(4, 2), [0, 2, 5, 1, 3]);
        assert_eq!(of(1, 3), [4, 2, 3, 5, 0]);
        assert_eq!(of(1, 6), [2, 3, 4, 5, 0], "a jump that ends where it began is none");
        assert_eq!(of(7, 1), [0; 0]);
        assert_eq!(buddies(&ring[..1], DriveId(5), 1), []);
    }

    #[test]
    fn another_drive_of_the_machine_comes_last() {
        let ring = [peer("a", 1), peer("a", 2), peer("b", 3), peer("c", 4)];
        assert_eq!(ids(&buddies(&ring, DriveId(1), 1)), [3, 4, 2]);
        assert_eq!(ids(&buddies(&ring, DriveId(4), 1)), [1, 2, 3]);
    }

    proptest! {
        /// Walked step by step, as one would with a finger; and nobody is left out or named twice.
        #[test]
        fn a_ring_is_walked_as_by_hand(
            hosts in proptest::collection::vec(0u8..6, 1..12),
            own in 0usize..12,
            jump in 0u64..40,
        ) {
            let own = own % hosts.len();
            let drives: Vec<Peer> =
                hosts.iter().zip(10..).map(|(host, n)| peer(&format!("h{host}"), n)).collect();
            let own_id = DriveId(10 + own as u64);
            let found = ids(&buddies(&drives, own_id, jump));

            let mut ring: Vec<(u8, u64)> = hosts.iter().copied().zip(10..).collect();
            ring.sort_unstable();
            let mut far = Vec::new();
            let mut near = Vec::new();
            for jump in [jump as usize, 1] {
                let mut at = ring.iter().position(|(_, id)| *id == own_id.0).unwrap();
                for _ in 1..ring.len() {
                    for _ in 0..jump {
                        at = if at + 1 == ring.len() { 0 } else { at + 1 };
                    }
                    let (host, id) = ring[at];
                    let list = if host == hosts[own] { &mut near } else { &mut far };
                    if id != own_id.0 && !list.contains(&id) {
                        list.push(id);
                    }
                }
            }
            far.append(&mut near);
            prop_assert_eq!(&found, &far);
            prop_assert_eq!(found.len(), hosts.len() - 1);
        }

        /// With one copy each, no drive gets more than one, as long as each machine has one drive.
        #[test]
        fn copies_are_spread_evenly(count in 2u64..20, jump in 1u64..30) {
            let ring: Vec<Peer> = (0..count).map(|n| peer(&format!("node-{n:02}"), n)).collect();
            let mut first: Vec<u64> =
                (0..count).map(|n| ids(&buddies(&ring, DriveId(n), jump))[0]).collect();
            first.sort_unstable();
            prop_assert_eq!(first, (0..count).collect::<Vec<_>>());
        }
    }
}
