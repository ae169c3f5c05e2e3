//! Who writes what: runs, attempts, structures.

use std::fmt;
use std::str::FromStr;

use forebay_error::{Code, Error};

/// One life of a training job: a random number that its ranks agree on once, at the first save.
///
/// 32 bits: it tells the lives of one checkpoint folder apart, a few thousand at most, so a chance meeting is a
/// matter of one in a million; and a meeting is refused, not mixed up, because begin records are created and never
/// replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunId(pub u32);

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// One try at writing a step: the run and the number of the save in it. Never used twice.
///
/// As text `<run, 8 hex digits>-<save, hex>`: `00c0ffee-1f`. It starts the names of all files of the attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AttemptId {
    /// The run.
    pub run: RunId,
    /// How many saves the run had begun before, of any step. The highest bit is kept for
    /// [`successor`](Self::successor).
    pub save: u32,
}

/// Set in the number of a save that somebody else finishes.
const SUCCESSOR: u32 = 1 << 31;

impl AttemptId {
    /// The attempt of those who finish this save in place of its ranks, where these have died: the same for all who do.
    /// `None` where it is such an attempt itself.
    pub fn successor(self) -> Option<Self> {
        (!self.is_successor()).then_some(Self { save: self.save | SUCCESSOR, ..self })
    }

    /// Whether it finishes a save of ranks that have died.
    pub fn is_successor(self) -> bool {
        self.save & SUCCESSOR != 0
    }

    /// Its place among the saves of its run: a successor comes right after the one that it stands for, and before the
    /// next save.
    pub fn place(self) -> u64 {
        place_of_save(self.save)
    }
}

/// See [`AttemptId::place`].
pub(crate) fn place_of_save(save: u32) -> u64 {
    u64::from(save & !SUCCESSOR) << 1 | u64::from(save & SUCCESSOR != 0)
}

impl fmt::Display for AttemptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:x}", self.run, self.save)
    }
}

impl FromStr for AttemptId {
    type Err = Error;

    /// Errors: `invalid_metadata` for anything that [`Display`](fmt::Display) does not write.
    fn from_str(text: &str) -> Result<Self, Error> {
        let parsed =
            text.split_once('-').filter(|(run, _)| run.len() == 8).and_then(|(run, save)| {
                let run = RunId(u32::from_str_radix(run, 16).ok()?);
                Some(Self { run, save: u32::from_str_radix(save, 16).ok()? })
            });
        match parsed {
            Some(id) if id.to_string() == text => Ok(id),
            _ => {
                let shown: String = text.chars().take(40).flat_map(char::escape_debug).collect();
                let what = format!("`{shown}` does not name an attempt");
                Err(Error::new(Code::InvalidMetadata, what))
            }
        }
    }
}

/// A hash of what all ranks must agree on: names, shapes, dtypes, sharding. What goes in is the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StructureHash(pub [u8; 32]);

impl fmt::Display for StructureHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_has_a_name_of_its_own_and_its_place_before_the_next_save() {
        let id = |save| AttemptId { run: RunId(7), save };
        let next = id(0x1f).successor().unwrap();
        assert_eq!(next.to_string(), "00000007-8000001f");
        assert_eq!(next.to_string().parse::<AttemptId>().unwrap(), next);
        assert!(next.is_successor() && !id(0x1f).is_successor());
        assert_eq!(next.successor(), None);
        let places = [id(0x1e), id(0x1f), next, id(0x20)].map(AttemptId::place);
        assert!(places.is_sorted_by(|a, b| a < b), "{places:?}");
    }

    #[test]
    fn attempts_are_read_back_from_their_one_spelling() {
        let id = AttemptId { run: RunId(0x00c0_ffee), save: 0x1f };
        assert_eq!(id.to_string(), "00c0ffee-1f");
        assert_eq!("00c0ffee-1f".parse::<AttemptId>().unwrap(), id);
        for bad in ["", "c0ffee-1f", "00C0FFEE-1f", "00c0ffee-01", "00c0ffee-", "+0c0ffee-1"] {
            assert_eq!(
                bad.parse::<AttemptId>().unwrap_err().code(),
                Code::InvalidMetadata,
                "{bad}"
            );
        }
    }
}
