//! Keys and values in the key-value store, see [`super`].

use super::Hint;
use crate::commit::id::AttemptId;
use crate::commit::record::{Notice, decode, encode};

/// What a rank's counter becomes when it saves no more.
pub(crate) const CLOSED: &[u8] = b"closed";
/// Most bytes of a value that are looked at: a failure fits a block.
const VALUE_BYTES_MAX: usize = 64 << 10;

pub(crate) fn beat(rank: u32) -> String {
    format!("beat/{rank}")
}

pub(crate) fn parts(attempt: AttemptId) -> String {
    format!("parts/{attempt}")
}

pub(crate) fn event(attempt: AttemptId) -> String {
    format!("event/{attempt}")
}

/// The value that tells of a hint, a record in its frame so that garbling shows; `None` where it travels otherwise.
pub(crate) fn value(attempt: AttemptId, hint: &Hint) -> Option<Vec<u8>> {
    let failure = match hint {
        Hint::Part => return None,
        Hint::Failed(failure) => Some(failure.clone()),
        Hint::Decided => None,
    };
    encode(&Notice { attempt: attempt.to_string(), failure }, &[]).ok()
}

/// What a value tells; `None` where it is no news of this attempt.
pub(crate) fn read(attempt: AttemptId, value: &[u8]) -> Option<Hint> {
    if value.len() > VALUE_BYTES_MAX {
        return None;
    }
    let (notice, _) = decode::<Notice>(value).ok().flatten()?;
    (notice.attempt == attempt.to_string())
        .then(|| notice.failure.map_or(Hint::Decided, Hint::Failed))
}

/// A counter; `None` where the value is none.
pub(crate) fn count(value: &[u8]) -> Option<i64> {
    let text = value.get(..value.len().min(24))?;
    std::str::from_utf8(text).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commit::id::RunId;
    use crate::commit::record::Failure;
    use forebay_error::{Code, Error};

    #[test]
    fn news_come_back_and_what_was_garbled_or_is_of_another_attempt_is_none() {
        let attempt = AttemptId { run: RunId(7), save: 3 };
        let error = Error::new(Code::NoSpace, "full").at("x").hint("free some");
        for hint in [Hint::Decided, Hint::Failed(Failure::of(1, &error))] {
            let bytes = value(attempt, &hint).unwrap();
            assert_eq!(read(attempt, &bytes), Some(hint));
            assert_eq!(read(AttemptId { save: 4, ..attempt }, &bytes), None);
            for at in 0..bytes.len() {
                let mut garbled = bytes.clone();
                garbled[at] ^= 0x10;
                assert_eq!(read(attempt, &garbled), None, "byte {at}");
            }
            assert_eq!(read(attempt, &bytes[..bytes.len() - 1]), None);
        }
        assert_eq!(value(attempt, &Hint::Part), None);
        assert_eq!(read(attempt, b""), None);
        assert_eq!(read(attempt, &vec![b'x'; VALUE_BYTES_MAX + 1]), None);
    }

    #[test]
    fn counters_are_numbers_and_nothing_else() {
        assert_eq!(count(b"12"), Some(12));
        for other in [&b"closed"[..], b"", b"12x", b"\xff", &[b'1'; 99]] {
            assert_eq!(count(other), None, "{other:?}");
        }
    }
}
