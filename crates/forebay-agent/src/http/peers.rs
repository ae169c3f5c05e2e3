//! Connections by address: one that opens many leaves places for others, the probe of a liveness check among them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Who is connected, and how often.
#[derive(Default)]
pub(super) struct Peers(Mutex<HashMap<IpAddr, usize>>);

/// The place of a connection, given back when this is dropped.
pub(super) struct Seat {
    peers: Arc<Peers>,
    address: IpAddr,
}

impl Peers {
    /// A place for one more connection of an address; `None` where it has `most`.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr, most: usize) -> Option<Seat> {
        let mut all = self.lock();
        let count = all.entry(address).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(Seat { peers: Arc::clone(self), address })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut all = self.peers.lock();
        if let Some(count) = all.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_so_many_places_and_no_more() {
        let peers = Arc::new(Peers::default());
        let (one, two) = ("127.0.0.1".parse().unwrap(), "::1".parse().unwrap());
        let seats: Vec<Seat> = (0..3).map(|_| peers.enter(one, 3).unwrap()).collect();
        assert!(peers.enter(one, 3).is_none());
        let other = peers.enter(two, 3).unwrap();
        drop(seats);
        peers.enter(one, 3).unwrap();
        drop(other);
        assert!(peers.lock().is_empty(), "nothing is remembered of who is gone");
    }
}
