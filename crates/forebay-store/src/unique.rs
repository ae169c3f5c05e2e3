//! Numbers that no two writers share, for names and nonces.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// Random bits, from the keys that the standard library gets of the system; no secret. Process and time are part of it,
/// because the keys survive a fork.
pub fn random() -> u64 {
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    hasher.write_u128(time.map_or(0, |time| time.as_nanos()));
    hasher.finish()
}
